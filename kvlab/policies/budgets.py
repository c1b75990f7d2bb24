"""Budgets: unlimited, a token count, a fraction of what was seen, a quantile threshold. Scope: each KV head for itself.

Integers decide, never truncated floats: 10 tokens at ratio 0.1 keep 1, 1000 at 0.2 keep 200.
"""

import math
from dataclasses import dataclass
from fractions import Fraction as Ratio
from typing import ClassVar

from kvlab.policies.base import Budget


@dataclass(frozen=True, slots=True)
class Unlimited(Budget):
    """Nothing is evicted."""

    kind: ClassVar[str] = "unlimited"
    evicts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return ""

    def keep(self, stored: int, new: int, protected: int, seen: int) -> int:
        return stored + new


def _ratio(share: float) -> Ratio:
    """A share as a person means it: 1 - 0.7 is 3/10, not the 0.30000000000000004 that floats make of it."""
    return Ratio(f"{share:.12g}")


def _within(limit: int, stored: int, new: int, protected: int) -> int:
    """Clamp a limit on all tokens to what the encoded part may keep. A sequence never loses its last token."""
    floor = 0 if protected else min(1, stored + new)
    return max(floor, min(stored + new, limit - protected))


@dataclass(frozen=True, slots=True)
class Tokens(Budget):
    """At most `tokens` per head once eviction runs, sinks and recent tokens included."""

    kind: ClassVar[str] = "tokens"
    tokens: int = 1024

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"budget tokens must be at least 1, got {self.tokens}: decode needs something to read")

    @property
    def label(self) -> str:
        return f"{self.tokens} tok"

    def keep(self, stored: int, new: int, protected: int, seen: int) -> int:
        return _within(self.tokens, stored, new, protected)


@dataclass(frozen=True, slots=True)
class Fraction(Budget):
    """ceil(fraction x seen) tokens per head, sinks and recent tokens included."""

    kind: ClassVar[str] = "fraction"
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"budget fraction must lie in (0, 1], got {self.fraction!r}: 0.5 keeps half")

    @property
    def label(self) -> str:
        return f"{self.fraction * 100:.4g}%"

    def keep(self, stored: int, new: int, protected: int, seen: int) -> int:
        return _within(math.ceil(_ratio(self.fraction) * seen), stored, new, protected)


@dataclass(frozen=True, slots=True)
class Threshold(Budget):
    """Evict tokens whose importance lies below the `quantile` of their block, once, as they leave the recent window.

    Tokens that stay are never looked at again. Ties at the quantile go against the older token.
    """

    kind: ClassVar[str] = "threshold"
    revisits: ClassVar[bool] = False
    quantile: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.quantile < 1:
            raise ValueError(f"eviction threshold is a quantile in [0, 1), got {self.quantile!r}: 0.5 evicts half")

    @property
    def label(self) -> str:
        return f"q{self.quantile:g}"

    def keep(self, stored: int, new: int, protected: int, seen: int) -> int:
        kept = new - math.floor(_ratio(self.quantile) * new)
        return stored + (max(kept, 1) if stored + protected == 0 and new else kept)
