"""Stepping: one query over what a row holds, by the compiled kernel, straight from the pages. Same answer as Reading's.

Knows tables and formats. Which way a row goes is the row's business.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.centre import Centre
from kvlab.kernels import rowwise_arrays
from kvlab.kernels.rowwise import Extras, Stored
from kvlab.layer import LayerConfig
from kvlab.selecting import Choice
from kvlab.store import PageTable

Parts = tuple[rowwise_arrays.Part, rowwise_arrays.Part]  # the same raw tokens' K and V


class Pinned:
    """What a row holds as the kernel takes it, looked up anew only after it has moved."""

    def __init__(self) -> None:
        self._stored: Stored | None = None
        self._moves = -1
        self._raw: dict[str, tuple[Tensor, Parts]] = {}

    def raw(self, name: str, pair: tuple[Tensor, Tensor] | None, count: int) -> Parts:
        """Sinks or window, the first `count` tokens of which are real. K and V move together."""
        if pair is None:
            return rowwise_arrays.NO_PARTS
        held = self._raw.get(name)
        if held is None or held[0] is not pair[0]:
            held = pair[0], (rowwise_arrays.part(pair[0], 0), rowwise_arrays.part(pair[1], 0))
            if all(x.is_contiguous() for x in pair):  # else the parts are copies, which see nothing written later
                self._raw[name] = held
        k, v = held[1]
        return rowwise_arrays.Part(*k[:4], count), rowwise_arrays.Part(*v[:4], count)

    def stored(self, config: LayerConfig, table: PageTable, first: int, dims: tuple[int, int]) -> Stored | None:
        """None while nothing is encoded. `first` is the position of the first token where none were evicted."""
        if not table.length:
            return None
        index, held = table.index(), self._stored
        if held is None or held.index is not index or self._moves != table.pool.moves:
            streams = table.pool.streams
            formats = config.key.stored_as(dims[0]), config.value.stored_as(dims[1])
            key, value = (
                {name: streams[f"{side}.{name}"] for name in fmt.names} for side, fmt in zip("kv", formats, strict=True)
            )
            counts = torch.tensor(table.counts)
            page, position = table.pool.page_tokens, streams.get("position")
            held = Stored(key, value, *formats, index, counts, table.length, page, position, first)
            self._stored, self._moves = held, table.pool.moves
        return held


def keeps_tokens(window: tuple[Tensor, Tensor]) -> bool:
    """Whether the kernel can put a token into the window: it writes to the memory itself, and not to a copy."""
    return all(x.is_contiguous() for x in window)


class Single(NamedTuple):
    """One query for each head and how it reads: see `Row.attend`. `seen` is its position."""

    q: Float[Tensor, "H 1 D"]
    scale: float
    softcap: float | None
    sink_logits: Float[Tensor, " H"] | None
    choice: Choice | None
    centre: Centre | None
    seen: int

    def extras(self, stored: Stored | None) -> Extras:
        """The same in the kernel's terms."""
        drift = trig = selected = None
        chunk = 0
        if self.centre is not None and stored is not None:
            grouped = self.q.float().view(stored.index.shape[0], -1, self.q.shape[2]) * self.scale
            drift = self.centre.rotary.drift(grouped, self.centre.mu).flatten(0, 1)
            trig = self.centre.rotary.table(self.seen, torch.float32)
        if self.choice is not None:
            selected, chunk = self.choice.chunks[:, 0], self.choice.size
        return Extras(self.softcap, self.sink_logits, drift, trig, selected, chunk)


def attend_single(
    single: Single,
    stored: Stored | None,
    held: Sequence[Parts],
    k: Float[Tensor, "N 1 D"],
    v: Float[Tensor, "N 1 E"],
    weights: Float[Tensor, " 1"] | None,
    slot: int = -1,
) -> tuple[Float[Tensor, "H 1 E"], Float[Tensor, "N C"] | None]:
    """Attention of one query over `stored`, raw tokens `held` and its own K and V.

    With `weights` also what it adds to the attention mass of every key. `held` are sinks and window; its own K and V
    are also put at `slot` of the window, if that is not negative.
    """
    parts = [*held, (rowwise_arrays.part(k, 1), rowwise_arrays.part(v, 1))]
    dims, extras = (k.shape[0], v.shape[2]), single.extras(stored)
    out, mass = rowwise_arrays.step(single.q, stored, parts, dims, single.scale, extras, weights is not None, slot)
    if mass is not None and weights is not None:
        mass *= float(weights[0])
    return out if out.dtype == single.q.dtype else out.to(single.q.dtype), mass
