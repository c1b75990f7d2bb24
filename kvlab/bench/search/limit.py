"""The least a score pass could take: each context prefilled once, and every answer forced on the plain model in batches
of the size that serves it best, from an uncompressed cache. Nothing of kvlab runs here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvlab.bench.search.items import Asked
from kvlab.cache import cache_kwarg

ROWS = (8, 16, 32, 64)


class Spent(NamedTuple):
    """Seconds by the wall and of this process's CPU time."""

    wall: float
    cpu: float

    def least(self, other: "Spent | None") -> "Spent":
        """The lesser of both, each clock for itself."""
        return self if other is None else Spent(min(self.wall, other.wall), min(self.cpu, other.cpu))

    def times(self, factor: float) -> "Spent":
        return Spent(self.wall * factor, self.cpu * factor)


def clocked(work: Callable[[], object]) -> Spent:
    """How long `work` takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


@dataclass(slots=True)
class Limit:
    """Least times over the turns so far: prefills of all items together, and one forced row by batch size."""

    prefills: Spent | None = None
    row: dict[int, Spent] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The batch size that serves a row best."""
        return min(self.row, key=lambda n: self.row[n].wall)

    def per_pair(self, items: int, configs: int) -> Spent:
        """Seconds for each config and item."""
        assert self.prefills is not None
        shared, own = self.prefills.times(1 / (items * configs)), self.row[self.rows]
        least_cpu = min(row.cpu for row in self.row.values())
        return Spent(shared.wall + own.wall, shared.cpu + least_cpu)

    @torch.no_grad()
    def turn(self, model: PreTrainedModel, asked: Sequence[Asked], most_rows: int) -> None:
        """Measure once more; what took less counts."""
        spent = [clocked(lambda one=one: _prefilled(model, one.context)) for one in asked]
        total = Spent(sum(s.wall for s in spent), sum(s.cpu for s in spent))
        self.prefills = total.least(self.prefills)
        longest = max(asked, key=lambda one: len(one.context))
        held = _prefilled(model, longest.context)
        for rows in [n for n in ROWS if n <= most_rows] or [most_rows]:
            self.row[rows] = _forced(model, held, longest, rows).times(1 / rows).least(self.row.get(rows))


def _prefilled(model: PreTrainedModel, context: Sequence[int]) -> DynamicCache:
    cache = DynamicCache()
    model.base_model(input_ids=torch.tensor([list(context)]), use_cache=True, **{cache_kwarg(): cache})
    return cache


def _forced(model: PreTrainedModel, held: DynamicCache, one: Asked, rows: int) -> Spent:
    """One forward of `rows` rows over question and answer, each row with a cache of its own."""
    cache = DynamicCache()
    for i, layer in enumerate(held.layers):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        cache.update(layer.keys.repeat(rows, 1, 1, 1), layer.values.repeat(rows, 1, 1, 1), i)
    ids = torch.tensor([(one.question + one.answer)[:-1]] * rows)
    at = torch.arange(len(one.context), len(one.context) + one.fed).expand(rows, -1)

    def work() -> None:
        logits = model(
            input_ids=ids,
            position_ids=at,
            use_cache=True,
            logits_to_keep=len(one.answer),
            **{cache_kwarg(): cache},
        ).logits
        torch.log_softmax(logits, dim=-1)

    return clocked(work)
