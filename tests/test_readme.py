"""What the README says is so: its commands, its tree, its figures."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.stats import VERDICTS, planned_margin

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", TEXT, re.S | re.M)
    return ["".join(line.removeprefix(indent) + "\n" for line in body.splitlines()) for indent, body in found]


def tree():
    """Every path of the file tree, from its indentation."""
    (body,) = blocks("tree")
    folders, out = {}, []
    for line in body.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        path = folders.get(depth - 1, "") + name
        if name.endswith("/"):
            folders[depth] = path
        out.append(path)
        assert len(line.split()) > 1, f"{name} is not explained"
    return out


def test_there_are_two_commands_and_each_is_one_line_that_sets_up_and_goes():
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    setup = r"python3 -m venv \.venv && \.venv/bin/pip install -q -c constraints\.txt -e '\.\[(cpu|test)\]' && "
    assert len(commands) == 2
    assert re.fullmatch(setup + r"\.venv/bin/python -m kvlab\.search --budget-gb 6", commands[0])
    assert re.fullmatch(setup + r"\.venv/bin/python -m pytest -q -n auto", commands[1])


def test_every_path_of_the_tree_exists_once():
    paths = tree()
    assert [p for p in paths if not (ROOT / p).exists()] == []
    assert len(set(paths)) == len(paths)


def test_the_tree_is_complete():
    listed = set(tree())
    here = {p.relative_to(ROOT) for p in (ROOT / "kvlab").rglob("*.py")}
    modules = {str(p) for p in here if p.name not in ("__init__.py", "__main__.py")}
    folders = {f"{p.parent}/" for p in here}
    assert sorted((modules | folders | {"kvlab/__main__.py"}) - listed) == []
    for folder in ("sweeps", "evalsets"):
        files = {str(p.relative_to(ROOT)) for p in (ROOT / folder).iterdir() if not p.name.startswith(".")}
        assert sorted(files - listed) == []


def test_python_examples_parse_and_import_what_exists():
    for source in blocks("python"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                # names that are modules, such as kvlab.nb, are there once they are asked for
                module = __import__(node.module, fromlist=[alias.name for alias in node.names])
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_words_and_margins_are_those_of_the_code():
    assert re.findall(r"^\| ([A-Z]+) \|", TEXT, re.M) == [*VERDICTS]
    (said,) = re.findall(r"(\d+) items a family can show 10 points, (\d+) show 5, (\d+) show 3, (\d+) show 2", TEXT)
    for n, margin in zip(map(int, said), (0.10, 0.05, 0.03, 0.02), strict=True):
        assert planned_margin(n) == margin
        assert n == 29 or planned_margin(n - 1) > margin
    with pytest.raises(ValueError, match="29"):
        planned_margin(28)


def test_ci_takes_its_command_from_here(tmp_path):
    script = (ROOT / ".ci" / "run").read_text()
    # the whole suite by the README's words alone; what CI adds names its folders
    extra = [line for line in script.splitlines() if "pytest -q" in line]
    assert all(" tests/browser " in line or " tests/kernels " in line for line in extra)
    # a stand-in for python3 would be the whole run; the extraction is what can go wrong
    body = script.split("<<'PYTHON'\n")[1].split("\nPYTHON")[0]
    done = subprocess.run([sys.executable, "-c", body], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == [line for block in blocks("bash") for line in block.splitlines()][1]
