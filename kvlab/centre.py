"""Centre: the constant part of one layer's keys, taken out before they are encoded and put back when they are read.

Keys arrive after RoPE, so the constant mu turns with the position: what is stored is K - R_p(mu), and a logit is
q . (K - R_p(mu)) + q . R_p(mu). The second term needs no stored bytes and is exact for any mu; a good mu only makes the
rest small. Where mu comes from is for centring.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvlab.kernels.rope import Rotary

# Where tokens stand: one run of positions for every head, or positions [N, T] where heads differ.
Places = slice | Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Centre:
    """`mu` [N, D] is the constant of each KV head before RoPE, as a key at position 0 would show it."""

    mu: Tensor
    rotary: Rotary

    def __deepcopy__(self, memo: dict) -> "Centre":
        """Itself: it belongs to the model and never changes, so copies of a cache share it."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of mu: once for a model, not for a sequence."""
        return self.mu.numel() * self.mu.element_size()

    def heads(self, which: slice) -> "Centre":
        """The same for some of the heads."""
        return Centre(self.mu[which], self.rotary)

    def term(self, places: Places, end: int | None, dtype: torch.dtype) -> Float[Tensor, "N T D"]:
        """R_p(mu) for every head and position. `end` lies past every position; None has it looked up."""
        return self.rotary.turn(self.mu.to(dtype).unsqueeze(1), self._rows(places, end, dtype))

    def take_out(self, keys: Float[Tensor, "N T D"], places: Places, end: int | None = None) -> Float[Tensor, "N T D"]:
        """What is encoded of `keys`, in float32 at least."""
        wide = torch.promote_types(keys.dtype, torch.float32)
        return keys.to(wide) - self.term(places, end, wide)

    def put_back(self, rest: Float[Tensor, "N T D"], places: Places, end: int | None = None) -> Float[Tensor, "N T D"]:
        """Keys from what was decoded; computed in float32 at least, same dtype out."""
        wide = torch.promote_types(rest.dtype, torch.float32)
        return (rest.to(wide) + self.term(places, end, wide)).to(rest.dtype)

    def logits(self, q: Float[Tensor, "N R D"], places: Places, end: int) -> Float[Tensor, "N R T"]:
        """q . R_p(mu), without ever forming R_p(mu)."""
        drift = self.rotary.drift(q, self.mu)
        if isinstance(places, slice) or 4 * places.shape[1] < end:
            return drift @ self._rows(places, end, q.dtype).mT
        # Few tokens were evicted: all positions in one product, then a pick, moves less than a row of angles for each.
        every = drift @ self.rotary.table(end, q.dtype).mT
        return every.gather(2, places.unsqueeze(1).expand(-1, q.shape[1], -1))

    def _rows(self, places: Places, end: int | None, dtype: torch.dtype) -> Shaped[Tensor, "*N T D"]:
        past = end if end is not None else places.stop if isinstance(places, slice) else int(places.max()) + 1
        return self.rotary.table(past, dtype)[places]


class KeyTerm(NamedTuple):
    """What encoded keys lack in their logits because a centre was taken out: that centre, and where they stand."""

    centre: Centre
    places: Places
    end: int  # past every position

    @property
    def length(self) -> int:
        return self.places.stop - self.places.start if isinstance(self.places, slice) else self.places.shape[1]

    def logits(self, q: Float[Tensor, "N R D"], slots: Tensor | None = None) -> Float[Tensor, "N R T"]:
        """For scaled and folded queries, of everything stored or of the tokens in `slots` [N, T] of the table."""
        places = self.places
        if slots is not None:
            at = slots.clamp(0, self.length - 1)
            places = at + places.start if isinstance(places, slice) else places.gather(1, at)
        return self.centre.logits(q, places, self.end)


def joined(centres: Sequence[Centre | None]) -> Centre | None:
    """The heads of several layers side by side; None where none is centred.

    Raises ValueError when some are and some are not, or when they turn differently.
    """
    known = [c for c in centres if c is not None]
    if not known:
        return None
    if len(known) < len(centres) or any(c.rotary is not known[0].rotary for c in known):
        raise ValueError("layers can be joined only where all are centred, with one rotary embedding")
    return Centre(torch.cat([c.mu for c in known]), known[0].rotary)


def positions_of(places: Places, heads: int, device: torch.device) -> Int[Tensor, "N T"]:
    """`places` written out for every head."""
    if isinstance(places, slice):
        return torch.arange(places.start, places.stop, device=device).expand(heads, -1)
    return places
