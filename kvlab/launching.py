"""Launching: one decode step of several rows in one kernel launch, straight from their pages. Same answer as the rows'
own; which rows may go together and when is decided here, what a step does to them is the rows' business.
"""

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.kernels import paged
from kvlab.kernels.dispatch import Impl, on_pages
from kvlab.row import Row
from kvlab.selecting import Choice


class Launch:
    """Where the pages of some rows are, as the kernel takes them; looked up anew only after pages have moved."""

    def __init__(self) -> None:
        self._found: paged.Pages | None = None
        self._held: list[Tensor] = []
        self._moves = -1

    def pages(self, rows: Sequence[Row], dims: tuple[int, int]) -> paged.Pages:
        """For rows of one pool. A row without pages has zero counts."""
        pool = rows[0].table.pool
        indices = [row.table.index() for row in rows]
        same = len(indices) == len(self._held) and all(a is b for a, b in zip(indices, self._held, strict=True))
        if self._found is None or not same or self._moves != pool.moves:
            device = rows[0].table.device
            index = torch.zeros(len(rows), indices[0].shape[0], max(i.shape[1] for i in indices), dtype=torch.int32)
            for b, row in enumerate(rows):
                for n, pages in enumerate(row.table.pages):
                    index[b, n, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            counts = torch.tensor([row.table.counts for row in rows], dtype=torch.int32)
            config, streams = rows[0].config, pool.streams
            key, value = config.key.stored_as(dims[0]), config.value.stored_as(dims[1])
            self._found = paged.Pages(
                {name: streams[f"k.{name}"] for name in key.names},
                {name: streams[f"v.{name}"] for name in value.names},
                index.to(device),
                counts.to(device),
                pool.page_tokens,
                streams.get("position"),
                rows[0].n_sinks,
            )
            self._held, self._moves = indices, pool.moves
        return self._found


def launch_groups(
    rows: Sequence[Row], which: Sequence[int], q: Float[Tensor, "B H Q D"], impl: Impl | None = None
) -> list[list[int]]:
    """Those of `which` rows that launches serve, one list for each launch: one pool, one config, as many sinks.

    A row is served so when it has one new token and a past, and its pool has pages. `impl` is by default the pool's.
    Raises ValueError when "triton" is asked for and cannot run on the device, saying what is in the way.
    """
    groups: dict[Hashable, list[int]] = {}
    for b in which:
        row, pool = rows[b], rows[b].table.pool
        serves = on_pages(impl or pool.impl, q.device, q.dtype) == "triton"
        if serves and q.shape[2] == 1 and not q.requires_grad and row.seen and pool.n_pages:
            groups.setdefault((id(pool), row.config, row.n_sinks), []).append(b)
    return list(groups.values())


def attend_together(
    launch: Launch,
    rows: Sequence[Row],
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B N 1 D"],
    v: Float[Tensor, "B N 1 E"],
    scale: float,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
    observe: bool = True,
) -> tuple[Float[Tensor, "B H 1 E"], list[Tensor | None]]:
    """`Row.attend` of every row: outputs, and each row's attention mass where its config tracks it."""
    config = rows[0].config
    choices = [row.select(q[b], observe) for b, row in enumerate(rows)]
    weights = config.scorer.query_weights(1) if observe and config.tracks_mass else None
    by_attention = weights is not None and not config.scorer.reads_selection
    decoded = paged.decode(
        q[:, :, 0],
        pages := launch.pages(rows, (k.shape[3], v.shape[3])),
        config.key.stored_as(k.shape[3]),
        config.value.stored_as(v.shape[3]),
        _raw(rows, k, v),
        scale,
        softcap=softcap,
        sink_logits=sink_logits,
        centring=_centring(rows, q[:, :, 0] * scale),
        chosen=_chosen(rows, choices),
        mass=by_attention,
        impl="triton",
    )
    masses: list[Tensor | None] = [None] * len(rows)
    for b, row in enumerate(rows):
        if by_attention and decoded.mass is not None and weights is not None:
            raw = pages.index.shape[2] * pages.page_tokens
            parts = decoded.mass[b, :, : row.table.length], decoded.mass[b, :, raw : raw + _raw_tokens(row)]
            masses[b] = torch.cat(parts, dim=1) * float(weights[0])
        elif weights is not None:
            masses[b] = row.selected_mass(choices[b], 1)
        elif observe:
            masses[b] = row.observed_queries(q[b], scale)
    return decoded.out.unsqueeze(2), masses


def _raw_tokens(row: Row) -> int:
    return row.n_sinks + row.n_window + 1


def _raw(rows: Sequence[Row], k: Tensor, v: Tensor) -> paged.Fresh:
    """Sinks, window and the new token of every row, side by side."""
    counts = [_raw_tokens(row) for row in rows]
    sides = []
    for i, new in enumerate((k, v)):
        side = new.new_zeros(len(rows), new.shape[1], max(counts), new.shape[3])
        for b, row in enumerate(rows):
            parts = [part[i].to(new.dtype) for part in (row.sinks, row.window()) if part]
            side[b, :, : counts[b]] = torch.cat([*parts, new[b]], dim=1)
        sides.append(side)
    return paged.Fresh(sides[0], sides[1], torch.tensor(counts, dtype=torch.int32).to(k.device, non_blocking=True))


def _centring(rows: Sequence[Row], scaled: Float[Tensor, "B H D"]) -> paged.Centring | None:
    centre = rows[0].centre
    if centre is None:
        return None
    n_kv = centre.mu.shape[0]
    drift = [centre.rotary.drift(q.float().unflatten(0, (n_kv, -1)), centre.mu).flatten(0, 1) for q in scaled]
    table = centre.rotary.table(max(row.seen for row in rows), torch.float32)
    return paged.Centring(torch.stack(drift), table)


def _chosen(rows: Sequence[Row], choices: Sequence[Choice | None]) -> paged.Chosen | None:
    """Chunks of every row, -1 behind a head's last; None where all rows read everything."""
    known = [choice for choice in choices if choice is not None]
    if not known:
        return None
    size = known[0].size
    lists = []
    for row, choice in zip(rows, choices, strict=True):
        every = torch.arange(-(-row.table.length // size), device=row.table.device)
        lists.append(choice.chunks[:, 0] if choice is not None else every.expand(len(row.table.pages), -1))
    chunks = lists[0].new_full((len(rows), lists[0].shape[0], max(x.shape[1] for x in lists)), -1, dtype=torch.int32)
    for b, listed in enumerate(lists):
        chunks[b, :, : listed.shape[1]] = listed
    return paged.Chosen(chunks, size)
