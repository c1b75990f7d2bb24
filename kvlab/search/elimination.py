"""When a config has lost for good: a paired test against a rival, which may be looked at after every round of items.

A round is one paired difference from each family, each clipped to [-1, 1]; positive is worse than the rival. A gambler
who bets on "worse" with a stake fixed beforehand multiplies his wealth by 1 + stake * difference. Where the
family-balanced mean is not positive, a round cannot raise it on average (the product over families is at most the
power of their mean), so it ever reaches 1 / alpha with a chance of at most alpha, whenever one looks (Ville 1939). The
average over several stakes is such a wealth too, and needs no guess of how much worse a config will be; a race has too
few rounds for stakes that are learnt from earlier ones, as those of a confirmation are.

It holds for pairs named beforehand. A sampler that learns from the same items names some of them afterwards; the union
over all trials of a race is a guard against that, and no proof. Knows numbers only.
"""

import math
from collections.abc import Sequence

ALPHA = 0.05
STAKES = (0.1, 0.3, 0.6, 0.9)


def wealth(rounds: Sequence[Sequence[float]]) -> float:
    """The largest wealth at the end of any round; 1.0 before the first. One difference for each family in a round.

    Raises ValueError for a difference that is not finite.
    """
    held = [1.0] * len(STAKES)
    most = 1.0
    for differences in rounds:
        for difference in differences:
            if not math.isfinite(difference):
                raise ValueError(f"differences must be finite, got {difference}: leave unscored configs out")
            clipped = min(1.0, max(-1.0, difference))
            held = [w * (1 + stake * clipped) for w, stake in zip(held, STAKES, strict=True)]
        most = max(most, sum(held) / len(held))
    return most


def lost(rounds: Sequence[Sequence[float]], rivals: int, alpha: float = ALPHA) -> bool:
    """Whether a config is worse than a rival, at a level that `rivals` such comparisons share.

    So of a race of `rivals` trials: the chance that a config as good as any other is ever told so is at most alpha.
    """
    return wealth(rounds) >= max(1, rivals) / alpha
