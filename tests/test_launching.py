"""A step of several rows in one launch equals each row's own step. Triton runs in its interpreter where no GPU is."""

from typing import Any

import pytest
import torch
from rows import Sequence, make_row
from variants import SOME_CODECS, name_of

from kvlab.cache import AttentionCall, attend_rows
from kvlab.codecs import Affine, Raw
from kvlab.config import KVConfig
from kvlab.launching import Launch
from kvlab.policies import AttentionMass, Fraction, LastSelected, Threshold, TopK
from kvlab.row import Row

HEADS, QUERY_HEADS, DIM = 2, 6, 64
SCALE = DIM**-0.5


def rows_of(config: KVConfig, lengths: list[int]) -> list[Row]:
    """Rows of one pool after prompts of these lengths, in float32."""
    rows: list[Row] = []
    for b, length in enumerate(lengths):
        row = make_row(config, HEADS, DIM, torch.float32, pool=rows[0].table.pool if rows else None)
        for q, k, v in sequence(b, length).forwards([length]):
            row.commit(k, v, row.attend(q, k, v, SCALE, impl="torch")[1])
        rows.append(row)
    return rows


def sequence(seed: int, tokens: int) -> Sequence:
    return Sequence(tokens, HEADS, QUERY_HEADS, DIM, seed, torch.float32)


def step(rows: list[Row], seed: int, impl: Any, launch: Launch | None = None, **more: Any) -> torch.Tensor:
    """One new token for each row, taken in."""
    new = [next(sequence(100 + seed * 10 + b, 1).forwards([1])) for b in range(len(rows))]
    q, k, v = (torch.stack([x[i] for x in new]) for i in range(3))
    positions = torch.tensor([[row.seen] for row in rows])
    return attend_rows(rows, AttentionCall(q, k, v, SCALE, positions=positions, **more), impl=impl, launch=launch)


def agree(config: KVConfig, steps: int = 3, **more: Any) -> None:
    ours, theirs, launch = rows_of(config, [70, 33]), rows_of(config, [70, 33]), Launch()
    for n in range(steps):
        got = step(ours, n, "triton", launch, **more)
        want = step(theirs, n, "torch", **more)
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


def test_rows_that_cannot_go_together_go_alone() -> None:
    config = settings(key=Affine(4))
    ours = [*rows_of(config, [40]), *rows_of(config, [40])]  # two pools
    theirs = [*rows_of(config, [40]), *rows_of(config, [40])]
    torch.testing.assert_close(step(ours, 0, "auto"), step(theirs, 0, "torch"), rtol=1e-4, atol=1e-4)


def test_pages_are_looked_up_again_when_a_table_changes() -> None:
    rows, launch = rows_of(settings(key=Affine(4)), [70, 33]), Launch()
    pool = rows[0].table.pool
    pool.release(pool.alloc(50))  # room, so that no stream has to be rebuilt
    before, moves = launch.pages(rows, (DIM, DIM)), pool.moves
    assert launch.pages(rows, (DIM, DIM)) is before
    for q, k, v in sequence(9, 40).forwards([40]):
        rows[1].commit(k, v, rows[1].attend(q, k, v, SCALE, impl="torch")[1])
    after = launch.pages(rows, (DIM, DIM))
    assert pool.moves == moves
    assert after.counts.tolist() == [row.table.counts for row in rows]
    assert after.index[1, 0, : len(rows[1].table.pages[0])].tolist() == rows[1].table.pages[0]
