"""Selecting: which chunks of a row's pages each query reads, and the summaries of chunks that decide it.

Sinks, the recent window and new tokens are raw and always read; selection is about encoded tokens only. Knows tables
and readers, not how attention is computed.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.centre import Centre, KeyTerm, Places
from kvlab.kernels import chunk_pages
from kvlab.kernels import chunks as kernel
from kvlab.kernels.hadamard import hadamard
from kvlab.kernels.pages_step import select_chunks
from kvlab.layer import LayerConfig
from kvlab.policies import TopK
from kvlab.store import PageTable


class Remembered(NamedTuple):
    """What a block of query positions reads: chunks [N, K], ascending, -1 behind the last."""

    block: int
    chunks: Int[Tensor, "N K"]


class Choice(NamedTuple):
    """Chunks of `size` tokens that blocks of queries read, -1 behind the last; query q is of block `block_of[q]`."""

    chunks: Int[Tensor, "N B K"]
    block_of: Int[Tensor, " Q"]
    size: int
    block: int  # the last block's number

    @property
    def last(self) -> Remembered:
        """What the next query still reads if it belongs to the last block."""
        return Remembered(self.block, self.chunks[:, -1])

    def slots(self) -> Int[Tensor, "N L"]:
        """Table slots of the tokens one query reads; negative where there is no chunk."""
        within = torch.arange(self.size, device=self.chunks.device)
        return (self.chunks[:, 0].long().unsqueeze(-1) * self.size + within).flatten(1)

    def allowed(self, queries: slice, length: int) -> Bool[Tensor, "N Q T"]:
        """Which of `length` stored slots each of the queries reads."""
        chosen = self._spread(torch.ones_like(self.chunks, dtype=torch.bool), length)
        return chosen[:, self.block_of[queries]].repeat_interleave(self.size, dim=2)[..., :length]

    def last_read(self, seen: int, length: int) -> Float[Tensor, "N T"]:
        """Position of the last query that reads each stored slot, 0 where none does; `seen` is the first one's."""
        n_queries = self.block_of.shape[0]
        order = torch.arange(n_queries, device=self.block_of.device)
        ends = torch.zeros(self.chunks.shape[1], dtype=torch.long, device=order.device)
        ends = ends.scatter_reduce(0, self.block_of, order + seen, "amax", include_self=False)
        read = self._spread(ends.view(1, -1, 1).expand(self.chunks.shape), length).amax(1)
        return read.repeat_interleave(self.size, dim=1)[:, :length].float()

    def _spread(self, values: Tensor, length: int) -> Tensor:
        """[N, B, K] by chosen chunk -> [N, B, C] by chunk, zero where a chunk is not chosen."""
        count = -(-length // self.size)
        at = torch.where(self.chunks < 0, count, self.chunks).long()
        out = values.new_zeros(*self.chunks.shape[:2], count + 1)
        return out.scatter(2, at, values)[..., :count]


def all_read(heads: int, tokens: int, position: int, device: torch.device) -> Float[Tensor, "N T"]:
    """What `Choice.last_read` says where the query at `position` reads every token."""
    return torch.full((heads, tokens), float(position), device=device)


def choose(
    config: LayerConfig,
    table: PageTable,
    q: Float[Tensor, "H Q D"],
    seen: int,
    remembered: Remembered | None,
    key_term: KeyTerm | None = None,
    compiled: bool = False,
) -> Choice | None:
    """What the queries at positions seen, seen + 1, ... read of a table; None where that is everything.

    Positions are dealt into blocks of `select_every`. A block's first query selects for all of it; so does the first
    query after the pages changed, `remembered` being None then. A lone query may select by `compiled` code.
    """
    reader = config.reader
    if not isinstance(reader, TopK) or reader.chosen(n := -(-table.length // reader.chunk)) == n:
        return None
    n_queries, every = q.shape[1], reader.select_every
    first = seen // every
    block_of = torch.arange(seen, seen + n_queries, device=q.device) // every - first
    last = (seen + n_queries - 1) // every
    starts = [0, *(block * every - seen for block in range(first + 1, last + 1))]
    goes_on = remembered is not None and seen % every != 0 and remembered.block == first
    starts = starts[1:] if goes_on else starts
    parts = [remembered.chunks.unsqueeze(1)] if goes_on and remembered is not None else []
    if starts:
        lone = compiled and len(starts) == 1 and reader.summaries
        parts.append(_stepped(table, q, reader) if lone else _selected(config, table, q[:, starts], reader, key_term))
    return Choice(torch.cat(parts, dim=1), block_of, reader.chunk, last)


def _stepped(table: PageTable, q: Float[Tensor, "H 1 D"], reader: TopK) -> Int[Tensor, "N 1 K"]:
    """As `_selected` for one query, from the pages as they lie."""
    counts = [-(-count // reader.chunk) for count in table.counts]
    budgets, width = [reader.chosen(count) if count else 0 for count in counts], reader.chosen(max(counts))
    summaries = [table.pool.streams[f"k.{name}"] for name in reader.summaries]
    return select_chunks(q[:, 0], summaries, table.index(), counts, budgets, width).unsqueeze(1)


def _selected(
    config: LayerConfig, table: PageTable, q: Float[Tensor, "H B D"], reader: TopK, key_term: KeyTerm | None
) -> Int[Tensor, "N B K"]:
    counts = -(-table.sizes() // reader.chunk)
    scores = _scores(config, table, q, counts)
    if key_term is not None and reader.bound == "codec":
        # The codec's scales bound what is left of a key when its centre is out; what the centre adds is known exactly.
        scores = scores + _greatest_term(key_term, table, q, reader.chunk).to(scores.dtype)
    counts = counts.unsqueeze(1).expand(-1, q.shape[1])
    return kernel.select(scores, counts, **reader.share, forced_first=1, forced_last=1)


def _scores(config: LayerConfig, table: PageTable, q: Tensor, counts: Tensor) -> Float[Tensor, "N B C"]:
    """Scores of every chunk from summaries alone, summed over the query heads of a KV head."""
    reader, fmt = config.reader, config.key.stored_as(q.shape[2])
    assert isinstance(reader, TopK)
    if table.pool.works(q.dtype) == "triton":
        where, size = (table.index()[None], table.sizes()[None]), reader.chunk
        scores = chunk_pages.scores(q[None], _key_streams(table), fmt, *where, size, reader.bound, impl="triton")
        return scores[0, ..., : -(-table.length // size)]
    if reader.bound == "mean":
        return kernel.mean_scores(q, table.gather(["k.mean"])["k.mean"], counts)
    if reader.bound == "minmax":
        held = table.gather(["k.min", "k.max"])
        return kernel.bound_scores(q, kernel.Bounds(held["k.min"], held["k.max"]), counts)
    held = table.gather([f"k.{name}" for name in fmt.names if name != "codes"])
    bounds = kernel.codec_bounds(held["k.scale"], held.get("k.zero"), fmt.groups)
    # Keys that their codec rotates are bounded where they are rotated; so must the query be.
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    return kernel.bound_scores(hadamard(wide) if fmt.hadamard else wide, bounds, counts)


def _key_streams(table: PageTable) -> dict[str, Tensor]:
    """The pool's streams of K and their summaries, by the names kernels know."""
    return {name[2:]: stream for name, stream in table.pool.streams.items() if name.startswith("k.")}


def _greatest_term(key_term: KeyTerm, table: PageTable, q: Tensor, chunk: int) -> Float[Tensor, "N B C"]:
    """The most that the centre adds to any token of each chunk, summed over the query heads of a KV head."""
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    term = key_term.logits(wide.unflatten(0, (len(table.pages), -1)).sum(1))
    beyond = torch.arange(term.shape[2], device=q.device) >= table.sizes().unsqueeze(1)
    term = term.masked_fill(beyond.unsqueeze(1), -torch.inf)
    term = torch.nn.functional.pad(term, (0, -term.shape[2] % chunk), value=-torch.inf)
    return term.unflatten(2, (-1, chunk)).amax(3)


def summarise(
    config: LayerConfig, table: PageTable, raw: torch.dtype, start: int = 0, centre: Centre | None = None
) -> None:
    """Write the summaries of every chunk that holds a token from slot `start` on, over the keys as they are read back.

    `raw` is the dtype of raw tokens; sums and bounds are taken in that or float32. `centre` is what stored keys lack.
    """
    reader = config.reader
    if not isinstance(reader, TopK) or not reader.summaries or table.length <= start:
        return
    first = start // reader.chunk
    counts = table.sizes()
    these = torch.arange(first, -(-table.length // reader.chunk), device=table.device).expand(len(table.pages), -1)
    width = table.pool.layout[f"k.{reader.summaries[0]}"].width
    wide = torch.promote_types(raw, torch.float32)
    if table.pool.works(raw) == "triton":
        begin = first * reader.chunk
        lacking = None if centre is None else centre.term(_places(config, table, these, counts - begin), None, wide)
        chunk_pages.summarise(
            _key_streams(table), config.key.stored_as(width), table.index()[None], torch.full_like(counts, begin)[None],
            counts[None], table.length - begin, reader.chunk, added=None if lacking is None else lacking[None],
            impl="triton",
        )  # fmt: skip
        return
    names = [name for name, stream in table.pool.layout.items() if name.startswith("k.") and not stream.derived]
    packed = {name[2:]: rows for name, rows in table.take(these, reader.chunk, names).items()}
    keys = config.key.decode(packed, width, wide)
    counts = counts - first * reader.chunk
    if centre is not None:
        keys = centre.put_back(keys, _places(config, table, these, counts))
    if reader.bound == "mean":
        made: tuple[Tensor, ...] = (kernel.means(keys, reader.chunk, counts.clamp_min(0)),)
    else:
        made = kernel.bounds(keys, reader.chunk, counts.clamp_min(0))
    for name, rows in zip(reader.summaries, made, strict=True):
        table.write(f"k.{name}", rows, first * reader.chunk)


def _places(config: LayerConfig, table: PageTable, these: Int[Tensor, "N K"], counts: Int[Tensor, " N"]) -> Places:
    """Where the tokens of some consecutive chunks stand; 0 for slots that hold none."""
    size = these.shape[1] * config.reader.chunk  # type: ignore[attr-defined]
    if not config.budget.evicts:
        # Sinks come first and are full before anything is encoded.
        first = config.sink_tokens + int(these[0, 0]) * config.reader.chunk  # type: ignore[attr-defined]
        return slice(first, first + size)
    positions = table.take(these, config.reader.chunk, ["position"])["position"][..., 0].long()  # type: ignore[attr-defined]
    return positions * (torch.arange(size, device=table.device) < counts.unsqueeze(1))
