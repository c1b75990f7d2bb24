"""How many tokens stay: integers decide, something always does, nothing is invented."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from variants import ALL_BUDGETS, name_of

from kvlab.policies import BUDGETS, Budget, Fraction, Threshold, Tokens, Unlimited


def test_the_registry_names_classes_by_their_kind() -> None:
    assert {kind: cls.kind for kind, cls in BUDGETS.items()} == {kind: kind for kind in BUDGETS}


@pytest.mark.parametrize("budget", ALL_BUDGETS, ids=name_of)
@given(stored=st.integers(0, 300), new=st.integers(0, 300), protected=st.integers(0, 100), evicted=st.integers(0, 300))
def test_every_budget_keeps_a_possible_count(
    budget: Budget, stored: int, new: int, protected: int, evicted: int
) -> None:
    seen = stored + new + protected + evicted
    kept = budget.keep(stored, new, protected, seen)
    assert isinstance(kept, int)
    assert 0 <= kept <= stored + new
    if stored + new + protected:
        assert kept + protected >= 1  # decode has something to read
    if not budget.evicts:
        assert kept == stored + new
    if not budget.revisits:
        assert kept >= stored


@pytest.mark.parametrize(
    ("fraction", "seen", "kept"),
    [
        (1 - 0.9, 10, 1),
        (1 - 0.9, 100, 10),
        (0.1, 100, 10),
        (0.2, 1000, 200),
        (1 - 0.8, 1000, 200),
        (1 - 0.7, 10, 3),
        (0.1 + 0.2, 1000, 300),
        (0.29, 100, 29),
        (0.1, 1, 1),
        (0.5, 1, 1),
        (0.5, 3, 2),
        (0.1, 8, 1),
        (1e-6, 1000, 1),
        (1.0, 7, 7),
    ],
)
def test_fractions_do_not_fall_into_the_float_trap(fraction: float, seen: int, kept: int) -> None:
    assert Fraction(fraction).keep(0, seen, 0, seen) == kept


@pytest.mark.parametrize(
    ("quantile", "new", "kept"), [(1 - 0.9, 10, 9), (0.7, 10, 3), (0.1 + 0.2, 10, 7), (0.0, 5, 5), (0.29, 100, 71)]
)
def test_a_threshold_drops_whole_shares(quantile: float, new: int, kept: int) -> None:
    assert Threshold(quantile).keep(0, new, 4, new + 4) == kept
    assert Threshold(quantile).keep(20, new, 4, 99) == 20 + kept


def test_a_threshold_never_empties_a_sequence() -> None:
    assert Threshold(0.99).keep(0, 1, 0, 1) == 1
    assert Threshold(0.99).keep(0, 200, 0, 200) == 2
    assert Threshold(0.999).keep(0, 0, 4, 4) == 0


@pytest.mark.parametrize(
    ("tokens", "stored", "new", "protected", "kept"),
    [
        (20, 0, 100, 8, 12),
        (20, 12, 16, 8, 12),
        (20, 0, 5, 8, 5),  # shorter than the budget: nothing is evicted
        (20, 0, 50, 64, 0),  # sinks and recent tokens alone exceed it, and stay
        (1, 0, 50, 0, 1),
        (1000, 7, 9, 3, 16),
    ],
)
def test_a_token_budget_counts_sinks_and_recent_tokens(
    tokens: int, stored: int, new: int, protected: int, kept: int
) -> None:
    assert Tokens(tokens).keep(stored, new, protected, 10_000) == kept


def test_unlimited_keeps_all() -> None:
    assert Unlimited().keep(3, 4, 5, 12) == 7


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Tokens(0), "at least 1, got 0"),
        (lambda: Tokens(-5), "at least 1, got -5"),
        (lambda: Fraction(0.0), r"\(0, 1\], got 0.0"),
        (lambda: Fraction(1.5), r"\(0, 1\], got 1.5"),
        (lambda: Fraction(float("nan")), r"\(0, 1\], got nan"),
        (lambda: Threshold(1.0), r"\[0, 1\), got 1.0"),
        (lambda: Threshold(float("nan")), r"\[0, 1\), got nan"),
        (lambda: Threshold(-0.1), r"\[0, 1\), got -0.1"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(make, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()
