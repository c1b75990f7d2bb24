"""Attention in pieces against attention by definition: head mapping, masks, soft cap, sink logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.kernels.attend import (
    attend_reference,
    attention_mass,
    causal_sdpa,
    fold_heads,
    probabilities,
    unfold_heads,
)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (6, 2), (4, 1), (7, 7)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_each_query_head_reads_its_own_kv_head(heads: int, kv_heads: int, head_dim: int) -> None:
    q, k = _random(heads, 5, head_dim), _random(kv_heads, 5, head_dim, seed=1)
    v = torch.arange(1, kv_heads + 1, dtype=torch.float64).view(-1, 1, 1).expand(-1, 5, head_dim)
    expected = torch.tensor([float(h // (heads // kv_heads) + 1) for h in range(heads)], dtype=torch.float64)
    for out in (attend_reference(q, k, v, 0.1), causal_sdpa(q[None], k[None], v[None], 0.1)[0]):
        torch.testing.assert_close(out, expected.view(-1, 1, 1).expand_as(out), rtol=0, atol=1e-12)
    probs = probabilities(fold_heads(q, kv_heads) @ k.mT, None, None, None, 5)
    out = unfold_heads(probs @ v, heads)
    torch.testing.assert_close(out, expected.view(-1, 1, 1).expand_as(out), rtol=0, atol=1e-12)


def test_five_query_heads_over_two_kv_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of KV heads, got 5 query and 2 KV heads"):
        fold_heads(_random(5, 3, 8), 2)


@given(
    group=st.sampled_from([1, 3, 7]),
    n_queries=st.sampled_from([1, 2, 5]),
    softcap=st.sampled_from([None, 0.7, 30.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_pieces_equal_the_definition(group: int, n_queries: int, softcap: float | None, sinks: bool, seed: int) -> None:
    kv_heads, tokens = 2, 9
    heads = kv_heads * group
    q, k, v = (
        _random(n, t, 16, seed=seed + i) for i, (n, t) in enumerate([(heads, n_queries), (2, tokens), (2, tokens)])
    )
    sink_logits = _random(heads, seed=seed + 9) if sinks else None
    allowed = torch.rand(kv_heads, n_queries, tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    probs = probabilities(fold_heads(q * 0.25, kv_heads) @ k.mT, ~allowed, softcap, sink_logits, n_queries)
    expected = attend_reference(q, k, v, 0.25, allowed, softcap, sink_logits)
    torch.testing.assert_close(unfold_heads(probs @ v, heads), expected, rtol=0, atol=1e-12)


def test_a_query_without_any_key_gives_zeros_and_harms_nobody() -> None:
    logits = _random(1, 2, 3)
    forbidden = torch.tensor([[True, True, True], [False, True, True]])
    probs = probabilities(logits, forbidden, None, None, 2)
    assert probs[0].tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_sink_logit_takes_its_share() -> None:
    # Two keys of logit 0 and a sink of logit log 2: half of the probability is gone.
    probs = probabilities(torch.zeros(1, 1, 2).double(), None, None, torch.tensor([math.log(2)]).double(), 1)
    torch.testing.assert_close(probs, torch.full((1, 1, 2), 0.25).double())


def test_softcap_bounds_logits() -> None:
    probs = probabilities(torch.tensor([[[1000.0, 0.0]]]).double(), None, 2.0, None, 1)
    assert probs[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-2.0)), abs=1e-12)


def test_mass_is_the_mean_over_the_query_heads_of_a_kv_head() -> None:
    # Two KV heads, three query heads each, two queries: a hand-made probability for every one.
    probs = _random(6, 2, 4).softmax(-1)
    weights = torch.tensor([0.5, 1.0], dtype=torch.float64)
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for head in range(6):
        for query in range(2):
            expected[head // 3] += weights[query] * probs[head, query] / 3
    torch.testing.assert_close(attention_mass(fold_heads(probs, 2), weights), expected, rtol=0, atol=1e-14)


def test_one_vector_added_to_every_key_changes_nothing() -> None:
    q, k, v = _random(6, 3, 16), _random(2, 7, 16, seed=1), _random(2, 7, 16, seed=2)
    shifted = attend_reference(q, k + _random(16, seed=3), v, 0.25)
    torch.testing.assert_close(shifted, attend_reference(q, k, v, 0.25), rtol=0, atol=1e-12)
