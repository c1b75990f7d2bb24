import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.stats import anytime_p, betting_wealth, sequential


def by_hand(diffs, bound):
    """The same for "greater", an item at a time, from the definition."""
    wealth, seen, deviations, out = 1.0, [], [], []
    for diff in diffs:
        count = 10 + len(seen)
        mean = (-10 * bound + sum(seen)) / count
        variance = (10 * 0.05 + sum(deviations)) / count
        stake = min(max(mean / (variance + mean**2), 0.0), 0.5 / (1 + bound))
        gain = diff - bound
        wealth *= 1 + stake * gain
        seen.append(gain)
        deviations.append((gain - (-10 * bound + sum(seen)) / (10 + len(seen))) ** 2)
        out.append(wealth)
    return out


@given(st.lists(st.floats(-1, 1), max_size=30), st.floats(-0.9, 0.9))
def test_all_at_once_equals_one_at_a_time(diffs, bound):
    assert betting_wealth(diffs, bound).tolist() == pytest.approx(by_hand(diffs, bound), rel=1e-9)
    mirrored = betting_wealth([-d for d in diffs], -bound, "less")
    assert mirrored.tolist() == pytest.approx(by_hand(diffs, bound), rel=1e-9)


@pytest.mark.parametrize(("losses", "gains"), [(0.30, 0.10), (0.50, 0.20), (0.05, 0.0), (0.10, 0.40), (0.2, 0.2)])
@pytest.mark.parametrize("alternative", ["greater", "less"])
def test_the_bets_are_fair_at_the_bound(losses, gains, alternative):
    """Mean wealth over all 3^7 sequences, each by its chance, is exactly 1: nothing is won by looking."""
    chance = {-1: losses, 0: 1 - losses - gains, 1: gains}
    sequences = np.array(list(itertools.product((-1, 0, 1), repeat=7)), dtype=float)
    weights = np.prod(np.vectorize(chance.get)(sequences), axis=1)
    wealth = betting_wealth(sequences, gains - losses, alternative)
    assert (weights @ wealth).tolist() == pytest.approx([1.0] * 7, abs=1e-12)
    assert wealth.min() > 0


def test_beyond_the_bound_bets_lose_on_average():
    sequences = np.array(list(itertools.product((-1, 0, 1), repeat=7)), dtype=float)
    chance = {-1: 0.3, 0: 0.6, 1: 0.1}  # a mean of -.2, tested against -.1
    weights = np.prod(np.vectorize(chance.get)(sequences), axis=1)
    means = weights @ betting_wealth(sequences, -0.1)
    assert (np.diff(means) < 0).all()
    assert means[-1] < 0.95


@pytest.mark.parametrize(
    ("margin", "discordance", "median", "within_1000"),
    [(0.03, 0.01, 204, 1.0), (0.03, 0.05, 355, 0.92), (0.05, 0.01, 116, 1.0), (0.05, 0.10, 235, 0.98)],
)
def test_when_an_equal_config_is_accepted(margin, discordance, median, within_1000):
    draws = np.random.default_rng(0).random((2000, 1000))
    diffs = np.where(draws < discordance / 2, -1.0, np.where(draws < discordance, 1.0, 0.0))
    accepted = betting_wealth(diffs, -margin) >= 20
    first = np.where(accepted.any(axis=1), accepted.argmax(axis=1) + 1, 10**6)
    assert np.median(first) == pytest.approx(median, rel=0.1)
    assert accepted.any(axis=1).mean() == pytest.approx(within_1000, abs=0.03)


def test_looking_all_the_time_keeps_the_level_and_fixed_n_tests_do_not():
    """A config that loses exactly the margin, looked at after each of 600 items."""
    from scipy.stats import norm

    from kvlab.stats import tango_z

    draws = np.random.default_rng(1).random((3000, 600))
    diffs = np.where(draws < 0.075, -1.0, np.where(draws < 0.10, 1.0, 0.0))
    assert (betting_wealth(diffs, -0.05) >= 20).any(axis=1).mean() <= 0.05
    b, c = np.cumsum(diffs < 0, axis=1), np.cumsum(diffs > 0, axis=1)
    peeked = tango_z(b[:, 58:], c[:, 58:], np.arange(59, 601), -0.05) > norm.ppf(0.95)
    assert peeked.any(axis=1).mean() > 0.15


def test_where_a_test_ends():
    ended = sequential([0.0] * 300, 0.05)
    assert (ended.state, ended.n, ended.p_fails) == ("passes", 116, 1.0)
    assert ended.p_passes <= 0.05 < sequential([0.0] * 115, 0.05).p_passes
    assert sequential([0.0] * 115, 0.05).state == "open"
    lost = sequential([-1.0] * 30, 0.05)
    assert (lost.state, lost.n) == ("fails", 10)
    assert lost.p_passes == 1.0
    # What comes after the end does not matter.
    assert sequential([0.0] * 116 + [-1.0] * 200, 0.05) == ended
    empty = sequential([], 0.05)
    assert (empty.state, empty.n, empty.p_passes, empty.p_fails) == ("open", 0, 1.0, 1.0)
    assert sequential([1.0], 0.05).state == "open"  # n = 1
    assert sequential([0.0] * 300, 0.05, alpha=0.01).n > 116


def test_p_values_only_fall():
    rng = np.random.default_rng(2)
    p = anytime_p(betting_wealth(rng.choice([-1.0, 0.0, 1.0], size=(5, 200)), -0.05))
    assert p.shape == (5, 200)
    assert (np.diff(p, axis=1) <= 0).all()
    assert (p <= 1).all()
    assert (p > 0).all()


def test_refusals():
    for bad in ([0.1, 1.5], [math.nan], [-1.01]):
        with pytest.raises(ValueError, match=r"\[-1, 1\]"):
            betting_wealth(bad, 0.0)
    for bound in (-1.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="bound"):
            betting_wealth([0.0], bound)
    with pytest.raises(ValueError, match="'up'"):
        betting_wealth([0.0], 0.0, "up")
    with pytest.raises(ValueError, match="margin"):
        sequential([0.0], 0.0)
    with pytest.raises(ValueError, match="alpha"):
        sequential([0.0], 0.05, alpha=5)
    with pytest.raises(ValueError, match="one row"):
        sequential(np.zeros((2, 3)), 0.05)
