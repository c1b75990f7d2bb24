"""Exact probabilities of the paired score test: no normal approximation, whatever the number of items.

The score statistic against its normal quantile errs in up to 7 % of cases at a nominal 5 %, at some n and discordance.
Here its tail is summed over all tables (b, c) and taken at the discordance that makes it largest, so a claim made at
p <= alpha is wrong with a chance of at most alpha, for any discordance.
Source: Hsueh, Liu and Chen (2001), Biometrics 57:478-483, who show that the boundary of the hypothesis is where the
largest tail lies. Notation as in kvlab.stats.paired: b losses, c gains, difference (c - b) / n.
"""

import math
from functools import lru_cache

import numpy as np
from scipy.stats import binom, norm

from kvlab.stats.paired import tango_z

# A statistic this much above another is another table, not rounding.
_SAME = 1e-9


@lru_cache(maxsize=4096)  # counts are small: the same few tables come up again and again
def unconditional_p(z: float, n: int, diff: float) -> float:
    """Largest chance, over discordances, of a score statistic of at least `z` when the true difference is `diff`.

    With `z = tango_z(b, c, n, diff)` it is the exact p-value of "the difference is `diff` or less". For the other
    direction mirror the arms: `unconditional_p(-z, n, -diff)`. Raises ValueError for n < 1 or |diff| >= 1.
    """
    if n < 1 or not -1.0 < diff < 1.0:
        raise ValueError(f"needs n >= 1 and a difference strictly between -1 and 1, got n={n}, diff={diff}")
    if math.isnan(z):
        raise ValueError("the statistic is not a number")
    if z == -math.inf:
        return 1.0
    return _largest_tail(z, n, diff)


@lru_cache(maxsize=256)
def critical_z(n: int, margin: float, alpha: float = 0.05) -> float:
    """What the score statistic must reach so that `unconditional_p` is at most alpha; never below the normal quantile.

    Such that tango_z(b, c, n, -margin) >= critical_z(n, margin) passes, to within rounding. inf when nothing can pass.
    """
    low, high = float(norm.ppf(1 - alpha)), float(tango_z(0, n, n, -margin))
    if _largest_tail(high, n, -margin) > alpha:
        return math.inf
    if _largest_tail(low, n, -margin) <= alpha:
        return low
    while high - low > _SAME:
        middle = (low + high) / 2
        if _largest_tail(middle, n, -margin) <= alpha:
            high = middle
        else:
            low = middle
    return high


def pass_rate(n: int, margin: float, discordance: float, diff: float = 0.0, *, alpha: float = 0.05) -> float:
    """Chance that a config passes non-inferiority with n independent right/wrong items: its power where the true
    `diff` is above -margin, its error where it is not.

    discordance is the share of items on which the arms truly differ. Raises ValueError when |diff| exceeds it.
    """
    if not abs(diff) <= discordance <= 1.0:
        raise ValueError(f"discordance must be at least |diff| and at most 1, got {discordance} with diff {diff}")
    critical = critical_z(n, margin, alpha)
    if math.isinf(critical):
        return 0.0
    least = _least_gains(critical, n, -margin)
    return float(_tails(least, n, np.array([(discordance - diff) / 2]), diff)[0])


def _largest_tail(z: float, n: int, diff: float) -> float:
    """The supremum over the rate of losses, on a grid even in its square root, where tails change at an even pace;
    then once more, finely, around the largest."""
    least = _least_gains(z, n, diff)
    low, high = math.sqrt(max(0.0, -diff)), math.sqrt((1 - diff) / 2)
    # The corner low is where only losses (or only gains) exist; near it tails change fastest.
    fewer = math.sqrt(high**2 - low**2)
    steps = np.linspace(0.0, fewer, 32 + math.ceil(12 * math.sqrt(n) * fewer))
    rates = low**2 + steps**2
    tails = _tails(least, n, rates, diff)
    best = int(tails.argmax())
    around = np.linspace(steps[max(best - 1, 0)], steps[min(best + 1, len(steps) - 1)], 17)
    return float(max(tails[best], _tails(least, n, low**2 + around**2, diff).max()))


def _least_gains(z: float, n: int, diff: float) -> np.ndarray:
    """For every b in 0..n the least c whose statistic reaches z, or n + 1 where none does. It rises with c."""
    b = np.arange(n + 1)
    low, high = np.zeros(n + 1, dtype=np.int64), n - b + 1
    while (low < high).any():
        middle = (low + high) // 2
        within = middle <= n - b
        reached = within & (tango_z(b, np.minimum(middle, n - b), n, diff) >= z - _SAME)
        high = np.where((low < high) & reached, middle, high)
        low = np.where((low < high) & ~reached, middle + 1, low)
    return np.where(low > n - b, n + 1, low)


def _tails(least: np.ndarray, n: int, losses: np.ndarray, diff: float) -> np.ndarray:
    """Chance of a table in the region for every rate of losses: b is binomial, c given b too."""
    b = np.arange(n + 1)
    gains = np.clip(losses + diff, 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        given = np.where(losses < 1.0, np.clip(gains / (1 - losses), 0.0, 1.0), 0.0)
    weights = binom.pmf(b, n, losses[:, None])
    return (weights * binom.sf(least - 1, n - b, given[:, None])).sum(axis=1)
