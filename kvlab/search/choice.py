"""Which of the searched configs go on to confirmation, and in which order. Looks at search scores and bytes only: what
is chosen here owes nothing to the items that will judge it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvlab.config import KVConfig

if TYPE_CHECKING:
    from kvlab.search.race import Race, Trial

FINALISTS = 3
# A finalist takes at most so much of the one before it: what is hardly smaller says little more.
_SMALLER = 0.95
# A sequence costs no level however long it is, only items.
STEPS = 6
# Where the search already sees a loss of more than so many baseline deviations, fewer bytes are not worth a step.
TOLERANCE = 0.25


def dominators(points: Mapping[str, tuple[float, float]]) -> dict[str, int]:
    """By how many others each point is beaten: no worse in either coordinate, better in one. Lower is better."""
    return {name: sum(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points.values()) for name, p in points.items()}


def front(race: "Race", n_items: int, size: Mapping[str, int]) -> list["Trial"]:
    """Trials scored on all `n_items` that no other beats in bytes and score: best score first, each further smaller.

    Trials that failed, do not fit or have seen fewer items take no part. `size` maps config id to workload bytes.
    """
    full = [
        (t.value, size[t.config.id], n, t)
        for n, t in enumerate(race.feasible().values())
        if t.items >= n_items and t.config is not None and t.value is not None and math.isfinite(t.value)
    ]
    kept: list[tuple[float, int, Trial]] = []
    for value, held, _, trial in sorted(full, key=lambda x: x[:3]):
        if not kept or held < kept[-1][1]:
            kept.append((value, held, trial))
    return [trial for _, _, trial in kept]


def finalists(
    race: "Race", n_items: int, size: Mapping[str, int], limit: int = FINALISTS, *, first: KVConfig | None = None
) -> list[KVConfig]:
    """`first`, by default the best score; then up to `limit` in all of what the front has that is clearly smaller each
    time.
    """
    kept = [] if first is None else [first]
    for config in _configs(front(race, n_items, size)):
        if not kept or size[config.id] <= _SMALLER * size[kept[-1].id]:
            kept.append(config)
    return kept[:limit]


def spread(trials: Sequence["Trial"], size: Mapping[str, int], limit: int = FINALISTS) -> list[KVConfig]:
    """At most `limit` of a front, both ends and what lies most evenly between them in bytes (log), order kept."""
    if len(trials) <= limit:
        return _configs(trials)
    logs = [math.log(size[t.config.id]) for t in trials if t.config is not None]
    steps = [logs[0] + (logs[-1] - logs[0]) * n / max(1, limit - 1) for n in range(limit)]
    chosen: list[int] = []
    for step in steps:
        free = [n for n in range(len(trials)) if n not in chosen]
        chosen.append(min(free, key=lambda n: abs(logs[n] - step)))
    return _configs([trials[n] for n in sorted(chosen)])


def sequence(trials: Sequence["Trial"], size: Mapping[str, int], limit: int = STEPS) -> list[KVConfig]:
    """From a front, what to test from the largest to the smallest until one fails: spread over sizes at which the
    search saw little loss, and the next smaller one.
    """
    best = min((t.value for t in trials if t.value is not None), default=0.0)
    good = [n for n, t in enumerate(trials) if t.value is not None and t.value <= best + TOLERANCE]
    return spread(trials[: max(good, default=-1) + 2], size, limit)


def _configs(trials: Sequence["Trial"]) -> list[KVConfig]:
    return [t.config for t in trials if t.config is not None]
