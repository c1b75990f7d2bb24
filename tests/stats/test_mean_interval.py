"""The interval of a mean difference: Student's, with clusters counted once."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import t, ttest_1samp

from kvlab.stats import mean_interval

RNG = np.random.default_rng(7)


def test_alone_it_is_students():
    diffs = RNG.normal(0.3, 2.0, 17)
    low, high = mean_interval(diffs, level=0.95)
    assert (low, high) == pytest.approx(tuple(ttest_1samp(diffs, 0).confidence_interval(0.95)))
    assert mean_interval(diffs, list(range(17)), level=0.95) == pytest.approx((low, high))


def test_clusters_of_one_size_are_students_over_their_means():
    means = RNG.normal(0, 1, (9, 4))
    got = mean_interval(means.ravel(), [c for c in range(9) for _ in range(4)])
    assert got == pytest.approx(tuple(ttest_1samp(means.mean(1), 0).confidence_interval(0.90)))


def test_clusters_of_all_sizes_agree_with_the_sandwich():
    clusters = RNG.integers(0, 12, 60)
    diffs = RNG.normal(0, 1, 60) + 0.7 * clusters
    fit = sm.OLS(diffs, np.ones(60)).fit(cov_type="cluster", cov_kwds={"groups": clusters, "use_correction": False})
    k = len(set(clusters))
    error = fit.bse[0] * np.sqrt(k / (k - 1))
    reach = t.isf(0.05, k - 1) * error
    assert mean_interval(diffs, list(clusters)) == pytest.approx((diffs.mean() - reach, diffs.mean() + reach))


def test_what_cannot_vary_has_no_interval():
    assert mean_interval([0.5]) is None
    assert mean_interval([0.5, 0.1, 0.2], ["a", "a", "a"]) is None
    assert mean_interval([0.25, 0.25]) == (0.25, 0.25)
    with pytest.raises(ValueError, match="level"):
        mean_interval([0.1, 0.2], level=1.0)


def test_it_covers_as_often_as_it_says():
    hits = sum(low <= 0 <= high for low, high in (mean_interval(RNG.normal(0, 1, 12)) or (1, 1) for _ in range(2000)))
    assert abs(hits / 2000 - 0.90) < 3 * np.sqrt(0.09 / 2000)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        mean_interval([0.1, bad])
