"""Real processes on real storages: killed in the middle of everything, they end where one process alone does."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from optuna.trial import TrialState

from kvlab.study import simulated
from kvlab.study.board import PIECE, Board, create
from kvlab.study.loop import work
from kvlab.study.storages import Storage, open_storage
from kvlab.study.summary import front, summary

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300  # seconds until a process is given up
LEASE = 8.0  # long enough for a starved machine: no living worker should seem dead


def made(url: str, name: str, settings: simulated.Settings) -> Board:
    storage = open_storage(url)
    assert create(storage, name, settings.to_dict())
    board = Board(storage, name)
    board.post(simulated.plan(name, settings))
    board.seal()
    return board


def serial(folder: Path, name: str, settings: simulated.Settings) -> Board:
    """The same study, worked on by nobody but this process."""
    board = made(f"journal:{folder}/serial.log", name, settings)
    work(board, simulated.Simulated(settings), stop=SimpleNamespace(asked=False))
    return board


def mortal(url: str, name: str, log: Path, die: str | None = None, after: int = 0) -> subprocess.Popen[str]:
    job = {"url": url, "study": name, "lease": LEASE, "log": str(log), "die": die, "after": after}
    command = [sys.executable, str(ROOT / "tests" / "mortal.py"), json.dumps(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What they wrote to stderr, once all have ended."""
    try:
        return [p.communicate(timeout=LIMIT)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()


def complete(storage: Storage, name: str) -> int:
    return sum(t.state == TrialState.COMPLETE for t in Board(storage, name).trials())


def until(condition: Any) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_four_workers_two_killed_and_the_server_restarted_end_where_one_does(url, fresh, tmp_path, request) -> None:
    settings = simulated.Settings(trials=40, seconds=0.1)
    name, log = fresh("four"), tmp_path / "pieces.log"
    board = made(url, name, settings)
    dying = [mortal(url, name, log, "trial", 3), mortal(url, name, log, "write", 5), mortal(url, name, log, "claim")]
    living = [mortal(url, name, log) for _ in range(2)]
    if url.startswith("postgresql"):
        server = request.getfixturevalue("postgres")
        until(lambda: complete(board.storage, name) >= 8)
        server.stop("immediate")
        server.start()
    said = ended(dying + living)
    assert [p.returncode for p in dying] == [-signal.SIGKILL] * 3
    assert [p.returncode for p in living] == [0, 0], said[3:]

    trials = Board(open_storage(url), name).trials()
    assert [t.number for t in trials] == list(range(40))
    assert {t.state for t in trials} == {TrialState.COMPLETE}
    assert len({json.dumps(t.params) for t in trials}) == 40
    assert all(sum(k.startswith(PIECE) for k in t.user_attrs) == 2 for t in trials)

    alone = serial(tmp_path, name, settings)
    assert [(t.params, t.value) for t in trials] == [(t.params, t.value) for t in alone.trials()]
    assert front(trials) == front(alone.trials())
    assert len(front(trials)) > 3
    assert summary(board)["best"] == summary(alone)["best"]
    _nothing_is_done_in_vain(log)


def _nothing_is_done_in_vain(log: Path) -> None:
    """Only pieces that died with their worker, unsaved, were computed twice."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    times = Counter(json.dumps([body, piece]) for body, piece, _ in lines)
    again = {key for key, n in times.items() if n > 1}
    assert len(times) == 80
    assert len(again) <= 3  # one of the worker killed mid-trial, one of that killed mid-write; one that was reaped
    assert sum(times.values()) <= 83


def test_sixteen_start_at_once_on_a_new_study_while_another_reads(url, fresh, tmp_path) -> None:
    name = fresh("many")
    words = ["--study", name, "--storage", url, "--simulate", "--quiet", "--trials", "320", "--seconds", "0.005"]
    command = [sys.executable, str(ROOT / "tests" / "mortal.py"), "many", "16", *words]
    with (tmp_path / "said").open("w+") as said:
        # A file: sixteen write to it while nobody reads.
        workers = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT)
        storage, full = open_storage(url), f"{name}-{simulated.space_hash()}"
        until(lambda: any(s.study_name == full for s in storage.direct.get_all_studies()))
        reader = Board(storage, full)
        while workers.poll() is None:
            assert summary(reader)["failed"] == []
            time.sleep(0.2)
        said.seek(0)
        lines = said.read().splitlines()
    assert workers.returncode == 0, lines
    assert sum(json.loads(line)["units"] for line in lines) == 320
    assert len(lines) == 16
    trials = reader.trials()
    assert [t.number for t in trials] == list(range(320))
    assert {t.state for t in trials} == {TrialState.COMPLETE}
    assert len({json.dumps(t.params) for t in trials}) == 320


def test_a_stopped_worker_gives_back_what_it_has_and_keeps_its_pieces(url, fresh, tmp_path) -> None:
    name = fresh("stopped")
    settings = simulated.Settings(trials=1, seconds=600, pieces=1000)
    board = made(url, name, settings)
    command = [sys.executable, "-m", "kvlab.worker", "--study", name, "--storage", url]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    until(lambda: any(k.startswith(PIECE) for t in board.trials() for k in t.user_attrs))
    worker.terminate()
    out, err = worker.communicate(timeout=LIMIT)
    assert worker.returncode == 130, err
    assert json.loads(out)["why"] == "stopped"
    (trial,) = board.trials()
    assert trial.state == TrialState.WAITING
    unit = board.claim()
    assert unit is not None
    assert unit.attempt == 1  # a stop counts for nothing
    assert len(unit.done) >= 1


def test_every_line_of_a_worker_is_one_write(tmp_path, monkeypatch) -> None:
    """Many share a log, and an unbuffered stream hands on each write as it comes."""
    from kvlab.worker import main

    writes: list[str] = []
    stream = SimpleNamespace(write=writes.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    flags = ["--study", "s", "--storage", f"journal:{tmp_path}/a.log", "--simulate", "--trials", "3"]
    assert main([*flags, "--seconds", "0"]) == 0
    assert len(writes) >= 2
    assert all(text.endswith("\n") and len(text) > 1 for text in writes)
    assert json.loads(writes[-1])["units"] == 3


def test_a_worker_refuses_another_study_of_the_same_name(tmp_path) -> None:
    from kvlab.worker import main

    base = ["--study", "s", "--storage", f"journal:{tmp_path}/a.log", "--simulate", "--quiet"]
    assert main([*base, "--trials", "3"]) == 0
    assert main([*base, "--trials", "4"]) == 2


def test_configs_of_a_study_depend_on_its_name_and_nothing_else() -> None:
    settings = simulated.Settings(trials=50)
    first = [w.body for w in simulated.plan("a", settings)]
    assert first == [w.body for w in simulated.plan("a", settings)]
    assert first != [w.body for w in simulated.plan("b", settings)]
    assert first[:20] == [w.body for w in simulated.plan("a", simulated.Settings(trials=20))]
    assert len({json.dumps(b) for b in first}) == 50
