"""Grades of generated texts: score, failed extraction, the benchmark's own score; each metric with right values."""

from typing import Any

import pytest

from kvlab.evals import grading
from kvlab.evals.grading import Graded, grade
from kvlab.evals.item import CodeCheck, Item


def item(metric: str, *answers: str, stop: tuple[str, ...] = ("\n",), **more: Any) -> Item:
    return Item(
        id="t/search/0/0", task="t", family="math", context="c", question="q", answers=answers, cluster="c",
        stop=stop, metric=metric, **more,
    )  # fmt: skip


GSM = (" It is 18.\n#### 18", " 18")


@pytest.mark.parametrize(
    ("one", "text", "found"),
    [
        (item("exact", " 123"), "123\nThe next", Graded(1.0, True)),
        (item("exact", " 123"), " 1234", Graded(0.0, True)),
        (item("exact", " 123"), "  \n ", Graded(0.0, False)),
        (item("number", *GSM, stop=("\nQ:",)), "He has 18.0\n#### 18.0\nQ: 5", Graded(1.0, True, 1.0)),
        (item("number", *GSM, stop=("\nQ:",)), "He has $18.00.", Graded(1.0, True, 0.0)),
        (item("number", *GSM, stop=("\nQ:",)), "He has 18, no, 19", Graded(0.0, True, 0.0)),
        (item("number", *GSM, stop=("\nQ:",)), "I do not know.", Graded(0.0, False, 0.0)),
        (item("number", " 18"), "18", Graded(1.0, True, None)),
        (item("literal", " [1, 2]"), " [1,2]\nassert", Graded(1.0, True)),
        (item("literal", " [1, 2]"), " [2, 1]", Graded(0.0, True)),
        (item("literal", " [1, 2]"), " sorted([2, 1])", Graded(0.0, False)),
        (item("literal", " True"), " x or True", Graded(0.0, False)),
        (item("latex", "42"), r"so \boxed{42.0}", Graded(1.0, True)),
        (item("latex", "42"), r"put it in \boxed please, 42", Graded(0.0, False)),
        (item("contains", "lamp"), "It is the Lamp.", Graded(1.0, True)),
        (item("contains", "lamp"), "", Graded(0.0, False)),
        (item("ruler", " 12, 34", references=("12", "34")), "12 and 34", Graded(1.0, True, 1.0)),
        (item("ruler", " 12, 34", references=("12", "34")), "312", Graded(0.0, True, 0.5)),
        (item("ruler", " 12, 34", references=("12", "34")), "", Graded(0.0, False, 0.0)),
    ],
)
def test_grades(one: Item, text: str, found: Graded) -> None:
    assert grade(one, text) == found


def test_every_metric_is_tried_above() -> None:
    assert set(grading.GRADERS) == {"exact", "number", "literal", "latex", "contains", "ruler"}
    assert set(grading.NAMES) - set(grading.GRADERS) == {"execute", "likelihood"}


def test_what_no_text_can_be_graded_for_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown metric 'numbers'; did you mean 'number'"):
        grade(item("numbers", "1"), "1")
    check = CodeCheck(before="", entry="f", tests="")
    with pytest.raises(ValueError, match="has to run"):
        grade(item("execute", "def f(): pass", check=check), "def f(): pass")
    with pytest.raises(ValueError, match="only the teacher-forced pass"):
        grade(item("likelihood", " words", forced="tokens"), "words")
