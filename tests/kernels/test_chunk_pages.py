"""Summaries and scores of chunks where they lie in pages: both paths against the definition, and against each other."""

import pytest
import torch

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.kernels import chunks
from kvlab.kernels.chunk_pages import scores, summarise
from kvlab.kernels.encode import append

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("impl", ["torch", "triton"])
PAGES, M = 21, 3  # pages of the pool, and of each of 2 x 3 heads


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(codec: Codec, head_dim: int, page: int, chunk: int, names: tuple[str, ...]):
    """Streams, index, counts and the keys as they are read back; what holds no token is NaN or an absurd code."""
    fmt = codec.stored_as(head_dim)
    layout = codec.streams(head_dim, page, torch.float16)
    streams = {}
    for name, s in layout.items():
        nothing = 0x7F if s.dtype in (torch.uint8, torch.int8) else torch.nan
        streams[name] = torch.full((PAGES, s.rows, s.width), nothing, dtype=s.dtype)
    for name in names:
        streams[name] = torch.full((PAGES, page // chunk, head_dim), torch.nan).half()
    index = torch.randperm(PAGES, generator=rng(7))[: 6 * M].view(2, 3, M).int()
    unit = codec.block_tokens
    counts = torch.tensor([[M * page, 0, page + 3], [1, 2 * page, page - 1]]).int() // unit * unit
    x = torch.randn(2, 3, M * page, head_dim, generator=rng(head_dim)) * 3
    append(x, streams, fmt, index, torch.zeros(2, 3).int(), counts, impl="torch")
    x = x.half() if fmt.kind == "raw" else x
    keys = torch.zeros(2, 3, M * page, head_dim)
    for b in range(2):
        packed = codec.encode(x[b, :, : M * page])
        keys[b] = codec.decode(packed, head_dim, torch.float32)
    return streams, fmt, index, counts, keys


def on(device: str, streams: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: s.clone().to(device) for name, s in streams.items()}


def summarised(streams, fmt, index, start, counts, tokens, chunk, impl, added=None) -> dict[str, torch.Tensor]:
    place = DEVICE if impl == "triton" else "cpu"
    held, added = on(place, streams), None if added is None else added.to(place)
    table = (t.to(place) for t in (index, start, counts))
    summarise(held, fmt, *table, tokens, chunk, added=added, impl=impl)
    return {name: s.cpu() for name, s in held.items()}


CASES = [
    (Raw(), 64, 32, 16),
    (Affine(4, "token", 32), 64, 16, 16),
    (Affine(4, "token", 0, "midrise", 0.88, hadamard=True), 128, 16, 8),
    (Affine(3, "channel", 16, "asymmetric", 0.8, hadamard=True), 80, 16, 16),
    (Affine(2, "token", 16, "symmetric"), 80, 16, 16),
    (Affine(8, "channel", 16, "midrise"), 96, 16, 4),
    (Fp8("e4m3", exponents=(-1, 0, 2)), 96, 16, 16),
    (Fp8("e5m2", "dynamic", hadamard=True), 64, 16, 16),
]


@BOTH
@pytest.mark.parametrize(("codec", "head_dim", "page", "chunk"), CASES, ids=lambda v: getattr(v, "label", None))
def test_summaries_are_of_the_keys_that_are_read_back(
    impl: str, codec: Codec, head_dim: int, page: int, chunk: int
) -> None:
    mean = codec.kind == "fp8"
    names = ("mean",) if mean else ("min", "max")
    streams, fmt, index, counts, keys = filled(codec, head_dim, page, chunk, names)
    added = torch.randn(1, 3, M * page, head_dim, generator=rng(3))
    got = summarised(streams, fmt, index, torch.zeros(2, 3).int(), counts, M * page, chunk, impl, added)
    for b in range(2):
        whole = keys[b] + added[0]
        made = (chunks.means(whole, chunk, counts[b]),) if mean else chunks.bounds(whole, chunk, counts[b])
        for name, expected in zip(names, made, strict=True):
            at = got[name][index[b].long()].flatten(1, 2)
            held = torch.arange(at.shape[1]) * chunk < counts[b].unsqueeze(-1)
            if mean:
                torch.testing.assert_close(at[held], expected[held], rtol=2e-3, atol=2e-3)
            else:
                assert torch.equal(at[held], expected[held])
            assert bool(at[~held].isnan().all())
    # Nothing but summaries is written, and of those only heads' own.
    own = {name: s.view(torch.uint8) for name, s in streams.items() if name not in names}
    assert all(torch.equal(got[name].view(torch.uint8), s) for name, s in own.items())
    free = sorted(set(range(PAGES)) - set(index.flatten().tolist()))
    assert all(bool(got[name][free].isnan().all()) for name in names)


@BOTH
def test_only_chunks_with_new_tokens_are_summarised(impl: str) -> None:
    codec = Affine(4, "token", 16)
    streams, fmt, index, counts, _ = filled(codec, 64, 16, 8, ("min", "max"))
    start = torch.tensor([[40, 0, 19], [0, 8, 15]]).int()
    got = summarised(streams, fmt, index, start, counts, 48, 8, impl)
    whole = summarised(streams, fmt, index, torch.zeros(2, 3).int(), counts, 48, 8, impl)
    for b in range(2):
        for n in range(3):
            rows, all_rows = (s["min"][index[b, n].long()].flatten(0, 1) for s in (got, whole))
            for c in range(6):
                new = start[b, n] < counts[b, n] and start[b, n] // 8 <= c and c * 8 < counts[b, n]
                assert torch.equal(rows[c], all_rows[c]) if new else bool(rows[c].isnan().all())


@BOTH
def test_what_is_put_back_goes_by_slots_from_the_start(impl: str) -> None:
    streams, fmt, index, counts, keys = filled(Raw(), 64, 16, 16, ("min", "max"))
    added = torch.randn(2, 3, 32, 64, generator=rng(5))
    start = torch.full((2, 3), 16).int()
    got = summarised(streams, fmt, index, start, counts, 32, 16, impl, added)
    page = int(index[0, 0, 2])
    expected = chunks.bounds(keys[0, 0, 32:] + added[0, 0, 16:], 16)
    assert torch.equal(got["min"][page], expected.low)
    assert torch.equal(got["max"][page], expected.high)


SCORED = [
    (Raw(), 64, 16, "minmax", 1, torch.float32),
    (Raw(), 80, 8, "mean", 3, torch.float16),
    (Raw(), 256, 16, "minmax", 7, torch.bfloat16),
    (Affine(4, "channel", 16, "asymmetric", hadamard=True), 80, 16, "codec", 3, torch.float32),
    (Affine(3, "channel", 16, "symmetric"), 128, 16, "codec", 4, torch.float16),
    (Affine(2, "channel", 16, "midrise", hadamard=True), 64, 16, "codec", 1, torch.float32),
]


@BOTH
@pytest.mark.parametrize(("codec", "head_dim", "chunk", "bound", "group", "dtype"), SCORED)
def test_scores_match_the_definition_in_double_precision(
    impl: str, codec: Codec, head_dim: int, chunk: int, bound: str, group: int, dtype: torch.dtype
) -> None:
    names = {"minmax": ("min", "max"), "mean": ("mean",), "codec": ("min", "max")}[bound]
    streams, fmt, index, counts, _ = filled(codec, head_dim, 16, chunk, names)
    zeros = torch.zeros(2, 3).int()
    streams = summarised(streams, fmt, index, zeros, counts, 48, chunk, "torch")
    q = torch.randn(2, 3 * group, 2, head_dim, generator=rng(11)).to(dtype)
    expected = scores(q.double(), streams, fmt, index, counts, chunk, bound, scale=0.125, impl="torch")  # type: ignore[arg-type]
    place = DEVICE if impl == "triton" else "cpu"
    held = on(place, streams)
    table = (index.to(place), counts.to(place))
    got = scores(q.to(place), held, fmt, *table, chunk, bound, scale=0.125, impl=impl).cpu()  # type: ignore[arg-type]
    assert got.dtype == torch.float32
    there = expected.isfinite()
    assert torch.equal(there[:, :, 0].sum(-1), -(-counts // chunk))
    assert bool((got[~there] == -torch.inf).all())
    # Sums of D * G products: relative to the largest, since one score may cancel to nothing.
    assert float((got - expected)[there].abs().max() / expected[there].abs().max()) < 1e-6


@BOTH
@pytest.mark.parametrize("rotate", [False, True])
def test_codec_bounds_hold_over_stored_keys(impl: str, rotate: bool) -> None:
    codec = Affine(3, "channel", 16, "asymmetric", 0.8, rotate)
    streams, fmt, index, _, keys = filled(codec, 64, 16, 16, ())
    counts = torch.full((2, 3), 48).int()
    x = torch.randn(2, 3, 48, 64, generator=rng(64)) * 3
    append(x, streams, fmt, index, torch.zeros(2, 3).int(), impl="torch")
    q = torch.randn(2, 6, 1, 64, generator=rng(12))
    place = DEVICE if impl == "triton" else "cpu"
    table = (index.to(place), counts.to(place))
    got = scores(q.to(place), on(place, streams), fmt, *table, 16, "codec", impl=impl).cpu()  # type: ignore[arg-type]
    products = (q.unflatten(1, (3, 2)).double() @ keys.double().mT.unsqueeze(2)).sum(2)
    best = torch.stack([part.amax(-1) for part in products.split(16, dim=-1)], dim=-1)
    assert bool((got.double() >= best - 1e-4).all())


@BOTH
def test_a_bound_without_limit_is_read(impl: str) -> None:
    place = DEVICE if impl == "triton" else "cpu"
    streams = {"data": torch.zeros(1, 16, 64), "min": torch.zeros(1, 4, 64).half(), "max": torch.zeros(1, 4, 64).half()}
    streams["max"][0, 1, 3], streams["max"][0, 2, 5] = torch.inf, torch.nan
    q = torch.ones(1, 1, 1, 64)
    q[..., 3] = 0
    table = (torch.zeros(1, 1, 1).int().to(place), torch.full((1, 1), 16).int().to(place))
    got = scores(q.to(place), on(place, streams), Raw().stored_as(64), *table, 4, "minmax", impl=impl)  # type: ignore[arg-type]
    assert got.flatten().tolist() == [0.0, float("inf"), float("inf"), 0.0]


def test_what_does_not_fit_is_refused() -> None:
    streams, fmt, index, counts, _ = filled(Raw(), 64, 16, 16, ("min", "max"))
    zeros, q = torch.zeros(2, 3).int(), torch.zeros(2, 3, 1, 64)
    with pytest.raises(ValueError, match="chunk must divide a page, got chunks of 12"):
        summarise(streams, fmt, index, zeros, counts, 48, 12)
    with pytest.raises(ValueError, match="must have 2 rows a page, got 1"):
        summarise(streams, fmt, index, zeros, counts, 48, 8)
    with pytest.raises(ValueError, match="'mean', or 'min' and 'max'"):
        summarise({"data": streams["data"]}, fmt, index, zeros, counts, 48, 16)
    with pytest.raises(ValueError, match="channel codes and chunks of a page, got raw by token"):
        scores(q, streams, fmt, index, counts, 16, "codec")
    for impl in ("torch", "triton"):
        with pytest.raises(ValueError, match="multiple of KV heads, got 4 query and 3 KV heads"):
            scores(torch.zeros(2, 4, 1, 64), streams, fmt, index, counts, 16, "minmax", impl=impl)  # type: ignore[arg-type]
