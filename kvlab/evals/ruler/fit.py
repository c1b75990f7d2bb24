"""Make a context as long as asked, in tokens of any tokenizer: never longer, and at most a few tokens shorter.

A text is counted whole, about six times whatever its length, so the time grows with the length alone. This file refuses
to know what the text says and who counts.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.evals.bundled import sentences

Count = Callable[[str], int]
TOLERANCE = 8
"""A prompt with the room for its answer is at most this many tokens shorter than asked: less than a long word."""
GOLDEN = 0.6180339887498949
_PAD_TRIES = 6


def counter(tokenizer: Any) -> Count:
    """How many tokens anything with `encode` makes of a text, with what it puts in front: never too few."""
    return lambda text: len(tokenizer.encode(text))


@dataclass(slots=True)
class Drawn:
    """A stream of text units with a memory, so that a longer text begins as a shorter one.

    Units that hold one of `without` are left out, whatever their letter case.
    """

    source: Iterator[str]
    without: tuple[str, ...] = ()
    units: list[str] = field(default_factory=list, init=False)

    def first(self, n: int) -> list[str]:
        """The first `n` units. Raises ValueError where the stream ends before."""
        banned = [text.lower() for text in self.without]
        while len(self.units) < n:
            one = next(self.source, None)
            if one is None:
                raise ValueError(f"the haystack ends after {len(self.units)} units, {n} are needed; ask for less")
            if not any(text in one.lower() for text in banned):
                self.units.append(one)
        return self.units[:n]


def prose(rng: random.Random) -> Iterator[str]:
    """The bundled sentences without end, in a new order each time round."""
    while True:
        pool = list(sentences())
        rng.shuffle(pool)
        yield from pool


def excerpt(rng: random.Random) -> Callable[[int], str]:
    """`words(m)`: the last `m` words of some sentences, as a text that begins in the middle. It fills what is left."""
    words = " ".join(next(source) for source in [prose(rng)] for _ in range(40)).split()
    return lambda m: " ".join((words * (1 + m // len(words)))[-m:]) if m else ""


def spread(index: int, count: int) -> list[float]:
    """Depths from 0 to 1 for `count` needles of item number `index`, the one that is asked for first.

    Over items the first depth follows the golden ratio, so any number of items covers all depths evenly; the others
    stand evenly around it.
    """
    start = (0.5 + index * GOLDEN) % 1
    return [(start + place / count) % 1 for place in range(count)]


def placed(units: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """`units` with each needle at its depth; needles come in order of depth, where they touch too."""
    order = sorted(range(len(needles)), key=lambda n: (depths[n], n))
    out, done = [], 0
    for n in order:
        place = round(depths[n] * len(units))
        out += [*units[done:place], needles[n]]
        done = place
    return [*out, *units[done:]]


def depth_of(context: str, needle: str) -> float:
    """Where `needle` begins in the context: the share of characters before it. It must stand there once."""
    if context.count(needle) != 1:
        raise ValueError(f"{needle!r} stands {context.count(needle)} times in the context; it must stand there once")
    return context.index(needle) / len(context)


def fitted(write: Callable[[int, int], str], *, task: str, length: int, rest: int, count: Count, least: int = 0) -> str:
    """`write(units, pad)` with as many units, then as much padding, as fit into `length - rest` tokens.

    `rest` is what question and answer take. Both arguments must make the text longer as they grow, padding by a token
    or few. Raises ValueError with the least possible length where not even `write(least, 0)` fits.
    """
    limit = length - rest
    small = count(write(least, 0))
    if small > limit:
        raise ValueError(
            f"task {task!r} does not fit into {length} tokens: its least length is {small + rest}, of which {rest} are "
            "for question and answer. Ask for a longer context or leave the task out"
        )
    units, used = _grown(lambda n: count(write(n, 0)), least, small, limit)
    # Padding is measured on the shortest text, which is quick, and then checked on the whole.
    pad, _ = _grown(lambda m: count(write(least, m)), 0, small, small + limit - used, exact=True)
    text = write(units, pad)
    if count(text) > limit:
        for fewer in range(pad - 1, -1, -1):
            text = write(units, fewer)
            if count(text) <= limit:
                return text
        raise ValueError(f"task {task!r}: a text that fitted no longer does; does the tokenizer count alike twice?")
    for more in range(pad + 1, pad + 1 + _PAD_TRIES):
        longer = write(units, more)
        if count(longer) > limit:
            break
        text = longer
    return text


def _grown(size: Callable[[int], int], low: int, low_size: int, limit: int, exact: bool = False) -> tuple[int, int]:
    """A large `n` from `low` with size(n) <= limit, and its size: the largest if `exact`, else short by less than an
    average step. Regula falsi between what fits and what does not."""
    first, first_size = low, low_size
    high: int | None = None
    high_size = 0
    guess = low + 16
    while high is None or high > low + 1:
        got = size(guess)
        if got <= limit:
            low, low_size = guess, got
        else:
            high, high_size = guess, got
        if high is not None:
            step = max((high_size - low_size) / (high - low), 1e-9)
        else:
            step = max((low_size - first_size) / (low - first), 1e-9)
        ahead = int((limit - low_size) / step)
        if not ahead and not exact:
            break
        guess = low + max(ahead, 1)
        if high is not None:
            guess = min(guess, high - 1)
    return low, low_size
