"""Chunk summaries bound what they summarise, and selection takes what its rule says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs import Affine
from kvlab.kernels.chunks import (
    Bounds,
    bound_scores,
    bounds,
    codec_bounds,
    mean_scores,
    means,
    select,
    select_mass,
    width_of,
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def brute(q: torch.Tensor, keys: torch.Tensor, chunk: int) -> torch.Tensor:
    """max over a chunk's keys of the sum over query heads of q . k: [B, N, Q, C]."""
    products = q.double().unflatten(1, (keys.shape[1], -1)) @ keys.double().mT.unsqueeze(2)
    return torch.stack([part.amax(-1) for part in products.sum(2).split(chunk, dim=-1)], dim=-1)


@given(
    tokens=st.sampled_from([1, 15, 16, 63, 64]),
    group=st.sampled_from([1, 3, 7]),
    queries=st.sampled_from([1, 5]),
    loud=st.sampled_from([1e-6, 1.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_no_key_of_a_chunk_scores_above_its_bound(
    tokens: int, group: int, queries: int, loud: float, seed: int
) -> None:
    keys = torch.randn(2, 2, tokens, 64, generator=rng(seed), dtype=torch.float64) * loud
    q = torch.randn(2, 2 * group, queries, 64, generator=rng(seed + 1), dtype=torch.float64)
    low, high = bounds(keys, 16)
    assert low.dtype == torch.float16
    slack = 1e-12 * q.abs().sum(1, keepdim=True).amax() * loud * 64
    assert bool((bound_scores(q, Bounds(low, high)) >= brute(q, keys, 16) - slack).all())
    # Outward by one fp16 step and no more.
    exact = torch.stack([part.amax(-2) for part in keys.split(16, dim=2)], dim=2)
    assert bool((high.double() >= exact).all())
    assert bool((high.double() - exact <= exact.abs() * 2.0**-10 + 2.0**-24).all())


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (1.0, 1.0, 1.0),
        (0.0, 0.0, 0.0),
        (1e-12, 0.0, 2.0**-24),
        (-1e-12, -(2.0**-24), 0.0),
        (1 + 1e-6, 1.0, 1 + 2.0**-10),
        (-1 - 1e-6, -1 - 2.0**-10, -1.0),
        (65510.0, 65504.0, float("inf")),
        (-1e6, -float("inf"), -65504.0),
    ],
)
def test_bounds_round_outward(value: float, low: float, high: float) -> None:
    got = bounds(torch.full((1, 1, 4), value), 16)
    assert (got.low[0, 0, 0].item(), got.high[0, 0, 0].item()) == (low, high)


def test_one_key_is_scored_exactly() -> None:
    # Where a chunk holds one fp16 key, bound and mean are the product itself, for the sum of a group's queries.
    keys = torch.randn(1, 2, 5, 32, generator=rng()).half()
    q = torch.randn(1, 6, 3, 32, generator=rng(1), dtype=torch.float64)
    expected = (q.unflatten(1, (2, 3)) @ keys.double().mT.unsqueeze(2)).sum(2)
    torch.testing.assert_close(bound_scores(q, bounds(keys, 1)), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean_scores(q, means(keys, 1)), expected, rtol=1e-12, atol=1e-12)


def test_a_bound_of_a_single_query_is_quests() -> None:
    keys = torch.randn(1, 1, 32, 8, generator=rng())
    q = torch.randn(1, 1, 1, 8, generator=rng(1))
    low, high = bounds(keys, 16)
    expected = torch.maximum(q[0, 0] * low[0, 0].float(), q[0, 0] * high[0, 0].float()).sum(-1)
    torch.testing.assert_close(bound_scores(q, Bounds(low, high))[0, 0, 0], expected)


def test_means_are_over_real_tokens() -> None:
    keys = torch.randn(3, 40, 8, generator=rng())
    counts = torch.tensor([40, 17, 0])
    keys[1, 17:] = torch.nan
    keys[2] = torch.nan
    got = means(keys, 16, counts)
    assert got.shape == (3, 3, 8)
    torch.testing.assert_close(got[0, 2], keys[0, 32:40].mean(0).half())
    torch.testing.assert_close(got[1, 1], keys[1, 16].half())
    assert torch.equal(got[1:, 2], torch.zeros(2, 8).half())


def test_slots_without_a_token_do_not_widen_a_bound() -> None:
    keys = torch.randn(2, 40, 8, generator=rng())
    keys[0, 17:] = torch.nan
    low, high = bounds(keys, 16, torch.tensor([17, 40]))
    alone = bounds(keys[0, :17], 16)
    assert torch.equal(low[0, :2], alone.low)
    assert torch.equal(high[0, :2], alone.high)
    assert torch.equal(torch.stack([low[0, 2], high[0, 2]]), torch.zeros(2, 8).half())


@pytest.mark.parametrize("mode", ["asymmetric", "symmetric", "midrise"])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("rotate", [False, True])
@given(clip=st.sampled_from([0.6, 1.0]), seed=st.integers(0, 2**16))
def test_the_codec_bounds_what_it_stores(mode: str, bits: int, rotate: bool, clip: float, seed: int) -> None:
    from kvlab.kernels.hadamard import hadamard

    codec = Affine(bits, "channel", 16, mode, clip, rotate)  # type: ignore[arg-type]
    keys = torch.randn(2, 48, 64, generator=rng(seed)) * torch.rand(64, generator=rng(seed)) * 30
    packed = codec.encode(keys)
    low, high = codec_bounds(packed["scale"], packed.get("zero"), codec.stored_as(64).groups)
    stored = Affine(bits, "channel", 16, mode, clip).decode(packed, 64, torch.float32)  # in the codec's own space
    for chunk in range(3):
        part = stored[:, chunk * 16 : chunk * 16 + 16]
        assert bool((part <= high[:, chunk, None]).all())
        assert bool((part >= low[:, chunk, None]).all())
    q = torch.randn(1, 2, 1, 64, generator=rng(seed + 1), dtype=torch.float64)
    scores = bound_scores(hadamard(q) if rotate else q, Bounds(low[None], high[None]))
    restored = codec.decode(packed, 64, torch.float64)
    assert bool((scores >= brute(q, restored[None], 16) - 1e-4).all())


def test_codec_bounds_need_channel_groups() -> None:
    with pytest.raises(ValueError, match="axis='channel'"):
        codec_bounds(torch.ones(1, 1, 8), None, Affine(4, "token", 8).stored_as(8).groups)


def test_chunks_beyond_a_head_score_lowest_and_unbounded_ones_highest() -> None:
    low = torch.zeros(1, 1, 4, 8).half()
    high = low.clone()
    high[0, 0, 1], high[0, 0, 3] = torch.inf, torch.nan
    q = torch.zeros(1, 2, 1, 8)
    q[0, 0, 0, 0] = 1
    assert bound_scores(q, Bounds(low, high), torch.tensor([[3]]))[0, 0, 0].tolist() == [
        0.0,
        float("inf"),
        0.0,
        -float("inf"),
    ]
    assert mean_scores(q, low, torch.tensor([[0]]))[0, 0, 0].tolist() == [-float("inf")] * 4


def test_query_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="multiple of KV heads, got 5 query and 2 KV heads"):
        mean_scores(torch.zeros(1, 5, 1, 4), torch.zeros(1, 2, 1, 4))


def by_rule(scores: list[float], count: int, budget: int, first: int, last: int) -> list[int]:
    forced = {i for i in range(count) if i < first or i >= count - last}
    order = sorted(range(count), key=lambda i: (i not in forced, -scores[i], i))
    return sorted(order[:budget])


@given(
    chunks=st.integers(1, 40),
    k=st.integers(1, 45),
    first=st.integers(0, 3),
    last=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_selection_follows_its_rule(chunks: int, k: int, first: int, last: int, seed: int) -> None:
    scores = torch.randint(-3, 3, (2, 3, chunks), generator=rng(seed)).float()
    scores[0, 0, 0] = torch.inf
    counts = torch.randint(0, chunks + 1, (2, 3), generator=rng(seed + 1), dtype=torch.int32)
    got = select(scores, counts, k=k, forced_first=first, forced_last=last)
    width = min(chunks, max(k, first + last))
    assert got.dtype == torch.int32
    assert got.shape == (2, 3, width)
    for b in range(2):
        for n in range(3):
            expected = by_rule(scores[b, n].tolist(), int(counts[b, n]), width, first, last)
            assert got[b, n].tolist() == expected + [-1] * (width - len(expected))


@pytest.mark.parametrize("fraction", [0.1, 1 / 8, 0.3, 1.0])
def test_a_fraction_is_of_each_heads_own_chunks(fraction: float) -> None:
    counts = torch.arange(0, 41, dtype=torch.int32)
    scores = torch.rand(41, 40, generator=rng())
    got = select(scores, counts, fraction=fraction, forced_first=1, forced_last=1)
    taken = (got >= 0).sum(-1)
    exact = [min(c, max(2, -(-round(c * fraction * 1000) // 1000))) for c in range(41)]
    assert taken.tolist() == exact
    assert got.shape[1] == exact[-1] == width_of(40, fraction=fraction, forced_first=1, forced_last=1)


def test_all_chunks_are_all_chunks() -> None:
    got = select(torch.randn(2, 7, generator=rng()), torch.tensor([7, 4], dtype=torch.int32), fraction=1.0)
    assert got.tolist() == [list(range(7)), [0, 1, 2, 3, -1, -1, -1]]


def test_top_p_takes_the_fewest_that_reach_it() -> None:
    weights = torch.tensor([[0.05, 0.4, 0.05, 0.2, 0.3], [0.5, 0.5, 0.0, 0.0, 0.0]])
    counts = torch.tensor([5, 2], dtype=torch.int32)
    free = {"forced_first": 0, "forced_last": 0}
    assert select_mass(weights.log(), counts, p=0.65, width=5, **free).tolist() == [
        [1, 4, -1, -1, -1],
        [0, 1] + [-1] * 3,
    ]
    assert select_mass(weights.log(), counts, p=0.4, width=2, **free).tolist() == [[1, -1], [0, -1]]
    # A forced chunk counts with its weight; the cap holds.
    assert select_mass(weights.log(), counts, p=0.9, width=5, forced_first=1, forced_last=0)[0].tolist() == [
        0,
        1,
        3,
        4,
        -1,
    ]
    assert select_mass(weights.log(), counts, p=0.9, width=2, **free).tolist() == [[1, 4], [0, 1]]
    assert select_mass(weights.log(), counts, p=1.0, width=5, **free)[0].tolist() == [0, 1, 2, 3, 4]


def test_top_p_of_nothing_is_nothing() -> None:
    got = select_mass(torch.full((1, 4), -torch.inf), torch.tensor([0], dtype=torch.int32), p=0.5, width=3)
    assert got.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "either k or fraction"),
        ({"k": 1, "fraction": 0.5}, "either k or fraction"),
        ({"k": 0}, "k must be at least 1"),
        ({"fraction": 1.5}, r"\(0, 1\], got 1.5"),
        ({"k": 1, "forced_first": -1}, "not be negative"),
    ],
)
def test_impossible_selections_are_refused(fields: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        select(torch.zeros(1, 4), torch.tensor([4]), **fields)


def test_top_p_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="p must lie in"):
        select_mass(torch.zeros(1, 4), torch.tensor([4]), p=1.2, width=2)
