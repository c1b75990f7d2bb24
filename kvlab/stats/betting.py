"""Tests that may be looked at after every item: wealth of a gambler who bets against the hypothesis.

If the hypothesis is true, wealth stays fair at best, so it ever reaches 1 / alpha with a chance of at most alpha,
however often and whenever one looks. The price is power: a test at a number of items fixed beforehand needs fewer.
Declare one of the two before the run; the better of both is neither.

Knows differences in [-1, 1], one for each independent item or cluster mean, in an order that owes nothing to them.
Source: Waudby-Smith and Ramdas (2024), Journal of the Royal Statistical Society B 86:1-27, the hedged bets of
section 4; Ville (1939) for the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

State = Literal["passes", "fails", "open"]

# Bets start as if this many differences of mean 0 and this variance had been seen, and never stake more than a half.
_PRIOR_N, _PRIOR_VARIANCE, _STAKE = 10, 0.05, 0.5


@dataclass(frozen=True, slots=True)
class Sequential:
    """Where a test stands after its first `n` differences: those read until it ended, or all where it is open.

    `p_passes` and `p_fails` are valid at any time: the least the evidence has been so far, up to n.
    """

    state: State
    n: int
    p_passes: float
    p_fails: float


def betting_wealth(diffs: ArrayLike, bound: float, alternative: Literal["greater", "less"] = "greater") -> np.ndarray:
    """Wealth after each difference along the last axis, 1.0 before the first; same shape as `diffs`.

    The hypothesis under "greater" is that no difference has a mean above `bound`, given those before it; under "less",
    none below. Each stake is settled by earlier differences only. Raises ValueError for differences outside [-1, 1] or
    a bound not strictly inside.
    """
    values = np.asarray(diffs, dtype=np.float64)
    if not np.isfinite(values).all() or (np.abs(values) > 1).any():
        raise ValueError(
            "differences must be finite and in [-1, 1]: average the items of a cluster, scale what is wider"
        )
    if not -1.0 < bound < 1.0:
        raise ValueError(f"the bound must lie strictly between -1 and 1, got {bound}")
    if alternative not in ("greater", "less"):
        raise ValueError(f"alternative must be 'greater' or 'less', got {alternative!r}")
    sign = 1.0 if alternative == "greater" else -1.0
    gains = sign * (values - bound)
    return np.cumprod(1.0 + _stakes(gains, sign * bound) * gains, axis=-1)


def anytime_p(wealth: ArrayLike) -> np.ndarray:
    """p-value after each step, valid at any stopping time: one over the largest wealth so far, at most 1."""
    return 1.0 / np.maximum(np.maximum.accumulate(np.asarray(wealth, dtype=np.float64), axis=-1), 1.0)


def sequential(diffs: Sequence[float] | np.ndarray, margin: float, *, alpha: float = 0.05) -> Sequential:
    """Non-inferiority after every difference: "passes" once a mean of -margin or less is rejected, "fails" once one of
    -margin or more is, whichever comes first. Each of the two is wrong with a chance of at most alpha."""
    if not 0.0 < margin < 1.0:
        raise ValueError(f"margin is a score difference strictly between 0 and 1 (0.05 is 5 points), got {margin}")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}")
    values = np.asarray(diffs, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"needs one row of differences, got shape {values.shape}")
    passes, fails = (anytime_p(betting_wealth(values, -margin, side)) for side in ("greater", "less"))
    ended = np.flatnonzero((passes <= alpha) | (fails <= alpha))
    n = int(ended[0]) + 1 if len(ended) else len(values)
    if n == 0:
        return Sequential("open", 0, 1.0, 1.0)
    state: State = "open" if not len(ended) else "passes" if passes[n - 1] <= alpha else "fails"
    return Sequential(state, n, float(passes[n - 1]), float(fails[n - 1]))


def _stakes(gains: np.ndarray, bound: float) -> np.ndarray:
    """Mean over second moment of earlier gains, prior included: close to the stake of fastest growth. Between nothing
    and what loses at most half of the wealth on the worst difference, a gain of -1 - bound."""
    count = np.arange(1, gains.shape[-1] + 1) + _PRIOR_N
    mean = (_PRIOR_N * -bound + np.cumsum(gains, axis=-1)) / count
    # Each squared deviation is from the mean up to and with it; a stake looks only at those before its own.
    spread = (_PRIOR_N * _PRIOR_VARIANCE + np.cumsum((gains - mean) ** 2, axis=-1)) / count
    first = np.broadcast_to([-bound, _PRIOR_VARIANCE], (*gains.shape[:-1], 2))
    mean = np.concatenate([first[..., :1], mean[..., :-1]], axis=-1)[..., : gains.shape[-1]]
    spread = np.concatenate([first[..., 1:], spread[..., :-1]], axis=-1)[..., : gains.shape[-1]]
    return np.clip(mean / (spread + mean * mean), 0.0, _STAKE / (1.0 + bound))
