"""`python -m kvlab.search` as a person runs it: real runs of a tiny model, in processes that are killed and resumed.

Runs are made once and shared by the workers of a test session. Time limits are generous; nothing asserts on a clock.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pandas as pd
import pytest
from tiny_folder import save_tiny

from kvlab.config import KVConfig
from kvlab.runs import Run, config_hash
from kvlab.search.__main__ import main
from kvlab.subject import LocalSubject

WORK = ["--context", "4096", "--concurrency", "1"]
SIZES = ["--items", "4", "--trials", "10", "--seed", "3"]
BUDGET = 900_000  # raw takes 2.1 MB, int8 1.09 MB, int4 0.66 MB
LIMIT = 900  # seconds until a process is given up
ROW = ["role", "config_id", "item_id"]


def _shared(tmp_path_factory: Any, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that whichever worker comes first fills for all."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    folder = root / f"search-{name}"
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return _shared(tmp_path_factory, "model", lambda folder: save_tiny(folder / "tiny") and None) / "tiny"


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "KVLAB_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}


def _command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kvlab.search", "--out", str(folder / "runs"), "--json", *flags]


def _start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        _command(folder, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(folder),
        cwd=folder,
    )


def _run_of(folder: Path) -> Run:
    (path,) = (p for p in (folder / "runs").iterdir() if (p / "config.json").exists())
    return Run.open(path)


def _parts(folder: Path) -> int:
    return len(list((folder / "runs").glob("*/items/part-*.parquet")))


def _interrupt(folder: Path, process: subprocess.Popen[str], number: int, parts: int) -> tuple[str, str]:
    """Send a signal as soon as `parts` parts of rows are stored."""
    until = time.monotonic() + LIMIT
    while _parts(folder) < parts and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(number)
    return process.communicate(timeout=LIMIT)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny) -> SimpleNamespace:
    """A run that nobody disturbed."""

    def make(folder: Path) -> None:
        flags = ["--model", str(tiny), "--budget-gb", f"{BUDGET}B", *WORK, *SIZES]
        done = _start(folder, *flags)
        out, err = done.communicate(timeout=LIMIT)
        (folder / "stdout").write_text(out)
        (folder / "stderr").write_text(err)
        (folder / "code").write_text(str(done.returncode))

    folder = _shared(tmp_path_factory, "finished", make)
    out, err, code = ((folder / n).read_text() for n in ("stdout", "stderr", "code"))
    assert code == "0", err
    return SimpleNamespace(folder=folder, out=out, err=err, run=_run_of(folder), result=json.loads(out))


@pytest.fixture(scope="session")
def disturbed(tmp_path_factory, tiny) -> SimpleNamespace:
    """The same run, killed, its snapshots damaged, resumed, interrupted, and resumed to the end."""

    def make(folder: Path) -> None:
        told: dict[str, Any] = {}
        flags = ["--model", str(tiny), "--budget-gb", f"{BUDGET}B", *WORK, *SIZES]
        first = _start(folder, *flags)
        _interrupt(folder, first, signal.SIGKILL, 3)
        run = _run_of(folder)
        told["killed"] = {"code": first.returncode, "status": run.status, "state": run.state()}
        told["killed_rows"] = len(run.rows())
        for damaged in (run.path / "snapshots").glob("*.safetensors"):
            data = bytearray(damaged.read_bytes())
            data[len(data) // 2] ^= 16
            damaged.write_bytes(bytes(data))

        second = _start(folder, "--resume", str(run.path))
        out, err = _interrupt(folder, second, signal.SIGINT, _parts(folder) + 1)
        told["interrupted"] = {"code": second.returncode, "out": out, "err": err, "status": run.status}
        told["interrupted_rows"] = len(run.rows())

        third = _start(folder, "--resume", "auto")
        out, err = third.communicate(timeout=LIMIT)
        told["resumed"] = {"code": third.returncode, "out": out, "err": err, "status": run.status}
        (folder / "told.json").write_text(json.dumps(told))

    folder = _shared(tmp_path_factory, "disturbed", make)
    told = json.loads((folder / "told.json").read_text())
    assert told["resumed"]["code"] == 0, told["resumed"]["err"]
    return SimpleNamespace(folder=folder, run=_run_of(folder), result=json.loads(told["resumed"]["out"]), **told)


# -- a run that finishes -----------------------------------------------------------------------------------------------


def test_stdout_is_one_json_document_of_the_schema(finished) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    assert finished.out.count("\n") == 1
    result = json.loads(finished.out, parse_constant=refuse)
    assert result == json.loads((finished.run.path / "result.json").read_text(), parse_constant=refuse)
    assert result["schema"] == "kvlab.search/1"
    assert set(result) >= {
        *("schema", "model", "workload", "budget_bytes", "raw_workload_bytes", "binding", "notes", "baseline"),
        *("anchors", "trials", "finalists", "verdict", "winner", "margin", "controls", "before_after", "ledger"),
        *("counters", "wall_s", "run", "seed", "versions"),
    }
    assert set(result["model"]) >= {
        *("name", "revision", "weights_sha256", "dtype", "layers", "kv_heads", "head_dim", "trained_context"),
    }
    assert result["workload"] == {"context": 4096, "concurrency": 1}
    assert (result["budget_bytes"], result["seed"]) == (BUDGET, 3)
    assert result["run"] == str(finished.run.path)
    assert result["wall_s"] > 0


def test_judged_configs_carry_everything_that_is_promised(finished) -> None:
    result = finished.result
    assert 1 <= len(result["finalists"]) <= 3
    for f in result["finalists"]:
        assert set(f) >= {
            *("config_id", "label", "config", "toml", "workload_bytes", "predicted_bytes", "measured_bytes"),
            *("effective_bits", "bytes_per_token", "sessions", "families", "verdict"),
        }
        config = KVConfig.from_toml(f["toml"])
        assert config.id == f["config_id"]
        assert KVConfig.from_dict(f["config"]) == config
        assert f["predicted_bytes"] == f["measured_bytes"] > 0
        assert f["workload_bytes"] <= BUDGET
        assert set(f["families"]) == {"retrieval", "math", "code"}
        for row in f["families"].values():
            assert set(row) >= {"n", "base", "score", "diff", "low", "high", "margin", "verdict"}
            assert row["n"] == 4
            assert row["margin"] == 0.10  # four items cannot decide anything smaller
            assert row["verdict"] == "INSENSITIVE"  # a random model knows no answer
    assert result["verdict"] == "INSENSITIVE"
    assert result["winner"] is None
    assert result["margin"]["value_points"] == 10
    assert "cannot decide" in result["margin"]["rule"]


def test_the_uncompressed_cache_is_shown_as_over_the_budget(finished) -> None:
    result = finished.result
    anchors = {a["name"]: a for a in result["anchors"]}
    assert list(anchors) == ["raw", "fp8", "int8", "int4", "window"]
    assert anchors["raw"]["workload_bytes"] == result["raw_workload_bytes"] > BUDGET
    assert result["binding"] is True
    assert [n for n, a in anchors.items() if not a["feasible"]] == ["raw", "fp8", "int8"]
    assert all(a["effective_bits"] > 0 and a["search"] for a in anchors.values())
    assert anchors["int8"]["verdict"] == "INSENSITIVE"  # confirmed as well


def test_prefills_equal_distinct_items(finished) -> None:
    counters, rows = finished.result["counters"], finished.run.rows()
    assert counters["prefills"] == counters["items"] == rows.item_id.nunique() == 3 * (4 + 4)
    assert counters["configs_scored"] == rows.config_id.nunique() > 10
    assert counters["item_scores"] == len(rows)
    assert counters["corrupt_snapshots"] == 0
    assert not rows.duplicated(ROW).any()
    assert (rows.measured_bytes == rows.predicted_bytes).all()
    assert set(rows.role) == {"search", "confirm", "aa"}
    assert finished.result["controls"]["aa"] == {"n": 12, "flips": 0}


def test_the_run_folder_is_complete_and_keeps_no_snapshots(finished) -> None:
    run = finished.run
    assert run.is_complete()
    names = {p.name for p in run.path.iterdir()}
    assert names >= {"config.json", "provenance.json", "status.json", "items", "result.json", "report.html", "figures"}
    assert "sweet_spot.toml" not in names  # nothing held
    assert "snapshots" not in names
    assert (run.path / "figures" / "pareto.png").stat().st_size > 1000
    provenance = run.read_json("provenance.json")
    assert provenance["seeds"] == {"items": 3, "sampler": 3}
    assert provenance["evalset"]["search"] != provenance["evalset"]["confirm"]


def test_progress_goes_to_stderr(finished) -> None:
    lines = finished.err.splitlines()
    assert lines[0] == f"run: {finished.run.path}"
    assert lines[-1] == f"report: {finished.run.path / 'report.html'}"
    assert "Traceback" not in finished.err
    assert "Warning" not in finished.err


# -- killed, interrupted, resumed --------------------------------------------------------------------------------------


def test_a_kill_loses_what_was_not_stored_and_no_more(disturbed) -> None:
    assert disturbed.killed["code"] == -signal.SIGKILL
    assert disturbed.killed["status"]["state"] == "running"  # what the process said last
    assert disturbed.killed["state"] == "interrupted"  # what is known now
    assert 0 < disturbed.killed_rows < disturbed.interrupted_rows < len(disturbed.run.rows())


def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(disturbed) -> None:
    told = disturbed.interrupted
    assert told["code"] == 130
    assert told["out"] == ""
    assert told["status"]["state"] == "interrupted"
    assert f"python -m kvlab.search --resume {disturbed.run.path}" in told["err"].splitlines()[-1]
    assert "Traceback" not in told["err"]


def test_no_item_is_scored_twice(disturbed, finished) -> None:
    rows = disturbed.run.rows()
    assert not rows.duplicated(ROW).any()
    assert set(map(tuple, rows[ROW].values)) == set(map(tuple, finished.run.rows()[ROW].values))


def test_a_resumed_run_ends_where_an_undisturbed_one_does(disturbed, finished) -> None:
    ours, theirs = disturbed.result, finished.result
    assert disturbed.run.is_complete()

    def front(result: dict[str, Any]) -> list[Any]:
        return [(f["config_id"], f["workload_bytes"], f["verdict"]) for f in result["finalists"]]

    assert front(ours) == front(theirs)
    assert (ours["verdict"], ours["winner"], ours["margin"]) == (theirs["verdict"], theirs["winner"], theirs["margin"])
    for a, b in zip(ours["finalists"], theirs["finalists"], strict=True):
        assert a["families"] == b["families"]
        assert a["measured_bytes"] == b["measured_bytes"]
    for a, b in zip(ours["trials"], theirs["trials"], strict=True):
        same = ("number", "config_id", "state", "items", "feasible", "workload_bytes")
        assert [a[k] for k in same] == [b[k] for k in same]
        # Scores of float32 differ in the last digits with the company a row is computed in.
        assert a["value"] == pytest.approx(b["value"], rel=1e-4, abs=1e-5)
    assert ours["counters"]["items"] == theirs["counters"]["items"]
    assert ours["counters"]["item_scores"] == theirs["counters"]["item_scores"]
    pair = [r.rows().set_index(ROW).sort_index() for r in (disturbed.run, finished.run)]
    pd.testing.assert_series_equal(pair[0].nll, pair[1].nll, rtol=1e-4)
    pd.testing.assert_series_equal(pair[0].score, pair[1].score)


def test_damaged_snapshots_are_made_again_and_nothing_else_is(disturbed) -> None:
    counters = disturbed.result["counters"]
    assert 3 <= counters["corrupt_snapshots"] <= 12
    assert counters["prefills"] == counters["items"] + counters["corrupt_snapshots"]
    assert disturbed.interrupted["status"]["corrupt_snapshots"] >= 3


# -- refused, with nothing written -------------------------------------------------------------------------------------


def _tree(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty current folder with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path


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


# -- other ends --------------------------------------------------------------------------------------------------------


def _in_process(capsys: Any, *flags: str) -> tuple[int, dict[str, Any], str]:
    code = main(["--json", "--quiet", *flags])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


SMALL = ["--families", "math", "--items", "2", "--trials", "3", *WORK]


def test_dry_run_shows_the_plan_and_writes_no_run(tiny, place, capsys) -> None:
    flags = ["--model", str(tiny), "--budget-gb", "900kB", *WORK, "--items", "30", "--trials", "7", "--dry-run"]
    code, plan, err = _in_process(capsys, *flags)
    assert code == 0
    assert err == ""
    assert plan["schema"] == "kvlab.search.plan/1"
    assert plan["sizes"] == {"search_items": 15, "trials": 7, "confirm_items": 30}
    assert plan["margin"]["value_points"] == 10
    assert plan["estimated_s"] > 0
    assert {n: a["feasible"] for n, a in plan["anchors"].items()} == {
        "raw": False,
        "fp8": False,
        "int8": False,
        "int4": True,
        "window": True,
    }
    assert [p for p in place.rglob("*") if p.is_file()] == []
    assert not (place / "runs").exists()

    assert main(flags) == 0  # for people
    text = capsys.readouterr().out
    assert "budget 900 kB; uncompressed 16 bit needs 2.1 MB" in text
    assert "search 7 trials on up to 15 items per family, then confirm on 30 fresh ones; margin 10 points" in text
    assert not (place / "runs").exists()


def test_a_budget_that_nothing_fits_exits_3_with_the_nearest_misses(tiny, place, capsys) -> None:
    code, result, _ = _in_process(capsys, "--model", str(tiny), "--budget-gb", "2kB", *SMALL)
    assert code == 3
    assert result["finalists"] == []
    assert result["winner"] is None
    sizes = [m["workload_bytes"] for m in result["nearest_misses"]]
    assert len(sizes) == 3
    assert sizes == sorted(sizes)
    assert sizes[0] > 2000
    (folder,) = (place / "runs").glob("*-search-*")
    assert not (folder / "sweet_spot.toml").exists()
    assert Run.open(folder).is_complete()
    assert "NOTHING FITS" in (folder / "report.html").read_text()
    assert result["counters"]["prefills"] == result["counters"]["items"]


def test_a_trial_that_fails_exits_4_and_names_it(tiny, place, capsys, monkeypatch) -> None:
    scored = LocalSubject._row

    def row(self: Any, question: Any, config: KVConfig, *rest: Any) -> Any:
        if config.key.kind == "fp8" and config.budget.evicts:
            raise MemoryError("cannot allocate")
        return scored(self, question, config, *rest)

    monkeypatch.setattr(LocalSubject, "_row", row)
    code, result, _ = _in_process(capsys, "--model", str(tiny), "--budget-gb", "900kB", *SMALL)
    assert code == 4
    assert [t["state"] for t in result["trials"]].count("failed") == 1
    failed = next(t for t in result["trials"] if t["state"] == "failed")
    assert failed["reason"] == "MemoryError: cannot allocate"
    assert failed["label"].startswith("fp8_e4m3 + snapkv")
    assert result["finalists"]
    assert list(result["baseline"]["families"]) == ["math"]
    assert result["counters"]["prefills"] == result["counters"]["items"] == 4 + 2


def test_a_budget_that_does_not_bind_says_so(tiny, place, capsys) -> None:
    code, result, _ = _in_process(capsys, "--model", str(tiny), "--budget-gb", "1", *SMALL)
    assert code == 0
    assert result["binding"] is False
    assert any("does not bind" in note for note in result["notes"])
    assert [a["name"] for a in result["anchors"]] == ["raw", "fp8", "int8", "int4"]


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvlab.search", "--help"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"torch", "transformers", "optuna", "numpy", "pandas", "matplotlib"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    for word in ("--budget-gb", "--resume", "--dry-run", "exit codes", "examples"):
        assert word in done.stdout
