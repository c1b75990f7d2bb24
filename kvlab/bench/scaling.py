"""How many workers a storage bears: a simulated study that sleeps for its trials, so that only coordination costs.

A worker of the bench is a thread with a storage, a lease and an identity of its own, some of them in each of a few
processes: what they ask of the storage is what as many machines would ask. Times are those that the storage recorded,
from the first start to the last end, so that starting Python is not measured.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvlab.bench.postgres import NoServerError, Server
from kvlab.bench.text import columns
from kvlab.study import simulated
from kvlab.study.board import Board, create
from kvlab.study.loop import work
from kvlab.study.storages import open_storage

SCHEMA = "kvlab.bench.workers/1"
STORAGES = ("journal", "postgresql")
COUNTS = (1, 4, 16, 64)
PROCESSES = 4
# What the figures are for: this many workers, trials of this length.
WANTED_WORKERS, WANTED_TRIAL_S = 64, 10.0
EACH = 3
NEAR_LINEAR = 0.8


def run(
    say: Callable[[str], None],
    storages: Sequence[str] = STORAGES,
    counts: Sequence[int] = COUNTS,
    trial_s: float = WANTED_TRIAL_S,
    each: int = EACH,
) -> dict[str, Any]:
    """The document: rows by storage and workers, and how many trials a second a storage can coordinate at most."""
    rows, capacity, notes = [], [], []
    for name in storages:
        try:
            with _place(name) as url:
                for count in counts:
                    rows.append({"storage": name, **_row(url, count, trial_s, each)})
                    say(f"{name}, {count} workers: {rows[-1]['speedup']:.1f} times one")
                free = _row(url, PROCESSES, 0.0, 20)
                rate = free["trials"] / free["wall_s"]
                capacity.append({"storage": name, "processes": PROCESSES, "trials_per_s": round(rate, 2)})
        except NoServerError as error:
            notes.append(f"{name} was left out: {error}")
    needed = WANTED_WORKERS / WANTED_TRIAL_S
    return {
        "schema": SCHEMA,
        "rows": rows,
        "capacity": capacity,
        "needed": {"workers": WANTED_WORKERS, "trial_s": WANTED_TRIAL_S, "trials_per_s": needed},
        "notes": notes,
        "ok": holds(rows, capacity, max(counts)),
    }


def holds(rows: Sequence[Mapping[str, Any]], capacity: Sequence[Mapping[str, Any]], most: int) -> bool:
    """Every trial done once, the most workers near-linear, and every storage quick enough for the workers wanted."""
    return (
        bool(rows)
        and all(r["distinct"] == r["complete"] == r["trials"] for r in rows)
        and all(c["trials_per_s"] >= WANTED_WORKERS / WANTED_TRIAL_S for c in capacity)
        and all(r["efficiency"] >= NEAR_LINEAR for r in rows if r["workers"] == most)
    )


@contextmanager
def _place(name: str) -> Iterator[str]:
    if name == "postgresql":
        with Server() as server:
            yield server.url
    else:
        with tempfile.TemporaryDirectory(prefix="kvlab-workers-") as folder:
            yield f"journal:{folder}/study.log"


def _row(url: str, workers: int, trial_s: float, each: int) -> dict[str, Any]:
    """One study of `workers` x `each` trials, from the first start to the last end."""
    settings = simulated.Settings(trials=workers * each, seconds=trial_s, pieces=1, seed=workers)
    name = f"bench-{workers}-{each}-{trial_s:g}"
    storage = open_storage(url)
    create(storage, name, settings.to_dict())
    board = Board(storage, name)
    processes = min(workers, PROCESSES)
    shares = [workers // processes + (n < workers % processes) for n in range(processes)]
    children = [_child({"url": url, "study": name, "threads": share}) for share in shares]
    try:
        for child in children:
            _line(child)
        board.post(simulated.plan(name, settings))
        board.seal()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            if child.wait():
                raise RuntimeError(f"a worker process of the bench ended with {child.returncode}")
    finally:
        for child in children:
            child.kill()
            child.wait()
    return _measured(board, workers, trial_s, each)


def _measured(board: Board, workers: int, trial_s: float, each: int) -> dict[str, Any]:
    done = [t for t in board.trials() if t.datetime_start and t.datetime_complete]
    begin, end = min(t.datetime_start for t in done), max(t.datetime_complete for t in done)  # type: ignore[type-var]
    wall = (end - begin).total_seconds()  # type: ignore[operator]
    return {
        "workers": workers,
        "trial_s": trial_s,
        "trials": workers * each,
        "complete": sum(t.state.name == "COMPLETE" for t in board.trials()),
        "distinct": len({json.dumps(t.params) for t in done}),
        "wall_s": round(wall, 3),
        "trials_per_s": round(len(done) / wall, 2),
        "speedup": round(len(done) * trial_s / wall, 2),
        "efficiency": round(each * trial_s / wall, 3),
    }


def _child(job: Mapping[str, Any]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "kvlab.bench.scaling"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(job) + "\n")
    child.stdin.flush()
    return child


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker process of the bench ended with {child.wait()} before it was ready")
    return line


def serve() -> None:
    """A child: open everything, say so, wait for the word, work."""
    job = json.loads(sys.stdin.readline())
    boards = [Board(open_storage(job["url"]), job["study"]) for _ in range(job["threads"])]
    objective = simulated.Simulated(simulated.Settings.from_dict(boards[0].spec()))
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        return
    threads = [threading.Thread(target=work, args=(b, objective), kwargs={"stop": _Never()}) for b in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Never:
    """Nobody asks for a stop: the bench ends its children."""

    asked = False


def table(document: Mapping[str, Any]) -> str:
    """The rows for people, and what they mean for the workers wanted."""
    head = ["storage", "workers", "trials", "trials/s", "speed-up", "efficiency"]
    names = ("workers", "trials", "trials_per_s", "speedup", "efficiency")
    lines = columns([head, *([r["storage"], *(f"{r[n]:g}" for n in names)] for r in document["rows"])])
    need = document["needed"]
    for row in document["capacity"]:
        lines.append(
            f"{row['storage']}: {row['trials_per_s']:g} trials/s at most from {row['processes']} processes; "
            f"{need['workers']} workers with trials of {need['trial_s']:g} s need {need['trials_per_s']:g}"
        )
    return "\n".join([*lines, *document["notes"], f"ok: {document['ok']}"])


if __name__ == "__main__":
    serve()
