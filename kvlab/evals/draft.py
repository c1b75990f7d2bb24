"""What a generator returns, and what all generators share: a seed, a token estimate, filling to a length.

This file refuses to know any task and any tokenizer: lengths are estimated so that items do not depend on a model.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_PIECES = re.compile(r" (?=\d)|\d|[^\W\d_]+|[^\w\s]+|_|\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One item before it has an id.

    `question` is what is asked and `cue` the words after it that the answer completes; with a question-aware context
    the question moves before compression and the cue stays behind. `references` are what a generated answer must name,
    all of them, where `answers[0]` lists several; `depths` is where each of them stands in the context, from 0 to 1.
    """

    context: str
    question: str
    cue: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    depths: tuple[float, ...] = ()
    metric: str = "exact"
    stop: tuple[str, ...] = ("\n",)
    max_new_tokens: int = 16


def seeded(*parts: object) -> random.Random:
    """A generator seeded by sha256 over the parts, so that streams with different parts share nothing."""
    text = "|".join(str(part) for part in parts)
    return random.Random(int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:16], "big"))


def estimate_tokens(text: str) -> int:
    """Tokens that byte-pair tokenizers with single digits make of plain English or Python, within about 15 per cent."""
    return sum(1 + (len(piece) > 9) for piece in _PIECES.findall(text))


def fill(head: str, line: Callable[[int], str], length: int, *, least: int = 1) -> str:
    """`head` and then `line(0)`, `line(1)`, ... while the estimate stays within `length`; at least `least` lines."""
    text, used, index = head, estimate_tokens(head), 0
    while True:
        extra = line(index)
        used += estimate_tokens(extra)
        if index >= least and used > length:
            return text
        text += extra
        index += 1


def near_misses(rng: random.Random, value: int, count: int, *, low: int = 0, spread: int = 3) -> list[int]:
    """`count` different wrong numbers of the same size near `value`, none below `low`."""
    pool = [value + step for step in range(-spread, spread + 1) if step and value + step >= low]
    if len(pool) < count:
        raise ValueError(f"only {len(pool)} wrong numbers within {spread} of {value}; {count} are needed")
    return rng.sample(pool, count)


def shuffled(rng: random.Random, values: Sequence[object]) -> list[str]:
    """The values as strings with a leading space, in random order."""
    out = [f" {value}" for value in values]
    rng.shuffle(out)
    return out
