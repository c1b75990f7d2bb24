import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from kvlab.stats import cluster_bootstrap, fixed_sequence, holm, macro, pooled, sample_error, sign_flip_p, wilson


@given(
    st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.9, 0.95])
)
def test_wilson_agrees_with_statsmodels(case, level):
    k, n = case
    expected = proportion_confint(k, n, alpha=1 - level, method="wilson")
    assert wilson(k, n, level) == pytest.approx(expected, abs=1e-12)


def test_wilson_says_something_at_the_boundary():
    assert wilson(0, 25) == (0.0, pytest.approx(0.133, abs=5e-4))
    assert wilson(25, 25) == (pytest.approx(0.867, abs=5e-4), 1.0)
    low, high = wilson(1, 1)
    assert 0 < low < 0.21
    assert high == 1.0
    for k, n in [(0, 0), (3, 2), (-1, 5)]:
        with pytest.raises(ValueError, match=f"got {k} of {n}"):
            wilson(k, n)


def test_sample_error():
    assert sample_error([1, 1, 1, 0]) == pytest.approx(0.25)
    assert sample_error([1]) is None
    assert sample_error([]) is None
    assert sample_error([0] * 25) is None  # never zero: use the interval
    assert sample_error([0.2, 0.4, 0.9]) == pytest.approx(scipy_stats.sem([0.2, 0.4, 0.9]))
    with pytest.raises(ValueError, match="nan"):
        sample_error([0.5, float("nan")])


def test_macro_and_pooled_keep_their_own_error():
    groups = {"small": [1] * 5 + [0] * 5, "large": [1] * 900 + [0] * 100}
    by_task, by_item = macro(groups), pooled(groups)
    assert (by_task.kind, round(by_task.mean, 3), round(by_task.error, 4), by_task.n) == ("macro", 0.700, 0.0835, 1010)
    assert (by_item.kind, round(by_item.mean, 3), round(by_item.error, 4), by_item.n) == ("pooled", 0.896, 0.0096, 1010)
    assert macro({"a": [1], "b": [0, 1]}).error is None
    with pytest.raises(ValueError, match="'empty'"):
        macro({"full": [1, 0], "empty": []})


def test_bootstrap_agrees_with_scipy():
    rng = np.random.default_rng(3)
    diffs = np.clip(rng.gamma(0.4, 0.3, 120) - 0.2, -1, 1)
    ours = cluster_bootstrap(diffs.tolist(), seed=1)
    theirs = scipy_stats.bootstrap(
        (diffs,), np.mean, confidence_level=0.90, method="BCa", n_resamples=10_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.003)


def test_clusters_widen_the_interval():
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.normal(0, 0.2, 12).clip(-0.9, 0.9), 10)
    names = [f"doc{i // 10}" for i in range(120)]
    low, high = cluster_bootstrap(shared.tolist(), names)
    plain_low, plain_high = cluster_bootstrap(shared.tolist())
    assert high - low > 2 * (plain_high - plain_low)


def test_bootstrap_never_claims_more_than_silence_supports():
    reach = 1.6448536269514722**2 / (40 + 1.6448536269514722**2)
    assert cluster_bootstrap([0.0] * 40) == pytest.approx((-reach, reach))
    low, _ = cluster_bootstrap([0.0] * 39 + [0.01])
    assert low <= -reach + 0.01 / 40
    for bad in ([0.1], []):
        with pytest.raises(ValueError, match="at least 2 clusters"):
            cluster_bootstrap(bad)
    with pytest.raises(ValueError, match="finite"):
        cluster_bootstrap([0.1, float("nan")])
    with pytest.raises(ValueError, match="one cluster per difference"):
        cluster_bootstrap([0.1, 0.2], ["a"])


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.integers(0, 5))
def test_bootstrap_contains_the_mean(diffs, seed):
    low, high = cluster_bootstrap(diffs, resamples=300, seed=seed)
    assert -1 <= low <= float(np.mean(diffs)) + 1e-12
    assert float(np.mean(diffs)) - 1e-12 <= high <= 1


def test_sign_flip_matches_mcnemar_and_scipy():
    from kvlab.stats import mcnemar_p

    binary = [1.0] * 9 + [-1.0] * 2 + [0.0] * 30
    assert sign_flip_p(binary) == pytest.approx(mcnemar_p(2, 9))
    assert sign_flip_p(binary, alternative="greater") == pytest.approx(mcnemar_p(2, 9, "greater"))
    assert sign_flip_p([0.0] * 5) == 1.0
    assert sign_flip_p([0.5] * 80, alternative="greater") == 1 / 10_001  # a simulated p-value is never zero
    rng = np.random.default_rng(5)
    diffs = rng.normal(0.05, 0.2, 80).clip(-1, 1)
    reference = scipy_stats.permutation_test(
        (diffs, np.zeros(80)), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=20_000,
        alternative="greater", rng=np.random.default_rng(6),
    ).pvalue  # fmt: skip
    assert sign_flip_p(diffs.tolist(), alternative="greater") == pytest.approx(reference, abs=0.01)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_agrees_with_statsmodels(p_values):
    named = {f"f{i}": p for i, p in enumerate(p_values)}
    expected = multipletests(p_values, method="holm")[1]
    assert list(holm(named)) == list(named)
    assert list(holm(named).values()) == pytest.approx(expected.tolist(), abs=1e-12)


def test_holm_refuses_what_is_no_p_value():
    assert holm({}) == {}
    with pytest.raises(ValueError, match="'math'"):
        holm({"math": 1.2})


def test_a_pass_after_a_failure_is_no_claim():
    assert fixed_sequence([True, True, False, True]) == (True, True, False, False)
    assert fixed_sequence([]) == ()
