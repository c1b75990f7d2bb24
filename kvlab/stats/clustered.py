"""Paired differences of any size in [-1, 1], alone or in clusters of items that share a source.

The counterpart of kvlab.stats.paired where scores are fractional or items are not independent: an interval by
resampling clusters, and two tests. Knows differences only, config minus baseline, so that a loss is negative.
"""

import math
import warnings
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.stats import DegenerateDataWarning, bootstrap, norm, t

from kvlab.stats.exact import unconditional_p
from kvlab.stats.paired import tango_interval, tango_z

_LEAST_TAIL = 1e-12  # two clusters ask for a tail that rounds to none


def cluster_bootstrap(
    diffs: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    level: float = 0.90,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """BCa interval of the mean paired difference, resampling whole clusters (items that share a source).

    diffs lie in [-1, 1]; without clusters each item is its own. Three corrections keep few clusters honest. Tails are
    those of Student's t, widened by sqrt(k / (k - 1)): a resample varies less than a sample. No end is nearer than that
    of the score interval at the sample's size of difference, which is steadier where few clusters differ. And a
    resample cannot hold what the sample does not: each end lies at least 1 - tail^(1/k) from the mean, the share of
    clusters that k of them may all miss.
    Sources: Efron (1987), JASA 82:171-185; Hesterberg (2015), The American Statistician 69:371-386, for the first
    correction. Raises ValueError for fewer than two clusters.
    """
    sums, sizes = _by_cluster(np.asarray(diffs, dtype=np.float64), clusters)
    k = len(sums)
    if k < 2:
        raise ValueError(f"a bootstrap needs at least 2 clusters, got {k}: nothing varies between them")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
    mean = float(sums.sum() / sizes.sum())
    tail = (1 - level) / 2
    reach = 1 - tail ** (1 / k)
    low = high = mean
    if np.ptp(sums / sizes) > 0:
        widened = float(norm.sf(math.sqrt(k / (k - 1)) * t.isf(tail, k - 1)))
        # Beyond the outermost resample there is nothing to interpolate.
        resampled = _bca(sums, sizes, max(widened, 1 / resamples), resamples, seed)
        scored = _score_ends(sums / sizes.mean(), max(widened, _LEAST_TAIL))
        low, high = min(resampled[0], scored[0]), max(resampled[1], scored[1])
    return max(-1.0, min(low, mean - reach)), min(1.0, max(high, mean + reach))


def mean_interval(
    diffs: Sequence[float], clusters: Sequence[Hashable] | None = None, *, level: float = 0.90
) -> tuple[float, float] | None:
    """Student's t interval of the mean of differences of any size, such as nats; None for fewer than two clusters.

    Whole clusters vary, items within one do not count as more: the error is that of a ratio of cluster sums to sizes
    (Cochran, Sampling Techniques, 3rd ed., sections 6.3 and 9A.2), with one less degree of freedom than clusters.
    Raises ValueError for a level outside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
    sums, sizes = _by_cluster(np.asarray(diffs, dtype=np.float64), clusters, most=math.inf)
    k = len(sums)
    if k < 2:
        return None
    mean = sums.sum() / sizes.sum()
    error = math.sqrt(k / (k - 1) * float(((sums - mean * sizes) ** 2).sum())) / float(sizes.sum())
    reach = float(t.isf((1 - level) / 2, k - 1)) * error
    return float(mean - reach), float(mean + reach)


def score_p(diffs: Sequence[float] | np.ndarray, bound: float, clusters: Sequence[Hashable] | None = None) -> float:
    """p-value of H0: the mean difference is `bound` or less. Clusters count once, however many items they have.

    For right/wrong scores of single items it is the exact test of the score statistic. Otherwise the larger of two:
    that test at the one size of difference that matches the sample's mean size and mean square, its statistic read as
    a t of k - 1 degrees; and the chance that k clusters show none of the whole losses that would bring the mean down
    to `bound`. Neither alone is enough: sizes that vary little hide rare large losses, and the second sees no spread.
    By simulation (`kvlab.bench stats`) its error at the bound stays near 5 %; it is not exact.
    Raises ValueError for fewer than two clusters or a bound not strictly between -1 and 1.
    """
    if not -1.0 < bound < 1.0:
        raise ValueError(f"the bound must lie strictly between -1 and 1, got {bound}")
    sums, sizes = _by_cluster(np.asarray(diffs, dtype=np.float64), clusters)
    k = len(sums)
    if k < 2:
        raise ValueError(f"a test needs at least 2 clusters, got {k}: nothing varies between them")
    means = sums / sizes.mean()
    excess = float(means.mean()) - bound
    if excess <= 0:
        return 1.0
    if np.isin(means, (-1.0, 0.0, 1.0)).all():
        return _matched_p(means, bound)
    unseen = max(0.0, 1 - excess) ** k
    return max(unseen, _matched_p(means, bound))


def sign_flip_p(
    diffs: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    alternative: str = "two-sided",
    resamples: int = 10_000,
    seed: int = 0,
) -> float:
    """Randomisation p-value of H0: the two arms are exchangeable within a cluster; the counterpart of McNemar for
    fractional or clustered scores. Exact when 2^clusters <= resamples, else Monte Carlo with the +1 correction."""
    if alternative not in ("two-sided", "greater"):
        raise ValueError(f"alternative must be 'two-sided' or 'greater', got {alternative!r}")
    sums, _ = _by_cluster(np.asarray(diffs, dtype=np.float64), clusters)
    sums = sums[sums != 0]
    if len(sums) == 0:
        return 1.0
    exact = 2 ** len(sums) <= resamples if len(sums) < 60 else False
    if exact:
        bits = (np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1
        null = (2 * bits - 1) @ sums
    else:
        rng = np.random.default_rng(seed)
        sizes = [min(500, resamples - done) for done in range(0, resamples, 500)]  # small blocks of signs
        null = np.concatenate([(2 * rng.integers(0, 2, (size, len(sums))) - 1) @ sums for size in sizes])
    observed = sums.sum()
    slack = 1e-12 * np.abs(sums).sum()
    hits = null >= observed - slack if alternative == "greater" else np.abs(null) >= abs(observed) - slack
    return float(hits.mean() if exact else (hits.sum() + 1) / (len(null) + 1))


def _bca(sums: np.ndarray, sizes: np.ndarray, tail: float, resamples: int, seed: int) -> tuple[float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)
        found = bootstrap(
            (sums, sizes),
            lambda a, b, axis=-1: a.sum(axis=axis) / b.sum(axis=axis),
            paired=True,
            vectorized=True,
            method="BCa",
            confidence_level=1 - 2 * tail,
            n_resamples=resamples,
            batch=1000,
            rng=np.random.default_rng(seed),
        )
    low, high = float(found.confidence_interval.low), float(found.confidence_interval.high)
    if math.isnan(low) or math.isnan(high):
        # The bias correction is infinite: all resamples lie on one side. Their whole range is what is known.
        draws = found.bootstrap_distribution
        return float(draws.min()), float(draws.max())
    return low, high


def _matched_p(means: np.ndarray, bound: float) -> float:
    """The exact test at one size of difference. Losses and gains of all sizes become counts of that size."""
    k = len(means)
    size, losses, gains = _counts(means)
    if bound <= -size:
        return 0.0
    if bound >= size:
        return 1.0
    z = float(tango_z(losses, gains, k, bound / size))
    shown = np.abs(means[means != 0])
    if len(shown) and np.ptp(shown) > 1e-12:
        z = float(norm.isf(t.sf(z * math.sqrt((k - 1) / k), k - 1)))
    return unconditional_p(z, k, bound / size)


def _score_ends(means: np.ndarray, tail: float) -> tuple[float, float]:
    """The score interval at one size of difference."""
    size, losses, gains = _counts(means)
    low, high = tango_interval(losses, gains, len(means), 1 - 2 * tail)
    return size * low, size * high


def _counts(means: np.ndarray) -> tuple[float, float, float]:
    """The one size of difference with the sample's mean size and mean square, and how many losses and gains of that
    size make up the sample's. 1.0 where nothing differs."""
    sizes, k = np.abs(means), len(means)
    total, squares = float(sizes.sum()), float((sizes**2).sum())
    if squares == 0:
        return 1.0, 0.0, 0.0
    size = squares / total
    losses, gains = (float(part.sum()) / size for part in (np.maximum(-means, 0), np.maximum(means, 0)))
    # By Cauchy and Schwarz no more than k together; rounding may not know.
    over = max(1.0, (losses + gains) / k)
    return size, losses / over, gains / over


def _by_cluster(
    values: np.ndarray, clusters: Sequence[Hashable] | None, most: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    wrong = values[~np.isfinite(values) | (np.abs(values) > most)]
    if len(wrong):
        raise ValueError(f"differences must be finite{' and in [-1, 1]' if most == 1 else ''}, got {wrong[0]}")
    if clusters is None:
        return values, np.ones(len(values))
    if len(clusters) != len(values):
        raise ValueError(f"need one cluster per difference, got {len(clusters)} clusters for {len(values)}")
    order = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index = np.array([order[name] for name in clusters], dtype=np.int64)
    return np.bincount(index, values, len(order)), np.bincount(index, minlength=len(order)).astype(np.float64)
