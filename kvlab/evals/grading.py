"""A generated text against its item: score, whether an answer could be read at all, and the benchmark's own score.

A text without an answer is a failed extraction: it scores 0, and it is counted, since a cache that makes a model ramble
looks the same as one that makes it wrong. Code is never run here: see kvlab.evals.execution.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.evals import metrics
from kvlab.evals.item import Item, unknown
from kvlab.evals.ruler import scores


@dataclass(frozen=True, slots=True)
class Graded:
    """`score` in [0, 1]; `extracted` is False where no answer could be read; `benchmark` is the score by the
    benchmark's own rule where that differs; `outcome` is what running the answer ended in."""

    score: float
    extracted: bool
    benchmark: float | None = None
    outcome: str | None = None


def _any(metric: Callable[[str, str], bool], item: Item, answer: str) -> float:
    return float(any(metric(answer, gold) for gold in item.answers))


def _number(item: Item, answer: str) -> Graded:
    """The last number, or the marked one; by the benchmark's rule only a marked one counts, where gold is marked."""
    strict = None
    if any(metrics.marked_number(gold) is not None for gold in item.answers):
        strict = _any(metrics.strict_number, item, answer)
    return Graded(_any(metrics.number, item, answer), metrics.final_number(answer) is not None, strict)


def _literal(item: Item, answer: str) -> Graded:
    return Graded(_any(metrics.literal, item, answer), metrics.is_literal(answer))


def _latex(item: Item, answer: str) -> Graded:
    return Graded(_any(metrics.latex, item, answer), metrics.boxed(answer) is not None)


def _exact(item: Item, answer: str) -> Graded:
    return Graded(_any(metrics.exact, item, answer), bool(answer.strip()))


def _contains(item: Item, answer: str) -> Graded:
    return Graded(_any(metrics.contains, item, answer), bool(answer.strip()))


def _ruler(item: Item, answer: str) -> Graded:
    found = scores.both(item, answer)
    return Graded(found.strict, bool(answer.strip()), found.compatible)


GRADERS: dict[str, Callable[[Item, str], Graded]] = {
    "exact": _exact,
    "number": _number,
    "latex": _latex,
    "literal": _literal,
    "contains": _contains,
    "ruler": _ruler,
}
"""How `Item.metric` reads and compares a text that was cut at the item's stop strings."""
NAMES = (*GRADERS, "execute", "likelihood")
"""All of them: `execute` runs tests, `likelihood` is running text, for which no generated answer is right or wrong."""


def grade(item: Item, text: str) -> Graded:
    """Grade one generated text. Raises ValueError for an unknown metric, for code, which only a sandbox can grade, and
    for running text."""
    if item.metric == "execute":
        raise ValueError(f"item {item.id}: its answer is code that has to run; kvlab.evals.execution grades it")
    if item.metric == "likelihood":
        raise ValueError(f"item {item.id} is running text: only the teacher-forced pass scores it")
    if item.metric not in GRADERS:
        raise unknown("metric", item.metric, NAMES)
    return GRADERS[item.metric](item, metrics.cut(text, item.stop))
