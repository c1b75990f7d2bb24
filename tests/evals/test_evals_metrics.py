"""Parsers and comparisons with right values: numbers, LaTeX boxes, Python literals, containment."""

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.evals import metrics

DATA = Path(os.environ.get("KVLAB_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{1{,}250}", "1{,}250"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed 6", "6"),
        (r"\boxed 6.", "6"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}", None),
        (r"\boxed{7} or maybe \boxed{\frac{1}", None),
        (r"put it in \boxed please", None),
        (r"\boxed{7}, as asked in \boxed please", "7"),
        (r"\boxed{}", None),
        (r"\boxedthing{3}", None),
        (r"\boxed {a{b{c}}d}", "a{b{c}}d"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("", None),
        ("no box", None),
        ("\\boxed", None),
        ("\\boxed{\\", None),
    ],
)
def test_boxed(text: str, inside: str | None) -> None:
    assert metrics.boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"1{,}250", 1250),
        (r"\$1,250", 1250),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
        (r"\frac34", Fraction(3, 4)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        ("42.0", 42),
        (r"\text{7 apples}", 7),
        (r"7\text{ apples}", 7),
        (r"12^\circ", 12),
        (r"50\%", 50),
        ("3/4", Fraction(3, 4)),
        (r"\frac{1}{0}", None),
        ("(3, 4)", None),
        ("(3,4)", None),
        (r"2\sqrt{3}", None),
        ("x + 1/2", None),
        (r"\text{seven}", None),
        ("", None),
    ],
)
def test_latex_value(text: str, value: Fraction | int | None) -> None:
    assert metrics.latex_value(text) == value


@pytest.mark.parametrize(
    ("prediction", "gold", "same"),
    [
        (r"\boxed{1{,}250}", "1250", True),
        (r"\boxed{\$1,250}", r"\boxed{1250}", True),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{5}", False),
        (r"\boxed{\frac{3}{4}}", "0.75", True),
        (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}", False),
        (r"\boxed 6", "6", True),
        (r"\boxed{5} no: \boxed{6}", "6", True),
        (r"\boxed{6} no: \boxed{5}", "6", False),
        (r"\boxed{\frac{1}", "1", False),
        (r"put it in \boxed please, 6", "6", False),
        (r"\boxed{42.0}", "42", True),
        (r"\boxed{\text{7 apples}}", "7", True),
        (r"\boxed{(3,4)}", r"\boxed{(3, 4)}", False),
        (r"\boxed{(3,4)}", "34", False),
        (r"\boxed{x^2}", "x^2", True),
        (r"\boxed{\text{east}}", "east", True),
        ("6", "6", False),
    ],
)
def test_latex(prediction: str, gold: str, same: bool) -> None:
    assert metrics.latex(prediction, gold) is same


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("So she has 5...", 5),
        ("It is 18 ...", 18),
        ("$29.00", 29),
        ("the total is $1,250.50.", Fraction("1250.5")),
        ("1,00,000 people", 100000),
        ("10-3", 3),
        ("it is -3", -3),
        ("it is \u22123", -3),
        ("12 eggs\n#### 18\nthen 99", 18),
        ("#### $1,234", 1234),
        ("#### -5", -5),
        ("#### no", None),
        ("none", None),
        ("", None),
        (".5", Fraction(1, 2)),
        ("1,234.", 1234),
        ("5..", 5),
        ("10,", 10),
        ("-5", -5),
        ("\ufe635", -5),
        ("-$5.", -5),
        ("$-5", -5),
        ("10-$3", 3),
        ("€1,250", 1250),
        ("50%", 50),
        ("50 %.", 50),
        ("3/4", Fraction(3, 4)),
        ("so it is -1/2.", Fraction(-1, 2)),
        ("16/2 = 8", 8),
        ("3 / 4", 4),
        ("1/0", 0),
        ("10/3/2020", 2020),
        ("#### 3/4", Fraction(3, 4)),
        ("####\u22121,000", -1000),
        ("#### 5. Wait. #### 7", 7),
    ],
)
def test_final_number(text: str, value: Fraction | int | None) -> None:
    assert metrics.final_number(text) == value


def test_strict_reading_needs_the_mark() -> None:
    assert metrics.marked_number("so 18") is None
    assert metrics.marked_number("#### about 18") is None
    assert metrics.strict_number("#### 18.0", "a\n#### 18")
    assert metrics.strict_number("####18", "18")
    assert not metrics.strict_number("It is 18", "#### 18")
    assert not metrics.strict_number("#### 19, I mean 18", "#### 18")
    assert metrics.number("#### 19, I mean 18", "#### 19")


def test_numbers_are_exact() -> None:
    assert metrics.number("0.1", "0.10")
    assert not metrics.number("0.30000000000000004", "0.3")
    assert metrics.number("18.0", "a\n#### 18")
    assert not metrics.number("", "18")
    assert metrics.numbers("3, 4 and 5,000") == [3, 4, 5000]


@pytest.mark.parametrize(
    ("prediction", "gold", "same"),
    [
        ("[1, 2]", " [1,2]", True),
        ("'a'", '"a"', True),
        ("x or True", "True", False),
        ("1", "True", False),
        ("1.0", "1", False),
        ("[1]", "[True]", False),
        ("(1,)", "[1]", False),
        ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}", True),
        ("{'a': 1}", "{'a': True}", False),
        ("[1", "[1]", False),
        ("", "''", False),
        ("None", "None", True),
        ("__import__('os')", "0", False),
        ("[" * 5000, "[]", False),
    ],
)
def test_literal(prediction: str, gold: str, same: bool) -> None:
    assert metrics.literal(prediction, gold) is same


@pytest.mark.parametrize(
    ("prediction", "gold", "hit"),
    [
        ("The number is 12.", "12", True),
        ("312", "12", False),
        ("12.5", "12", False),
        ("3.12", "12", False),
        ("1,250", "250", False),
        ("A LAMP, please", "lamp", True),
        ("lamps", "lamp", False),
        ("new  york", "New York", True),
        ("anything", "", False),
        ("a+b", "a+b", True),
    ],
)
def test_contains(prediction: str, gold: str, hit: bool) -> None:
    assert metrics.contains(prediction, gold) is hit


def test_ruler_scores_as_the_benchmark_does() -> None:
    assert metrics.ruler("It is 312 and ABC", ["12", "abc", "no"]) == pytest.approx(2 / 3)
    assert metrics.ruler("It is 312 and ABC", ["12", "no"], "any") == 1.0
    assert metrics.ruler("a\x00b", ["a\nb"]) == 1.0
    with pytest.raises(ValueError, match="at least one reference"):
        metrics.ruler("a", [])
    with pytest.raises(ValueError, match="unknown RULER rule 'part'"):
        metrics.ruler("a", ["a"], "part")


def test_cut_keeps_an_answer_that_starts_with_a_stop_string() -> None:
    assert metrics.cut("\n12\nmore", ("\n",)) == "\n12"
    assert metrics.cut("12 Question: x", ("\n", "Question:")) == "12 "
    assert metrics.cut("12", ()) == "12"


@given(st.text(alphabet="\\boxed{}fract123 ,.$-/%#", max_size=60), st.text(max_size=20))
def test_no_text_raises(text: str, other: str) -> None:
    for metric in metrics.METRICS.values():
        assert metric(text, other) in (True, False)
    assert metrics.latex("\\boxed{" + text + "}", text) in (True, False)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_written_numbers_are_read_back(value) -> None:
    assert metrics.final_number(f"= {value:,}") == Fraction(value)
    minus = f"{value:,}".replace("-", "\u2212")
    for text in (f"It is {value:,}.", f"It is ${minus},", f"{minus}%", f"#### {minus}...", f"9 = {minus} .."):
        assert metrics.final_number(text) == Fraction(value), text
    assert metrics.marked_number(f"8 {minus}\n####{minus}.\n") == Fraction(value)
    assert metrics.latex_value(f"{value:,}".replace(",", "{,}")) == Fraction(value)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data folder {DATA}; set KVLAB_DATA")
def test_every_public_gold_answer_matches_itself() -> None:
    for line in (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines():
        gold = json.loads(line)["answer"]
        value = gold.rpartition("####")[2].strip()
        assert metrics.number(gold, gold)
        assert metrics.number(value, gold)
        assert metrics.latex(f"\\boxed{{{value}}}", value)
    for line in (DATA / "cruxeval.jsonl").read_text(encoding="utf-8").splitlines():
        output = json.loads(line)["output"]
        assert metrics.literal(output, f" {output}"), output
