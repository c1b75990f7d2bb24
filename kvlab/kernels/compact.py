"""Kept tokens close up: rows of every stream move to the front of their head's pages as they are, never re-rounded.

Knows nothing of what the rows mean. A stream whose rows belong to several tokens cannot lose some of them: where it
has one row a page, keep whole pages and renumber the table; summaries of chunks are built anew from what was kept.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from kvlab.kernels.dispatch import Impl, choose


def compact(
    streams: Mapping[str, Tensor],
    index: Int[Tensor, "B N M"],
    kept: Int[Tensor, "B N K"],
    lengths: Int[Tensor, "B N"],
    *,
    target: Int[Tensor, "B N L"] | None = None,
    impl: Impl = "auto",
) -> None:
    """Slot i of head (b, n) becomes what slot `kept[b, n, i]` was, for i below `lengths[b, n]`; nothing else changes.

    `kept` is ascending without repeats. Slot s lies in row s % P of page `index[b, n, s // P]` of streams
    [pages, P, width]. Rows move in place, or, where `target` names other pages, to those; the two page lists share no
    page then. Raises ValueError for a stream that has no row for each token, or when `impl` cannot run.
    """
    page = max((s.shape[1] for s in streams.values()), default=1)
    shared = sorted(name for name, s in streams.items() if s.shape[1] != page)
    if shared:
        raise ValueError(
            f"streams {shared} have fewer rows than the {page} tokens of a page: single tokens cannot leave them. "
            "Keep whole pages where groups run along tokens; leave chunk summaries out and build them again"
        )
    if kept.shape[-1] == 0:
        return
    if choose(impl, ("triton", "torch"), index.device) == "triton":
        from kvlab.kernels.compact_triton import compact_triton

        compact_triton(streams, index, kept, lengths, target, page)
        return
    at = torch.arange(kept.shape[-1], device=kept.device).expand_as(kept)
    real = at < lengths.unsqueeze(-1)
    source = _rows(index, kept, page)[real]
    place = _rows(index if target is None else target, at, page)[real]
    for stream in streams.values():
        rows = stream.view(-1, stream.shape[2])
        rows[place] = rows[source]


def _rows(index: Tensor, slots: Tensor, page: int) -> Tensor:
    """Where slots lie among the rows of all pages. Slots that no page holds give a row that must not be used."""
    slots = slots.long().clamp(0, index.shape[-1] * page - 1)
    return index.long().gather(-1, slots // page) * page + slots % page
