"""Statistics for paired comparisons of cache configurations.

Knows numbers only: scores in [0, 1], paired by item. Knows no model, no cache, no file and no figure.
"""

from kvlab.stats.intervals import Estimate, cluster_bootstrap, macro, pooled, sample_error, sign_flip_p, wilson
from kvlab.stats.multiple import fixed_sequence, holm
from kvlab.stats.paired import MARGINS, mcnemar_p, n_needed, planned_margin, tango_interval, tango_z
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
    "cluster_bootstrap",
    "control_failed",
    "fixed_sequence",
    "holm",
    "judge",
    "judge_family",
    "macro",
    "mcnemar_p",
    "n_needed",
    "planned_margin",
    "pooled",
    "sample_error",
    "score_interval",
    "sign_flip_p",
    "tango_interval",
    "tango_z",
    "wilson",
]
