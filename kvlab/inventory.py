"""What a compressed cache holds, counted on the tensors themselves: bytes by stream and layer, tokens kept by place.

The streams of all layers add up to the cache's `nbytes`. Knows rows and pages; shows nothing and decides nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab.layer import LayerShape
from kvlab.row import Row

SCHEMA = "kvlab.cache/1"
BUDGETS = (6_000_000_000, 24_000_000_000, 80_000_000_000)
BINS = 48  # of positions, in the map of kept tokens
STREAMS: tuple[str, ...] = (
    "K", "V", "scales", "positions", "attention mass", "chunk summaries", "query sums", "raw sinks", "raw window",
    "page slack", "other layers",
)  # fmt: skip


class Stock(NamedTuple):
    """A layer that keeps transformers' own cache: bytes held, and the shapes of K and V."""

    nbytes: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def raw16_bytes(self) -> int:
        """What the tokens it keeps would take in 16 bit."""
        return sum(2 * math.prod(shape) for shape in self.shapes)


class Own(NamedTuple):
    """A compressed layer: its sequences, how it is served, its heads."""

    rows: Sequence[Row]
    mode: str
    shape: LayerShape

    @property
    def raw16_bytes(self) -> int:
        """What the tokens it has seen would take in 16 bit."""
        per_token = 2 * self.shape.kv_heads * (self.shape.key_dim + self.shape.value_dim)
        return per_token * sum(row.seen for row in self.rows)


def document(
    layers: Sequence[Stock | Own | None], nbytes: int, storage_bytes: int, budgets: Iterable[int]
) -> dict[str, Any]:
    """A cache as plain data, from its layers; None for one that has not seen a token."""
    own = {i: x for i, x in enumerate(layers) if isinstance(x, Own)}
    first = next(iter(own.values()), None)
    per_layer = [{"layer": i, "bytes": _bytes(x)} for i, x in enumerate(layers)]
    raw16 = sum(x.raw16_bytes for x in layers if x is not None)
    row = first.rows[0] if first else None
    return {
        "schema": SCHEMA,
        "form": first.mode if first else "empty",
        "dtype": str(row.raw).removeprefix("torch.") if row else None,
        "device": str(row.table.device) if row else None,
        "layers": len(layers),
        "compressed_layers": sum(not isinstance(x, Stock) for x in layers),
        "kv_heads": first.shape.kv_heads if first else None,
        "head_dim": first.shape.key_dim if first else None,
        "rows": len(first.rows) if first else 0,
        "tokens": max((r.seen for x in own.values() for r in x.rows), default=0),
        "nbytes": nbytes,
        "preallocated_bytes": storage_bytes - nbytes,
        "raw16_bytes": raw16,
        "effective_bits": 16 * nbytes / raw16 if raw16 else None,
        "ratio": raw16 / nbytes if nbytes else None,
        "streams": total(per_layer),
        "per_layer": per_layer,
        "kept": {
            "share": round(kept_share([r for x in own.values() for r in x.rows]), 6),
            "tokens": row.seen if row else 0,
            "layers": list(own),
            "bins": [kept_bins(x.rows[0]) for x in own.values()],
        },
        "sessions": sessions(nbytes, len(first.rows) if first else 0, budgets),
    }


def _bytes(layer: Stock | Own | None) -> dict[str, int]:
    if isinstance(layer, Own):
        return of_rows(layer.rows)
    return {"other layers": layer.nbytes} if layer and layer.nbytes else {}


def of_rows(rows: Sequence[Row]) -> dict[str, int]:
    """Bytes of one layer's sequences by stream; those of 0 bytes left out, the rest in the order of STREAMS."""
    found = dict.fromkeys(STREAMS, 0)
    for row in rows:
        for name, count in _of_pages(row).items():
            found[name] += count
        found["raw sinks"] += _size(row.sinks or ())
        found["raw window"] += _size(row.window())
        if row._mass is not None:
            found["attention mass"] += _size([row._mass[:, : row.n_window]])
        if row._queries is not None:
            found["query sums"] += _size([row._queries])
    return {name: count for name, count in found.items() if count}


def _of_pages(row: Row) -> dict[str, int]:
    """Bytes of a sequence's pages: slots that hold a token by stream, the rest of the last pages as slack."""
    table, found = row.table, dict.fromkeys(STREAMS, 0)
    for name, stream in table.pool.streams.items():
        per_row = stream.shape[2] * stream.element_size()
        rows_of_page, page = stream.shape[1], table.pool.page_tokens
        for pages, tokens in zip(table.pages, table.counts, strict=True):
            used = -(-tokens * rows_of_page // page)
            found[_kind(name)] += used * per_row
            found["page slack"] += (len(pages) * rows_of_page - used) * per_row
    return found


def _kind(stream: str) -> str:
    """What a page's stream is called here."""
    named = {"position": "positions", "mass": "attention mass"}
    if stream in named:
        return named[stream]
    side, _, part = stream.partition(".")
    if part in ("codes", "data"):
        return side.upper()
    return "chunk summaries" if part in ("min", "max", "mean") else "scales"


def kept_bins(row: Row, bins: int = BINS) -> list[float]:
    """The share of (token, head) pairs that a sequence still holds in one layer, by place in the sequence."""
    seen = row.seen
    bins = min(bins, seen)
    if not bins:
        return []
    if kept_share([row]) == 1:
        return [1.0] * bins
    heads = len(row.table.pages)
    counts = torch.zeros(bins, dtype=torch.long)
    for first, last in ((0, row.n_sinks), (seen - row.n_window, seen)):
        counts += heads * _binned(torch.arange(first, last), seen, bins)
    if row.table.length:
        positions = row.positions().cpu()
        real = torch.arange(positions.shape[1]) < torch.tensor(row.table.counts)[:, None]
        counts += _binned(positions[real], seen, bins)
    whole = heads * _binned(torch.arange(seen), seen, bins)
    return [round(share, 4) for share in (counts.double() / whole).tolist()]


def _binned(positions: Tensor, seen: int, bins: int) -> Tensor:
    return torch.bincount(positions * bins // seen, minlength=bins)


def kept_share(rows: Sequence[Row]) -> float:
    """Of all (token, head) pairs ever seen by some sequences' layers, those still held."""
    held = sum(sum(o.kept for o in row.occupancy) for row in rows)
    return held / max(1, sum(row.seen * len(row.table.pages) for row in rows))


def sessions(nbytes: int, rows: int, budgets: Iterable[int]) -> list[dict[str, int]]:
    """How many sequences of this size fit each budget."""
    return [{"budget_bytes": b, "sessions": b * rows // nbytes} for b in budgets if nbytes]


def total(layers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by stream over all layers."""
    layers = list(layers)
    sums = {name: sum(layer["bytes"].get(name, 0) for layer in layers) for name in STREAMS}
    return {name: count for name, count in sums.items() if count}


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
