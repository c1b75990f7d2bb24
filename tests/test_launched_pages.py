"""What launches write into pages, move there and score is what plain torch does. Interpreted where no GPU is."""

from typing import Any

import pytest
import torch
from rows import make_row
from tiny import tiny_model, token_ids
from variants import SOME_CODECS, name_of

from kvlab import evicting, seam, selecting, store
from kvlab.attach import attach, cache_kwarg
from kvlab.codecs import Affine, Raw
from kvlab.config import KVConfig
from kvlab.once import once
from kvlab.policies import AttentionMass, Budget, KeyNorm, Tokens, TopK
from kvlab.row import Row

pytest.importorskip("triton")
HEADS, QUERY_HEADS, DIM, PAGE = 2, 4, 32, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROTATED = Affine(4, group=0, mode="midrise", hadamard=True)


def settings(**more: Any) -> KVConfig:
    return KVConfig(**({"sink_tokens": 2, "recent_tokens": 5, "page_tokens": PAGE} | more))


def filled(config: KVConfig, impl: Any, parts: list[int], dtype: torch.dtype = torch.float32) -> Row:
    """A row that took in random tokens, with random mass where it is tracked."""
    row, rng = make_row(config, HEADS, DIM, dtype, impl=impl, device=DEVICE), torch.Generator().manual_seed(3)
    for part in parts:
        k, v = (torch.randn(HEADS, part, DIM, generator=rng).to(DEVICE, dtype) for _ in range(2))
        columns = row.n_sinks + row.table.length + row.n_window + part
        row.commit(k, v, torch.rand(HEADS, columns, generator=rng).to(DEVICE) if config.at(0).tracks_mass else None)
    return row


def held(row: Row) -> dict[str, torch.Tensor]:
    """Every stream of every head's real tokens, as bytes."""
    page, streams = row.table.pool.page_tokens, row.table.gather()
    return {
        f"{name} {n}": x[n, : -(-count * row.table.pool.layout[name].rows // page)].cpu().view(torch.uint8)
        for name, x in streams.items()
        for n, count in enumerate(row.table.counts)
    }


def same_pages(config: KVConfig, parts: list[int], dtype: torch.dtype = torch.float32) -> Row:
    """Both ways hold the same bytes in as many pages. Returns the launched row."""
    ours, theirs = (filled(config, impl, parts, dtype) for impl in ("triton", "torch"))
    assert ours.table.counts == theirs.table.counts
    assert max(ours.table.counts) > PAGE
    assert [len(p) for p in ours.table.pages] == [len(p) for p in theirs.table.pages]
    assert ours.table.pool.used_pages == theirs.table.pool.used_pages == sum(len(p) for p in ours.table.pages)
    got, want = held(ours), held(theirs)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert torch.equal(got[name], x), name
    return ours


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels asked for by launches."""
    names: list[str] = []

    def watch(module: Any, name: str) -> None:
        run = getattr(module, name)

        def seen(*args: Any, **kwargs: Any) -> Any:
            names.extend([name] * (kwargs.get("impl") == "triton"))
            return run(*args, **kwargs)

        monkeypatch.setattr(module, name, seen)

    watch(evicting, "append")
    watch(store, "compact")
    watch(selecting.chunk_pages, "summarise")
    watch(selecting.chunk_pages, "scores")
    return names


@pytest.mark.parametrize("codec", SOME_CODECS, ids=name_of)
def test_every_codec_is_written_alike(codec: Any, launched: list[str]) -> None:
    same_pages(settings(key=codec, value=codec), [30, 20, 17])
    assert launched == ["append", "append"] * 3


def test_half_precision_and_centred_keys_are_written_alike() -> None:
    same_pages(settings(key=ROTATED, value=Raw(), centring="mean"), [40, 17], torch.float16)


@pytest.mark.parametrize("budget", [Tokens(70), Tokens(70, scope="layer", floor=0.0)], ids=name_of)
def test_kept_tokens_close_up_alike(budget: Budget, launched: list[str]) -> None:
    reader = TopK(chunk=4, count=3, dense_layers=0)
    config = settings(key=Affine(4), value=Affine(3), scorer=AttentionMass(), budget=budget, reader=reader)
    same_pages(config, [90, 20, 17])
    assert launched.count("compact") == 2


@pytest.mark.parametrize("budget", [Tokens(70), Tokens(70, scope="layer", floor=0.0)], ids=name_of)
def test_kept_pages_are_renumbered(budget: Budget, launched: list[str]) -> None:
    channel = Affine(4, axis="channel", group=PAGE)
    reader = TopK(bound="mean", count=2, dense_layers=0)
    row = same_pages(
        settings(key=channel, value=channel, scorer=KeyNorm(), budget=budget, reader=reader), [100, 20, 33]
    )
    first = row.positions()[0, : row.table.counts[0]]
    assert first.diff().max() > 1  # a page between others has gone
    assert "compact" not in launched


@pytest.mark.parametrize("centring", ["none", "mean"])
@pytest.mark.parametrize(
    ("key", "more"),
    [
        (ROTATED, {"bound": "minmax", "chunk": 4, "count": 4}),
        (Raw(), {"bound": "mean", "fraction": 0.4}),
        (Affine(4, axis="channel", group=PAGE, hadamard=True), {"bound": "codec", "count": 3}),
    ],
    ids=["minmax", "mean", "codec"],
)
def test_the_same_chunks_are_chosen(key: Any, more: dict[str, Any], centring: Any, launched: list[str]) -> None:
    config = settings(key=key, reader=TopK(dense_layers=0, **more), centring=centring)
    ours, theirs = (filled(config, impl, [110, 20]) for impl in ("triton", "torch"))
    q = torch.randn(QUERY_HEADS, 3, DIM, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    got, want = ours.select(q), theirs.select(q)
    assert got is not None
    assert want is not None
    assert (got.chunks >= 0).sum(-1).min() < ours.table.counts[0] // more.get("chunk", PAGE)
    assert torch.equal(got.chunks, want.chunks)
    assert launched.count("scores") == 1
    assert launched.count("summarise") == (0 if more["bound"] == "codec" else 2)
    if more["bound"] == "minmax":
        assert all(torch.equal(held(ours)[name], x) for name, x in held(theirs).items())


@torch.no_grad()
def logits(kv: Any, model: Any, impl: Any) -> torch.Tensor:
    """Of one step behind a prompt of two rows, the second padded."""
    ids, mask, cache = (
        token_ids(2, 41).to(DEVICE),
        torch.ones(2, 41, dtype=torch.long, device=DEVICE),
        kv.cache(impl=impl),
    )
    mask[1, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for part in (slice(0, 40), slice(40, 41)):
        kept = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part], cache_kwarg(): cache}
        out = model(input_ids=ids[:, part], use_cache=True, **kept).logits
    assert cache.implementation == impl
    return out[:, -1]


def test_a_model_is_served_by_launches_when_asked(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, splits = tiny_model("llama_4_2", torch.float32).to(DEVICE), []
    split = seam._split
    monkeypatch.setattr(seam, "_split", lambda *a: (splits.append(1), split(*a))[1])
    with attach(model, settings(key=Affine(8, group=0), value=Affine(8, group=0))) as kv:
        want = logits(kv, model, "torch")
        assert launched == []
        splits.clear()
        torch.testing.assert_close(logits(kv, model, "triton"), want, rtol=1e-2, atol=1e-2)
    assert launched == ["append"] * (2 * 2 * model.config.num_hidden_layers)  # K and V, two rows, one flush each
    assert len(splits) == 2  # a mask is read once in a forward, not in every layer


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama1", torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with attach(model, settings()) as kv, torch.no_grad():
        for name, why in (("triton", "interpreter"), ("reference", "must be one of")):
            with pytest.raises(ValueError, match=why):
                model(input_ids=token_ids(1, 20), use_cache=True, **{cache_kwarg(): kv.cache(impl=name)})


def test_a_tensor_is_read_once_until_it_changes() -> None:
    x, reads = torch.zeros(3), []

    def read(x: torch.Tensor) -> float:
        reads.append(1)
        return float(x.sum())

    assert once(x, 5, read) == once(x, 5, read) == 0
    assert len(reads) == 1
    x += 1
    assert once(x, 5, read) == 3
    assert once(x, 6, read) == 3
    assert len(reads) == 3
