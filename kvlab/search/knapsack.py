"""One choice for every layer: the least damage for any number of bytes, exactly.

Damages add up over layers by assumption; bytes add up by construction. The whole front is made at once, so every
budget has its answer. Knows numbers only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Option:
    """What a layer may be stored as: its bytes, and the damage it is believed to do."""

    bytes: int
    damage: float

    def __post_init__(self) -> None:
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or self.bytes < 0:
            raise ValueError(f"an option's bytes must be an integer of at least 0, got {self.bytes!r}")
        if not (math.isfinite(self.damage) and self.damage >= 0):
            raise ValueError(f"an option's damage must be finite and at least 0, got {self.damage!r}: measure it first")


@dataclass(frozen=True, slots=True)
class Allocation:
    """The option chosen for each layer, and the sums."""

    bytes: int
    damage: float
    chosen: tuple[int, ...]


class Front:
    """Every allocation that no other beats in bytes and damage, smallest first.

    `layers` holds the options of each layer. A partial sum that another one beats can never become part of a best
    whole, so only undominated ones are carried on (Nemhauser and Ullmann 1969); where layers are alike their bytes
    fall on few values, and few are left.
    """

    def __init__(self, layers: Sequence[Sequence[Option]]) -> None:
        if not layers or not all(layers):
            raise ValueError("every layer needs at least one option to choose from")
        self._bytes, self._damage = np.zeros(1, np.int64), np.zeros(1)
        self._steps: list[np.ndarray] = []  # of each layer [kept, 2]: the sum it came from, and the option taken
        for options in layers:
            size, harm = np.array([o.bytes for o in options], np.int64), np.array([o.damage for o in options])
            sizes = (self._bytes[:, None] + size).ravel()
            harms = (self._damage[:, None] + harm).ravel()
            kept = _undominated(sizes, harms)
            self._bytes, self._damage = sizes[kept], harms[kept]
            self._steps.append(np.stack(np.divmod(kept, len(options)), axis=1))

    def __len__(self) -> int:
        return len(self._bytes)

    def best(self, budget: int) -> Allocation | None:
        """The least damage within `budget` bytes; None where even the smallest choice of every layer is over it."""
        at = int(np.searchsorted(self._bytes, budget, side="right")) - 1
        return None if at < 0 else self._traced(at)

    def smallest(self) -> Allocation:
        """The fewest bytes of all, with the least damage among those."""
        return self._traced(0)

    def all(self) -> list[Allocation]:
        """The whole front, from the smallest and most damaging on."""
        return [self._traced(n) for n in range(len(self))]

    def _traced(self, at: int) -> Allocation:
        size, harm = int(self._bytes[at]), float(self._damage[at])
        chosen = []
        for steps in reversed(self._steps):
            at, option = (int(x) for x in steps[at])
            chosen.append(option)
        return Allocation(size, harm, tuple(reversed(chosen)))


def _undominated(sizes: np.ndarray, harms: np.ndarray) -> np.ndarray:
    """Indices of what nothing beats, by rising bytes and falling damage. Ties go to the first."""
    order = np.lexsort((harms, sizes))
    sorted_harms = harms[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_harms)[:-1]])
    return order[sorted_harms < least_before]
