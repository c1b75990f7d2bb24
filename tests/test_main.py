"""`python -m kvlab`: one line for each command, nothing heavy before one is chosen."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvlab.__main__ import COMMANDS, main
from kvlab.runs import Run

HEAVY = {"torch", "transformers", "numpy", "pandas", "optuna", "papermill", "matplotlib", "IPython"}


def test_help_lists_every_command_with_one_line(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, (_, line) in COMMANDS.items():
        assert f"  {name:<9} {line}\n" in printed


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_nothing_heavy(argv):
    code = f"""
import sys
import time
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
    assert all(f"  {name:<9} {line}\n" in printed for name, (_, line) in COMMANDS.items())
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


def test_caches_are_listed_longest_unused_first(tmp_path, capsys):
    for kind, name, size, days in (("centres", "c.safetensors", 10, 20), ("snapshots", "s.safetensors", 400, 30)):
        path = tmp_path / kind / name
        path.parent.mkdir()
        path.write_bytes(b"x" * size)
        os.utime(path, (time.time() - days * 86_400,) * 2)
    assert main(["ls", "--caches", "--cache", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(t["kind"], t["name"], t["bytes"], round(t["unused_days"])) for t in found] == [
        ("snapshots", "s", 400, 30),
        ("centres", "c", 10, 20),
    ]
    assert main(["ls", "--caches", "--cache", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[2:4] for line in out.splitlines()] == [["snapshots", "s,"], ["centres", "c,"]]
    assert err == f"2 things, 410 B, in {tmp_path}\n"


def test_a_reader_that_has_read_enough_ends_it_quietly(tmp_path):
    (tmp_path / "snapshots").mkdir()
    for n in range(1500):  # more than a pipe holds
        (tmp_path / "snapshots" / f"{n:0100d}").touch()
    command = [sys.executable, "-m", "kvlab", "ls", "--caches", "--cache", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        assert "snapshots" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 128 + signal.SIGPIPE
