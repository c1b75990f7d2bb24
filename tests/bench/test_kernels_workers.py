"""Jobs in processes that die, hang and chatter: each job is answered once."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from kvlab.bench import workers
from kvlab.bench.workers import last_line, spread

# Does what each job says: a number is doubled.
CHILD = """
import json, os, sys, time
for job in json.load(sys.stdin):
    if job == "die":
        raise ValueError("as asked")
    if job == "abort":
        print('{"double": ', end="", flush=True)
        os.abort()
    if job == "stop":
        sys.exit(0)
    if job == "hang":
        time.sleep(60)
    print("a library says hello")
    print(json.dumps({"double": 2 * job, "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "child.py").write_text(CHILD)
    return [sys.executable, str(tmp_path / "child.py")]


@pytest.mark.parametrize("processes", [1, 3, 99])
def test_a_job_that_kills_its_process_costs_only_itself(command, processes) -> None:
    jobs = [1, "die", 2, 3, "abort", 4, 5]
    answers = {answer.job: answer for answer in spread(jobs, command, os.environ, processes)}
    assert sorted(answers, key=jobs.index) == jobs
    assert {job: a.result["double"] for job, a in answers.items() if a.result} == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}
    assert answers["die"].error == "ValueError: as asked (exit 1)"
    assert "exit -6" in answers["abort"].error
    assert not any(answer.skipped for answer in answers.values())


def test_work_is_dealt_out_over_the_processes(command) -> None:
    answers = list(spread([1, 2, 3, 4], command, os.environ, 2))
    pids = {answer.job: answer.result["pid"] for answer in answers if answer.result}
    assert pids[1] == pids[3] != pids[2] == pids[4]


def test_a_child_that_ends_in_good_order_leaves_jobs_unstarted(command) -> None:
    answers = list(spread([1, "stop", 2], command, os.environ, 1))
    assert [(a.job, a.skipped) for a in answers] == [(1, False), ("stop", True), (2, True)]


def test_nothing_is_started_after_the_deadline(command) -> None:
    (answer,) = spread([1], command, os.environ, 1, deadline=time.monotonic() - 1)
    assert answer.skipped
    assert answer.result is None


def test_a_child_that_hangs_is_ended_after_its_grace(command, monkeypatch) -> None:
    monkeypatch.setattr(workers, "GRACE_S", 0.1)
    answers = list(spread([1, "hang", 2], command, os.environ, 1, deadline=time.monotonic() + 2))
    assert answers[0].result is not None
    assert (answers[1].skipped, answers[1].error) == (False, "no message (exit -9)")
    assert answers[2].skipped


def test_jobs_may_be_larger_than_a_command_line(command, tmp_path) -> None:
    (tmp_path / "count.py").write_text(
        "import json, sys\nfor job in json.load(sys.stdin): print(json.dumps({'n': len(job)}))"
    )
    (answer,) = spread(["x" * 2_000_000], [sys.executable, str(tmp_path / "count.py")], os.environ, 1)
    assert answer.result == {"n": 2_000_000}
    assert json.dumps(answer.result)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no message"),
        ("Traceback\n  File x\nValueError: bad\n", "ValueError: bad"),
        ("a\ntorch.cuda.OutOfMemoryError: full\nwarning: b\n", "torch.cuda.OutOfMemoryError: full"),
        ("LLVM ERROR: no\nframe 1\nframe 2\n", "LLVM ERROR: no"),
        ("some words\n", "some words"),
    ],
)
def test_the_line_that_says_most(text, line) -> None:
    assert last_line(text) == line
