"""Code read out of a text in the shapes in which models give it, and programs graded through a runner."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.evals import execution
from kvlab.evals.code_answers import program
from kvlab.evals.execution import pass_at_k
from kvlab.evals.grading import Graded
from kvlab.evals.item import CodeCheck, Item
from kvlab.sandbox import Program

BEFORE = 'import math\n\n\ndef half(n):\n    return n / 2\n\n\ndef area(r, n):\n    """ Area of n discs.\n    """\n'
CHECK = CodeCheck(before=BEFORE, entry="area", tests="assert area(1, 2) == 2 * math.pi\nassert area(0, 1) == 0")
RIGHT = {
    "body": "\n    a = math.pi * r * r\n    return a * n\n",
    "body, then more": "\n    a = math.pi * r * r\n    return a * n\n\n\n# Test\nprint(area(1, 2))\nDone.\n",
    "body, first line not indented": "a = math.pi * r * r\n    return a * n",
    "body, not indented": "a = math.pi * r * r\nif n:\n    a = a * n\n    return a\nreturn 0",
    "body, tabs": "\n\ta = math.pi * r * r\n\tif n:\n\t\ta = a * n\n\treturn a",
    "body, Windows lines": "\r\n    a = math.pi * r * r\r\n    return a * n\r\n",
    "body, closing fence": "    return math.pi * r * r * n\n```\nThis multiplies.",
    "full function": "def area(r, n):\n    return math.pi * r * r * n\n",
    "full function, tabs": "def area(r, n):\n\tif n:\n\t\treturn math.pi * r * r * n\n\treturn 0\n",
    "full function, then prose": "def area(r, n):\n    return math.pi * r * r * n\n\nDone\nIt multiplies the two.",
    "prose, then full function": "Here it is.\n\nimport math\ndef area(r, n):\n    return math.pi * r * r * n\n",
    "fenced": "Sure!\n```python\ndef area(r, n):\n    return math.pi * r * r * n\n```\nIt multiplies.",
    "fenced body": "```\n    return math.pi * r * r * n\n```",
    "fence not closed": "```python\ndef area(r, n):\n    return math.pi * r * r * n\n",
    "second fence": "Run\n```\npip install it\n```\nthen\n```py\ndef area(r, n):\n    return math.pi * r * r * n\n```",
    "helper after": "\n    return disc(r) * n\n\n\ndef disc(r):\n    return math.pi * r * r\n",
    "helper before": "def disc(r):\n    return math.pi * r * r\n\ndef area(r, n):\n    return disc(r) * n\n",
    "helper of the prompt": "def area(r, n):\n    return 2 * half(math.pi) * r * r * n\n",
    "decorated": "import functools\n\n@functools.cache\ndef area(r, n):\n    return math.pi * r * r * n\n",
    "a name": "area = lambda r, n: math.pi * r * r * n\n",
}  # fmt: skip
NONE = {
    "nothing": "",
    "blank": " \n\n",
    "prose": "I do not know how to do that.",
    "no body": "def area(r, n):\n    '''Only this.'''\n",
    "broken": "\n    return a +",
    "null byte": "\n    return '\x00'",
}


@pytest.mark.parametrize("shape", RIGHT)
def test_every_shape_of_a_right_answer_is_right(shape: str) -> None:
    source = program(CHECK, RIGHT[shape])
    assert source is not None
    # Sources of this file, not of a model.
    exec(compile(f"{source}\n{CHECK.tests}", shape, "exec"), {"__name__": "answer"})
    assert "print" not in source
    assert "Done" not in source


@pytest.mark.parametrize("shape", NONE)
def test_a_text_without_code_is_a_failed_extraction(shape: str) -> None:
    assert program(CHECK, NONE[shape]) is None


def test_without_a_name_any_definition_is_the_answer() -> None:
    check = CodeCheck(before="", entry="", tests="assert f() == 1")
    assert program(check, "def f():\n    return 1\n\nThat is it.") == "def f():\n    return 1\n\n"
    assert program(check, "x = 1\n") == "x = 1\n"
    assert program(check, "    return 1") is None


@given(st.text(alphabet="def area(r,n):\n\t `'\"return[]{}#=x1", max_size=80))
def test_no_text_raises_and_what_is_found_parses(text: str) -> None:
    source = program(CHECK, text)
    if source is not None:
        compile(source, "found", "exec", flags=1024)  # ast.PyCF_ONLY_AST: parsed, not run


# -- grading by a runner -----------------------------------------------------------------------------------------------


def code_item(index: int, *answers: str, metric: str = "execute") -> Item:
    return Item(
        id=f"t/search/0/{index}", task="t", family="code", context="c", question="q", answers=answers, cluster="c",
        stop=("\nassert ",), metric=metric, check=CHECK if metric == "execute" else None,
    )  # fmt: skip


def test_programs_of_a_batch_run_together_and_keep_their_places() -> None:
    asked: list[Sequence[Program]] = []

    def runner(programs: Sequence[Program]) -> list[SimpleNamespace]:
        asked.append(programs)
        verdicts = ["passed" if "r * r" in one.source else "wrong" for one in programs]
        return [SimpleNamespace(verdict=verdict, detail="") for verdict in verdicts]

    items = [code_item(0, "x"), code_item(1, " 4", metric="number"), code_item(2, "x"), code_item(3, "x")]
    texts = ["\n    return math.pi * r * r * n\nassert area(1, 1)", "4", "no idea", "\n    return n"]
    assert execution.grade_all(items, texts, runner) == [
        Graded(1.0, True, outcome="passed"),
        Graded(1.0, True),
        Graded(0.0, False, outcome="no code"),
        Graded(0.0, True, outcome="wrong"),
    ]
    ((first, second),) = asked
    assert first.source == f"{BEFORE}    return math.pi * r * r * n\n"
    assert second.source.endswith("return n\n")
    for one in (first, second):
        assert (one.tests, one.entry, one.given) == (f"{CHECK.tests}\n", CHECK.entry, CHECK.before)


def test_nothing_runs_without_a_runner() -> None:
    with pytest.raises(ValueError, match="running it was not allowed"):
        execution.grade_all([code_item(0, "x")], ["    return 1"])
    assert not execution.gradable(code_item(0, "x"), None)
    assert execution.gradable(code_item(0, "x"), lambda programs: [])
    assert execution.gradable(code_item(0, "4", metric="number"), None)


def test_a_runner_that_does_not_answer_for_every_program_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        execution.grade_all([code_item(0, "x")], ["    return 1"], lambda programs: [])


def test_pass_at_k() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    assert pass_at_k(10, 3, 8) == 1.0
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(1, 1, 1) == 1.0
    with pytest.raises(ValueError, match=r"pass@11 cannot be estimated from 10 samples"):
        pass_at_k(10, 3, 11)
    for n, c in ((0, 0), (3, 4), (3, -1)):
        with pytest.raises(ValueError, match="needs 0 <= c <= n"):
            pass_at_k(n, c, 1)
