"""HumanEval's and MBPP's own solutions pass, and solutions that answer something else fail."""

import ast
import os
from pathlib import Path

import pytest

from kvlab.evals import execution
from kvlab.evals.item import Item
from kvlab.evals.loaders import at, find_spec, load
from kvlab.sandbox import Limits, Program, run

DATA = Path(os.environ.get("KVLAB_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
pytestmark = [
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no data folder {DATA}; set KVLAB_DATA"),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),  # the sets' own, when they are parsed
]
# Solutions that do not pass here, by id, each with its reason. There are none.
EXCEPTIONS: dict[str, dict[str, str]] = {"humaneval": {}, "mbpp": {}}
# Changed solutions that pass nevertheless, by id, with the reason.
NOT_TOLD_APART: dict[str, dict[str, str]] = {"humaneval": {}, "mbpp": {}}
ROWS = {"humaneval": 164, "mbpp": 974}


def solved(name: str) -> tuple[list[Item], list[Program]]:
    loaded = load(at(find_spec(name), str(DATA)))
    items = [item for split in ("search", "confirm", "replicate") for item in loaded.items(split, 10**6)]
    programs = [execution.tested(item, item.answers[0]) for item in items]
    return items, [program for program in programs if program is not None]


class Elsewhere(ast.NodeTransformer):
    """Every value that a function returns, packed into a tuple: right for no test that compares."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Tuple([node.value or ast.Constant(None), ast.Constant("changed")], ast.Load()))


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_canonical_solutions_pass(name: str) -> None:
    items, programs = solved(name)
    assert len(items) == len(programs) == ROWS[name]
    outcomes = run(programs, Limits(cpu_s=60, wall_s=600))
    failed = {item.id: out for item, out in zip(items, outcomes, strict=True) if not out.passed}
    assert {key: (out.verdict, out.detail) for key, out in failed.items() if key not in EXCEPTIONS[name]} == {}
    assert set(failed) == set(EXCEPTIONS[name])


@pytest.mark.parametrize(("name", "step"), [("humaneval", 1), ("mbpp", 5)])
def test_changed_solutions_fail(name: str, step: int) -> None:
    items, programs = solved(name)
    items, programs = items[::step], programs[::step]
    changed = [
        Program(
            source=ast.unparse(ast.fix_missing_locations(Elsewhere().visit(ast.parse(program.source)))),
            tests=program.tests,
            entry=program.entry,
            given=program.given,
        )
        for program in programs
    ]
    assert sum(one.source != ast.unparse(ast.parse(p.source)) for one, p in zip(changed, programs, strict=True)) > 0
    outcomes = run(changed, Limits(cpu_s=60, wall_s=600))
    passed = {item.id for item, outcome in zip(items, outcomes, strict=True) if outcome.passed}
    assert passed == set(NOT_TOLD_APART[name])
    assert {outcome.verdict for outcome in outcomes} <= {"wrong", "crashed"}
