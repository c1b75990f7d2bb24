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


def run(programs: Sequence[Program], limits: Limits | None = None, workers: int | None = None) -> list[Outcome]:
    """The outcome of each program, in order. A program runs once: a timeout is an outcome.

    `workers` programs run side by side, by default one for each processor this process may use; each needs up to twice
    `limits.memory_bytes`. The canaries run before: give all programs of an evaluation in one call.

    Raises SandboxUnavailable where the machine lacks what the isolation needs, CanaryError where a canary got a
    verdict that it must not get. Neither leaves outcomes.
    """
    limits = limits or Limits()
    count = _worker_count(workers, len(programs))
    _check_platform()
    from kvlab.sandbox.worker import Worker  # ctypes and Linux only from here on

    stop = threading.Event()
    with ExitStack() as stack:
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(count):
            idle.put(stack.enter_context(Worker(stop)))
        pool = stack.enter_context(ThreadPoolExecutor(count))

        def one(job: tuple[Program, Limits]) -> Outcome:
            worker = idle.get()
            try:
                return worker.judge(*job)
            finally:
                idle.put(worker)

        try:
            check(list(pool.map(one, [(c.program, c.limits(limits)) for c in CANARIES])))
            return list(pool.map(one, [(program, limits) for program in programs]))
        except BaseException:  # an interrupt too: whatever runs ends now, and the pool is waited for
            stop.set()
            raise


def check_available() -> None:
    """Raise SandboxUnavailable, with the missing part and its fix, or CanaryError, where code can not be run here."""
    run(())


def _worker_count(workers: int | None, programs: int) -> int:
    if workers is None:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return max(1, min(usable, _MOST_WORKERS, max(programs, len(CANARIES))))
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    return workers


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
