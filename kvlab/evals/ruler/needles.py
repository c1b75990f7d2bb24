"""Needle tasks in RULER's layouts (arXiv 2404.06654, section 3.1): something is said in a long text and asked later.

Haystacks are lines of noise, bundled prose, or needles that nobody asks for. Words and values are our own. This file
refuses to know any model and tokenizer.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvlab.evals.draft import Draft, estimate_tokens
from kvlab.evals.retrieval import NOISE
from kvlab.evals.ruler import words
from kvlab.evals.ruler.fit import Count, Drawn, depth_of, excerpt, fitted, placed, prose, spread

HAYSTACKS = ("noise", "text", "needles")
KINDS = {"number": words.numbers, "code": words.codes, "word": words.keys}
ROOM = {"number": 16, "code": 48, "word": 12}
"""Tokens that may be generated for one value; more where a tokenizer needs more for the gold answer."""
_LEAST_RIVALS = 3


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked for, in words: the keys, and for each its values in the order of the answer."""

    kind: str
    keys: tuple[str, ...]
    each: int

    def needle(self, key: str, value: str) -> str:
        return f"{'One' if self.each > 1 else 'The'} secret {self.kind} of {key} is {value}."

    @property
    def lead(self) -> str:
        many = "s" if self.each * len(self.keys) > 1 else ""
        return f"Read the text and remember the secret {self.kind}{many} in it. You are asked afterwards.\n"

    @property
    def question(self) -> str:
        if self.each > 1:
            return f"What are the {self.each} secret {self.kind}s of {self.names}, in the order of the text?"
        if len(self.keys) > 1:
            return f"What are the secret {self.kind}s of {self.names}, in this order?"
        return f"What is the secret {self.kind} of {self.names}?"

    @property
    def cue(self) -> str:
        many, verb = ("s", "are") if self.each * len(self.keys) > 1 else ("", "is")
        return f" The secret {self.kind}{many} of {self.names} {verb}"

    @property
    def names(self) -> str:
        return listed(self.keys)


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def single_noise(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """A number between lines of noise (niah_single_1)."""
    return _needles(rng, length, index, count, "ruler_single_noise", "noise", "number")


def single_text(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """A number in prose (niah_single_2)."""
    return _needles(rng, length, index, count, "ruler_single_text", "text", "number")


def single_uuid(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """A UUID in prose (niah_single_3)."""
    return _needles(rng, length, index, count, "ruler_single_uuid", "text", "code")


def single_word(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """A pair of words in prose; no task of RULER's average."""
    return _needles(rng, length, index, count, "ruler_single_word", "text", "word")


def multikey_text(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """A number in prose with three more of other keys (niah_multikey_1)."""
    return _needles(rng, length, index, count, "ruler_multikey_text", "text", "number", rivals=3)


def multikey_needles(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """A number among nothing but numbers of other keys (niah_multikey_2)."""
    return _needles(rng, length, index, count, "ruler_multikey_needles", "needles", "number")


def multikey_uuid(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """A UUID of a UUID among nothing but such pairs (niah_multikey_3)."""
    return _needles(rng, length, index, count, "ruler_multikey_uuid", "needles", "code", key_kind="code")


def multivalue(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """Four numbers of one key in prose (niah_multivalue). The gold list has them in the order of the text."""
    return _needles(rng, length, index, count, "ruler_multivalue", "text", "number", each=4)


def multiquery(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """The numbers of four keys in prose (niah_multiquery). The gold list has them in the order of the question."""
    return _needles(rng, length, index, count, "ruler_multiquery", "text", "number", queries=4)


def _needles(
    rng: random.Random,
    length: int,
    index: int,
    count: Count,
    task: str,
    haystack: str,
    kind: str,
    *,
    key_kind: str = "word",
    queries: int = 1,
    each: int = 1,
    rivals: int = 0,
) -> Draft:
    """`queries` keys with `each` values of `kind` are hidden and asked for, `rivals` more keys are only hidden."""
    key_stream, value_stream = KINDS[key_kind](rng), KINDS[kind](rng)
    names = [next(key_stream) for _ in range(queries + rivals)]
    asked = _Asked(kind, tuple(names[:queries]), each)
    values = [next(value_stream) for _ in range(each * len(names))]
    needles = [asked.needle(names[n // each], value) for n, value in enumerate(values)]
    depths = spread(index, len(needles))
    gold = values[: each * queries]
    if each > 1:
        gold = [value for _, value in sorted(zip(depths, gold, strict=True))]
    answer = " " + ", ".join(gold)
    room = max(ROOM[kind] * len(gold), count(answer) + 4)
    units = Drawn(_haystack(rng, haystack, asked, key_stream, value_stream), tuple(gold))
    words_of, between = excerpt(rng), " " if haystack == "text" else "\n"

    def write(n: int, pad: int) -> str:
        text = placed(units.first(n), needles, depths)
        return asked.lead + between.join([words_of(pad), *text] if pad else text) + "\n"

    context = fitted(
        write,
        task=task,
        length=length,
        rest=count(asked.question + asked.cue) + room,
        count=count,
        least=_LEAST_RIVALS if haystack == "needles" else 1,
    )
    where = {value: depth_of(context, needle) for value, needle in zip(values, needles, strict=True)}
    return Draft(
        context=context,
        question=asked.question,
        cue=asked.cue,
        answers=(answer,),
        references=tuple(gold),
        depths=tuple(where[value] for value in gold),
        metric="ruler",
        max_new_tokens=room,
    )


def _haystack(
    rng: random.Random, haystack: str, asked: _Asked, keys: Iterator[str], values: Iterator[str]
) -> Iterator[str]:
    """Units of the haystack without end. Needles in it have keys and values of their own."""
    if haystack == "text":
        yield from prose(rng)
    while haystack == "noise":
        yield rng.choice(NOISE).rstrip("\n")
    while haystack == "needles":
        yield asked.needle(next(keys), next(values))
