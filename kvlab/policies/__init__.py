"""F1: which tokens are kept. One scorer per file; adding one is that file and one line in SCORERS."""

from kvlab.policies.attention_mass import AttentionMass
from kvlab.policies.base import Budget, Scorer
from kvlab.policies.budgets import Fraction, Threshold, Tokens, Unlimited
from kvlab.policies.recency import Recency
from kvlab.policies.window_attention import WindowAttention

SCORERS: dict[str, type[Scorer]] = {
    "recency": Recency,
    "attention_mass": AttentionMass,
    "window_attention": WindowAttention,
}
BUDGETS: dict[str, type[Budget]] = {
    "unlimited": Unlimited,
    "tokens": Tokens,
    "fraction": Fraction,
    "threshold": Threshold,
}

__all__ = [
    "BUDGETS",
    "SCORERS",
    "AttentionMass",
    "Budget",
    "Fraction",
    "Recency",
    "Scorer",
    "Threshold",
    "Tokens",
    "Unlimited",
    "WindowAttention",
]
