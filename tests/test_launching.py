"""A step of several rows in one launch equals each row's own step. Triton runs in its interpreter where no GPU is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rows import Sequence, make_row
from variants import SOME_CODECS, name_of

from kvlab.attending import AttentionCall, attend_rows
from kvlab.codecs import Affine, Raw
from kvlab.config import KVConfig
from kvlab.kernels import paged
from kvlab.kernels.dispatch import Impl
from kvlab.launching import Launch
from kvlab.policies import AttentionMass, ExpectedAttention, Fraction, LastSelected, Threshold, TopK
from kvlab.row import Row

HEADS, QUERY_HEADS, DIM = 2, 6, 64
SCALE = DIM**-0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows_of(config: KVConfig, lengths: list[int], impl: Impl = "torch") -> list[Row]:
    """Rows of one pool after prompts of these lengths, in float32. `impl` is the pool's."""
    rows: list[Row] = []
    for b, length in enumerate(lengths):
        pool = rows[0].table.pool if rows else None
        row = make_row(config, HEADS, DIM, torch.float32, pool=pool, impl=impl, device=DEVICE)
        for q, k, v in forwards(b, [length]):
            row.commit(k, v, row.attend(q, k, v, SCALE, impl="torch")[1])
        rows.append(row)
    return rows


def forwards(seed: int, parts: list[int]) -> Iterator[list[torch.Tensor]]:
    sequence = Sequence(sum(parts), HEADS, QUERY_HEADS, DIM, seed, torch.float32)
    return ([x.to(DEVICE) for x in part] for part in sequence.forwards(parts))


def step(rows: list[Row], seed: int, launches: dict[int, Launch] | None = None, **more: Any) -> torch.Tensor:
    """One new token for each row, taken in."""
    new = [next(forwards(100 + seed * 10 + b, [1])) for b in range(len(rows))]
    q, k, v = (torch.stack([x[i] for x in new]) for i in range(3))
    positions = torch.tensor([[row.seen] for row in rows], device=DEVICE)
    return attend_rows(rows, AttentionCall(q, k, v, SCALE, positions=positions, **more), launches=launches)


def agree(config: KVConfig, steps: int = 3, **more: Any) -> None:
    ours, theirs, launches = rows_of(config, [70, 33], "triton"), rows_of(config, [70, 33]), {}
    for n in range(steps):
        got = step(ours, n, launches, **more)
        want = step(theirs, n, **more)
        torch.testing.assert_close(got, want, rtol=3e-3, atol=3e-3)
        for a, b in zip(ours, theirs, strict=True):
            assert a.table.counts == b.table.counts
            assert a.occupancy == b.occupancy
            if a._mass is not None and b._mass is not None:
                torch.testing.assert_close(a._mass[:, : a.n_window], b._mass[:, : b.n_window], rtol=2e-2, atol=2e-3)


def settings(**more: Any) -> KVConfig:
    return KVConfig(**({"sink_tokens": 2, "recent_tokens": 5, "page_tokens": 16} | more))


@pytest.mark.parametrize("codec", SOME_CODECS, ids=name_of)
def test_every_codec_is_read_alike(codec: Any) -> None:
    agree(settings(key=codec, value=codec), steps=2)


def test_soft_cap_and_sink_logits_are_passed_on() -> None:
    agree(settings(key=Affine(4), value=Raw()), softcap=3.0, sink_logits=torch.linspace(-1, 2, QUERY_HEADS))


def test_attention_mass_is_taken_in_and_decides_who_stays() -> None:
    agree(settings(key=Affine(8, group=0), scorer=AttentionMass(), budget=Fraction(0.5)), steps=18)


def test_heads_of_different_length_are_read_each_to_its_end() -> None:
    agree(settings(value=Affine(4), scorer=AttentionMass(), budget=Threshold(0.5, scope="layer")), steps=2)


@pytest.mark.parametrize("count", [2, 3])
def test_a_sparse_reader_hands_on_its_chunks(count: int) -> None:
    agree(settings(key=Affine(4), reader=TopK(count=count, dense_layers=0)), steps=2)


def test_what_was_read_last_is_remembered() -> None:
    reader = TopK(count=2, dense_layers=0)
    agree(settings(scorer=LastSelected(), budget=Fraction(0.8), reader=reader), steps=18)


def test_centred_keys_get_their_term() -> None:
    agree(settings(key=Affine(4), centring="mean"), steps=2)


def test_queries_are_taken_in_where_the_scorer_asks_for_them() -> None:
    agree(settings(scorer=ExpectedAttention(horizon=4), budget=Fraction(0.5)), steps=2)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every decode launch from here on."""
    sizes, decode = [], paged.decode
    monkeypatch.setattr(paged, "decode", lambda q, *a, **kw: (sizes.append(q.shape[0]), decode(q, *a, **kw))[1])
    return sizes


def test_rows_of_each_pool_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(impl: Impl) -> list[Row]:
        (a, b), (c,) = rows_of(first, [40, 30], impl), rows_of(second, [50], impl)
        return [a, c, b]

    first, second = settings(key=Affine(4)), settings(value=Affine(8, group=0))
    sizes = counted(monkeypatch)
    torch.testing.assert_close(step(rows("triton"), 0), step(rows("torch"), 0), rtol=3e-3, atol=3e-3)
    assert sorted(sizes) == [1, 2]


def test_rows_without_a_token_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sizes = rows_of(settings(key=Affine(4)), [40, 30, 35], "triton"), counted(monkeypatch)
    valid = torch.tensor([[True], [False], [True]], device=DEVICE)
    out = step(rows, 0, valid=valid)
    assert sizes == [2]
    assert [row.seen for row in rows] == [41, 30, 36]
    assert not out[1].any()
    assert out[0].any()
    assert out[2].any()


def test_a_mask_that_hides_nothing_hinders_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sizes = rows_of(settings(key=Affine(4)), [40, 30], "triton"), counted(monkeypatch)
    step(rows, 0, valid=torch.ones(2, 1, dtype=torch.bool, device=DEVICE))
    assert sizes == [2]


def test_pages_are_looked_up_again_when_a_table_changes() -> None:
    rows, launch = rows_of(settings(key=Affine(4)), [70, 33]), Launch()
    pool = rows[0].table.pool
    pool.release(pool.alloc(50))  # room, so that no stream has to be rebuilt
    before, moves = launch.pages(rows, (DIM, DIM)), pool.moves
    assert launch.pages(rows, (DIM, DIM)) is before
    for q, k, v in forwards(9, [40]):
        rows[1].commit(k, v, rows[1].attend(q, k, v, SCALE, impl="torch")[1])
    after = launch.pages(rows, (DIM, DIM))
    assert pool.moves == moves
    assert after.counts.tolist() == [row.table.counts for row in rows]
    assert after.index[1, 0, : len(rows[1].table.pages[0])].tolist() == rows[1].table.pages[0]
