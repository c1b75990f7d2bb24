"""Generated code, run where it can neither harm the machine nor write its own verdict.

Each program gets namespaces of its own (user, mount, PID, network, IPC, UTS), a file system of read-only libraries and
an empty folder in memory, resource limits, no privileges, and a filter of system calls under which it can start no
process and open no socket. Where a part of that is refused, nothing runs: SandboxUnavailable says what is missing.

What a pass means. Tests run in one process, the code under test in another; the code answers calls with plain data,
which is compared where it can reach nothing. It never holds the tests, the expected values or the pipe that the verdict
goes through, so exit codes, frames, memory, patched built-ins, `__eq__` and open files forge nothing. What is not
guaranteed: that the tests are good (code that knows their answers by heart passes), and that the kernel has no holes.
What does not work in here: other processes, sockets (asyncio's too), installed packages, and tests that look inside
objects of the code's own classes other than by attributes, items, calls and text: such objects are equal to nothing
but themselves. Arguments are copies; changes that a call makes to a list, dict, set or bytearray are carried back.

Importing this package loads nothing: names load on first use, and each program's own Python reads parts of it.
"""

import importlib

_HOME = {
    "CanaryError": "kvlab.sandbox.canaries",
    "Limits": "kvlab.sandbox.program",
    "MEANINGS": "kvlab.sandbox.program",
    "Outcome": "kvlab.sandbox.program",
    "Program": "kvlab.sandbox.program",
    "Sandbox": "kvlab.sandbox.running",
    "SandboxUnavailable": "kvlab.sandbox.refused",
    "VERDICTS": "kvlab.sandbox.program",
    "check_available": "kvlab.sandbox.running",
    "run": "kvlab.sandbox.running",
}
__all__ = [
    "MEANINGS",
    "VERDICTS",
    "CanaryError",
    "Limits",
    "Outcome",
    "Program",
    "Sandbox",
    "SandboxUnavailable",
    "check_available",
    "run",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.sandbox' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
