"""Jobs in child processes that may die: a job that kills its process costs itself, and the rest goes on in a new one.

A child reads one JSON list of jobs from stdin and prints one line of JSON for each, in order. What a job does, this
file does not know. Only what was started here is ever ended here.
"""

import json
import os
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Waited for a child beyond its deadline, in seconds: it looks at the clock only between two jobs.
GRACE_S = 20.0


class Answer(NamedTuple):
    """What became of one job: the child's object, or why there is none. `skipped` says that it was never started."""

    job: Any
    result: dict[str, Any] | None
    error: str = ""
    skipped: bool = False


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(
    jobs: Sequence[Any],
    command: Sequence[str],
    environment: Mapping[str, str],
    processes: int,
    deadline: float | None = None,
) -> Iterator[Answer]:
    """Answers as they come, each job once. Jobs must be plain JSON values.

    After `deadline` (time.monotonic) no process is started, and one that is `GRACE_S` behind it is ended.
    """
    answers: queue.Queue[Answer] = queue.Queue()
    # Neighbours tend to take the same time; dealt out in turn, no process gets all the slow ones.
    count = min(len(jobs), max(1, processes))
    for start in range(count):
        share = jobs[start::count]
        threading.Thread(target=_serve, args=(share, command, environment, deadline, answers.put), daemon=True).start()
    for _ in jobs:
        yield answers.get()


def _serve(jobs: Sequence[Any], command: Sequence[str], environment: Mapping[str, str], deadline, put) -> None:
    left = list(jobs)
    while left:
        if deadline is not None and time.monotonic() >= deadline:
            break
        code, said = _one_child(left, command, environment, deadline, put)
        if left and code == 0:
            break
        if left:
            put(Answer(left.pop(0), None, f"{last_line(said)} (exit {code})"))
    for job in left:
        put(Answer(job, None, "out of time", skipped=True))


def _one_child(left: list[Any], command, environment, deadline, put) -> tuple[int, str]:
    """Work on `left` from its front until the child ends; its exit code and stderr."""
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as given:
        json.dump(left, given)
        given.seek(0)
        child = subprocess.Popen(
            list(command), stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment)
        )
        guard = None
        if deadline is not None:
            guard = threading.Timer(max(0.0, deadline + GRACE_S - time.monotonic()), child.kill)
            guard.daemon = True
            guard.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if (result := _result(line)) is not None:
                    put(Answer(left.pop(0), result))
            code = child.wait()
        finally:
            if guard is not None:
                guard.cancel()
            if child.poll() is None:
                child.kill()
        errors.seek(0)
        return code, errors.read()


def _result(line: str) -> dict[str, Any] | None:
    """The object a line holds; None for what a library printed, and for a line cut short by death."""
    try:
        result = json.loads(line)
    except json.JSONDecodeError:
        return None
    return result if isinstance(result, dict) else None


def last_line(text: str) -> str:
    """The line of a process's stderr that says most: its exception, not the frames below it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|OutOfResources)\b|.*(LLVM ERROR|Fatal)", line)]
    return (named or lines or ["no message"])[-1][:300]
