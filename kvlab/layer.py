"""One layer under a config: its shape, the rules it follows, what it holds and reads. Integers only; nothing is stored
here.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction as Ratio
from typing import Any, Literal, NamedTuple

import torch

from kvlab.codecs import Codec, Stream
from kvlab.policies import Budget, Evicting, Reader, Scorer, TopK
from kvlab.policies.base import Scope, exact

# What is subtracted from keys before RoPE: nothing, the bias of k_proj, or a calibrated mean.
Centring = Literal["none", "bias", "mean"]


class LayerShape(NamedTuple):
    """One layer's KV heads. `window` is set where the layer keeps transformers' own sliding cache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the size of a cache depends on, besides the config."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    @property
    def compressed(self) -> list[int]:
        """Indices of the layers that a KVConfig stores: those that keep no window."""
        return [i for i, s in enumerate(self.layers) if s.window is None]

    def raw_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Bytes of an uncompressed cache of `tokens` tokens, by default in 16 bit."""
        held = (min(tokens, s.window - 1) if s.window else tokens for s in self.layers)
        return sum(
            t * s.kv_heads * (s.key_dim + s.value_dim) * itemsize for t, s in zip(held, self.layers, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the dtype's name, and kv_heads, key_dim, value_dim, window of each layer."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "layers": [list(s) for s in self.layers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelShape":
        """Inverse of `to_dict`. Raises ValueError for a dtype that torch does not have."""
        dtype = getattr(torch, str(data["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a model's dtype is one of torch's, such as float16, got {data['dtype']!r}")
        return cls(tuple(LayerShape(*layer) for layer in data["layers"]), dtype)


class Occupancy(NamedTuple):
    """Tokens one KV head holds: raw sinks, raw recent window, encoded tokens.

    Where heads share a budget, nobody knows beforehand how many encoded tokens each gets: a predicted occupancy then
    counts in `stored` those of all heads that share.
    """

    sinks: int
    window: int
    stored: int

    @property
    def kept(self) -> int:
        return self.sinks + self.window + self.stored


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A KVConfig as one layer follows it."""

    key: Codec
    value: Codec
    scorer: Scorer
    budget: Budget
    reader: Reader
    centring: Centring
    sink_tokens: int
    recent_tokens: int
    page_tokens: int
    share: Ratio = Ratio(1)  # of an even budget, by depth

    @property
    def block_tokens(self) -> int:
        """Tokens that must be encoded together."""
        return max(self.key.block_tokens, self.value.block_tokens)

    @property
    def scope(self) -> Scope:
        """Which heads share a budget."""
        return self.budget.scope if isinstance(self.budget, Evicting) else "head"

    @property
    def ragged(self) -> bool:
        """Whether heads may hold different numbers of tokens."""
        return self.scope != "head"

    @property
    def unit_tokens(self) -> int:
        """Tokens that leave the window together, and stay by so many: whole pages where heads share a budget."""
        return self.page_tokens if self.ragged else self.block_tokens

    @property
    def tracks_mass(self) -> bool:
        return self.budget.evicts and self.scorer.stateful and not self.scorer.reads_queries

    @property
    def tracks_queries(self) -> bool:
        return self.budget.evicts and self.scorer.reads_queries

    def flush_tokens(self, window: int, new_tokens: int) -> int:
        """How many of `window` raw tokens leave it after a forward of `new_tokens`.

        A forward of several tokens settles the window to its size; single steps settle it page by page.
        """
        overflow = window - self.recent_tokens
        unit = self.page_tokens if new_tokens == 1 else self.unit_tokens
        return max(0, overflow) // unit * unit

    def keep(self, stored: int, new: int, protected: int, seen: int, heads: int = 1) -> int:
        """Encoded tokens that stay after a flush, whole pages where codec or scope needs them.

        `heads` share the budget: they hold `stored` tokens between them, and `new` more have just left the window of
        each. Which of them stay is the scorer's business; how many is decided here, whatever the data.
        """
        kept = self.budget.keep(stored, heads * new, protected, seen, heads, self.share)
        unit = self.unit_tokens
        if unit == 1:
            return kept
        return max(kept // unit * unit, min(heads * unit * self.secures(stored, protected), stored + heads * new))

    def secures(self, stored: int, protected: int) -> bool:
        """Whether this flush must leave every head an encoded token.

        Without a raw token a head needs one to read. A shared budget that never looks back gives it one at the first
        flush, for good.
        """
        return not stored if self.ragged and not self.budget.revisits else not protected

    def floor_pages(self, pages: int, heads: int, secures: bool) -> int:
        """Of the `pages` that `heads` heads share, how many each gets before scores decide."""
        assert isinstance(self.budget, Evicting)
        return max(math.floor(exact(self.budget.floor) * pages / heads), int(secures))

    def occupancy(self, prefill: int, decoded: int = 0, heads: int = 1) -> Occupancy:
        """What one head holds after a forward of `prefill` tokens and `decoded` single steps.

        With a budget that `heads` heads share, `stored` is what they hold between them.
        """
        heads = heads if self.ragged else 1
        sinks = window = stored = seen = 0
        for step in itertools.chain([prefill] if prefill else [], itertools.repeat(1, decoded)):
            seen += step
            filled = min(self.sink_tokens - sinks, step)
            sinks, window = sinks + filled, window + step - filled
            flushed = self.flush_tokens(window, step)
            if flushed:
                window -= flushed
                stored = self.keep(stored, flushed, sinks + window, seen, heads)
        return Occupancy(sinks, window, stored)

    def streams(self, shape: LayerShape, raw: torch.dtype) -> dict[str, Stream]:
        """All streams of one page of one head."""
        streams = {f"k.{n}": s for n, s in self.key.streams(shape.key_dim, self.page_tokens, raw).items()}
        streams |= {f"v.{n}": s for n, s in self.value.streams(shape.value_dim, self.page_tokens, raw).items()}
        if self.budget.evicts:
            streams["position"] = Stream(self.page_tokens, 1, torch.int32)
        if self.tracks_mass:
            streams["mass"] = Stream(self.page_tokens, 1, torch.float32)
        if isinstance(self.reader, TopK):
            rows = self.page_tokens // self.reader.chunk
            streams |= {f"k.{n}": Stream(rows, shape.key_dim, torch.float16, True) for n in self.reader.summaries}
        return streams

    def nbytes(self, shape: LayerShape, raw: torch.dtype, held: Occupancy, layers: int = 1) -> int:
        """Bytes one sequence holds in one layer: whole pages, raw tokens, and the mass of raw recent tokens.

        Where heads share a budget, `held` is what all heads of `layers` layers hold, and so are the bytes.
        """
        heads = shape.kv_heads * layers
        page = sum(s.page_bytes for s in self.streams(shape, raw).values())
        per_raw = (shape.key_dim + shape.value_dim) * raw.itemsize
        mass = held.window * torch.float32.itemsize if self.tracks_mass else 0
        pages = -(-held.stored // self.page_tokens) * (1 if self.ragged else heads)
        sums = (shape.key_dim + 1) * shape.key_dim * torch.float32.itemsize if self.tracks_queries and held.kept else 0
        return pages * page + heads * ((held.sinks + held.window) * per_raw + mass + sums)

    def bytes_by_stream(self, shape: LayerShape, raw: torch.dtype, held: Occupancy, layers: int = 1) -> dict[str, int]:
        """What `nbytes` counts, by what it stores: named as in a cache's inventory, whole pages with their slack."""
        heads = shape.kv_heads * layers
        pages = -(-held.stored // self.page_tokens) * (1 if self.ragged else heads)
        found: dict[str, int] = {}
        for name, stream in self.streams(shape, raw).items():
            kind = _kind(name, stream)
            found[kind] = found.get(kind, 0) + pages * stream.page_bytes
        per_raw = (shape.key_dim + shape.value_dim) * raw.itemsize
        found["raw sinks"], found["raw window"] = heads * held.sinks * per_raw, heads * held.window * per_raw
        rest = self.nbytes(shape, raw, held, layers) - sum(found.values())
        tracked = heads * held.window * torch.float32.itemsize if self.tracks_mass else 0
        found["attention mass"] = found.get("attention mass", 0) + tracked
        return found | {"query sums": rest - tracked}

    def read_bytes(self, shape: LayerShape, raw: torch.dtype, held: Occupancy, layers: int = 1) -> int:
        """Bytes one decode step reads of what `nbytes` counts: raw tokens, chosen chunks, summaries, tracked mass.

        A selection that serves several steps shares its summaries out to them. Heads that share a budget are taken to
        hold equal parts of it. Positions are read where keys are centred, mass by the step that adds to it.
        """
        heads = shape.kv_heads * layers
        tokens = stored = -(-held.stored // heads) if self.ragged else held.stored
        streams = self.streams(shape, raw)
        summaries = {n for n, s in streams.items() if s.derived}
        of_choice = 0
        if isinstance(self.reader, TopK):
            chunk = self.reader.chunk
            chunks = -(-stored // chunk)
            chosen = self.reader.chosen(chunks)
            if chosen < chunks:
                tokens = chosen * chunk
                looked_at = summaries or {n for n in ("k.scale", "k.zero") if n in streams}
                of_choice = chunks * sum(streams[n].page_bytes for n in looked_at) * chunk // self.page_tokens
                of_choice = -(-of_choice // self.reader.select_every)
        read = {n for n in streams if n[:2] in ("k.", "v.")} - summaries
        read |= {"position"} & streams.keys() if self.centring != "none" else set()
        encoded = sum(
            -(-tokens * s.rows // self.page_tokens) * s.page_bytes // s.rows for n, s in streams.items() if n in read
        )
        mass = (stored + held.window) * torch.float32.itemsize if self.tracks_mass else 0
        per_raw = (shape.key_dim + shape.value_dim) * raw.itemsize
        return heads * (encoded + of_choice + mass + (held.sinks + held.window) * per_raw)


def _kind(name: str, stream: Stream) -> str:
    """What a stream of a page stores, in words."""
    side, _, part = name.partition(".")
    if not part:
        return {"position": "positions", "mass": "attention mass"}[name]
    if stream.derived:
        return "chunk summaries"
    return side.upper() if part in ("codes", "data") else "scales"
