"""Progress: lines, none, or drawn; rare, and the last one says 100 %."""

import io

import pytest

from kvlab import progress as module
from kvlab.nb import bars
from kvlab.progress import Moment, Progress, form
from kvlab.sweep.kernel import watched


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", made)
    monkeypatch.delenv("KVLAB_PROGRESS", raising=False)
    return made


@pytest.mark.parametrize(
    ("asked", "terminal", "drawn", "found"),
    [
        ("", True, False, "bar"), ("", False, False, "plain"), ("", False, True, "drawn"), ("", True, True, "drawn"),
        ("0", True, True, "none"), ("plain", True, True, "plain"), ("bar", False, False, "bar"),
    ],
)  # fmt: skip
def test_forms(asked, terminal, drawn, found):
    assert form({"KVLAB_PROGRESS": asked}, terminal=terminal, drawn=drawn) == found


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="0, plain, bar, got 'loud'"):
        form({"KVLAB_PROGRESS": "loud"}, terminal=False)


def test_at_most_a_line_every_five_seconds_and_the_last_says_100(clock):
    screen = io.StringIO()
    progress = Progress(100, stream=screen)
    progress.at("search")
    for _ in range(40):  # of 100 planned, done in 40 s
        clock.now += 1.0
        progress.add()
    lines = screen.getvalue().splitlines()
    assert len(lines) == 8
    assert lines[-1] == "search:  40%, 60 s left"
    progress.finish()
    assert screen.getvalue().splitlines()[-1] == "search: 100%, 40 s"


def test_zero_is_silence(clock, monkeypatch):
    monkeypatch.setenv("KVLAB_PROGRESS", "0")
    screen, heard = io.StringIO(), []
    progress = Progress(4, stream=screen, every_s=0.0, listener=lambda: heard.append(1))
    progress.add(3)
    progress.say("x")
    progress.finish()
    assert screen.getvalue() == ""
    assert heard == [1]


def test_drawn_ones_are_throttled_and_end_at_100(clock):
    moments = []
    progress = Progress(10, stream=io.StringIO(), draw=moments.append)
    for _ in range(8):
        clock.now += 0.2
        progress.add()
    progress.finish()
    assert [m.done for m in moments] == [0, 3, 6, 8]
    assert (moments[-1].done, moments[-1].total, moments[-1].over) == (8, 8, True)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, False), ({"JPY_PARENT_PID": "1"}, False), ({"JPY_SESSION_NAME": "/a/b.ipynb"}, True),
        ({"VSCODE_PID": "7"}, True), ({"JPY_SESSION_NAME": "x", "KVLAB_PROGRESS": "plain"}, False),
        ({"KVLAB_PROGRESS": "bar"}, True), ({"JPY_SESSION_NAME": "x", "KVLAB_PROGRESS": "0"}, False),
    ],
)  # fmt: skip
def test_who_looks_on(environ, found):
    assert watched(environ) is found


def test_the_bar_is_plain_html_with_words():
    made = bars.bundle(Moment("<b>", 3, 4, 6.0, 2.0))
    assert made["text/plain"] == "<b>:  75%, 2 s left"
    assert "&lt;b&gt;" in made["text/html"]
    assert 'aria-valuenow="75"' in made["text/html"]
    assert "<b>" not in made["text/html"]


def test_outside_a_kernel_it_goes_to_stderr(capsys):
    progress = bars.progress(2)
    progress.at("work")
    progress.add(2)
    progress.finish()
    said = capsys.readouterr()
    assert said.out == ""
    assert "work: 100%" in said.err
