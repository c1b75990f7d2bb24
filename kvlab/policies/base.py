"""What scorers and budgets are. A scorer says which tokens matter; a budget says how many stay. Pure, frozen, final.

The only state a scorer may have is one number per cached token, the attention mass: the cache carries it along with the
token, and the scorer says how each forward's probabilities fold into it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction as Ratio
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


class Expected(NamedTuple):
    """Mean [N, D] and covariance [N, D, D] of queries yet to come, as attention will see them, scaled."""

    mean: Float[Tensor, "N D"]
    covariance: Float[Tensor, "N D D"]


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
    expected: Expected | None = None

    @property
    def real(self) -> Bool[Tensor, "N T"] | None:
        """Which slots hold a token; None when all do."""
        if self.counts is None:
            return None
        return torch.arange(self.positions.shape[1], device=self.positions.device) < self.counts.unsqueeze(1)

    @property
    def value_norms(self) -> Float[Tensor, "N T"]:
        """||v|| of each candidate."""
        assert self.values is not None, "a scorer that uses values says so by `reads_values`"
        return self.values.to(torch.promote_types(self.values.dtype, torch.float32)).norm(dim=-1)

    def then(self, later: "Candidates") -> "Candidates":
        """These and, right behind the last real one of each head, the later ones, all of which must be real."""
        parts = [
            None if a is None or b is None else torch.cat([a.to(b.dtype), b], dim=1)
            for a, b in zip(self[:4], later[:4], strict=True)
        ]
        if self.counts is None:
            return Candidates(*parts, expected=later.expected)  # type: ignore[arg-type]
        stored, new = self.positions.shape[1], later.positions.shape[1]
        slot = torch.arange(stored + new, device=self.counts.device).expand(len(self.counts), -1)
        held = self.counts.unsqueeze(1)
        at = torch.where(slot < held, slot, slot - held + stored).clamp_max(stored + new - 1)
        moved = [None if x is None else taken(x, at) for x in parts]
        return Candidates(*moved, counts=self.counts + new, expected=later.expected)  # type: ignore[arg-type]


def taken(x: Shaped[Tensor, "N T ..."], index: Int[Tensor, "N K"]) -> Shaped[Tensor, "N K ..."]:
    """Tokens `index` of each head."""
    if x.ndim == 2 or not x.is_contiguous():
        return x.gather(1, index if x.ndim == 2 else index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    # Row by row: gather looks up every number.
    first = torch.arange(x.shape[0], device=x.device).unsqueeze(1) * x.shape[1]
    return x.flatten(0, 1).index_select(0, (index + first).flatten()).unflatten(0, index.shape)


class Scorer(ABC):
    """Ranks cached tokens, higher stays. `stateful` scorers need attention mass, some need K or V; all get positions.

    A `query_agnostic` scorer looks at no query: what it keeps does not depend on what is asked, before or after.
    """

    kind: ClassVar[str]
    stateful: ClassVar[bool]
    query_agnostic: ClassVar[bool]
    reads_keys: ClassVar[bool] = False
    reads_queries: ClassVar[bool] = False  # what it observes are sums of queries for each head, no attention
    relative: ClassVar[bool] = False  # a score depends on the other tokens held, those that stay anyway included
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


Scope = Literal["head", "layer", "model"]


class Budget(ABC):
    """How many encoded tokens stay. Knows numbers, not attention."""

    kind: ClassVar[str]
    evicts: ClassVar[bool] = True
    revisits: ClassVar[bool] = True  # may drop tokens that were kept before

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for tables; empty when nothing is evicted."""

    @abstractmethod
    def keep(self, stored: int, new: int, protected: int, seen: int, heads: int = 1, share: Ratio = Ratio(1)) -> int:
        """Of `stored` kept and `new` candidate tokens of `heads` heads, all told, how many stay.

        Each head has `protected` sinks and recent tokens beside them and has `seen` that many tokens of the sequence so
        far. `share` is what the heads get of an even budget's encoded part. The result lies in [0, stored + new].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicting(Budget):
    """A budget that evicts, and who shares it.

    Scope "head" gives every KV head the same count. "layer" and "model" pool what the heads of a layer, or of all
    layers, would get and hand it out in whole pages to where the scores are highest (as AdaKV, arXiv 2407.11550, does
    in a layer); every head keeps at least `floor` of its even part. `slope` tilts budgets over depth (PyramidKV, arXiv
    2406.02069): layer r of L gets 1 + slope (1 - 2r / (L - 1)) times the even budget beside sinks and recent tokens.
    """

    scope: Scope = "head"
    floor: float = 0.2
    slope: float = 0.0

    def _check_shared(self, part: Ratio = Ratio(0)) -> None:
        """Raise ValueError for settings that mean nothing. `part` is what an even budget keeps of everything."""
        if self.scope not in get_args(Scope):
            raise ValueError(f"budget scope must be one of {get_args(Scope)}, got {self.scope!r}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"budget floor is a share of the even budget in [0, 1], got {self.floor!r}")
        if not 0 <= self.slope < 1:
            raise ValueError(f"budget slope must lie in [0, 1), got {self.slope!r}: 0 gives every layer the same")
        if self.slope and self.scope == "model":
            raise ValueError(
                f"slope {self.slope!r} fixes each layer's budget, scope 'model' pools them: use one of the two"
            )
        if (1 + exact(self.slope)) * part > 1:
            raise ValueError(
                f"slope {self.slope!r} asks the first layer to keep more than everything: at most "
                f"{float(1 / part - 1):.4g} with this budget"
            )

    def share(self, rank: int, layers: int) -> Ratio:
        """What layer `rank` of `layers` gets of the even budget."""
        even = layers < 2 or not self.slope
        return Ratio(1) if even else 1 + exact(self.slope) * (1 - Ratio(2 * rank, layers - 1))

    def _scoped(self, label: str) -> str:
        """`label`, and what differs from an even budget for each head."""
        shared = "" if self.scope == "head" else f" {self.scope}" + (f" f{self.floor:g}" if self.floor != 0.2 else "")
        return label + shared + (f" slope {self.slope:g}" if self.slope else "")


def exact(share: float) -> Ratio:
    """A share as a person means it: 1 - 0.7 is 3/10, not the 0.30000000000000004 that floats make of it."""
    return Ratio(f"{share:.12g}")
