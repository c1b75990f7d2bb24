"""What each layer loses by itself: KL at the answers with one layer's keys or values encoded and all else uncompressed.

Measured once for a model and a few items; the scores are rows of the book like any others, so a memo hands them to
every later run. Formats that are not measured follow from those that are, by the law of uniform quantisers: a bit less
is four times the error power, and KL grows with that. More items tell layers apart better than more formats do.

The sum over layers is taken for what a mixed config will lose. That is an assumption: `additivity` says how far it was
right.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kvlab.book import ScoreBook
from kvlab.codecs import Affine, Codec, Raw
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet, Item
from kvlab.stats.agreement import LEAST, agreement

ROLE = "layers"
# Forks of so many configs are held at once, one item's context each.
_AT_ONCE = 40
# KL below this is rounding, and has no logarithm worth correlating.


class UnmeasuredError(RuntimeError):
    """Some layer could not be scored under some format, so layers cannot be compared."""


@dataclass(frozen=True, slots=True)
class Formats:
    """What a layer may be stored as, most bits first, K and V apart; and the config around it, without overrides."""

    base: KVConfig
    keys: tuple[Codec, ...]
    values: tuple[Codec, ...]

    def alone(self, layer: int, *, key: Codec | None = None, value: Codec | None = None) -> KVConfig:
        """One layer encoded, in keys or values or both; nothing else."""
        return replace(self.base, key=Raw(), value=Raw(), overrides=((layer, key or Raw(), value or Raw()),))

    def measured(self, depth: int) -> tuple[int, ...]:
        """Which formats are measured: all, or that of fewest bits and `depth - 1` more, every second one."""
        n = len(self.keys)
        return tuple(range(n)) if depth >= n else tuple(sorted(n - 1 - 2 * k for k in range(depth) if 2 * k < n))

    def probes(self, layers: Iterable[int], depth: int) -> list[KVConfig]:
        """Every layer in every measured format, keys and values apart."""
        return [
            self.alone(layer, **{stream: codecs[n]})
            for layer in layers
            for stream, codecs in (("key", self.keys), ("value", self.values))
            for n in self.measured(depth)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """KL in nats at the answer positions, [layer][format], family-balanced mean over `items` items a family.

    `depth` says how many formats were measured (`Formats.measured`), the rest follow from them.
    """

    formats: Formats
    layers: tuple[int, ...]
    key_kl: tuple[tuple[float, ...], ...]
    value_kl: tuple[tuple[float, ...], ...]
    items: int
    items_sha256: str
    depth: int

    def kl(self, layer: int, key: Codec, value: Codec) -> float | None:
        """What one layer loses alone, K and V added up; None for a format that was not measured."""
        if layer not in self.layers or key not in self.formats.keys or value not in self.formats.values:
            return None
        n = self.layers.index(layer)
        return self.key_kl[n][self.formats.keys.index(key)] + self.value_kl[n][self.formats.values.index(value)]

    def predicted(self, config: KVConfig) -> float | None:
        """Sum over layers of what each loses alone; None for a config of other formats, or with more than formats."""
        around = [f.name for f in fields(config) if f.name not in ("key", "value", "overrides")]
        if any(getattr(config, name) != getattr(self.formats.base, name) for name in around):
            return None
        parts = [self.kl(layer, (at := config.at(layer)).key, at.value) for layer in self.layers]
        return None if any(p is None for p in parts) else math.fsum(p for p in parts if p is not None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that a heat map can be drawn from."""
        return {
            "items_per_family": self.items,
            "items_sha256": self.items_sha256,
            "unit": "nats of KL at the answers, one layer alone",
            "layers": list(self.layers),
            "measured": [n in self.formats.measured(self.depth) for n in range(len(self.formats.keys))],
            "formats": {
                "K": [c.label for c in self.formats.keys],
                "V": [c.label for c in self.formats.values],
            },
            "kl": {"K": [list(row) for row in self.key_kl], "V": [list(row) for row in self.value_kl]},
        }


def measure(book: ScoreBook, items: EvalSet, formats: Formats, layers: Sequence[int], depth: int) -> Sensitivity:
    """Score every layer in every measured format on every item: a prefill an item, none where the book has its rows.

    Raises UnmeasuredError naming the first config that could not be scored.
    """
    probes = formats.probes(layers, depth)
    known = formats.measured(depth)
    for start in range(0, len(probes), _AT_ONCE):
        part = probes[start : start + _AT_ONCE]
        book.progress.at(f"layers: config {start + 1} of {len(probes)}")
        book.ensure(ROLE, items.items, part)
        failed = next((c for c in part if c.id in book.failures), None)
        if failed is not None:
            raise UnmeasuredError(f"{failed.label}: {book.failures[failed.id]}")

    def row(layer: int, stream: str, codecs: Sequence[Codec]) -> tuple[float, ...]:
        found = {
            _bits(codecs[n]): mean_kl(book, ROLE, items.items, formats.alone(layer, **{stream: codecs[n]}))
            for n in known
        }
        return tuple(_by_law(found, _bits(codec)) for codec in codecs)

    return Sensitivity(
        formats=formats,
        layers=tuple(layers),
        key_kl=tuple(row(layer, "key", formats.keys) for layer in layers),
        value_kl=tuple(row(layer, "value", formats.values) for layer in layers),
        items=len(items) // len(items.families),
        items_sha256=items.sha256,
        depth=depth,
    )


def _bits(codec: Codec) -> int:
    assert isinstance(codec, Affine), "formats by layer are uniform quantisers"
    return codec.bits


def _by_law(found: Mapping[int, float], bits: int) -> float:
    """KL at so many bits: as measured, else on the line through its neighbours in log, else a factor of 4 a bit."""
    if bits in found:
        return found[bits]
    below, above = (
        max((b for b in found if b < bits), default=None),
        min((b for b in found if b > bits), default=None),
    )
    if below is None or above is None:
        near = below if below is not None else above
        assert near is not None, "at least one format is measured"
        return found[near] * 4.0 ** (near - bits)
    share = (bits - below) / (above - below)
    return math.exp((1 - share) * _log(found[below]) + share * _log(found[above]))


def _log(kl: float) -> float:
    return math.log(max(kl, LEAST))


def mean_kl(book: ScoreBook, role: str, items: Sequence[Item], config: KVConfig) -> float:
    """Family-balanced mean KL of a config over items that it was scored on."""
    by_family: dict[str, list[float]] = {}
    for item in items:
        kl = book.get(role, config, item).kl
        assert kl is not None, "only the uncompressed baseline has none"
        by_family.setdefault(item.family, []).append(kl)
    return float(np.mean([np.mean(group) for group in by_family.values()]))


def additivity(
    table: Sensitivity, book: ScoreBook, role: str, items: EvalSet, configs: Mapping[str, KVConfig]
) -> dict[str, Any]:
    """Predicted sums beside what whole configs lost: on the very items of the table, and on all others.

    Correlations are of logarithms (Pearson) and of ranks (Spearman), None with fewer than three configs or no spread.
    """
    own = items.head(table.items).items
    pairs = []
    for config in configs.values():
        predicted = table.predicted(config)
        scored = [i for i in items.items if (role, config.id, i.id) in book.rows]
        if predicted is None or not set(own) <= set(scored):
            continue
        others = [i for i in scored if i not in own]
        whole = [mean_kl(book, role, part, config) if part else None for part in (own, others)]
        pairs.append({"config_id": config.id, "predicted": predicted, "same_items": whole[0], "other_items": whole[1]})
    return {"n": len(pairs), "pairs": pairs, **{k: agreement(pairs, k) for k in ("same_items", "other_items")}}
