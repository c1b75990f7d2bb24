"""The table of what layers lose alone, held against the rows it was made of.

A row does not say which layer its config encodes, so a measured cell must be the mean of some config scored for the
purpose, each config serving one cell. Cells that follow from measured ones are made again by the same law.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.stats.agreement import LEAST, agreement


def layers(table: Mapping, alone: Sequence[Mapping], searched: Sequence[Mapping]) -> Iterator[tuple[str, Any, Any]]:
    """Name, printed and recomputed of every cell, and of how far sums of layers told whole configs.

    `alone` are rows of one layer encoded, `searched` those of whole configs.
    """
    means = [mean_kl(own) for own in _by_config(alone).values()]
    families = len({row["family"] for row in alone})
    items = len({row["item_id"] for row in alone})
    yield "layers, items a family", table["items_per_family"], items // max(1, families)
    for stream, formats in table["formats"].items():
        for layer, row in zip(table["layers"], table["kl"][stream], strict=True):
            known = {_bits(f): kl for f, kl, m in zip(formats, row, table["measured"], strict=True) if m}
            for name, kl, measured in zip(formats, row, table["measured"], strict=True):
                found = _take(means, kl) if measured else by_law(known, _bits(name))
                yield f"layers, {stream} of layer {layer} as {name}", kl, found
    yield from _added_up(table.get("additivity") or {}, alone, _by_config(searched))


def _by_config(rows: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    held: dict[str, list[Mapping]] = {}
    for row in rows:
        held.setdefault(row["config_id"], []).append(row)
    return held


def mean_kl(own: Sequence[Mapping]) -> float:
    """Family-balanced mean KL of one config."""
    by_family: dict[str, list[float]] = {}
    for row in own:
        by_family.setdefault(row["family"], []).append(row["kl"])
    return float(np.mean([np.mean(values) for values in by_family.values()]))


def by_law(known: Mapping[int, float], bits: int) -> float:
    """KL at so many bits: on the line through measured neighbours in log, else a factor of 4 a bit."""
    below, above = [b for b in known if b < bits], [b for b in known if b > bits]
    if below and above:
        lower, upper = max(below), min(above)
        share = (bits - lower) / (upper - lower)
        return math.exp((1 - share) * math.log(max(known[lower], LEAST)) + share * math.log(max(known[upper], LEAST)))
    near = max(below) if below else min(above)
    return known[near] * 4.0 ** (near - bits)


def _bits(label: str) -> int:
    found = re.match(r"int(\d+)", label)
    if found is None:
        raise ValueError(f"a format by layer is called int and its bits, got {label!r}")
    return int(found[1])


def _take(means: list[float], kl: float) -> float | None:
    """The mean nearest to a cell, taken out so that it serves no other."""
    if not means:
        return None
    return means.pop(min(range(len(means)), key=lambda n: abs(means[n] - kl)))


def _added_up(
    said: Mapping, alone: Sequence[Mapping], searched: Mapping[str, Sequence[Mapping]]
) -> Iterator[tuple[str, Any, Any]]:
    items = {row["item_id"] for row in alone}
    pairs: Sequence[Mapping] = said.get("pairs") or []
    for pair in pairs:
        rows = searched.get(pair["config_id"], [])
        own, others = ([r for r in rows if (r["item_id"] in items) is inside] for inside in (True, False))
        for key, part in (("same_items", own), ("other_items", others)):
            yield f"layers added up, {pair['config_id'][:4]}, {key}", pair[key], mean_kl(part) if part else None
    for key in ("same_items", "other_items"):
        again = agreement(pairs, key)
        for name, value in (said.get(key) or {}).items():
            yield f"layers added up, {key}, {name}", value, (again or {}).get(name)
