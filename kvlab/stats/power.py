"""Planning: what a number of items can show, decided before any score exists. Knows no scores."""

import math

from scipy.stats import norm

from kvlab.stats.exact import unconditional_p
from kvlab.stats.paired import tango_z

# Margins a run may plan for, in score units: 2, 3, 5 and 10 points. Past 10 points "holds" would mean little.
MARGINS = (0.02, 0.03, 0.05, 0.10)


def least_items(margin: float, *, alpha: float = 0.05) -> int:
    """Fewest independent items with which a config without any flip passes non-inferiority at `margin`.

    A config that loses exactly the margin shows no flip in n items with chance (1 - margin)^n, which must be at most
    alpha: 29, 59, 99 and 149 items for 10, 5, 3 and 2 points.
    """
    check_margin(margin)
    return math.ceil(math.log(alpha) / math.log1p(-margin))


def forgiving_items(margin: float, *, alpha: float = 0.05) -> int:
    """Fewest independent items with which a config that lost one answer and gained none passes at `margin`.

    46, 93, 157 and 236 items for 10, 5, 3 and 2 points, by the unconditional test.
    """
    n = least_items(margin, alpha=alpha)
    while unconditional_p(float(tango_z(1, 0, n, -margin)), n, -margin) > alpha:
        n += 1
    return n


def planned_margin(n: int, *, alpha: float = 0.05) -> float:
    """Smallest margin of MARGINS that a lossless config (b = c = 0) can pass at n independent items a family.

    Decided before a run from n alone, so that a lossless config ends in HOLDS; one that flips now and then may need
    many more items (`n_needed`). Raises ValueError, naming the number of items needed, when even the widest margin is
    out of reach.
    """
    for margin in MARGINS:
        if n >= least_items(margin, alpha=alpha):
            return margin
    widest = MARGINS[-1]
    raise ValueError(
        f"{n} items a family cannot show that any config holds: even with no flip at all, a margin of "
        f"{widest * 100:.0f} points needs {least_items(widest, alpha=alpha)} items. Ask for at least that many."
    )


def n_needed(
    margin: float, discordance: float, diff: float = 0.0, *, alpha: float = 0.05, power: float = 0.80
) -> int | None:
    """Items that show non-inferiority at `margin` with the given power, if the true difference is `diff`.

    discordance is the share of items on which the arms differ (for fractional scores: the mean squared difference).
    Never less than the count at which a config with no flip at all can pass. None when diff <= -margin: then no
    number of items shows what is not so. `pass_rate` is the exact power at a given n; it is within a few points.
    Source: Nam (1997), Biometrics 53:1422-1430. The variance under the hypothesis is that of the score statistic,
    which at a discordance below the margin is far above the true one: the plain formula would promise too much.
    """
    check_margin(margin)
    if not 0.0 <= discordance <= 1.0:
        raise ValueError(f"discordance must be in [0, 1], got {discordance}")
    if diff <= -margin:
        return None
    null, true = _null_variance(margin, discordance, diff), max(discordance - diff * diff, 0.0)
    spread = float(norm.ppf(1 - alpha)) * math.sqrt(null) + float(norm.ppf(power)) * math.sqrt(true)
    # Rounding guards a ceil of 1546.0000000002 from turning into 1547.
    return max(math.ceil(round((spread / (margin + diff)) ** 2, 9)), least_items(margin, alpha=alpha))


def _null_variance(margin: float, discordance: float, diff: float) -> float:
    """Variance of one item's difference where a loss of `margin` is true and the rates are else closest to those."""
    b, c = max(discordance - diff, 0.0) / 2, max(discordance + diff, 0.0) / 2
    # The constrained maximum likelihood of kvlab.stats.paired.tango_z, per item.
    B = (2 - c + b) * -margin - (b + c)
    q = (math.sqrt(max(B * B - 8 * b * margin * (1 + margin), 0.0)) - B) / 4
    return max(2 * q - margin * (1 + margin), 0.0)


def check_margin(margin: float) -> None:
    """Raise ValueError for what is no margin."""
    if not 0.0 < margin < 1.0:
        raise ValueError(f"margin is a score difference strictly between 0 and 1 (0.05 is 5 points), got {margin}")
