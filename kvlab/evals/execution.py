"""Generated code graded by running it, where a runner is given; and pass@k.

The runner is any function from programs to what each ended in, such as `run` of an open `kvlab.sandbox.Sandbox`.
Without one nothing runs: sets of code are then scored by the likelihood of their canonical solution. This file refuses
to start processes itself.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from kvlab.evals import metrics
from kvlab.evals.code_answers import program
from kvlab.evals.grading import Graded, grade
from kvlab.evals.item import Item
from kvlab.sandbox.program import Program


class Ran(Protocol):
    """What one program ended in: `passed`, or a verdict that says why not."""

    @property
    def verdict(self) -> str: ...

    @property
    def detail(self) -> str: ...


Runner = Callable[[Sequence[Program]], Sequence[Ran]]
NO_CODE = "no code"
"""The outcome of a text in which no code was found; nothing ran."""


def gradable(item: Item, runner: Runner | None) -> bool:
    """Whether a generated answer of the item can be graded; otherwise only the teacher-forced pass scores it."""
    return not item.choices and item.metric != "likelihood" and (item.metric != "execute" or runner is not None)


def check_runnable(items: Sequence[Item], runner: Runner | None) -> None:
    """Raise ValueError where an answer has to run and nothing may run it, or where the item is running text."""
    for item in items:
        if item.metric == "likelihood":
            raise ValueError(f"item {item.id} is running text: only the teacher-forced pass scores it")
        if item.metric == "execute" and runner is None:
            raise ValueError(
                f"item {item.id}: a generated answer is code, and running it was not allowed. Allow it "
                "(--allow-code-exec), or score the canonical solution by its likelihood: the teacher-forced pass"
            )


def tested(item: Item, text: str) -> Program | None:
    """The program that tests a generated text: its code, and the item's tests apart. None where there is no code.

    What the problem itself brings along goes to the tests too, so that no generated helper stands in for it there.
    """
    if item.check is None:
        raise ValueError(f"item {item.id} has no tests")
    code = program(item.check, metrics.cut(text, item.stop))
    if code is None:
        return None
    check = item.check
    return Program(source=code, tests=f"{check.tests.strip()}\n", entry=check.entry, given=check.before)


def grade_all(items: Sequence[Item], texts: Sequence[str], runner: Runner | None = None) -> list[Graded]:
    """Grades in order. All programs of the batch go to the runner together, so that it may run them side by side.

    Raises ValueError where code has to run and there is no runner, or where it does not answer for every program.
    """
    check_runnable(items, runner)
    out: list[Graded | None] = []
    places, programs = [], []
    for item, text in zip(items, texts, strict=True):
        if item.metric != "execute":
            out.append(grade(item, text))
            continue
        tests = tested(item, text)
        if tests is not None:
            places.append(len(out))
            programs.append(tests)
        out.append(Graded(0.0, False, outcome=NO_CODE))
    if programs and runner is not None:
        for place, ran in zip(places, runner(programs), strict=True):
            out[place] = Graded(float(ran.verdict == "passed"), True, outcome=ran.verdict)
    return [graded for graded in out if graded is not None]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k samples drawn from n is among the c that pass: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. (2021), arXiv 2107.03374, section 2.1. Raises ValueError for k > n and impossible counts.
    """
    if not 0 <= c <= n or n < 1:
        raise ValueError(f"pass@k needs 0 <= c <= n and n >= 1, got n={n}, c={c}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples: draw at least {k}")
    # Whole numbers until the last step: one minus a quotient near one would lose a small chance.
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)
