"""A run followed, read back and watched: throttled, ended by itself, the same afterwards."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import textwrap

import matplotlib as mpl
import pytest
import showing

from kvlab.nb import live as module
from kvlab.nb.live import LivePareto
from kvlab.nb.loaded import load
from kvlab.nb.watching import watch
from kvlab.runs import Run


@pytest.fixture
def running(tmp_path):
    return showing.run(tmp_path, state="running", rows=9)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_lines_headless_are_few_and_only_when_there_is_news(running, capsys):
    clock = Clock()
    live = LivePareto(running, every_s=2.0, clock=clock)
    for _ in range(300):
        clock.now += 0.1
        live.refresh()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == live.updates == 1  # thirty seconds, nothing new after the first
    assert "27 scores of 3 configs so far, no verdict yet" in said.err
    running.append([{**running.rows().to_dict("records")[0], "item_id": "passkey/confirm/0/77"}])
    clock.now += 20
    live.refresh()
    assert "28 scores" in capsys.readouterr().err


def test_pictures_come_at_most_every_two_seconds_and_a_tenth_of_the_time(running, monkeypatch):
    clock, shown = Clock(), []

    def drawn(self, data, words):
        shown.append(clock.now)
        clock.now += 1.0  # a slow figure

    monkeypatch.setattr(module, "in_kernel", lambda: True)
    monkeypatch.setattr(LivePareto, "_put", drawn)
    monkeypatch.setattr(module, "picture", lambda run, result: (b"", ""))
    live = LivePareto(running, every_s=2.0, clock=clock)
    for n in range(400):
        clock.now += 0.1
        monkeypatch.setattr(module.doc, "from_rows", lambda run, n=n: {"scored": [{"n": n + 1}]})
        live.refresh()
    assert shown[0] == pytest.approx(2.0, abs=0.15)
    gaps = [b - a for a, b in itertools.pairwise(shown)]
    assert min(gaps) >= 10.0  # a second each: a tenth of the time


def test_it_ends_with_the_run_as_it_is(running, capsys):
    with LivePareto(every_s=2.0) as live:
        progress = live(running, 10)
        progress.add(3)
        running.set_status("failed", error="ValueError: x")
    assert "is failed" in capsys.readouterr().err
    with LivePareto() as unused:
        pass
    assert unused.finish() is None


def test_a_run_read_back_is_what_it_was(tmp_path):
    made = showing.run(tmp_path, document=showing.result())
    one, two = load(made), load(made.path.name[:15], root=tmp_path)
    assert one._repr_mimebundle_() == two._repr_mimebundle_()
    assert one.table.equals(two.table)
    assert one.figure.data == two.figure.data
    assert one.figure.data[:4] == b"\x89PNG"
    assert "int8" in one.figure.alt
    assert list(one.table.columns)[-1] == "verdict"
    assert len(one.rows) == 90
    assert {"finalists", "families"} <= set(one.tables)
    assert one.state == "done"


def test_a_figure_does_not_go_by_the_style_of_the_kernel(tmp_path):
    found = load(showing.run(tmp_path, document=showing.result()))
    plain = found.figure.data
    with mpl.rc_context({"font.family": "serif", "axes.linewidth": 4, "axes.labelpad": 20}):
        assert found.figure.data == plain


def test_an_unfinished_run_has_a_figure_of_its_rows(tmp_path):
    found = load(showing.run(tmp_path, state="running"))
    assert found.result["partial"] in ("running", "interrupted")
    assert found.figure.data[:4] == b"\x89PNG"
    assert "90 scores of 3 configs" in found.figure.alt
    assert "int4 4.50 bits" in found.figure.alt
    assert load(found.run).figure.data == found.figure.data


def test_an_empty_run_is_shown_all_the_same(tmp_path):
    run = Run.create(tmp_path, "search", {"seed": 0})
    found = load(run)
    assert found.table.empty
    assert "No score yet" in found.figure.alt
    assert "NO VERDICT" in repr(found)


def test_unknown_runs_name_the_nearest(tmp_path):
    made = showing.run(tmp_path)
    with pytest.raises(FileNotFoundError, match=made.path.name):
        load("20991231", root=tmp_path)


def test_watching_ends_when_the_run_is_done(tmp_path, capsys):
    run = Run.create(tmp_path, "sweep", {"seed": 0})
    done = showing.run(tmp_path / "other", document=showing.result())
    naps = []

    def meanwhile(seconds):
        naps.append(seconds)
        if len(naps) == 1:
            run.append(done.rows().to_dict("records"))
        if len(naps) == 3:
            run.write_json("result.json", showing.result() | {"run": str(run.path)})
            run.set_status("done")

    with run.lock():
        found = watch(run, every_s=0.5, sleep=meanwhile)
    assert naps == [0.5] * 3
    assert found.state == "done"
    assert found.figure.data == load(run).figure.data
    assert "is done" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["failed", "interrupted", "partial", "done"])
def test_watching_what_has_ended_does_not_wait(tmp_path, state):
    run = showing.run(tmp_path, state=state)
    assert watch(run, sleep=lambda s: pytest.fail("waited")).state == state


def test_watching_stops_after_a_timeout_and_by_the_kernels_interrupt(running, capsys):
    with running.lock():
        assert watch(running, timeout_s=0.0).state == "running"

        def interrupted(seconds):
            raise KeyboardInterrupt

        assert watch(running, sleep=interrupted).state == "running"
    assert "goes on" in capsys.readouterr().err


def test_watching_a_killed_run_ends(tmp_path):
    row = dataclasses.asdict(showing.score()) | {"role": "confirm", "label": "int8"}
    code = f"""
        import time
        from kvlab.runs import Run
        run = Run.create({str(tmp_path)!r}, "sweep", {{"seed": 0}})
        with run.lock():
            run.append([{row!r}])
            print(run.path, flush=True)
            time.sleep(600)
    """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        run = Run.open(writer.stdout.readline().strip())
        assert run.state() == "running"
        naps = []

        def kill_then(seconds):
            naps.append(seconds)
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()

        found = watch(run, sleep=kill_then)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert len(naps) == 1
    assert found.state == "interrupted"
    assert found.run.status["state"] == "running"  # nobody was left to say so
    assert "PARTIAL" in repr(found)
