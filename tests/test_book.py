"""The score book: what is in it is not asked again, failures included; what is on disk comes back; counts go on."""

import dataclasses
import os
import signal
from typing import Any

import pytest
import standin
import torch
from standin import StandIn, harmed, index, items

from kvlab.book import ScoreBook, StopFlag
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.layer import LayerShape, ModelShape
from kvlab.progress import Progress
from kvlab.runs import Run
from kvlab.subject import BASELINE

SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
GOOD, BAD = KVConfig(key=Fp8()), KVConfig(key=Affine(bits=2))
ITEMS = items("search", 3, ("math",)).items


def _bad_on_the_last(config: KVConfig, item: Item) -> float:
    if config == BAD and index(item) == 2:
        raise ArithmeticError("overflow")
    return harmed(config, item)


def test_a_config_that_fails_is_set_aside_alone_and_never_asked_again(tmp_path) -> None:
    subject = StandIn(SHAPE, _bad_on_the_last)
    book = standin.book(tmp_path, subject)
    book.ensure("search", ITEMS, [BASELINE, BAD, GOOD])
    assert book.failures == {BAD.id: "ArithmeticError: overflow"}
    assert {(c, i) for _, c, i in book.rows} >= {(c.id, i.id) for c in (BASELINE, GOOD) for i in ITEMS}
    asked = len(subject.asked)
    book.ensure("search", ITEMS, [BASELINE, BAD, GOOD])
    book.ensure("confirm", ITEMS, [BAD])
    assert len(subject.asked) == asked


def test_what_is_no_failure_of_a_config_ends_the_run(tmp_path) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        raise AttributeError("a fault of the program")

    book = standin.book(tmp_path, StandIn(SHAPE, nll))
    with pytest.raises(AttributeError):
        book.ensure("search", ITEMS, [BASELINE])
    assert book.failures == {}


def test_rows_come_back_from_disk_as_they_were(tmp_path) -> None:
    first = standin.book(tmp_path, StandIn(SHAPE, harmed))
    first.ensure("search", ITEMS, [BASELINE])
    first.ensure("confirm", ITEMS[:1], [GOOD, BASELINE])
    subject = StandIn(SHAPE, harmed)
    second = standin.book(tmp_path, subject, Run.open(first.run.path))
    assert list(second.rows) == list(first.rows)
    for key, row in first.rows.items():
        again = second.rows[key]
        assert again == row
        assert [type(v) for v in dataclasses.astuple(again)] == [type(v) for v in dataclasses.astuple(row)]
    second.ensure("search", ITEMS, [BASELINE, GOOD])
    assert subject.asked == [(GOOD.id, i.id) for i in ITEMS]


def test_roles_are_kept_apart(tmp_path) -> None:
    subject = StandIn(SHAPE, harmed)
    book = standin.book(tmp_path, subject)
    for role in ("search", "aa", "search"):
        book.ensure(role, ITEMS, [BASELINE])
    assert len(subject.asked) == 2 * len(ITEMS)
    assert set(book.run.rows().role) == {"search", "aa"}
    assert set(book.run.rows().label) == {"raw"}


def test_counts_go_on_after_a_resume(tmp_path) -> None:
    first = standin.book(tmp_path, StandIn(SHAPE, harmed))
    first.subject.counters.corrupt_snapshots = 1
    first.ensure("search", ITEMS, [BASELINE])
    assert first.counts() == {"prefills": 3, "corrupt_snapshots": 1}
    second = standin.book(tmp_path, StandIn(SHAPE, harmed), Run.open(first.run.path))
    assert second.counts() == first.counts()
    second.ensure("confirm", ITEMS[:2], [BASELINE])
    assert second.counts() == {"prefills": 5, "corrupt_snapshots": 1}
    # Killed before the status was written: each snapshot on disk was a prefill.
    folder = first.run.path / "snapshots"
    folder.mkdir()
    for n in range(7):
        (folder / f"{n}.safetensors").touch()
    assert standin.book(tmp_path, StandIn(SHAPE, harmed), Run.open(first.run.path)).prefills == 7


def test_rows_note_when_they_were_scored_and_what_the_process_held(tmp_path, monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("kvlab.book.time.monotonic", lambda: clock[0])

    def nll(config: KVConfig, item: Item) -> float:
        clock[0] += 2.0
        return harmed(config, item)

    first = standin.book(tmp_path, StandIn(SHAPE, nll))
    first.ensure("search", ITEMS, [BASELINE])
    assert list(first.run.rows().elapsed_s) == [2.0, 4.0, 6.0]
    clock[0] = 9000.0  # a night later
    second = standin.book(tmp_path, StandIn(SHAPE, nll), Run.open(first.run.path))
    second.ensure("confirm", ITEMS[:1], [BASELINE])
    rows = second.run.rows()
    assert list(rows.elapsed_s) == [2.0, 4.0, 6.0, 8.0]
    assert rows.host_bytes.between(1 << 20, 1 << 45).all()
    assert rows.device_bytes.isna().all()


def test_a_second_signal_aborts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class _Screen:
    """A stream that is no terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        return None


def _progress(total: int, **more: Any) -> tuple[Progress, _Screen]:
    screen: Any = _Screen()
    return Progress(total, stream=screen, **more), screen


def test_progress_says_what_happens_and_how_much_is_left() -> None:
    progress, screen = _progress(4, every_s=0.0)
    progress.at("search: trial 1 of 2")
    progress.add(1)
    assert screen.text.startswith("search: trial 1 of 2:  25%, ")
    assert screen.text.endswith(" s left\n")
    progress.add(7)  # more than was planned stretches the plan
    assert (progress.done, progress.total) == (8, 8)
    assert "100%, 0 s left" in screen.text
    progress.close()


def test_quiet_progress_and_rare_lines() -> None:
    for more in ({"quiet": True, "every_s": 0.0}, {"every_s": 1e9}):
        progress, screen = _progress(4, **more)
        progress.add(2)
        progress.add(0)
        assert screen.text == ""
    progress.say("kept")
    assert screen.text == "kept\n"


def test_a_book_needs_no_terminal(tmp_path) -> None:
    run = Run.create(tmp_path, "search", {})
    progress, screen = _progress(len(ITEMS), every_s=0.0)
    subject: Any = StandIn(SHAPE, harmed)
    ScoreBook(run, subject, StopFlag(), progress).ensure("search", ITEMS, [BASELINE])
    assert screen.text.count("\n") == len(ITEMS)
