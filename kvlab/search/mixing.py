"""Configs with formats of their own in every layer: the least predicted loss for any number of bytes.

The knapsack solves all layers at once; what is left to a search are a few multipliers of the damage it is told. Bytes
are those of the config, exactly. Knows a table of sensitivities, configs and bytes; no model, no items, no scores.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvlab.codecs import Codec
from kvlab.config import KVConfig
from kvlab.layer import LayerShape, ModelShape
from kvlab.search.knapsack import Allocation, Front, Option
from kvlab.search.sensitivity import Sensitivity
from kvlab.search.workload import Workload

Pair = tuple[Codec, Codec]
# Nats that a layer loses at least in its fewest bits, so that it has a logarithm.
_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Mixer:
    """Mixed configs of one model and workload."""

    table: Sensitivity
    shape: ModelShape
    workload: Workload

    def config(self, budget: int, keys: float = 1.0, contrast: float = 1.0) -> KVConfig | None:
        """The config whose workload takes at most `budget` bytes, None where the fewest bits everywhere take more.

        `keys` is what a key's loss counts against a value's. `contrast` is how far layers are told apart: 0 takes all
        for alike, 1 believes the table, more exaggerates it. (An exponent on the loss itself would change little:
        where every bit divides a loss by the same factor, the best choice is the same for all exponents.)
        """
        found = self._front(keys, contrast).best(self._per_sequence(budget))
        return None if found is None else self._built(found)

    def smallest(self) -> KVConfig:
        """The fewest bits everywhere."""
        return self._built(self._front(1.0, 1.0).smallest())

    def _per_sequence(self, budget: int) -> int:
        """Bytes that one conversation may take in the layers that are compressed."""
        fixed = [s for s in self.shape.layers if s.window is not None]
        held = KVConfig().predicted_bytes(ModelShape(tuple(fixed), self.shape.dtype), self.workload.context)
        return budget // self.workload.concurrency - held

    @property
    def pairs(self) -> list[Pair]:
        formats = self.table.formats
        return [(k, v) for k in formats.keys for v in formats.values]

    def _front(self, keys: float, contrast: float) -> Front:
        shapes = [self.shape.layers[i] for i in self.table.layers]
        sizes = {shape: self._sizes(shape) for shape in dict.fromkeys(shapes)}
        damages = self._damages(keys, contrast)
        return Front(
            [
                [Option(size, float(d)) for size, d in zip(sizes[shape], row, strict=True)]
                for shape, row in zip(shapes, damages, strict=True)
            ]
        )

    def _sizes(self, layer: LayerShape) -> list[int]:
        """Bytes of one sequence in such a layer, for each pair of formats."""
        one = ModelShape((layer,), self.shape.dtype)
        base = self.table.formats.base
        return [replace(base, key=k, value=v).predicted_bytes(one, self.workload.context) for k, v in self.pairs]

    def _damages(self, keys: float, contrast: float) -> np.ndarray:
        """[layer][pair of formats]. Fewer bits never count as less damage: that would be noise."""
        key, value = (np.maximum.accumulate(np.array(kl), axis=1) for kl in (self.table.key_kl, self.table.value_kl))
        worst = np.log(np.maximum((key + value)[:, -1:], _LEAST))
        told_apart = np.exp((contrast - 1) * (worst - worst.mean()))
        pairs = keys * key[:, :, None] + value[:, None, :]
        return pairs.reshape(len(key), -1) * told_apart

    def _built(self, found: Allocation) -> KVConfig:
        """One config for one allocation, however it came about: what most layers share is written once."""
        pairs = [self.pairs[n] for n in found.chosen]
        key, value = _commonest(pairs)
        apart = [(i, *p) for i, p in zip(self.table.layers, pairs, strict=True) if p != (key, value)]
        return replace(self.table.formats.base, key=key, value=value, overrides=tuple(apart))


def _commonest(pairs: Sequence[Pair]) -> Pair:
    """Of several as common, the one that stands in the lowest layer."""
    counted = Counter(pairs)
    return max(counted, key=lambda p: (counted[p], -pairs.index(p)))
