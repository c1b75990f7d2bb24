"""What scorers and budgets are. A scorer says which tokens matter; a budget says how many stay. Pure, frozen, final.

The only state a scorer may have is one number per cached token, the attention mass: the cache carries it along with the
token, and the scorer says how each forward's probabilities fold into it.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Candidates(NamedTuple):
    """Tokens of each head that may be evicted, in ascending position order; sinks and recent tokens are not among them.

    `mass` is there for stateful scorers, `keys` and `values` for those that read them, as attention would: stored ones
    decoded. Of head n only the first `counts[n]` tokens are real; all of them where it is None.
    """

    positions: Int[Tensor, "N T"]
    mass: Float[Tensor, "N T"] | None = None
    keys: Float[Tensor, "N T D"] | None = None
    values: Float[Tensor, "N T E"] | None = None
    counts: Int[Tensor, " N"] | None = None

    def then(self, later: "Candidates") -> "Candidates":
        """These and the later ones. Every head must hold equal counts."""
        parts = zip(self[:4], later[:4], strict=True)
        return Candidates(*(None if a is None or b is None else torch.cat([a.to(b.dtype), b], 1) for a, b in parts))  # type: ignore[arg-type]


class Scorer(ABC):
    """Ranks cached tokens, higher stays. `stateful` scorers need attention mass, some need K or V; all get positions.

    A `query_agnostic` scorer looks at no query: what it keeps does not depend on what is asked, before or after.
    """

    kind: ClassVar[str]
    stateful: ClassVar[bool]
    query_agnostic: ClassVar[bool]
    reads_keys: ClassVar[bool] = False
    reads_selection: ClassVar[bool] = False  # its mass is the last position whose query read the token, not attention

    @property
    def reads_values(self) -> bool:
        """Whether `score` needs the values."""
        return False

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

    def fold(self, mass: Tensor, observed: Tensor, n_queries: int) -> Tensor:
        """Mass accumulated before and what a forward of n queries observed, in one."""
        return mass * self.carry(n_queries) + observed

    @abstractmethod
    def score(self, candidates: Candidates) -> Float[Tensor, "N T"]:
        """Importance of each candidate; what it says of slots past a head's count means nothing."""


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
