import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvlab.stats import cluster_bootstrap, mcnemar_p, score_p, sign_flip_p, tango_interval, tango_z, unconditional_p

# -- the interval ------------------------------------------------------------------------------------------------------


def test_bootstrap_agrees_with_scipy_at_the_widened_level():
    rng = np.random.default_rng(3)
    diffs = np.clip(rng.gamma(0.4, 0.3, 120) - 0.2, -1, 1)
    widened = scipy_stats.norm.sf(math.sqrt(120 / 119) * scipy_stats.t.isf(0.05, 119))
    theirs = scipy_stats.bootstrap(
        (diffs,), np.mean, confidence_level=1 - 2 * widened, method="BCa", n_resamples=40_000,
        rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    low, high = cluster_bootstrap(diffs.tolist(), seed=1, resamples=40_000)
    # Gains are larger than losses: the bootstrap knows the upper end is farther, the score interval guards the lower.
    assert high == pytest.approx(theirs.high, abs=0.001)
    assert theirs.low - 0.01 < low <= theirs.low + 0.001


def test_no_end_is_nearer_than_that_of_the_score_interval():
    """Three right/wrong items to a cluster: the bootstrap alone ends too near in a good part of such samples."""
    rng = np.random.default_rng(8)
    nearer = 0
    for _ in range(20):
        own = rng.gamma([0.085, 0.035, 0.88], size=(99, 3))
        counts = rng.multinomial(3, own / own.sum(axis=1, keepdims=True))
        diffs, names = np.repeat(np.tile([-1.0, 1.0, 0.0], 99), counts.ravel()), np.repeat(np.arange(99), 3)
        means = (counts[:, 1] - counts[:, 0]) / 3
        size = (means**2).sum() / np.abs(means).sum()
        b, c = -means[means < 0].sum() / size, means[means > 0].sum() / size
        score = tango_interval(b, c, 99)
        low, high = cluster_bootstrap(diffs.tolist(), names.tolist(), resamples=500)
        assert low <= size * score[0] + 1e-9
        assert high >= size * score[1] - 1e-9
        plain = scipy_stats.bootstrap((means,), np.mean, confidence_level=0.9, n_resamples=500, rng=rng)
        nearer += plain.confidence_interval.high < size * score[1] - 1e-3
    assert nearer > 5


def test_a_few_clusters_reach_as_far_as_students_t():
    """Twelve symmetric differences: the plain percentile would be narrower by t against normal and 12 against 11."""
    diffs = np.array([0.15, 0.3, 0.45, 0.6, 0.75, 0.9])
    both = np.concatenate([diffs, -diffs])
    low, high = cluster_bootstrap(both.tolist(), resamples=40_000)
    half = scipy_stats.t.isf(0.05, 11) * both.std(ddof=1) / math.sqrt(12)
    plain = scipy_stats.norm.isf(0.05) * both.std(ddof=0) / math.sqrt(12)
    assert high - low > 2 * 0.95 * half > 2 * 1.06 * plain


def test_clusters_widen_the_interval():
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.normal(0, 0.2, 12).clip(-0.9, 0.9), 10)
    names = [f"doc{i // 10}" for i in range(120)]
    low, high = cluster_bootstrap(shared.tolist(), names)
    plain_low, plain_high = cluster_bootstrap(shared.tolist())
    assert high - low > 2 * (plain_high - plain_low)


def test_clusters_of_one_are_no_clusters():
    diffs = np.random.default_rng(1).uniform(-1, 1, 30).tolist()
    assert cluster_bootstrap(diffs, range(30)) == cluster_bootstrap(diffs)
    assert score_p(diffs, -0.3, range(30)) == score_p(diffs, -0.3)


def test_bootstrap_never_claims_more_than_silence_supports():
    reach = 1 - 0.05 ** (1 / 40)
    assert cluster_bootstrap([0.0] * 40) == pytest.approx((-reach, reach))
    low, _ = cluster_bootstrap([0.0] * 39 + [0.01])
    assert low <= -reach + 0.01 / 40
    low, high = cluster_bootstrap([0.1, 0.1])  # all alike
    assert (low, high) == pytest.approx((0.1 - 1 + 0.05**0.5, 0.1 + 1 - 0.05**0.5))
    for bad in ([0.1], []):
        with pytest.raises(ValueError, match="at least 2 clusters"):
            cluster_bootstrap(bad)
    with pytest.raises(ValueError, match="at least 2 clusters, got 1"):
        cluster_bootstrap([0.1, 0.2, 0.3], ["a", "a", "a"])
    with pytest.raises(ValueError, match="finite"):
        cluster_bootstrap([0.1, float("nan")])
    with pytest.raises(ValueError, match="one cluster per difference"):
        cluster_bootstrap([0.1, 0.2], ["a"])
    with pytest.raises(ValueError, match="level"):
        cluster_bootstrap([0.1, 0.2], level=90)


def test_two_clusters_give_nearly_no_bound():
    low, high = cluster_bootstrap([0.5, -0.5])
    assert low < -0.49
    assert high > 0.49


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.integers(0, 5))
def test_bootstrap_contains_the_mean(diffs, seed):
    low, high = cluster_bootstrap(diffs, resamples=300, seed=seed)
    assert -1 <= low <= float(np.mean(diffs)) + 1e-12
    assert float(np.mean(diffs)) - 1e-12 <= high <= 1


# -- the score test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 59), (6, 17, 200), (3, 0, 88), (60, 0, 60), (0, 60, 60)])
def test_right_and_wrong_take_the_exact_test(b, c, n):
    diffs = [-1.0] * b + [1.0] * c + [0.0] * (n - b - c)
    for bound in (-0.05, 0.0, 0.1):
        exact = unconditional_p(tango_z(b, c, n, bound), n, bound) if c - b > n * bound else 1.0
        assert score_p(diffs, bound) == pytest.approx(exact, abs=1e-12)


def test_whole_clusters_of_right_and_wrong_count_once():
    """Sixty clusters of five that flip as one are sixty items, not three hundred."""
    one = [-1.0] * 2 + [1.0] * 3 + [0.0] * 55
    five = np.repeat(one, 5).tolist()
    assert score_p(five, -0.1, [i // 5 for i in range(300)]) == pytest.approx(score_p(one, -0.1))
    assert score_p(five, -0.1) < score_p(one, -0.1) / 5


def test_small_differences_say_more_than_whole_ones_until_silence_speaks():
    rng = np.random.default_rng(0)
    small = rng.uniform(-0.2, 0.2, 200)
    whole = np.sign(small)
    assert score_p(small, -0.05) < score_p(whole, -0.05)
    # All alike says nothing of what was not drawn: the chance that no cluster of 59 shows a loss of five in a hundred.
    assert score_p([0.0] * 59, -0.05) == pytest.approx(0.95**59, rel=1e-9)
    assert score_p([0.01] * 59, -0.05) == pytest.approx(0.94**59, rel=1e-9)


def test_rare_losses_hide_behind_many_small_gains():
    """Gains of .03 and no loss seen in 29: a loss of .57 in one of twenty would make it a tie, and is not excluded."""
    gains = [0.03] * 29
    assert sign_flip_p(gains, alternative="greater") < 1e-3
    assert score_p(gains, 0.0) == pytest.approx(0.97**29, rel=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40), st.floats(-0.9, 0.8), st.floats(0.01, 0.1))
def test_a_higher_bound_is_harder_to_exclude(diffs, bound, more):
    low, high = score_p(diffs, bound), score_p(diffs, bound + more)
    assert 0 <= low <= high + 1e-6 <= 1 + 1e-6
    if float(np.mean(diffs)) <= bound:
        assert low == 1.0


def test_score_p_refuses_what_it_cannot_test():
    with pytest.raises(ValueError, match="at least 2 clusters"):
        score_p([0.1], 0.0)
    with pytest.raises(ValueError, match="bound"):
        score_p([0.1, 0.2], -1.0)
    with pytest.raises(ValueError, match="finite"):
        score_p([0.1, 1.2], 0.0)


# -- the randomisation test --------------------------------------------------------------------------------------------


def test_sign_flip_matches_mcnemar_and_scipy():
    binary = [1.0] * 9 + [-1.0] * 2 + [0.0] * 30
    assert sign_flip_p(binary) == pytest.approx(mcnemar_p(2, 9))
    assert sign_flip_p(binary, alternative="greater") == pytest.approx(mcnemar_p(2, 9, "greater"))
    assert sign_flip_p([0.0] * 5) == 1.0
    assert sign_flip_p([0.5] * 80, alternative="greater") == 1 / 10_001  # a simulated p-value is never zero
    assert sign_flip_p([0.5] * 80, alternative="greater", resamples=99) == 1 / 100
    rng = np.random.default_rng(5)
    diffs = rng.normal(0.05, 0.2, 80).clip(-1, 1)
    reference = scipy_stats.permutation_test(
        (diffs, np.zeros(80)), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=20_000,
        alternative="greater", rng=np.random.default_rng(6),
    ).pvalue  # fmt: skip
    assert sign_flip_p(diffs.tolist(), alternative="greater") == pytest.approx(reference, abs=0.01)
    with pytest.raises(ValueError, match="'up'"):
        sign_flip_p([0.1], alternative="up")


def test_one_cluster_flips_as_one():
    assert sign_flip_p([0.5, 0.4, 0.3], ["a", "a", "a"]) == 1.0
    assert sign_flip_p([0.5, 0.4, 0.3], ["a", "a", "a"], alternative="greater") == 0.5
