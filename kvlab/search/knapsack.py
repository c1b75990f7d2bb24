"""One choice for every layer: the least damage for any number of bytes, exactly.

Damages add up over layers by assumption; bytes add up by construction. The whole front is made at once, so every
budget has its answer. Knows numbers only.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


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
        sums: list[tuple[int, float]] = [(0, 0.0)]
        self._steps: list[list[tuple[int, int]]] = []  # of each layer: the sum it came from, and the option taken
        for options in layers:
            taken = [
                (size + o.bytes, harm + o.damage, before, n)
                for before, (size, harm) in enumerate(sums)
                for n, o in enumerate(options)
            ]
            sums, steps = _undominated(taken)
            self._steps.append(steps)
        self._sums = sums

    def __len__(self) -> int:
        return len(self._sums)

    def best(self, budget: int) -> Allocation | None:
        """The least damage within `budget` bytes; None where even the smallest choice of every layer is over it."""
        at = bisect_right(self._sums, budget, key=lambda s: s[0]) - 1
        return None if at < 0 else self._traced(at)

    def smallest(self) -> Allocation:
        """The fewest bytes of all, with the least damage among those."""
        return self._traced(0)

    def all(self) -> list[Allocation]:
        """The whole front, from the smallest and most damaging on."""
        return [self._traced(n) for n in range(len(self._sums))]

    def _traced(self, at: int) -> Allocation:
        size, harm = self._sums[at]
        chosen = []
        for steps in reversed(self._steps):
            at, option = steps[at]
            chosen.append(option)
        return Allocation(size, harm, tuple(reversed(chosen)))


def _undominated(
    taken: list[tuple[int, float, int, int]],
) -> tuple[list[tuple[int, float]], list[tuple[int, int]]]:
    """Sums by rising bytes and falling damage, and where each came from. Ties go to the first option."""
    sums: list[tuple[int, float]] = []
    steps: list[tuple[int, int]] = []
    for size, harm, before, n in sorted(taken):
        if not sums or harm < sums[-1][1]:
            sums.append((size, harm))
            steps.append((before, n))
    return sums, steps
