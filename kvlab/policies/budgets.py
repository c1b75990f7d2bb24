"""Budgets: unlimited, a token count, a fraction of what was seen, a quantile threshold.

Integers decide, never truncated floats: 10 tokens at ratio 0.1 keep 1, 1000 at 0.2 keep 200.
"""

import math
from dataclasses import dataclass
from fractions import Fraction as Ratio
from typing import ClassVar

from kvlab.policies.base import Budget, Evicting, exact

_EVEN = Ratio(1)


@dataclass(frozen=True, slots=True)
class Unlimited(Budget):
    """Nothing is evicted."""

    kind: ClassVar[str] = "unlimited"
    evicts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return ""

    def keep(self, stored: int, new: int, protected: int, seen: int, heads: int = 1, share: Ratio = _EVEN) -> int:
        return stored + new


def _within(limit: int, stored: int, new: int, protected: int, heads: int, share: Ratio) -> int:
    """Clamp a limit on each head's tokens to what the encoded part may keep. A head never loses its last token."""
    least = 0 if protected else min(heads, stored + new)
    return max(least, min(stored + new, math.floor(share * heads * (limit - protected))))


@dataclass(frozen=True, slots=True)
class Tokens(Evicting):
    """At most `tokens` per head once eviction runs, sinks and recent tokens included."""

    kind: ClassVar[str] = "tokens"
    tokens: int = 1024

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"budget tokens must be at least 1, got {self.tokens}: decode needs something to read")
        self._check_shared()

    @property
    def label(self) -> str:
        return self._scoped(f"{self.tokens} tok")

    def keep(self, stored: int, new: int, protected: int, seen: int, heads: int = 1, share: Ratio = _EVEN) -> int:
        return _within(self.tokens, stored, new, protected, heads, share)


@dataclass(frozen=True, slots=True)
class Fraction(Evicting):
    """ceil(fraction x seen) tokens per head, sinks and recent tokens included."""

    kind: ClassVar[str] = "fraction"
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"budget fraction must lie in (0, 1], got {self.fraction!r}: 0.5 keeps half")
        self._check_shared(exact(self.fraction))

    @property
    def label(self) -> str:
        return self._scoped(f"{self.fraction * 100:.4g}%")

    def keep(self, stored: int, new: int, protected: int, seen: int, heads: int = 1, share: Ratio = _EVEN) -> int:
        return _within(math.ceil(exact(self.fraction) * seen), stored, new, protected, heads, share)


@dataclass(frozen=True, slots=True)
class Threshold(Evicting):
    """Evict tokens whose importance lies below the `quantile` of their block, once, as they leave the recent window.

    In a wider scope the quantile is that of the pooled scores of all its heads, rounded to pages.

    Tokens that stay are never looked at again. Ties at the quantile go against the older token.
    """

    kind: ClassVar[str] = "threshold"
    revisits: ClassVar[bool] = False
    quantile: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.quantile < 1:
            raise ValueError(f"eviction threshold is a quantile in [0, 1), got {self.quantile!r}: 0.5 evicts half")
        self._check_shared(1 - exact(self.quantile))

    @property
    def label(self) -> str:
        return self._scoped(f"q{self.quantile:g}")

    def keep(self, stored: int, new: int, protected: int, seen: int, heads: int = 1, share: Ratio = _EVEN) -> int:
        kept = min(new, math.ceil((1 - exact(self.quantile)) * share * new))
        return stored + (max(kept, min(heads, new)) if stored + protected == 0 else kept)
