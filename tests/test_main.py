"""`python -m kvlab`: one line for each command, nothing heavy before one is chosen."""

import json
import subprocess
import sys

import pytest

from kvlab.__main__ import COMMANDS, main
from kvlab.runs import Run

HEAVY = {"torch", "transformers", "numpy", "pandas", "optuna", "papermill", "matplotlib", "IPython"}


def test_help_lists_every_command_with_one_line(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, (_, line) in COMMANDS.items():
        assert f"  {name:<8} {line}\n" in printed


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_nothing_heavy(argv):
    code = f"""
import sys
from kvlab.__main__ import main
try:
    main({argv!r})
except SystemExit as end:
    assert end.code == 0
print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert "usage" in done.stdout


@pytest.mark.parametrize(("word", "near"), [("serch", "search"), ("swep", "sweep"), ("list", "ls")])
def test_an_unknown_command_names_the_nearest(word, near, capsys):
    assert main([word]) == 2
    captured = capsys.readouterr()
    assert f"nearest is '{near}'" in captured.err
    assert captured.out == ""


def test_no_command_lists_them_all(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name:<8} {line}\n" in printed for name, (_, line) in COMMANDS.items())
    assert {"ls", "show", "compare", "gc", "report"} <= set(COMMANDS)


def test_arguments_reach_the_command(capsys):
    assert main(["sweep", "fp9"]) == 2
    assert "nearest is 'fp8'" in capsys.readouterr().err


def test_runs_are_listed_with_state_and_verdict(tmp_path, capsys):
    one = Run.create(tmp_path, "search", {"a": 1})
    one.write_json("result.json", {"verdict": "HOLDS"})
    one.set_status("done")
    two = Run.create(tmp_path, "sweep", {"a": 2})
    assert main(["ls", str(tmp_path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == [one.path.name, two.path.name]
    assert "HOLDS" in table[1]
    assert "interrupted" in table[2]
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [r["state"] for r in json.loads(capsys.readouterr().out)] == ["done", "interrupted"]
    assert main(["ls", str(tmp_path / "none")]) == 2
