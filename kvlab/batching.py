"""Batching: how many rows one forward takes, from the memory there is and what a row was measured to cost.

`fitting` is the rule, over numbers only. A Batcher measures, asks the rule, and takes half as many rows where memory
runs out all the same. What a row gets does not depend on how many go together.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from kvlab.room import available, peak

SHARE = 0.5
"""Of the memory that is free, for one forward: allocators leave holes, and other processes take their part."""
MOST_ON_HOST, MOST = 48, 256
"""Rows at most. More than so many do not make a processor any faster."""
_PROBES = (8, 40)

T = TypeVar("T")
R = TypeVar("R")


class Need(NamedTuple):
    """What a row asks of a forward: its new tokens, how many of them get logits that are kept, and the bytes it holds
    besides.
    """

    tokens: int
    kept: int
    held: int = 0


class Cost(NamedTuple):
    """Bytes of the activations of one token while a forward runs, and of the logits of one token afterwards."""

    token: int
    logits: int


def fitting(needs: Sequence[Need], cost: Cost, room: int, most: int, least: int = 1) -> int:
    """How many of the first `needs` one forward takes within `room` bytes: `most` at most, and `least` at least.

    Rows go beside each other, each as wide as the widest.
    """
    width = kept = held = count = 0
    for need in needs[:most]:
        width, kept, held = max(width, need.tokens), max(kept, need.kept), held + need.held
        bytes_of_all = (count + 1) * (width * cost.token + kept * cost.logits) + held
        if count >= least and bytes_of_all > room:
            break
        count += 1
    return count


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The allocator of the host raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


class Batcher:
    """Rows of one model's forwards. `most` bounds them and falls for good where memory has run out.

    `room` says how many bytes are free; it is asked before every forward.
    """

    def __init__(self, model: Any, most: int | None = None, room: Callable[[], int] | None = None) -> None:
        self.model = model
        self.most = most or (MOST_ON_HOST if model.device.type == "cpu" else MOST)
        self._room = room or functools.partial(available, model.device)

    @functools.cached_property
    def cost(self) -> Cost:
        """Measured on the model itself: by how much the peak of a forward grows with a token more.

        Logits are counted twice: as they come, and as log-probabilities in 32 bit at least.
        """
        few, many = (peak(functools.partial(self._probe, tokens)) for tokens in _PROBES)
        config = self.model.config.get_text_config(decoder=True)
        size = self.model.dtype.itemsize
        token = -(-(many - few) // (_PROBES[1] - _PROBES[0]))
        return Cost(max(token, 1), config.vocab_size * (size + max(size, 4)))

    @torch.no_grad()
    def _probe(self, tokens: int) -> None:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.model.device)
        self.model(input_ids=ids, use_cache=False, logits_to_keep=1)

    def count(self, needs: Sequence[Need], beside: int = 0) -> int:
        """How many of the first rows go together now; with rows `beside` them that go on, it may be none."""
        most = self.most - beside
        if most < 1:
            return 0
        return 1 if self.most == 1 else fitting(needs, self.cost, int(SHARE * self._room()), most, 0 if beside else 1)

    def fewer(self, count: int, error: BaseException) -> bool:
        """After `count` rows ended in an error: whether half of them may do. If so, more are never taken again."""
        if count < 2 or not out_of_memory(error):
            return False
        self.most = count // 2
        return True

    def portions(self, rows: Sequence[T], need: Callable[[T], Need]) -> Iterator[Sequence[T]]:
        """All rows in order, those together that there is room for now."""
        start = 0
        while start < len(rows):
            count = self.count([need(row) for row in rows[start : start + self.most]])
            yield rows[start : start + count]
            start += count

    def run(
        self, rows: Sequence[T], need: Callable[[T], Need], forward: Callable[[Sequence[T]], R]
    ) -> Iterator[tuple[Sequence[T], R]]:
        """`forward` of all rows in order, as many at a time as there is room for; what they were, and what it gave.

        Where memory runs out half as many are taken, and so on down to one, of which the error is raised. `forward`
        must leave what it is given as it was.
        """
        needs = [need(row) for row in rows]
        start = 0
        while start < len(rows):
            part = rows[start : start + self.count(needs[start:])]
            try:
                made = forward(part)
            except (RuntimeError, MemoryError) as error:
                if not self.fewer(len(part), error):
                    raise
                continue
            yield part, made
            start += len(part)
