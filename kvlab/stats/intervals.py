"""Intervals and errors of means: one arm (Wilson), groups of tasks (macro, pooled), paired differences (bootstrap).

Knows arrays of scores; knows neither verdicts nor margins.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error (None where a sample cannot give one) and the rule that made both."""

    kind: str  # "macro": tasks weigh the same. "pooled": items weigh the same.
    mean: float
    error: float | None
    n: int


def wilson(successes: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion: never empty at 0 or n successes, never outside [0, 1].

    A sum of fractional scores in [0, 1] is accepted: their variance is at most p (1 - p), so the interval is then
    conservative. Raises ValueError when n < 1 or successes lie outside [0, n]. Source: Wilson (1927).
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"an interval needs n >= 1 and 0 <= successes <= n, got {successes} of {n}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
    z = float(norm.ppf(0.5 + level / 2))
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the ends rounding may leave 1e-17 where the interval touches the boundary exactly.
    low = 0.0 if successes == 0 else max(0.0, (centre - half) / scale)
    high = 1.0 if successes == n else min(1.0, (centre + half) / scale)
    return low, high


def sample_error(scores: Sequence[float]) -> float | None:
    """Standard error of the mean, s / sqrt(n) with the n - 1 variance.

    None where a sample says nothing about it: fewer than two scores, or all scores equal (an error of exactly zero
    at 0 or 100 per cent would claim certainty from any n; use `wilson` there).
    """
    values = _scores(scores)
    if len(values) < 2 or np.ptp(values) == 0:
        return None
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def macro(groups: Mapping[str, Sequence[float]]) -> Estimate:
    """Unweighted mean over tasks, with the error that belongs to it: sqrt(sum error_t^2) / number of tasks."""
    tasks = {name: _scores(scores) for name, scores in groups.items()}
    _need_items(tasks)
    errors = [sample_error(scores.tolist()) for scores in tasks.values()]
    known = [error for error in errors if error is not None]
    error = math.sqrt(sum(e * e for e in known)) / len(tasks) if len(known) == len(tasks) else None
    mean = float(np.mean([scores.mean() for scores in tasks.values()]))
    return Estimate("macro", mean, error, sum(len(s) for s in tasks.values()))


def pooled(groups: Mapping[str, Sequence[float]]) -> Estimate:
    """Mean over all items of all tasks, with the error that belongs to it: that of one big sample."""
    tasks = {name: _scores(scores) for name, scores in groups.items()}
    _need_items(tasks)
    everything = np.concatenate(list(tasks.values()))
    return Estimate("pooled", float(everything.mean()), sample_error(everything.tolist()), len(everything))


def cluster_bootstrap(
    diffs: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    level: float = 0.90,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """BCa interval of the mean paired difference, resampling whole clusters (items that share a source).

    diffs lie in [-1, 1]; without clusters each item is its own. A bootstrap cannot see what the sample does not
    hold, and shrinks to zero width when nothing differs, so each end is moved out to at least
    z^2 / (k + z^2) from the mean, the reach of the Tango interval for k silent clusters.
    Source: Efron (1987), JASA 82:171-185. Raises ValueError for fewer than two clusters.
    """
    values = np.asarray(diffs, dtype=np.float64)
    sums, sizes = _by_cluster(values, clusters)
    k = len(sums)
    if k < 2:
        raise ValueError(f"a bootstrap needs at least 2 clusters, got {k}: nothing varies between them")
    mean = float(sums.sum() / sizes.sum())
    z = float(norm.ppf(0.5 + level / 2))
    reach = z * z / (k + z * z)
    low, high = _bca(sums, sizes, mean, level, resamples, seed) if np.ptp(values) > 0 else (mean, mean)
    return max(-1.0, min(low, mean - reach)), min(1.0, max(high, mean + reach))


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
        null = np.concatenate([(2 * rng.integers(0, 2, (500, len(sums))) - 1) @ sums for _ in range(resamples // 500)])
    observed = sums.sum()
    slack = 1e-12 * np.abs(sums).sum()
    hits = null >= observed - slack if alternative == "greater" else np.abs(null) >= abs(observed) - slack
    return float(hits.mean() if exact else (hits.sum() + 1) / (len(null) + 1))


def _bca(
    sums: np.ndarray, sizes: np.ndarray, mean: float, level: float, resamples: int, seed: int
) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    k = len(sums)
    draws = np.empty(resamples)
    for start in range(0, resamples, 1000):  # 1000 rows at a time keep the index block small
        pick = rng.integers(0, k, (min(1000, resamples - start), k))
        draws[start : start + len(pick)] = sums[pick].sum(1) / sizes[pick].sum(1)
    below = ((draws < mean).sum() + 0.5 * (draws == mean).sum()) / resamples
    bias = norm.ppf(np.clip(below, 1 / resamples, 1 - 1 / resamples))
    jackknife = (sums.sum() - sums) / (sizes.sum() - sizes)
    centred = jackknife.mean() - jackknife
    spread = (centred**2).sum() ** 1.5
    acceleration = (centred**3).sum() / (6 * spread) if spread > 0 else 0.0
    tails = bias + norm.ppf([0.5 - level / 2, 0.5 + level / 2])
    shares = norm.cdf(bias + tails / (1 - acceleration * tails))
    low, high = np.quantile(draws, shares)
    return float(low), float(high)


def _by_cluster(values: np.ndarray, clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    if not np.isfinite(values).all() or (np.abs(values) > 1).any():
        raise ValueError("differences of scores must be finite and in [-1, 1]")
    if clusters is None:
        return values, np.ones(len(values))
    if len(clusters) != len(values):
        raise ValueError(f"need one cluster per difference, got {len(clusters)} clusters for {len(values)}")
    order = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index = np.array([order[name] for name in clusters], dtype=np.int64)
    return np.bincount(index, values, len(order)), np.bincount(index, minlength=len(order)).astype(np.float64)


def _scores(scores: Sequence[float]) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or (values > 1).any():
        bad = [v for v in values.tolist() if not 0 <= v <= 1]
        raise ValueError(f"scores must be finite and in [0, 1], got {bad[:3]}")
    return values


def _need_items(tasks: Mapping[str, np.ndarray]) -> None:
    empty = [name for name, scores in tasks.items() if len(scores) == 0]
    if empty or not tasks:
        raise ValueError(f"a mean needs at least one score in each task, none in {empty or 'any task'}")
