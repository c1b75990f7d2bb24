"""Statistics for paired comparisons of cache configurations.

Knows numbers only: scores in [0, 1], paired by item. Knows no model, no cache, no file and no figure.
"""

from kvlab.stats.betting import Sequential, anytime_p, betting_wealth, sequential
from kvlab.stats.clustered import cluster_bootstrap, mean_interval, score_p, sign_flip_p
from kvlab.stats.exact import critical_z, pass_rate, unconditional_p
from kvlab.stats.intervals import Estimate, macro, pooled, sample_error, wilson
from kvlab.stats.multiple import fixed_sequence, holm
from kvlab.stats.paired import mcnemar_p, tango_interval, tango_z
from kvlab.stats.power import MARGINS, forgiving_items, least_items, n_needed, planned_margin
from kvlab.stats.verdict import (
    BASELINE_RANGE,
    VERDICTS,
    FamilyVerdict,
    Judgement,
    Paired,
    control_failed,
    judge,
    judge_family,
    score_interval,
)

__all__ = [
    "BASELINE_RANGE",
    "MARGINS",
    "VERDICTS",
    "Estimate",
    "FamilyVerdict",
    "Judgement",
    "Paired",
    "Sequential",
    "anytime_p",
    "betting_wealth",
    "cluster_bootstrap",
    "control_failed",
    "critical_z",
    "fixed_sequence",
    "forgiving_items",
    "holm",
    "judge",
    "judge_family",
    "least_items",
    "macro",
    "mcnemar_p",
    "mean_interval",
    "n_needed",
    "pass_rate",
    "planned_margin",
    "pooled",
    "sample_error",
    "score_interval",
    "score_p",
    "sequential",
    "sign_flip_p",
    "tango_interval",
    "tango_z",
    "unconditional_p",
    "wilson",
]
