"""Runs of the command that several tests look at: made once, in processes of their own, shared by all workers."""

import json
import os
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
import pytest
from tiny_folder import save_tiny

from kvlab.runs import Run

WORK = ["--context", "4096", "--concurrency", "1"]
SIZES = ["--items", "4", "--trials", "10", "--seed", "3"]
BUDGET = 900_000  # raw takes 2.1 MB, int8 1.09 MB, int4 0.66 MB
LIMIT = 900  # seconds until a process is given up


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


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty current folder with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path
