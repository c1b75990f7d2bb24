"""Settling: rows that share one budget, as the layers of a model may, let go of tokens together."""

from collections.abc import Sequence

import torch

from kvlab.centre import joined
from kvlab.evicting import Leaving, flush
from kvlab.policies.base import Expected
from kvlab.row import Row
from kvlab.store import PageTable


def settle(rows: Sequence[Row]) -> None:
    """Flush the windows of rows that share one budget: one sequence's layers, as the heads of one long row.

    Does nothing while no window overflows. Raises ValueError when the rows do not share a pool.
    """
    first = rows[0]
    flushed = first.config.flush_tokens(first.n_window, 1)
    if flushed == 0:
        return
    windows = [row.window() for row in rows]
    k, v = (torch.cat([window[i][:, :flushed] for window in windows]) for i in (0, 1))
    mass = torch.cat([row.window_mass()[:, :flushed] for row in rows]) if first.config.tracks_mass else None
    for row in rows:
        row.cut_window(flushed)
    start = first.seen - first.n_window - flushed
    positions = torch.arange(start, start + flushed, device=k.device).expand(k.shape[0], -1)
    leaving, protected = Leaving(k, v, positions, mass), first.n_sinks + first.n_window
    table = PageTable.joined([row.table for row in rows])
    centre = joined([row.centre for row in rows])
    more = centre, None, lambda: _all_expected(rows), first.known if len(rows) == 1 else None
    flush(first.config, table, leaving, protected, first.seen, first.raw, *more)
    for row, part in zip(rows, table.dealt([len(row.table.pages) for row in rows]), strict=True):
        row.table = part


def _all_expected(rows: Sequence[Row]) -> Expected | None:
    """The queries to come of every row's heads, side by side."""
    known = [x for row in rows if (x := row.expected()) is not None]
    return Expected(*(torch.cat(parts) for parts in zip(*known, strict=True))) if known else None
