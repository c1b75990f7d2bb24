"""Paged, packed storage: a pool of pages and, per sequence, one table of pages for each KV head.

A page holds P tokens of one head: every stream of the K and V codecs, positions and attention mass where needed.
Heads may hold different numbers of tokens. The store moves bytes; it does not know what they mean. Its pool says what
works on the pages, for whoever does.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kvlab.codecs import Stream
from kvlab.kernels.compact import compact
from kvlab.kernels.dispatch import Impl, on_pages


class PagePool:
    """Pages of one kind, shared by the sequences of a layer. Grows by doubling; `fit` gives the slack back.

    `impl` is what was asked to work on them, see `works`.
    """

    def __init__(
        self, streams: Mapping[str, Stream], page_tokens: int, device: torch.device, impl: Impl = "auto"
    ) -> None:
        self.page_tokens, self.device = page_tokens, device
        self.impl: Impl = impl
        self.layout = dict(streams)
        self.streams = {
            name: torch.empty(0, s.rows, s.width, dtype=s.dtype, device=device) for name, s in self.layout.items()
        }
        self.free: list[int] = []
        self.n_pages = 0
        self.moves = 0  # how often the streams were rebuilt: views of them are void after it

    def works(self, dtype: torch.dtype = torch.float32) -> str:
        """What encodes tokens of `dtype` into these pages, moves and reads them. Raises ValueError as `on_pages`."""
        return on_pages(self.impl, self.device, dtype)

    @property
    def page_bytes(self) -> int:
        return sum(s.page_bytes for s in self.layout.values())

    @property
    def used_pages(self) -> int:
        return self.n_pages - len(self.free)

    def storages(self) -> list[Tensor]:
        """Every tensor that owns memory."""
        return list(self.streams.values())

    def alloc(self, count: int) -> list[int]:
        """Ids of `count` pages, lowest first so that bulk appends stay contiguous."""
        if count > len(self.free):
            self._grow(max(count - len(self.free), self.n_pages))
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def release(self, pages: list[int]) -> None:
        self.free = sorted(self.free + pages)

    def _grow(self, extra: int) -> None:
        self._move(torch.arange(self.n_pages), self.n_pages + extra)
        self.free += range(self.n_pages, self.n_pages + extra)
        self.n_pages += extra

    def _move(self, source: Tensor, size: int) -> None:
        """Rebuild each stream with `size` pages, of which the first are copies of pages `source`."""
        self.moves += 1
        for name, old in self.streams.items():
            # Zeros, not empty: unread slots of a page must not turn 0 * x into NaN.
            new = torch.zeros(size, *old.shape[1:], dtype=old.dtype, device=old.device)
            if source.numel():
                new[: source.shape[0]] = old[source.to(old.device)]
            self.streams[name] = new

    def fit(self, tables: list["PageTable"]) -> None:
        """Shrink to the pages `tables` use and renumber them there."""
        used = sorted(page for table in tables for head in table.pages for page in head)
        self._move(torch.tensor(used, dtype=torch.long), len(used))
        self.n_pages, self.free = len(used), []
        renumber = {old: new for new, old in enumerate(used)}
        for table in tables:
            table.renumber(renumber)


class PageTable:
    """The pages of one sequence in one layer: `pages[n]` in order, `counts[n]` tokens, for each KV head n."""

    def __init__(self, pool: PagePool, n_heads: int) -> None:
        self.pool = pool
        self.pages: list[list[int]] = [[] for _ in range(n_heads)]
        self.counts = [0] * n_heads
        self._index: Tensor | None = None  # both on the device, until the table changes
        self._sizes: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens `gather` returns for every head: the longest head's."""
        return max(self.counts)

    @property
    def ragged(self) -> bool:
        """Whether `gather` returns slots that hold no token."""
        return any(count != self.length for count in self.counts)

    def index(self) -> Int[Tensor, "N M"]:
        """Page ids, padded with page 0 where a head has fewer."""
        if self._index is None:
            longest = max(len(p) for p in self.pages)
            padded = [p + [0] * (longest - len(p)) for p in self.pages]
            self._index = torch.tensor(padded, dtype=torch.long, device=self.device)
        return self._index

    def sizes(self) -> Int[Tensor, " N"]:
        """`counts` on the device, not to be written to."""
        if self._sizes is None:
            self._sizes = torch.tensor(self.counts, device=self.device)
        return self._sizes

    def _run(self) -> slice | None:
        """The pages as one slice of the pool, head after head, where they lie so: read without a copy."""
        flat = [page for head in self.pages for page in head]
        equal = all(len(head) == len(self.pages[0]) for head in self.pages)
        if equal and flat == list(range(flat[0], flat[0] + len(flat))):
            return slice(flat[0], flat[0] + len(flat))
        return None

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def append(self, packed: Mapping[str, Tensor], lengths: list[int] | None = None) -> None:
        """Add tokens to every head: the first `lengths[n]` of head n, all of them by default.

        Each stream is [N, t * rows / P, width]; t and the lengths are multiples of P / rows.
        """
        page = self.pool.page_tokens
        tokens = max(x.shape[1] * page // self.pool.layout[name].rows for name, x in packed.items())
        lengths = [tokens] * len(self.pages) if lengths is None else lengths
        start = self.extend(lengths)
        for name, rows in packed.items():
            self.place(name, rows, start, lengths)

    def extend(self, lengths: list[int]) -> list[int]:
        """Pages for `lengths[n]` more tokens of head n, to be written by the caller. Returns where they start."""
        page, start = self.pool.page_tokens, list(self.counts)
        self.counts = [old + new for old, new in zip(start, lengths, strict=True)]
        missing = [-(-count // page) - len(held) for count, held in zip(self.counts, self.pages, strict=True)]
        fresh = self.pool.alloc(sum(missing))
        old, self._index, self._sizes = self._index, None, None
        if old is not None and len(set(missing)) == 1 and all(len(held) == old.shape[1] for held in self.pages):
            # As many for each head: the lists of a long table are not read again.
            added = torch.tensor(fresh, dtype=torch.long, device=self.device).view(len(self.pages), -1)
            self._index = torch.cat([old, added], dim=1)
        for held, more in zip(self.pages, missing, strict=True):
            held += fresh[:more]
            fresh = fresh[more:]
        return start

    def place(self, name: str, rows: Tensor, start: list[int], lengths: list[int]) -> None:
        """Write the rows of the first `lengths[n]` tokens of head n from token `start[n]` on."""
        index, stream, page = self.index(), self.pool.streams[name], self.pool.page_tokens
        if index.numel() == 0:
            return
        per_page = stream.shape[1]
        flat_stream = stream.view(-1, stream.shape[2])
        order = torch.arange(rows.shape[1], device=self.device)
        if len(set(start)) == 1 and len(set(lengths)) == 1:
            begin, count = start[0] * per_page // page, -(-lengths[0] * per_page // page)
            if not start[0] and (run := self._run()) is not None:
                stream[run].view(index.shape[0], -1, stream.shape[2])[:, begin : begin + count] = rows[:, :count]
                return
            rows = rows[:, :count].to(stream.dtype)
            # Whole pages by page: a fraction of the copies, and these are what eviction moves.
            whole = 0 if begin % per_page else count // per_page
            if whole:
                first = begin // per_page
                these = index[:, first : first + whole]
                # A copy: a slice may begin within a word.
                moved = rows[:, : whole * per_page].clone(memory_format=torch.contiguous_format)
                _words(stream.view(stream.shape[0], -1))[these] = _words(moved.view(*these.shape, -1))
            if whole * per_page < count:
                at = order[whole * per_page : count] + begin
                flat_stream[index[:, at // per_page] * per_page + at % per_page] = rows[:, whole * per_page :]
            return
        first, count = (
            torch.tensor([-(-x * per_page // page) for x in xs], device=self.device).unsqueeze(1)
            for xs in (start, lengths)
        )
        real = order < count
        at = (first + order).clamp_max(index.shape[1] * per_page - 1)
        flat = index.gather(1, at // per_page) * per_page + at % per_page
        flat_stream[flat[real]] = rows[real].to(stream.dtype)

    def gather(self, names: list[str] | None = None) -> dict[str, Tensor]:
        """Stored streams as [N, length * rows / P, width], to be read only.

        A shorter head's last rows are finite but mean nothing.
        """
        index, page = self.index(), self.pool.page_tokens
        if index.numel() == 0:
            return {}
        run, gathered = self._run(), {}
        for name in names or self.pool.streams:
            stream = self.pool.streams[name]
            pages = stream[index] if run is None else stream[run].view(*index.shape, *stream.shape[1:])
            gathered[name] = pages.flatten(1, 2)[:, : -(-self.length * stream.shape[1] // page)]
        return gathered

    def take(self, chunks: Int[Tensor, "N K"], tokens: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Streams of some chunks of `tokens` tokens each, as [N, K * tokens * rows / P, width], to be read only.

        `tokens` divides P. Any slot of a page may be asked for; those that hold no token mean nothing.
        """
        parts = self.pool.page_tokens // tokens
        at = self.index().gather(1, chunks // parts) * parts + chunks % parts
        taken = {}
        for name in names:
            stream = self.pool.streams[name]
            taken[name] = stream.view(-1, stream.shape[1] // parts, stream.shape[2])[at].flatten(1, 2)
        return taken

    def write(self, name: str, rows: Tensor, start: int = 0) -> None:
        """Replace one stream from token `start` of every head on, in the shape `gather` returns."""
        begin = [min(start, count) for count in self.counts]
        self.place(name, rows, begin, [count - first for count, first in zip(self.counts, begin, strict=True)])

    def keep(self, kept: Int[Tensor, "N K"], unit_tokens: int = 1, lengths: list[int] | None = None) -> None:
        """Keep only `kept` (ascending), moving codes without re-rounding, and free the rest.

        An index stands for one token, or for a whole page where `unit_tokens` is P. `lengths[n]` says how many of head
        n's indices count, all of them by default. Derived streams follow whole pages only.
        """
        per_page = self.pool.page_tokens // unit_tokens
        if self.pool.works() == "triton":
            self._close_up(kept, unit_tokens, lengths or [kept.shape[1]] * len(self.pages))
            return
        moved = {}
        for name, rows in self.gather(
            [n for n, s in self.pool.layout.items() if not s.derived or per_page == 1]
        ).items():
            grouped = rows.unflatten(1, (-1, self.pool.layout[name].rows // per_page))
            index = kept[..., None, None].expand(-1, -1, *grouped.shape[2:])
            moved[name] = grouped.gather(1, index).flatten(1, 2)
        self.clear()
        if moved:
            self.append(moved, None if lengths is None else [n * unit_tokens for n in lengths])

    def _close_up(self, kept: Tensor, unit_tokens: int, lengths: list[int]) -> None:
        """As `keep`, where the tokens are: whole pages by their ids alone, single ones to the front of their head's."""
        page = self.pool.page_tokens
        if unit_tokens == page:
            stay = [[held[i] for i in row[:n]] for held, row, n in zip(self.pages, kept.tolist(), lengths, strict=True)]
        else:
            moving = {name: x for name, x in self.pool.streams.items() if not self.pool.layout[name].derived}
            counts = torch.tensor(lengths, device=self.device)
            compact(moving, self.index()[None], kept[None], counts[None], impl="triton")
            stay = [held[: -(-n // page)] for held, n in zip(self.pages, lengths, strict=True)]
        gone = {p for held in self.pages for p in held} - {p for held in stay for p in held}
        self.pool.release(list(gone))
        self.pages, self.counts = stay, [n * unit_tokens for n in lengths]
        self._index = self._sizes = None

    def heads(self, which: slice) -> "PageTable":
        """A table of some of the heads, over the same pages."""
        part = PageTable(self.pool, len(self.pages[which]))
        part.pages = [list(head) for head in self.pages[which]]
        part.counts = self.counts[which]
        return part

    @classmethod
    def joined(cls, tables: Sequence["PageTable"]) -> "PageTable":
        """All heads of several tables side by side, over the same pages. Raises ValueError for tables of two pools."""
        if any(table.pool is not tables[0].pool for table in tables):
            raise ValueError("tables can be joined only where they share a pool: one config and one shape for all")
        whole = cls(tables[0].pool, 0)
        whole.pages = [list(head) for table in tables for head in table.pages]
        whole.counts = [count for table in tables for count in table.counts]
        return whole

    def dealt(self, heads: Sequence[int]) -> list["PageTable"]:
        """The heads in parts of so many each: the inverse of `joined`."""
        ends = list(itertools.accumulate(heads))
        return [self.heads(slice(end - count, end)) for count, end in zip(heads, ends, strict=True)]

    def clear(self) -> None:
        """Give every page back."""
        self.pool.release([page for head in self.pages for page in head])
        self.pages = [[] for _ in self.pages]
        self.counts = [0] * len(self.counts)
        self._index = self._sizes = None

    def renumber(self, mapping: Mapping[int, int]) -> None:
        self.pages = [[mapping[p] for p in head] for head in self.pages]
        self._index = self._sizes = None

    def copy(self) -> "PageTable":
        """The same tokens on pages of their own."""
        twin = PageTable(self.pool, len(self.pages))
        if self.length:
            twin.append(self.gather(), list(self.counts))
        return twin


def _words(x: Tensor) -> Tensor:
    """The same memory in numbers of 8 bytes, if each row is a multiple of that: indexing moves number by number."""
    return x.view(torch.int64) if x.shape[-1] * x.element_size() % 8 == 0 else x
