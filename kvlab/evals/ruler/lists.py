"""Tracing and counting tasks in RULER's layouts (arXiv 2404.06654, sections 3.2 and 3.3): chains of variables, common
words, frequent words. Words are our own. This file refuses to know any model and tokenizer.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.evals.draft import Draft, estimate_tokens
from kvlab.evals.retrieval import NOISE
from kvlab.evals.ruler import words
from kvlab.evals.ruler.fit import GOLDEN, Count, Drawn, depth_of, excerpt, fitted, placed

_DOTS, _RANKED = "...", 3


def variables(
    rng: random.Random,
    length: int,
    *,
    index: int = 0,
    count: Count = estimate_tokens,
    chains: int = 1,
    hops: int = 4,
) -> Draft:
    """Which variables hold a value, through `hops` assignments after the first (vt).

    The lines of a chain stand in order between lines of noise; other chains hold other values. The gold list follows
    the chain.
    """
    if chains < 1 or hops < 1:
        raise ValueError(f"variable tracking with chains={chains}, hops={hops}: both must be at least 1")
    names, numbers = words.variables(rng), words.numbers(rng, 10_000, 99_999)
    shown = _chain(names, next(numbers), min(hops, 2))
    asked, *others = [_chain(names, next(numbers), hops) for _ in range(chains)]
    lead = "VAR gives a variable a value.\n"
    example = "".join(f"{line}\n" for line in shown.lines) + f"{shown.question}{shown.cue}{shown.answer}\n\n"
    lines = [line for chain in (asked, *others) for line in chain.lines]
    depths = [depth for _ in range(chains) for depth in _gaps(rng, index, hops + 1)]
    noise, words_of = Drawn(rng.choice(NOISE).rstrip("\n") for _ in itertools.count()), excerpt(rng)

    def write(n: int, pad: int) -> str:
        text = placed(noise.first(n), lines, depths)
        return lead + example + "\n".join([words_of(pad), *text] if pad else text) + "\n"

    room = max(8 * len(asked.names), count(asked.answer) + 4)
    rest = count(asked.question + asked.cue) + room
    context = fitted(write, task="ruler_variables", length=length, rest=rest, count=count)
    return Draft(
        context=context,
        question=asked.question,
        cue=asked.cue,
        answers=(asked.answer,),
        references=asked.names,
        depths=tuple(depth_of(context, f"{line}\n") for line in asked.lines),
        metric="ruler",
        max_new_tokens=room,
    )


@dataclass(frozen=True, slots=True)
class _Chain:
    value: str
    names: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        pairs = itertools.pairwise(self.names)
        return [f"VAR {self.names[0]} = {self.value}", *(f"VAR {new} = VAR {old}" for old, new in pairs)]

    @property
    def question(self) -> str:
        return f"Which variables hold the value {self.value}, in the order in which they got it?"

    @property
    def cue(self) -> str:
        return f" The {len(self.names)} variables that hold the value {self.value} are"

    @property
    def answer(self) -> str:
        return " " + ", ".join(self.names)


def _chain(names: Iterator[str], value: str, hops: int) -> _Chain:
    return _Chain(value, tuple(next(names) for _ in range(hops + 1)))


def _gaps(rng: random.Random, index: int, count: int) -> list[float]:
    """Rising depths: one in each of `count` equal parts of the text. The first follows the item's index, so that over
    items it covers its part evenly."""
    return [((0.5 + index * GOLDEN) % 1 if not n else rng.random()) / count + n / count for n in range(count)]


_SHOWN = 5
_SCALES = ((4096, 10, 30, 3), (1024, 10, 6, 1), (0, 4, 4, 1))
"""Common words: from which length on, how many are asked for, how often each comes, and how often the others do.

The first two are RULER's; below 1,024 tokens theirs do not fit.
"""


def common_words(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """The words of a numbered list that come far more often than the rest (cwe), after a small worked example.

    The gold list has them in the order of their first appearance. `index` changes nothing: they are everywhere.
    """
    asked, often, seldom = next(scale[1:] for scale in _SCALES if length >= scale[0])
    entries = length / _tokens_each(count)
    stream = words.plain(rng, _SHOWN + asked + max(asked, int((entries - asked * often) / seldom)))
    shown, common = [next(stream) for _ in range(_SHOWN)], [next(stream) for _ in range(asked)]
    rare = Drawn(itertools.chain.from_iterable([word] * seldom for word in stream))
    lead = f"A numbered list of words. Some come up more often.\nExample: {_example(shown)}"
    question = f"What are the {asked} most common words in the list, in the order in which each comes first?"
    cue = f" The {asked} most common words in the list are"
    room = max(6 * asked + 8, count(" " + ", ".join(common)) + 4)
    seed = rng.getrandbits(64)

    def write(n: int, pad: int) -> str:
        draw = random.Random(seed)  # a number an entry: a longer list is the shorter with more in it
        order = sorted((draw.random(), word) for word in [*common * often, *rare.first(n)])
        numbered = " ".join(f"{place}. {word}" for place, (_, word) in enumerate(order, 1))
        return f"{lead}{' '.join('*' * (pad + 1))}\n{numbered}\n"

    rest = count(question + cue) + room
    context = fitted(write, task="ruler_common_words", length=length, rest=rest, count=count, least=asked)
    first = {word: context.index(f". {word} ") for word in common}
    gold = tuple(sorted(common, key=first.__getitem__))
    return Draft(
        context=context,
        question=question,
        cue=cue,
        answers=(" " + ", ".join(gold),),
        references=gold,
        metric="ruler",
        max_new_tokens=room,
    )


def _tokens_each(count: Count) -> float:
    """Tokens of an entry of a list of single words, at least one; those of pairs have more."""
    sample = words.NOUNS[:20]
    return max(1.0, count(" ".join(f"{place}. {word}" for place, word in enumerate(sample, 10))) / len(sample))


def _example(shown: list[str]) -> str:
    """A list of seven in which two of five words come twice."""
    a, b, c, d, e = shown
    numbered = " ".join(f"{place}. {word}" for place, word in enumerate((a, b, c, a, d, b, e), 1))
    return f"{numbered}\nThe 2 most common words in the list are {a}, {b}\n"


def frequent_words(
    rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens, alpha: float = 2.0
) -> Draft:
    """The three most frequent of meaningless words whose counts fall as rank ** -alpha, after dots on rank one (fwe).

    The gold list begins with the most frequent. `index` changes nothing: they are everywhere.
    """
    if not 1.0 < alpha <= 3.5:
        raise ValueError(f"alpha={alpha} must lie above 1 and not above 3.5: counts fall as rank ** -alpha")
    vocabulary = max(_RANKED + 2, length // 50)
    stream = words.coded(rng)
    ranked = [_DOTS, *(next(stream) for _ in range(vocabulary - 1))]
    total = math.fsum(rank**-alpha for rank in range(1, vocabulary + 1))
    # From here on the counts of ranks 4 and 5 differ by one or more, and so do all before them.
    least = math.ceil(total / ((_RANKED + 1) ** -alpha - (_RANKED + 2) ** -alpha))
    seeds = [rng.getrandbits(64) for _ in ranked]
    lead = "A coded text. Dots mean nothing; keep in mind which words come most often.\n"
    question = f"Which {_RANKED} words come most often in the coded text, dots left out, the most frequent first?"
    cue = f" The {_RANKED} most frequent words are"
    gold = tuple(ranked[1 : 1 + _RANKED])
    answer = " " + ", ".join(gold)
    room = max(24, count(answer) + 4)

    def write(n: int, pad: int) -> str:
        order = []
        for rank, (word, seed) in enumerate(zip(ranked, seeds, strict=True), 1):
            draw, times = random.Random(seed), int(n * rank**-alpha / total)
            order += [(draw.random(), word) for _ in range(times + (pad if rank == 1 else 0))]
        return f"{lead}{' '.join(word for _, word in sorted(order))}\n"

    rest = count(question + cue) + room
    context = fitted(write, task="ruler_frequent_words", length=length, rest=rest, count=count, least=least)
    return Draft(
        context=context,
        question=question,
        cue=cue,
        answers=(answer,),
        references=gold,
        metric="ruler",
        max_new_tokens=room,
    )
