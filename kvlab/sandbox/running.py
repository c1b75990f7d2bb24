"""Programs to verdicts, several at a time, with the canaries first. The door of the sandbox."""

import os
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from kvlab.sandbox.canaries import CANARIES, check
from kvlab.sandbox.program import Limits, Outcome, Program
from kvlab.sandbox.refused import SandboxUnavailable

_MOST_WORKERS = 16


class Sandbox:
    """Workers that stay, for an evaluation that comes in parts. Use as a context manager; `run` any number of times.

    `workers` programs run side by side, by default one for each processor this process may use; each may take twice
    `limits.memory_bytes`. Entering runs the canaries and raises SandboxUnavailable where the machine lacks what the
    isolation needs, CanaryError where a canary got a verdict that it must not get. There is no way around either.
    """

    def __init__(self, limits: Limits | None = None, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.limits, self.workers = limits or Limits(), workers or min(_usable(), _MOST_WORKERS)

    def __enter__(self) -> "Sandbox":
        _check_platform()
        from kvlab.sandbox.worker import Worker  # ctypes and Linux only from here on

        self._stop = threading.Event()
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        with ExitStack() as stack:
            for _ in range(self.workers):
                self._idle.put(stack.enter_context(Worker(self._stop)))
            self._pool = stack.enter_context(ThreadPoolExecutor(self.workers, "kvlab-sandbox"))
            check(self._all([(canary.program, canary.limits(self.limits)) for canary in CANARIES]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, programs: Sequence[Program]) -> list[Outcome]:
        """The outcome of each program, in order. A program runs once: a timeout is an outcome."""
        return self._all([(program, self.limits) for program in programs])

    def _all(self, jobs: Sequence[tuple[Program, Limits]]) -> list[Outcome]:
        try:
            return list(self._pool.map(self._one, jobs))
        except BaseException:  # an interrupt too: what runs ends now, and nothing runs after
            self._stop.set()
            raise

    def _one(self, job: tuple[Program, Limits]) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.judge(*job)
        finally:
            self._idle.put(worker)


def run(programs: Sequence[Program], limits: Limits | None = None, workers: int | None = None) -> list[Outcome]:
    """The outcome of each program, in order: a Sandbox opened for them and closed after. Raises as Sandbox does."""
    with Sandbox(limits, workers) as sandbox:
        return sandbox.run(programs)


def check_available() -> None:
    """Raise SandboxUnavailable, with the missing part and its fix, or CanaryError, where code can not be run here."""
    with Sandbox():
        return


def _usable() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _check_platform() -> None:
    from kvlab.sandbox.seccomp import compiled

    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"generated code runs only in Linux' namespaces, and this is {sys.platform}: use Linux"
        )
    try:
        compiled(os.uname().machine, 1)
    except ValueError as error:
        raise SandboxUnavailable(str(error)) from error
    if not sys.executable:
        raise SandboxUnavailable("sys.executable is empty: a sandbox starts a Python of its own from it")
