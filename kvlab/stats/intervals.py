"""Intervals and errors of one arm's mean: Wilson for a proportion, standard errors of groups of tasks.

Knows arrays of scores; knows neither pairs nor verdicts nor margins.
"""

import math
from collections.abc import Mapping, Sequence
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
