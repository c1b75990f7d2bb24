"""What scorers and budgets are. A scorer says which tokens matter; a budget says how many stay. Pure, frozen, final.

The only state a scorer may have is one number per cached token, the attention mass: the cache carries it along with the
token, and the scorer says how each forward's probabilities fold into it.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Scorer(ABC):
    """Ranks cached tokens, higher stays. `stateful` scorers need attention mass; others need positions only."""

    kind: ClassVar[str]
    stateful: ClassVar[bool]

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for tables."""

    def query_weights(self, n_queries: int) -> Float[Tensor, " Q"]:
        """How much each query of one forward adds to the mass of the keys it attends to; zero weights cost nothing."""
        return torch.zeros(n_queries)

    def carry(self, n_queries: int) -> float:
        """What a forward of n queries leaves of the mass accumulated before."""
        return 1.0

    @abstractmethod
    def score(self, mass: Float[Tensor, "N T"], positions: Int[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """Importance of each candidate, in ascending position order. Sinks and recent tokens are not candidates."""


class Budget(ABC):
    """How many encoded tokens one head keeps. Knows numbers, not attention."""

    kind: ClassVar[str]
    evicts: ClassVar[bool] = True
    revisits: ClassVar[bool] = True  # may drop tokens that were kept before

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for tables; empty when nothing is evicted."""

    @abstractmethod
    def keep(self, stored: int, new: int, protected: int, seen: int) -> int:
        """Of `stored` kept and `new` candidate tokens, how many stay, beside `protected` sinks and recent tokens.

        `seen` counts every token of the sequence so far. The result lies in [0, stored + new].
        """
