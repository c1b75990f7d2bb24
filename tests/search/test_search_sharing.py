"""A search worked on by many: the same steps as alone, every row made once; nobody joins who would change a score."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import standin
import torch
from standin import StandIn, harmed, items

from kvlab.book import Interrupted, StopFlag
from kvlab.layer import LayerShape, ModelShape
from kvlab.search import sharing
from kvlab.search.choice import finalists
from kvlab.search.race import Race, Racer
from kvlab.search.settings import UsageError
from kvlab.search.sharing import SearchObjective, SharedSubject, joined
from kvlab.search.space import Space
from kvlab.search.workload import Workload
from kvlab.study.board import MOST_ATTEMPTS, PIECE, Board, create
from kvlab.study.loop import run_unit, work
from kvlab.study.storages import open_storage
from kvlab.subject import BASELINE

SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
LOAD = Workload(4096, 1)
BUDGET = 2 * 2 * 64 * 2 * 4096 // 3
SEARCH = items("search", 8)
GOING = SimpleNamespace(asked=False)
LIMIT = 600
ROW = ["role", "config_id", "item_id"]


def subject(nll: Any = harmed) -> StandIn:
    made = StandIn(SHAPE, nll)
    made.loaded = SimpleNamespace(weights_sha256="0" * 64)  # type: ignore[attr-defined]
    return made


def raced(root: Path, scoring: Any) -> tuple[Race, Racer]:
    space = Space(SHAPE, LOAD, BUDGET, "float16")
    racer = Racer(space, standin.book(root, scoring), SEARCH, n_items=8, seed=0)
    return racer.run(24, 8, list(space.anchors().values()), None), racer


@pytest.fixture
def board(tmp_path) -> Board:
    storage = open_storage(f"journal:{tmp_path}/study.log")
    create(storage, "s", {"objective": "search"})
    return Board(storage, "s")


@pytest.fixture
def helpers(board) -> Iterator[list[StandIn]]:
    """Three more workers, each with a model and a storage of its own."""
    made, threads = [subject() for _ in range(3)], []
    for n, one in enumerate(made):
        mine = Board(open_storage(board.storage.url), "s", me=f"helper {n}")
        objective = SearchObjective(one, SEARCH.items, mine.me)  # type: ignore[arg-type]
        threads.append(threading.Thread(target=work, args=(mine, objective), kwargs={"stop": GOING}))
    for thread in threads:
        thread.start()
    yield made
    board.seal()
    for thread in threads:
        thread.join()


def test_a_shared_race_takes_the_steps_of_one_alone_and_makes_each_row_once(board, helpers, tmp_path) -> None:
    alone = subject()
    expected, before = raced(tmp_path / "alone", alone)
    own = subject()
    shared = SharedSubject(own, board, StopFlag())  # type: ignore[arg-type]
    claim = board.claim

    def after_the_others(prefers: Any) -> Any:
        return claim(prefers) if all(one.asked for one in helpers) else None

    board.claim = after_the_others  # type: ignore[method-assign]
    found, racer = raced(tmp_path / "shared", shared)
    assert found == expected
    size = {t.config.id: LOAD.bytes(t.config, SHAPE) for t in found.trials if t.config}
    assert finalists(found, len(SEARCH), size) == finalists(expected, len(SEARCH), size)
    assert racer.book.rows == before.book.rows
    asked = Counter(x for one in (own, *helpers) for x in one.asked)
    assert asked == Counter(alone.asked)
    assert max(asked.values()) == 1
    assert shared.counters.prefills == sum(one.counters.prefills for one in (own, *helpers))


def test_each_row_is_stored_once(board, helpers, tmp_path) -> None:
    _, racer = raced(tmp_path / "shared", SharedSubject(subject(), board, StopFlag()))  # type: ignore[arg-type]
    racer.book.save()
    rows = racer.book.run.rows()
    assert len(rows) == len(racer.book.rows)
    assert not rows.duplicated(["role", "config_id", "item_id"]).any()


def test_the_same_asked_again_is_scored_again(board) -> None:
    own = subject()
    shared = SharedSubject(own, board, StopFlag())  # type: ignore[arg-type]
    first, second = ({r.item_id: r for r in shared.score(SEARCH.items[:4], [BASELINE])} for _ in range(2))
    assert first == second
    assert len(own.asked) == 8  # a control that compares a pass with its own copy would show nothing


def test_items_of_one_context_are_one_unit(board) -> None:
    shared = SharedSubject(subject(), board, StopFlag())  # type: ignore[arg-type]
    first, second = SEARCH.items[:2]
    twin = dataclasses.replace(second, context=first.context)
    rows = list(shared.score([first, SEARCH.items[5], twin], [BASELINE]))
    assert [r.item_id for r in rows if r.item_id != SEARCH.items[5].id] == [first.id, twin.id]
    assert len(board.trials()) == 2


def test_a_config_that_cannot_be_scored_is_set_aside_as_alone(board, helpers, tmp_path) -> None:
    bad: set[str] = set()

    def broken(config: Any, item: Any) -> float:
        if config != BASELINE and config.id[0] in "0123":
            bad.add(config.id)
            raise RuntimeError(f"no kernel for {config.label}")
        return harmed(config, item)

    for helper in helpers:
        helper._nll = broken
    expected, _ = raced(tmp_path / "alone", subject(broken))
    found, racer = raced(tmp_path / "shared", SharedSubject(subject(broken), board, StopFlag()))  # type: ignore[arg-type]
    assert bad
    assert found == expected
    assert set(racer.book.failures) <= bad
    assert all(reason.startswith("RuntimeError: no kernel") for reason in racer.book.failures.values())


def test_what_fails_elsewhere_only_is_scored_here(board) -> None:
    own = subject()
    shared = SharedSubject(own, board, StopFlag())  # type: ignore[arg-type]
    other = Board(open_storage(board.storage.url), "s")

    def smaller(config: Any, item: Any) -> float:
        raise MemoryError("12 GB")

    scoring = shared.score(SEARCH.items[:1], [BASELINE])
    claim, taken = board.claim, []

    def other_first(prefers: Any) -> Any:
        if not taken:
            taken.append(other.claim())
            run_unit(other, SearchObjective(subject(smaller), SEARCH.items, other.me), taken[0], GOING)  # type: ignore[arg-type]
        return claim(prefers)

    board.claim = other_first  # type: ignore[method-assign]
    assert [row.item_id for row in scoring] == [SEARCH.items[0].id]
    assert len(own.asked) == 1


def test_a_config_that_kills_its_workers_is_not_tried_by_the_one_that_searches(board, tmp_path) -> None:
    own = subject()
    shared = SharedSubject(own, board, StopFlag())  # type: ignore[arg-type]

    def deadly(prefers: Any) -> None:
        (trial,) = board.trials()
        board.fail(trial._trial_id, "lost", f"{MOST_ATTEMPTS} workers died on it")

    board.claim = deadly  # type: ignore[method-assign,assignment]
    book = standin.book(tmp_path / "runs", shared)
    book.ensure("search", SEARCH.items[:1], [BASELINE])
    assert book.failures == {BASELINE.id: "RuntimeError: 3 workers died on it"}
    assert own.asked == []


def test_a_stop_ends_the_wait_for_others(board) -> None:
    stop = StopFlag()
    shared = SharedSubject(subject(), board, stop)  # type: ignore[arg-type]
    scoring = shared.score([SEARCH.items[0], SEARCH.items[3]], [BASELINE])
    next(scoring)
    stop.asked = True
    with pytest.raises(Interrupted):
        list(scoring)


def test_pieces_are_addressed_by_model_items_and_configs() -> None:
    body = {"items": ["a", "b"], "configs": [{"id": "1"}, {"id": "2"}]}

    def name(weights: str, **changes: Any) -> str:
        one = subject()
        one.loaded.weights_sha256 = weights  # type: ignore[attr-defined]
        (only,) = SearchObjective(one, (), "me").pieces(body | changes)  # type: ignore[arg-type]
        return only

    usual = name("w")
    assert usual == name("w", configs=[{"id": "2"}, {"id": "1"}], persist=True)
    others = {name("v"), name("w", items=["a"]), name("w", configs=[{"id": "1"}])}
    assert usual not in others
    assert len(others) == 3


def test_a_piece_saved_by_two_is_one_row_each(board) -> None:
    shared = SharedSubject(subject(), board, StopFlag())  # type: ignore[arg-type]
    list(shared.score(SEARCH.items[:1], [BASELINE]))
    (trial,) = board.trials()
    assert sum(k.startswith(PIECE) for k in trial.user_attrs) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"code": "0000"}, "code: 0000 there"),
        ({"versions": {"kvlab": "0.0.1"}}, r"versions: .*'kvlab': '0\.0\.1'.* there"),
    ],
)
def test_other_code_or_versions_are_refused_before_a_model_is_loaded(board, change, said, monkeypatch) -> None:
    monkeypatch.setattr(sharing.engine, "open_session", lambda request: pytest.fail("loaded a model"))
    facts = {"code": sharing.code_version(), "versions": sharing.engine.versions()} | change
    with pytest.raises(UsageError, match=f"cannot join s, its scores would not compare: {said}.*Install the"):
        joined(board, {"facts": facts}, model=None, threads=None)


# -- processes and a real model --------------------------------------------------------------------------------------


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "KVLAB_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}


def _until(condition: Any, process: subprocess.Popen[Any] | None = None) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert process is None or process.poll() is None, "it ended before"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def test_a_search_with_workers_of_which_one_is_killed_ends_as_one_alone(finished, tiny, tmp_path) -> None:
    url, asked = f"journal:{tmp_path}/study.log", finished.run.config["request"]
    flags = ["--model", str(tiny), "--budget-gb", f"{asked['budget_bytes']}B", "--context", str(asked["context"])]
    flags += ["--concurrency", str(asked["concurrency"]), "--items", str(asked["items"])]
    flags += ["--trials", str(asked["trials"]), "--seed", str(asked["seed"]), "--out", str(tmp_path / "runs"), "--json"]
    env = _environment(tmp_path)
    said = tmp_path / "leader.err"
    with said.open("w") as errors:
        leader = subprocess.Popen(
            [sys.executable, "-m", "kvlab.search", "--storage", url, "--study", "demo", *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
            cwd=tmp_path,
        )
    workers: list[subprocess.Popen[str]] = []
    try:
        _until(lambda: re.search(r"^study: demo-[0-9a-f]{12}; others join with", said.read_text(), re.M), leader)
        leader.send_signal(signal.SIGSTOP)  # so that there is something left when the others have loaded the model
        command = [sys.executable, "-m", "kvlab.worker", "--study", "demo", "--storage", url, "--lease", "3"]
        logs = [tmp_path / f"worker{n}.err" for n in range(2)]
        for log in logs:
            with log.open("w") as errors:
                workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env))
        for worker, log in zip(workers, logs, strict=True):
            _until(lambda log=log: "joined demo-" in log.read_text(), worker)
        leader.send_signal(signal.SIGCONT)
        for worker, log in zip(workers, logs, strict=True):
            _until(lambda log=log: "done" in log.read_text(), worker)
        workers[0].kill()
        out, _ = leader.communicate(timeout=LIMIT)
        told, _ = workers[1].communicate(timeout=LIMIT)
    finally:
        for process in (leader, *workers):
            process.kill()
    assert leader.returncode == finished_code(finished), said.read_text()
    assert workers[1].returncode == 0, logs[1].read_text()
    assert json.loads(told)["why"] == "over"
    assert json.loads(told)["units"] >= 1
    ours, theirs = json.loads(out), finished.result
    same = ("number", "config_id", "state", "items", "feasible", "workload_bytes")
    assert [[t.get(k) for k in same] for t in ours["trials"]] == [[t.get(k) for k in same] for t in theirs["trials"]]
    assert [f["config_id"] for f in ours["finalists"]] == [f["config_id"] for f in theirs["finalists"]]
    assert (ours["verdict"], ours["winner"]) == (theirs["verdict"], theirs["winner"])
    (path,) = (tmp_path / "runs").glob("*-search-*")
    from kvlab.runs import Run

    rows = Run.open(path).rows()
    assert not rows.duplicated(ROW).any()
    assert set(map(tuple, rows[ROW].values)) == set(map(tuple, finished.run.rows()[ROW].values))
    states = Counter(t.state.name for t in Board(open_storage(url), _name(url)).trials())
    assert states["RUNNING"] == states["WAITING"] == 0


def finished_code(finished: Any) -> int:
    return int((finished.folder / "code").read_text())


def _name(url: str) -> str:
    (study,) = open_storage(url).direct.get_all_studies()
    return study.study_name


def test_a_worker_with_other_weights_is_refused(finished, tiny, tmp_path) -> None:
    """The study says which weights; a folder with others is not it."""
    from tiny_folder import save_tiny

    url = f"journal:{tmp_path}/study.log"
    request = finished.run.config["request"]
    storage = open_storage(url)
    facts = finished.run.config["identity"] | {"device": "cpu", "code": sharing.code_version()}
    spec = {"objective": "search", "request": request, "facts": facts, "items": {}, "threads": 1}
    create(storage, "other-0123456789ab", spec)
    save_tiny(tmp_path / "tiny", seed=5)
    command = [sys.executable, "-m", "kvlab.worker", "--study", "other", "--storage", url]
    done = subprocess.run(
        [*command, "--model", str(tmp_path / "tiny")],
        capture_output=True,
        text=True,
        env=_environment(tmp_path),
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot join other-0123456789ab, its scores would not compare: weights_sha256:" in done.stderr
    assert "Traceback" not in done.stderr
