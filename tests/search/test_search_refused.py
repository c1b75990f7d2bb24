"""Bad input: exit 2, one line that names the value, the rule and the fix, and nothing written or lost."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab.runs import Run, config_hash
from kvlab.search.__main__ import main

LIMIT = 900
BUDGET = 900_000  # as in conftest.py


def _tree(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def _refused(capsys: Any, *flags: str) -> str:
    """The one line that a refused command says."""
    try:
        code = main(list(flags))
    except SystemExit as stop:  # argparse
        code = stop.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--budget-gb is needed"),
        (["--budget-gb", "0"], "a budget must be positive, got '0'"),
        (["--budget-gb", "-3"], "a budget must be positive, got '-3'"),
        (["--budget-gb", "6 potatoes"], "a number of GB or a size such as 6GiB or 800MB, got '6 potatoes'"),
        (["--budget-gb", "nan"], "got 'nan'"),
        (["--budget-gb", "6", "--context", "0"], "--context must be at least 1, got 0"),
        (["--budget-gb", "6", "--context", "many"], "invalid int value: 'many'"),
        (["--budget-gb", "6", "--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--budget-gb", "6", "--families", "maths"], "did you mean 'math'?"),
        (["--budget-gb", "6", "--families", ","], "--families needs at least one"),
        (["--budget-gb", "6", "--items", "1"], "--items must be at least 2, got 1"),
        (["--budget-gb", "6", "--trials", "0"], "--trials must be at least 1, got 0"),
        (["--budget-gb", "6", "--minutes", "nan"], "--minutes must be a positive number, got nan"),
        (["--budget-gb", "6", "--mode", "smalest"], "did you mean 'smallest'?"),
        (["--budget-gb", "6", "--layers", "each"], "--layers: unknown layers 'each'"),
        (["--budget-gb", "6", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--budget-gb", "6", "--model", "smollm2-135n"], "did you mean 'smollm2-135m'?"),
        (["--budget-gb", "6", "--model", "./nowhere"], "check the path"),
        (["--budget", "6", "--bugdet", "7"], "unrecognized arguments: --bugdet 7"),
        (["--resume", "auto"], "no unfinished search under runs; start one with --budget-gb"),
        (["--resume", "20990101T000000000Z-search-00000000"], "no run '20990101T000000000Z-search-00000000'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_refused_and_nothing_is_written(place, capsys, flags, says) -> None:
    assert says in _refused(capsys, *flags)
    assert list(place.rglob("*")) == []


def test_an_out_below_a_file_is_refused(place, capsys) -> None:
    (place / "file").write_text("mine")
    line = _refused(capsys, "--budget-gb", "6", "--out", "file/runs")
    assert "file is a file; choose a folder" in line
    assert _tree(place).keys() == {"file"}
    assert (place / "file").read_text() == "mine"


def test_an_out_that_cannot_be_written_is_refused(place, capsys) -> None:
    """Where even root may not."""
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    assert "--out /proc/runs cannot be written" in _refused(capsys, "--budget-gb", "6", "--out", "/proc/runs")


def test_a_folder_that_is_no_run_is_refused(place, capsys) -> None:
    (place / "notes").mkdir()
    assert "is a folder but not a run" in _refused(capsys, "--resume", "notes")


def _copied(finished: Any, place: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The finished run with a changed config, under the name that config has."""
    config = json.loads((finished.run.path / "config.json").read_text())
    change(config)
    path = place / "runs" / f"{finished.run.path.name[:-8]}{config_hash(config)[:8]}"
    shutil.copytree(finished.run.path, path)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--trials", "99"], "trials: this run has 10, asked for 99"),
        (["--budget-gb", "6"], f"budget_bytes: this run has {BUDGET}, asked for 6000000000"),
        (["--context", "8192"], "context: this run has 4096, asked for 8192"),
        (["--families", "math"], "families: this run has ('retrieval', 'math', 'code'), asked for ('math',)"),
        (["--seed", "4"], "seed: this run has 3, asked for 4"),
        (["--mode", "map"], "mode: this run has best, asked for map"),
        (["--layers", "uniform"], "layers: this run has auto, asked for uniform"),
    ],
)
def test_flags_that_contradict_the_run_are_refused(finished, place, capsys, flags, says) -> None:
    before = _tree(finished.folder)
    line = _refused(capsys, "--resume", str(finished.run.path), *flags)
    assert says in line
    assert "Leave these flags out" in line
    assert _tree(finished.folder) == before
    assert list(place.rglob("*")) == []


@pytest.mark.parametrize("what", ["space", "weights_sha256", "items", "versions"])
def test_a_run_of_another_space_model_or_version_is_not_resumed(finished, place, capsys, what) -> None:
    def change(config: dict[str, Any]) -> None:
        config["identity"][what] = {"torch": "1.0"} if what == "versions" else "0123456789ab"

    path = _copied(finished, place, change)
    before = _tree(path)
    line = _refused(capsys, "--resume", str(path))
    assert f"cannot be resumed, its scores would not compare: {what}: " in line
    assert "now" in line
    assert "Start a new run" in line
    assert _tree(path) == before


def test_a_config_edited_by_hand_is_not_resumed(finished, place, capsys) -> None:
    path = place / "runs" / finished.run.path.name
    shutil.copytree(finished.run.path, path)
    config = json.loads((path / "config.json").read_text())
    config["sizes"]["trials"] = 3
    (path / "config.json").write_text(json.dumps(config))
    assert "edited after the run" in _refused(capsys, "--resume", str(path))


def test_a_run_that_is_no_search_is_not_resumed(place, capsys) -> None:
    run = Run.create(place / "runs", "sweep", {"schema": "kvlab.sweep/1"})
    assert "is not a search" in _refused(capsys, "--resume", run.path.name)


def test_a_run_that_is_being_written_is_not_resumed(finished, place, capsys) -> None:
    path = _copied(finished, place, lambda config: None)
    hold = f"from kvlab.runs import Run\nwith Run.open({str(path)!r}).lock():\n print('held', flush=True)\n input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        line = _refused(capsys, "--resume", str(path))
        other.communicate("\n", timeout=LIMIT)
    assert f"is being written by process {other.pid}" in line
