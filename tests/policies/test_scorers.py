"""What scorers rank by, and how a forward's attention folds into what was known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from variants import ALL_SCORERS, name_of

from kvlab.policies import SCORERS, AttentionMass, Candidates, Recency, Scorer, WindowAttention
from kvlab.policies.base import Expected


def test_the_registry_names_classes_by_their_kind() -> None:
    assert {kind: cls.kind for kind, cls in SCORERS.items()} == {kind: kind for kind in SCORERS}


@pytest.mark.parametrize("scorer", ALL_SCORERS, ids=name_of)
@given(tokens=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_every_scorer_gives_one_finite_score_per_token(scorer: Scorer, tokens: int, seed: int) -> None:
    mass = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed))
    before = mass.clone()
    keys, values = (torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(seed + i)) for i in (1, 2))
    expected = Expected(keys.mean(1), torch.eye(8).expand(2, -1, -1))
    candidates = Candidates(torch.arange(tokens).expand(2, -1), mass, keys, values, expected=expected)
    score = scorer.score(candidates)
    assert score.shape == (2, tokens)
    assert bool(torch.isfinite(score).all())
    assert torch.equal(mass, before)
    # Heads are judged apart.
    second = Candidates(torch.arange(tokens).expand(1, -1), mass[1:], keys[1:], values[1:])
    alone = second._replace(expected=Expected(*(x[1:] for x in expected)))
    torch.testing.assert_close(scorer.score(alone), score[1:])


@pytest.mark.parametrize(
    "scorer", [s for s in ALL_SCORERS if s.stateful and not (s.reads_queries or s.reads_selection)], ids=name_of
)
@given(parts=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_weights_do_not_depend_on_call_boundaries(scorer: Scorer, parts: list[int]) -> None:
    # One query's weight after all parts = its weight in its part x what later parts leave of it.
    total = sum(parts)
    if isinstance(scorer, WindowAttention):
        # Exact only while no forward spans a window: there SnapKV's own plain mean takes over.
        parts = [1] * total
    folded = torch.zeros(0, dtype=torch.float64)
    for n in parts:
        folded = torch.cat([folded * scorer.carry(n), scorer.query_weights(n).double()])
    if isinstance(scorer, AttentionMass):
        torch.testing.assert_close(folded, scorer.query_weights(total), rtol=1e-12, atol=0)
    else:
        ages = torch.arange(total - 1, -1, -1, dtype=torch.float64)
        assert scorer.kind == "window_attention"
        expected = (1 - 1 / scorer.window) ** ages / scorer.window  # type: ignore[attr-defined]
        torch.testing.assert_close(folded, expected, rtol=1e-12, atol=0)


def test_decay_halves_what_is_old() -> None:
    assert AttentionMass(0.5).query_weights(4).tolist() == [0.125, 0.25, 0.5, 1.0]
    assert AttentionMass(0.5).carry(3) == 0.125
    assert AttentionMass().query_weights(3).tolist() == [1.0, 1.0, 1.0]


def test_a_prompt_counts_its_last_window_of_queries() -> None:
    assert WindowAttention(2, 1).query_weights(5).tolist() == [0, 0, 0, 0.5, 0.5]
    assert WindowAttention(2, 1).carry(5) == 0.0


def test_pooling_is_a_mean_over_real_neighbours() -> None:
    mass = torch.tensor([[3.0, 0.0, 0.0, 6.0]])
    positions = torch.arange(4).unsqueeze(0)
    assert WindowAttention(2, 3).score(Candidates(positions, mass)).tolist() == [[1.5, 1.0, 2.0, 3.0]]
    assert torch.equal(WindowAttention(2, 1).score(Candidates(positions, mass)), mass)


def test_recency_is_position() -> None:
    assert Recency().score(Candidates(torch.tensor([[4, 9, 11]]))).tolist() == [[4.0, 9.0, 11.0]]
    assert float(Recency().query_weights(4).sum()) == 0.0


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: AttentionMass(0.0), "decay must lie in"),
        (lambda: AttentionMass(float("nan")), "decay must lie in"),
        (lambda: WindowAttention(0), "at least 1 query"),
        (lambda: WindowAttention(4, 2), "odd number"),
    ],
)
def test_scorers_that_mean_nothing_are_refused(make, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()
