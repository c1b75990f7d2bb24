"""How well predicted losses agree with measured ones. Losses span decades, so all of it is on logarithms."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

LEAST = 1e-7  # nats: below, KL is rounding


def agreement(pairs: Sequence[Mapping[str, Any]], which: str) -> dict[str, float] | None:
    """How well `predicted` agrees with what was measured as `which`, on logarithms; None for fewer than three pairs."""
    both = [(p["predicted"], p[which]) for p in pairs if p[which] is not None]
    x, y = (np.log(np.maximum([pair[n] for pair in both], LEAST)) for n in (0, 1))
    if len(both) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return {
        "n": len(both),
        "pearson_log": float(pearsonr(x, y)[0]),  # type: ignore[arg-type]
        "spearman": float(spearmanr(x, y)[0]),  # type: ignore[arg-type]
        "median_measured_over_predicted": float(np.exp(np.median(y - x))),
    }
