"""Rotary position embedding as three maps: turn a vector to its position, turn it back, and split q . R_p(mu) in two.

A Rotary is given its frequencies and its pairing; it knows no model and does not ask where they come from. Dims past
the rotated ones (partial rotation) stay as they are. A model's own scaling of cos and sin (YaRN) is not part of it:
R_p is a pure rotation, so K at position p is R_p of K at position 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Rotary:
    """R_p for heads of `head_dim`: pair j turns by p * inv_freq[j].

    Pairs are (j, j + M) (half split, Llama) or (2j, 2j + 1) (interleaved, GPT-J and Cohere), M = len(inv_freq). With no
    frequencies R_p is the identity. Raises ValueError when the pairs do not fit the head.
    """

    def __init__(self, inv_freq: Float[Tensor, " M"], head_dim: int, interleaved: bool = False) -> None:
        if 2 * inv_freq.shape[0] > head_dim:
            raise ValueError(f"{inv_freq.shape[0]} pairs need {2 * inv_freq.shape[0]} dims, the head has {head_dim}")
        self.inv_freq = inv_freq.detach().clone()
        self.head_dim, self.interleaved = head_dim, interleaved
        self._tables: dict[torch.dtype, Tensor] = {}

    @property
    def pairs(self) -> int:
        return self.inv_freq.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of frequencies and of the tables made so far. They belong to a model, not to a sequence."""
        return sum(x.numel() * x.element_size() for x in (self.inv_freq, *self._tables.values()))

    def same_as(self, other: "Rotary") -> bool:
        """Whether both turn every vector alike."""
        ours, theirs = ((r.head_dim, r.pairs and r.interleaved, r.inv_freq.tolist()) for r in (self, other))
        return ours == theirs

    def trig(self, positions: Int[Tensor, "*T"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "*T D"]:
        """[cos | sin | 1 for each dim that is not rotated] of every position."""
        # The angle is one float32 product, as models compute it: at position 100000 a more exact angle would turn a
        # vector elsewhere than the model did.
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inv_freq.to(torch.float32)
        angles = angles.to(torch.float64)
        still = angles.new_ones(*positions.shape, self.head_dim - 2 * self.pairs)
        return torch.cat([angles.cos(), angles.sin(), still], dim=-1).to(dtype)

    def table(self, length: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "T D"]:
        """`trig` of positions 0 .. length - 1, kept and grown by doubling: a decode step looks angles up."""
        held = self._tables.get(dtype)
        if held is None or held.shape[0] < length:
            size = max(length, 256, 0 if held is None else 2 * held.shape[0])
            held = self.trig(torch.arange(size, device=self.inv_freq.device), dtype)
            self._tables[dtype] = held
        return held[:length]

    def turn(self, x: Float[Tensor, "*A D"], trig: Float[Tensor, "*B D"]) -> Float[Tensor, "*C D"]:
        """Pairs of `x` times (cos, sin) of `trig`, broadcast over leading axes.

        With a row of `trig` it is R_p x; with a mean of rows it is the mean of R_p x.
        """
        first, second, rest = self._pairs(x)
        cos, sin, still = trig.split([self.pairs, self.pairs, self.head_dim - 2 * self.pairs], dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        both = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        return torch.cat([both, rest * still], dim=-1)

    def rotate(self, x: Float[Tensor, "*N T D"], positions: Int[Tensor, "*P T"]) -> Float[Tensor, "*N T D"]:
        """R_p x for tokens at `positions`, [T] or one row per head. Computed in float32 at least, same dtype out."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.turn(x.to(wide), self.trig(positions, wide)).to(x.dtype)

    def rotate_back(self, x: Float[Tensor, "*N T D"], positions: Int[Tensor, "*P T"]) -> Float[Tensor, "*N T D"]:
        """The inverse of `rotate`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.turn(x.to(wide), self.opposite(self.trig(positions, wide))).to(x.dtype)

    def opposite(self, trig: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """`trig` of the negated positions."""
        flipped = trig.clone()
        flipped[..., self.pairs : 2 * self.pairs] *= -1
        return flipped

    def drift(self, q: Float[Tensor, "N R D"], mu: Float[Tensor, "N D"]) -> Float[Tensor, "N R D"]:
        """What q . R_p(mu) depends on besides p: its dot product with a row of `trig` is that number, for every p."""
        q1, q2, q3 = self._pairs(q)
        m1, m2, m3 = self._pairs(mu.to(q.dtype).unsqueeze(-2))
        return torch.cat([q1 * m1 + q2 * m2, q2 * m1 - q1 * m2, q3 * m3], dim=-1)

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First and second of each rotated pair, and the dims that are not rotated."""
        turning, rest = x[..., : 2 * self.pairs], x[..., 2 * self.pairs :]
        if self.interleaved:
            return turning[..., 0::2], turning[..., 1::2], rest
        return turning[..., : self.pairs], turning[..., self.pairs :], rest
