"""The paired test of the race: how often it is wrong by simulation, what it finds, and by hand what it counts."""

import math

import numpy as np
import pytest

from kvlab.search.elimination import ALPHA, STAKES, lost, wealth

TRIALS, ROUNDS = 24, 16


def test_wealth_is_the_mean_over_stakes_of_what_bets_return() -> None:
    rounds = [(0.5, -0.2), (3.0, 0.1)]  # beyond 1 counts as 1
    paths = [[(1 + 0.5 * s) * (1 - 0.2 * s), (1 + s) * (1 + 0.1 * s)] for s in STAKES]
    first = np.mean([a for a, _ in paths])
    both = np.mean([a * b for a, b in paths])
    assert wealth([]) == 1.0
    assert wealth(rounds) == pytest.approx(max(first, both), rel=1e-12)
    assert wealth(rounds[:1]) == pytest.approx(first, rel=1e-12)
    # What was once reached counts: one may stop at any time.
    assert wealth([*rounds, (-1.0, -1.0)]) == wealth(rounds)


def test_a_round_ends_with_its_last_family() -> None:
    """Inside a round one family may be worse on average and another better: looking there would be a peek too many."""
    assert wealth([(1.0, -1.0)]) == 1.0


@pytest.mark.parametrize("noise", ["normal", "skewed", "coin", "apart"])
def test_a_config_as_good_as_all_others_is_stopped_no_oftener_than_alpha(noise) -> None:
    """Over a whole race of trials of equal worth, looked at after every round, whoever is the rival."""
    rng = np.random.default_rng(7)
    shape, races = (TRIALS, ROUNDS, 3), 400
    wrong = 0
    for _ in range(races):
        if noise == "normal":
            scores = rng.normal(size=shape) * 0.4
        elif noise == "skewed":
            scores = 0.5 * (rng.exponential(size=shape) - 1)
        elif noise == "coin":
            scores = rng.integers(0, 2, size=shape).astype(float)
        else:  # worse in one family, better in the two others, even on balance
            means = rng.permuted(np.tile([0.5, -0.25, -0.25], (TRIALS, 1)), axis=1)
            scores = rng.normal(size=shape) * 0.3 + means[:, None]
        wrong += any(lost((scores[0] - scores[k]).tolist(), TRIALS) for k in range(1, TRIALS))
    error = math.sqrt(ALPHA * (1 - ALPHA) / races)
    assert wrong / races <= ALPHA + 2 * error


def test_one_comparison_alone_has_the_level_too() -> None:
    rng = np.random.default_rng(3)
    runs = 4000
    wrong = sum(lost(rng.choice([-1.0, 1.0], size=(64, 3)).tolist(), 1) for _ in range(runs))
    assert 0 < wrong / runs <= ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / runs)


@pytest.mark.parametrize(("loss", "rounds", "least"), [(0.8, 8, 0.95), (0.4, 16, 0.9)])
def test_what_is_clearly_worse_is_found(loss, rounds, least) -> None:
    rng = np.random.default_rng(1)
    found = [lost((loss + 0.4 * rng.normal(size=(rounds, 3))).tolist(), TRIALS) for _ in range(200)]
    assert np.mean(found) >= least


def test_more_rivals_need_more_evidence() -> None:
    rounds = [(1.0, 1.0, 1.0)] * 3
    assert lost(rounds, 1)
    assert not lost(rounds, 100)
    assert wealth(rounds) < 100 / ALPHA


def test_a_difference_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        wealth([(0.1, math.nan)])
