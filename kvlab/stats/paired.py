"""Paired right/wrong outcomes of two arms on the same items.

Notation, used by every function here: n items; b items the baseline gets right and the config wrong; c the reverse.
The difference is config minus baseline, (c - b) / n, so a loss is negative. Knows counts only: whether items are
independent is the caller's claim (kvlab.stats.verdict switches to a cluster bootstrap when they are not).
"""

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, norm

# Margins a run may plan for, in score units: 2, 3, 5 and 10 points. Past 10 points "holds" would mean little.
MARGINS = (0.02, 0.03, 0.05, 0.10)


def tango_z(b, c, n, diff):
    """Score statistic of H0: true difference == diff, with the nuisance rate at its constrained maximum likelihood.

    Takes numbers or arrays that broadcast. Large positive values speak for a difference above `diff`.
    Where the constrained variance is zero the statistic is 0 if nothing contradicts H0, else +-inf.
    Source: Tango (1998), Statistics in Medicine 17:891-908.
    """
    b, c, n, diff = (np.asarray(x, dtype=np.float64) for x in (b, c, n, diff))
    B = (2 * n - c + b) * diff - (b + c)
    C = -b * diff * (1 - diff)
    # With C = 0 the root is |B| exactly; squaring a B under 1e-154 would lose it.
    root = np.where(C == 0, np.abs(B), np.sqrt(np.maximum(B * B - 8 * n * C, 0.0)))
    q = (root - B) / (4 * n)
    variance = np.maximum(n * (2 * q + diff * (1 - diff)), 0.0)
    gap = c - b - n * diff
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(variance > 0, gap / np.sqrt(variance), np.where(gap == 0, 0.0, np.sign(gap) * np.inf))
    return float(z) if z.ndim == 0 else z


def tango_interval(b: int, c: int, n: int, level: float = 0.90) -> tuple[float, float]:
    """Two-sided score interval of the paired difference (c - b) / n, by inverting `tango_z`.

    At level .90 each end is a one-sided 5 % bound. With b = c = 0 it is exactly +-z^2 / (n + z^2): silence in n
    items never proves a difference of zero. Raises ValueError for impossible counts or level.
    """
    _check_counts(b, c, n)
    z = _z(level)
    if b == c == 0:
        reach = z * z / (n + z * z)
        return -reach, reach
    # At the corners the constrained variance vanishes at the estimate itself; the bound then has a closed form.
    corner = (n - z * z) / (n + z * z)
    if c == n:
        return corner, 1.0
    if b == n:
        return -1.0, -corner

    def gap(diff: float, sign: int) -> float:
        return float(np.clip(tango_z(b, c, n, diff), -1e6, 1e6)) - sign * z

    estimate = (c - b) / n
    return _root(gap, -1.0, estimate, 1), _root(gap, estimate, 1.0, -1)


def mcnemar_p(b: int, c: int, alternative: str = "two-sided") -> float:
    """Exact McNemar p-value from the discordant counts; 1.0 when there are none.

    alternative "greater" asks whether the config is better (c > b), "less" whether it is worse.
    Source: McNemar (1947); the binomial form conditions on b + c.
    """
    _check_counts(b, c, b + c or 1)
    if alternative not in ("two-sided", "greater", "less"):
        raise ValueError(f"alternative must be 'two-sided', 'greater' or 'less', got {alternative!r}")
    total = b + c
    if total == 0:
        return 1.0
    if alternative == "greater":
        return float(binom.sf(c - 1, total, 0.5))
    if alternative == "less":
        return float(binom.sf(b - 1, total, 0.5))
    return min(1.0, 2.0 * float(binom.cdf(min(b, c), total, 0.5)))


def n_needed(
    margin: float, discordance: float, diff: float = 0.0, *, alpha: float = 0.05, power: float = 0.80
) -> int | None:
    """Items that show non-inferiority at `margin` with the given power, if the true difference is `diff`.

    discordance is the share of items on which the arms differ (for fractional scores: the mean squared difference).
    Never less than the count at which a config with no flip at all can pass. None when diff <= -margin: then no
    number of items shows what is not so.
    Source: normal approximation, n = (z_a + z_b)^2 (discordance - diff^2) / (margin + diff)^2.
    """
    _check_margin(margin)
    if not 0.0 <= discordance <= 1.0:
        raise ValueError(f"discordance must be in [0, 1], got {discordance}")
    if diff <= -margin:
        return None
    z = float(norm.ppf(1 - alpha) + norm.ppf(power))
    spread = max(discordance - diff * diff, 0.0)
    # Rounding guards a ceil of 1546.0000000002 from turning into 1547.
    approximate = math.ceil(round(z * z * spread / (margin + diff) ** 2, 9))
    return max(approximate, _n_without_flips(margin, alpha))


def planned_margin(n: int, *, alpha: float = 0.05) -> float:
    """Smallest margin of MARGINS that a lossless config (b = c = 0) can pass at n independent items a family.

    Decided before a run from n alone, so that a lossless config ends in HOLDS. Raises ValueError, naming the number
    of items needed, when even the widest margin is out of reach.

    The score test is an approximation: at the least n for a margin (25, 52, 88, 133), a config that loses exactly
    the margin, with no gains at all, still passes in up to 7.2 % of runs. From 29, 59, 99 and 149 items on,
    (1 - margin)^n is under 5 %.
    """
    for margin in MARGINS:
        if n >= _n_without_flips(margin, alpha):
            return margin
    widest = MARGINS[-1]
    raise ValueError(
        f"{n} items a family cannot show that any config holds: even with no flip at all, a margin of "
        f"{widest * 100:.0f} points needs {_n_without_flips(widest, alpha)} items. Ask for at least that many."
    )


def _n_without_flips(margin: float, alpha: float) -> int:
    """Smallest n with tango_z(0, 0, n, -margin) > z_alpha, that is n margin / (1 - margin) > z_alpha^2."""
    z = float(norm.ppf(1 - alpha))
    return math.floor(z * z * (1 - margin) / margin) + 1


def _root(function: Callable[[float, int], float], start: float, stop: float, sign: int) -> float:
    return brentq(function, start, stop, args=(sign,), xtol=1e-12)  # pyright: ignore[reportReturnType]


def _z(level: float) -> float:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}")
    return float(norm.ppf(0.5 + level / 2))


def _check_margin(margin: float) -> None:
    if not 0.0 < margin < 1.0:
        raise ValueError(f"margin is a score difference strictly between 0 and 1 (0.05 is 5 points), got {margin}")


def _check_counts(b: int, c: int, n: int) -> None:
    if n < 1 or b < 0 or c < 0 or b + c > n:
        raise ValueError(f"flips must satisfy 0 <= b, 0 <= c, b + c <= n and n >= 1, got b={b}, c={c}, n={n}")
