"""Arithmetic generators: worked examples in the context, a fresh problem after it.

The number of examples grows with the length. No example repeats the problem that is asked. This file refuses to know
any model.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.evals.draft import Draft, estimate_tokens, fill, near_misses, shuffled

Pair = tuple[int, int]

NAMES = ("Anna", "Ben", "Clara", "Dan", "Emma", "Finn", "Grace", "Hugo", "Ivy", "Jack", "Kate", "Leo")
GOODS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "cards", "plums", "keys")


def _shots(rng: random.Random, length: int, asked: str, example: Callable[[], tuple[str, str]]) -> str:
    """Lines of question and answer, none of which asks `asked`."""

    def line(_: int) -> str:
        while True:
            question, answer = example()
            if question != asked:
                return f"{question} {answer}\n"

    return fill("", line, length)


def _binary(
    rng: random.Random, length: int, sign: str, draw: Callable[[], Pair], solve: Callable[[int, int], int]
) -> tuple[str, str, int]:
    """Context, question and value of a two-number problem written `a sign b =`."""

    def example() -> tuple[str, str]:
        a, b = draw()
        return f"{a} {sign} {b} =", str(solve(a, b))

    question, answer = example()
    return _shots(rng, length, question, example), question, int(answer)


def _greedy(context: str, question: str, value: int) -> Draft:
    head, cue = question[:-2], question[-2:]
    return Draft(context=context, question=head, cue=cue, answers=(f" {value}",))


def _choice(rng: random.Random, draft: Draft, *, count: int = 3, spread: int = 3) -> Draft:
    """The same problem with `count` near misses beside the right number."""
    value = int(draft.answers[0])
    options = shuffled(rng, [value, *near_misses(rng, value, count, spread=spread)])
    return Draft(
        context=draft.context, question=draft.question, cue=draft.cue, answers=draft.answers, choices=tuple(options)
    )


def add1(rng: random.Random, length: int) -> Draft:
    """One-digit addition."""
    return _greedy(*_binary(rng, length, "+", lambda: (rng.randint(1, 9), rng.randint(1, 9)), lambda a, b: a + b))


def add1_choice(rng: random.Random, length: int) -> Draft:
    """One-digit addition, four choices."""
    return _choice(rng, add1(rng, length))


def add2(rng: random.Random, length: int) -> Draft:
    """Two-digit addition."""
    return _greedy(*_binary(rng, length, "+", lambda: (rng.randint(10, 49), rng.randint(10, 49)), lambda a, b: a + b))


def add2_choice(rng: random.Random, length: int) -> Draft:
    """Two-digit addition, four choices up to twelve away."""
    return _choice(rng, add2(rng, length), spread=12)


def subtract(rng: random.Random, length: int) -> Draft:
    """Subtraction of a digit from a number up to eighteen; the difference never equals the digit."""

    def draw() -> Pair:
        while True:
            b, rest = rng.randint(1, 9), rng.randint(1, 9)
            if b != rest:
                return b + rest, b

    return _greedy(*_binary(rng, length, "-", draw, lambda a, b: a - b))


def subtract_choice(rng: random.Random, length: int) -> Draft:
    """Subtraction, four choices."""
    return _choice(rng, subtract(rng, length))


def _progression(rng: random.Random) -> tuple[str, int]:
    start, step = rng.randint(1, 20), rng.randint(2, 9)
    shown = [start + step * index for index in range(4)]
    return ", ".join(map(str, shown)) + ",", start + step * 4


def progression_choice(rng: random.Random, length: int) -> Draft:
    """The next number of an arithmetic progression, four choices."""
    question, value = _progression(rng)

    def example() -> tuple[str, str]:
        text, answer = _progression(rng)
        return text, str(answer)

    context = _shots(rng, length, question, example)
    draft = Draft(context=context, question=question[:-1], cue=",", answers=(f" {value}",))
    return _choice(rng, draft, spread=9)


def count_on(rng: random.Random, length: int) -> Draft:
    """Counting on in twos, fives or tens: the next number after five."""

    def run() -> tuple[str, str]:
        step = rng.choice((2, 5, 10))
        start = step * rng.randint(1, 60 // step)
        shown = [start + step * index for index in range(5)]
        return ", ".join(map(str, shown)) + ",", str(start + step * 5)

    question, answer = run()
    context = _shots(rng, length, question, run)
    return Draft(context=context, question=question[:-1], cue=",", answers=(f" {answer}",))


def compare_choice(rng: random.Random, length: int) -> Draft:
    """The larger of two numbers, as a choice between the two."""

    def example() -> tuple[str, str]:
        a, b = rng.sample(range(10, 100), 2)
        return f"The larger of {a} and {b} is", str(max(a, b))

    question, answer = example()
    a, b = (int(word) for word in question.split() if word.isdigit())
    context = _shots(rng, length, question, example)
    options = tuple(f" {number}" for number in (a, b))
    return Draft(context=context, question=question[:-3], cue=" is", answers=(f" {answer}",), choices=options)


@dataclass(frozen=True, slots=True)
class _Story:
    told: str
    asked: str
    value: int
    working: str
    wrong: tuple[str, ...]


def _story(rng: random.Random) -> _Story:
    """A one-step story; the result differs from both numbers, so that copying one of them is never right."""
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    while True:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        more = rng.random() < 0.5
        value = a + b if more else a - b
        if value > 0 and value not in (a, b):
            break
    act = f"buys {b} more" if more else f"gives away {b}"
    sign, other = ("+", "-") if more else ("-", "+")
    off = value + rng.choice((-1, 1))
    swapped = a - b if more else a + b
    moved = b + 1 if b < 9 else b - 2
    return _Story(
        told=f"{name} has {a} {goods} and {act}.",
        asked=f"How many {goods} does {name} have now?",
        value=value,
        working=f" {a} {sign} {b} = {value}",
        wrong=(f" {a} {other} {b} = {swapped}", f" {a} {sign} {b} = {off}", f" {a} {sign} {moved} = {value}"),
    )


def _story_context(rng: random.Random, length: int, story: _Story) -> str:
    def line(_: int) -> str:
        while True:
            shown = _story(rng)
            if shown.told != story.told:
                return f"{shown.told} {shown.asked} Answer:{shown.working}\n"

    return fill("", line, length - estimate_tokens(story.told)) + story.told


def word_problem(rng: random.Random, length: int) -> Draft:
    """A one-step story after worked examples, answered with its working. Only the question comes after the context."""
    story = _story(rng)
    context = _story_context(rng, length, story)
    return Draft(context=context, question=f" {story.asked}", cue=" Answer:", answers=(story.working,))


def word_problem_choice(rng: random.Random, length: int) -> Draft:
    """The same with three wrong workings: the other operation, a wrong result, a wrong number."""
    story = _story(rng)
    options = [story.working, *story.wrong]
    rng.shuffle(options)
    return Draft(
        context=_story_context(rng, length, story),
        question=f" {story.asked}",
        cue=" Answer:",
        answers=(story.working,),
        choices=tuple(options),
    )
