"""F1: which tokens are kept, and which of those are read. One scorer per file, and one line in SCORERS."""

from kvlab.policies.attention_mass import AttentionMass
from kvlab.policies.base import Budget, Candidates, Evicting, Scorer
from kvlab.policies.budgets import Fraction, Threshold, Tokens, Unlimited
from kvlab.policies.expected_attention import ExpectedAttention
from kvlab.policies.key_diff import KeyDiff
from kvlab.policies.key_norm import KeyNorm
from kvlab.policies.last_selected import LastSelected
from kvlab.policies.readers import Dense, Reader, TopK
from kvlab.policies.recency import Recency
from kvlab.policies.window_attention import WindowAttention

SCORERS: dict[str, type[Scorer]] = {
    "recency": Recency,
    "attention_mass": AttentionMass,
    "window_attention": WindowAttention,
    "key_norm": KeyNorm,
    "key_diff": KeyDiff,
    "expected_attention": ExpectedAttention,
    "last_selected": LastSelected,
}
BUDGETS: dict[str, type[Budget]] = {
    "unlimited": Unlimited,
    "tokens": Tokens,
    "fraction": Fraction,
    "threshold": Threshold,
}
READERS: dict[str, type[Reader]] = {"dense": Dense, "top_k": TopK}

__all__ = [
    "BUDGETS",
    "READERS",
    "SCORERS",
    "AttentionMass",
    "Budget",
    "Candidates",
    "Dense",
    "Evicting",
    "ExpectedAttention",
    "Fraction",
    "KeyDiff",
    "KeyNorm",
    "LastSelected",
    "Reader",
    "Recency",
    "Scorer",
    "Threshold",
    "Tokens",
    "TopK",
    "Unlimited",
    "WindowAttention",
]
