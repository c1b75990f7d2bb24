"""Pages with shuffled ids and poison wherever no token is, for tests of kernels that read them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.codecs import Codec
from kvlab.kernels.formats import Format
from kvlab.kernels.paged import Fresh, Pages


def _poison(stream: Tensor) -> None:
    stream.fill_(torch.nan if stream.is_floating_point() else torch.iinfo(stream.dtype).max)


def _placed(codec: Codec, tokens: list[list[Tensor]], pages: list[list[Tensor]], total: int, P: int, raw: torch.dtype):
    """Streams of `total` pages holding the tokens of every row and head; slots without a token hold poison."""
    dim = tokens[0][0].shape[1]
    streams = {
        name: torch.empty(total, s.rows, s.width, dtype=s.dtype) for name, s in codec.streams(dim, P, raw).items()
    }
    for stream in streams.values():
        _poison(stream)
    n_heads = len(tokens[0])
    for row_tokens, row_pages in zip(tokens, pages, strict=True):
        longest = max(-(-len(x) // P) for x in row_tokens) * P
        if longest == 0:
            continue
        padded = torch.zeros(n_heads, longest, dim)
        for head, x in enumerate(row_tokens):
            padded[head, : len(x)] = x
            if len(x) and codec.block_tokens > 1:  # a page's scales are those of its own tokens
                padded[head, len(x) :] = x[-1]
        for name, packed in codec.encode(padded).items():
            by_page = packed.unflatten(1, (longest // P, -1)).to(streams[name].dtype)
            for head, x in enumerate(row_tokens):
                ids = row_pages[head]
                streams[name][ids] = by_page[head, : len(ids)]
                if streams[name].shape[1] == P and len(x) % P:
                    _poison(streams[name][ids[-1], len(x) % P :])
    return streams


class Case:
    """Arguments of `paged.decode` for random tensors. `counts` is [B][N] stored tokens; `fresh` [B] raw ones."""

    def __init__(
        self,
        key: Codec,
        value: Codec,
        counts: Sequence[Sequence[int]],
        fresh: Sequence[int],
        *,
        group: int = 4,
        dim: int = 64,
        high: int | None = None,
        page: int = 16,
        positions: bool = False,
        raw: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        high = high or dim
        rows, n_heads = len(counts), len(counts[0])
        needed = [[-(-c // page) for c in row] for row in counts]
        total = sum(map(sum, needed)) + 3
        order = torch.randperm(total)
        wide = max(1, max(map(max, needed)))
        index = torch.full((rows, n_heads, wide), int(order[-1]), dtype=torch.int32)
        pages, at = [], 0
        for row in range(rows):
            pages.append([])
            for head in range(n_heads):
                pages[row].append(order[at : at + needed[row][head]])
                index[row, head, : needed[row][head]] = pages[row][head].int()
                at += needed[row][head]
        k = [[2 * torch.randn(c, dim) for c in row] for row in counts]
        v = [[torch.randn(c, high) + 0.5 for c in row] for row in counts]
        position = None
        if positions:
            position = torch.full((total, page, 1), 2**31 - 1, dtype=torch.int32)
            for row in range(rows):
                for head in range(n_heads):
                    places = torch.randperm(512)[: counts[row][head]].sort().values.int()
                    for i, p in enumerate(places):
                        position[pages[row][head][i // page], i % page, 0] = p
        self.pages = Pages(
            _placed(key, k, pages, total, page, raw),
            _placed(value, v, pages, total, page, raw),
            index,
            torch.tensor(counts, dtype=torch.int32),
            page,
            position,
            first=2,
        )
        self.key: Format = key.stored_as(dim)
        self.value: Format = value.stored_as(high)
        window = max(fresh)
        self.raw = Fresh(
            torch.randn(rows, n_heads, window, dim, dtype=dtype),
            torch.randn(rows, n_heads, window, high, dtype=dtype),
            torch.tensor(fresh, dtype=torch.int32),
        )
        for row, n in enumerate(fresh):
            self.raw.k[row, :, n:] = torch.nan
            self.raw.v[row, :, n:] = torch.nan
        self.q = torch.randn(rows, n_heads * group, dim, dtype=dtype)
        self._move(device)

    def _move(self, device: str) -> None:
        self.q = self.q.to(device)
        self.raw = Fresh(*(x.to(device) for x in self.raw))
        held = {side: {n: x.to(device) for n, x in getattr(self.pages, side).items()} for side in ("k", "v")}
        position = None if self.pages.position is None else self.pages.position.to(device)
        self.pages = self.pages._replace(
            **held, index=self.pages.index.to(device), counts=self.pages.counts.to(device), position=position
        )

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """q to scale; with `dtype`, queries and raw window widened to it."""
        q, raw = self.q, self.raw
        if dtype is not None:
            q, raw = q.to(dtype), Fresh(raw.k.to(dtype), raw.v.to(dtype), raw.counts)
        return q, self.pages, self.key, self.value, raw, q.shape[-1] ** -0.5
