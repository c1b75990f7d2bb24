"""`python -m kvlab study`: ls, status, repair, and a gRPC proxy that workers use."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.trial import TrialState

from kvlab.__main__ import main
from kvlab.study import simulated
from kvlab.study.board import Board, create
from kvlab.study.loop import work
from kvlab.study.storages import open_storage

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = simulated.Settings(trials=6)


@pytest.fixture
def board(url, fresh) -> Board:
    name = fresh("cli")
    storage = open_storage(url)
    create(storage, name, SETTINGS.to_dict())
    board = Board(storage, name, lease_s=0.5)
    board.post(simulated.plan(name, SETTINGS))
    board.seal()
    return board


def said(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_ls_and_status_count(board, url, capsys) -> None:
    unit = board.claim()
    assert unit is not None
    assert main(["study", "ls", "--storage", url, "--json"]) == 0
    (row,) = [r for r in said(capsys) if r["study"] == board.name]
    assert (row["objective"], row["waiting"], row["running"], row["complete"]) == ("simulated", 5, 1, 0)
    assert main(["study", "ls", "--storage", url]) == 0
    assert f"{board.name}  simulated  1 running, 5 waiting" in capsys.readouterr().out
    assert main(["study", "status", board.name, "--storage", url, "--json"]) == 0
    status = said(capsys)
    assert status["schema"] == "kvlab.study/1"
    assert [r["owner"] for r in status["running"]] == [board.me]
    assert status["best"] is None


def test_repair_gives_back_what_does_not_beat_and_leaves_what_does(board, url, capsys) -> None:
    dead, alive = board.claim(), board.claim()
    assert dead is not None
    assert alive is not None
    alive_board = Board(open_storage(url), board.name, me=board.me, lease_s=0.5)
    stop = SimpleNamespace(done=False)

    def beat() -> None:
        n = 0
        while not stop.done:
            n += 1
            alive_board.renew(alive, n)
            time.sleep(0.05)

    import threading

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert main(["study", "repair", board.name, "--storage", url, "--json"]) == 0
    finally:
        stop.done = True
        thread.join()
    found = said(capsys)
    assert found == {"study": board.name, "given_back": [dead.number], "posted_again": [], "running": 1}
    assert main(["study", "repair", board.name, "--storage", url, "--json", "--now"]) == 0
    assert said(capsys)["given_back"] == [alive.number]
    assert work(board, simulated.Simulated(SETTINGS), stop=SimpleNamespace(asked=False)).units == 6
    assert {t.state for t in board.trials()} == {TrialState.COMPLETE}


def test_repair_posts_what_failed_once_more_when_asked(board, url, capsys) -> None:
    unit = board.claim()
    assert unit is not None
    board.fail(unit.trial_id, "error", "RuntimeError: no memory")
    assert main(["study", "repair", board.name, "--storage", url]) == 0
    assert "0 posted again" in capsys.readouterr().out
    assert main(["study", "repair", board.name, "--storage", url, "--failed", "--json"]) == 0
    assert said(capsys)["posted_again"] == [unit.number]
    work(board, simulated.Simulated(SETTINGS), stop=SimpleNamespace(asked=False))
    done = [t for t in board.trials() if t.state == TrialState.COMPLETE]
    assert len({json.dumps(t.params) for t in done}) == 6
    assert main(["study", "repair", board.name, "--storage", url, "--failed", "--json"]) == 0
    assert said(capsys)["posted_again"] == []


def test_an_unknown_study_names_the_nearest(board, url, capsys) -> None:
    for command in (["study", "status", f"{board.name}x"], ["worker", "--study", f"{board.name}x"]):
        assert main([*command, "--storage", url]) == 2
        assert "nearest is" in capsys.readouterr().err


def test_workers_go_through_a_proxy(postgres, fresh, capsys) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'kvlab[grpc]'")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvlab.study", "serve", "--storage", postgres.url, "--port", str(port)]
    # Errors to a file of its own: nobody reads a pipe while the proxy runs.
    proxy = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT, env=os.environ)
    url, name = f"grpc://localhost:{port}", fresh("proxy")
    try:
        create(open_storage(url), name, SETTINGS.to_dict())
        board = Board(open_storage(url), name)
        board.post(simulated.plan(name, SETTINGS))
        board.seal()
        worker = [sys.executable, "-m", "kvlab.worker", "--study", name, "--quiet", "--storage", url]
        both = [subprocess.Popen(worker, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
        outs = [json.loads(p.communicate(timeout=300)[0]) for p in both]
        assert sum(o["units"] for o in outs) == 6
        assert {t.state for t in Board(open_storage(postgres.url), name).trials()} == {TrialState.COMPLETE}
    finally:
        proxy.kill()
        proxy.wait()
