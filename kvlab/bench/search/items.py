"""Items of the search bench: prose, and then the beginning of a sentence of it to go on from, with an exact number of
answer tokens. To copy, a model has to read what compression may have dropped.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.evals.bundled import sentences
from kvlab.evals.item import Item
from kvlab.questions import in_tokens

CUE_WORDS = 3
_ATTEMPTS = 40


@dataclass(frozen=True, slots=True)
class Asked:
    """An item and its tokens, as every side gets them."""

    item: Item
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def fed(self) -> int:
        """Tokens that have to be forced: the last one of the answer predicts nothing."""
        return len(self.question) + len(self.answer) - 1


def make(tokenizer: Any, count: int, context_tokens: int, answer_tokens: int, seed: int) -> list[Asked]:
    """`count` items of at most `context_tokens`, less than a sentence below, and exactly `answer_tokens`.

    Raises ValueError where the bundled prose gives no such item.
    """
    draw = random.Random(seed)
    made: list[Asked] = []
    for _ in range(_ATTEMPTS * count):
        if len(made) == count:
            break
        found = _drawn(tokenizer, draw, len(made), context_tokens, answer_tokens)
        made += [found] if found is not None else []
    if len(made) < count:
        raise ValueError(
            f"no item with {context_tokens} context and {answer_tokens} answer tokens was found in the bundled prose: "
            "take a longer context or a shorter answer"
        )
    return made


def _drawn(tokenizer: Any, draw: random.Random, index: int, most: int, answer_tokens: int) -> Asked | None:
    order = list(sentences())
    draw.shuffle(order)
    context = _filled(tokenizer, order, most)
    if len(context) < 2:
        return None
    first = draw.randrange(len(context) - 1)
    words = " ".join(context[first:]).split(" ")
    cue, rest = words[:CUE_WORDS], words[CUE_WORDS:]
    answer = _of_length(tokenizer, rest, answer_tokens)
    if answer is None:
        return None
    item = Item(
        id=f"continue/search/0/{index}",
        task="continue",
        family="retrieval",
        cluster=f"prose{index}",
        context=" ".join(context),
        question=" " + " ".join(cue),
        answers=(answer,),
    )
    asked = in_tokens(item, tokenizer.encode)
    return Asked(item, asked.context, asked.question, asked.continuations[0])


def _filled(tokenizer: Any, order: Sequence[str], most: int) -> list[str]:
    """As many of the sentences, in order, as fit."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(tokenizer.encode(" ".join(order[:middle]))) <= most
        low, high = (middle, high) if fits else (low, middle - 1)
    return list(order[:low])


def _of_length(tokenizer: Any, words: Sequence[str], tokens: int) -> str | None:
    """The beginning of the words that is so many tokens long; None where none is."""
    for count in range(1, len(words) + 1):
        text = " " + " ".join(words[:count])
        length = len(tokenizer.encode(text, add_special_tokens=False))
        if length >= tokens:
            return text if length == tokens else None
    return None
