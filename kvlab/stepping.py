"""Stepping: one query over what a row holds, by the compiled kernel, straight from the pages. Same answer as Reading's.

Knows tables and formats. Which way a row goes is the row's business.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.centre import Centre
from kvlab.kernels.rowwise import Extras, Raw, Stored, attend_one
from kvlab.layer import LayerConfig
from kvlab.selecting import Choice
from kvlab.store import PageTable


class Pinned:
    """A table's pages as the kernel takes them, looked up anew only after pages or pool have moved."""

    def __init__(self) -> None:
        self._stored: Stored | None = None
        self._moves = -1

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


class Single(NamedTuple):
    """One query for each head and how it reads: see `Row.attend`. `seen` is its position."""

    q: Float[Tensor, "H D"]
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
            grouped = self.q.float().view(stored.index.shape[0], -1, self.q.shape[1]) * self.scale
            drift = self.centre.rotary.drift(grouped, self.centre.mu).flatten(0, 1)
            trig = self.centre.rotary.table(self.seen, torch.float32)
        if self.choice is not None:
            selected, chunk = self.choice.chunks[:, 0], self.choice.size
        return Extras(self.softcap, self.sink_logits, drift, trig, selected, chunk)


def attend_single(
    single: Single, stored: Stored | None, raw: Sequence[Raw], weights: Float[Tensor, " 1"] | None
) -> tuple[Float[Tensor, "H 1 E"], Float[Tensor, "N C"] | None]:
    """Attention of one query and, with `weights`, what it adds to the attention mass of every key."""
    out, mass = attend_one(
        single.q, stored, raw, single.scale, single.extras(stored), mass=weights is not None, impl="numba"
    )
    if mass is not None and weights is not None:
        mass *= float(weights[0])
    return out.unsqueeze(1).to(single.q.dtype), mass
