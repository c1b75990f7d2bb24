"""What goes into the sandbox and what comes out: a program with its tests, limits, and a verdict with its reason."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal[
    "passed",
    "wrong",
    "syntax",
    "crashed",
    "timeout",
    "memory",
    "output_limit",
    "exited_early",
    "stdin",
    "forbidden",
    "bad_tests",
]
VERDICTS: tuple[str, ...] = get_args(Verdict)
# Verdict -> what it says, for reports.
MEANINGS: dict[Verdict, str] = {
    "passed": "the tests ran to their end",
    "wrong": "a test did not hold, or the function it calls is missing",
    "syntax": "the code is not Python",
    "crashed": "an exception, a signal, or answers that can not be read",
    "timeout": "too much processor time, or too much time",
    "memory": "more memory than is allowed",
    "output_limit": "printed, wrote or answered more than is allowed",
    "exited_early": "ended itself before the tests were done",
    "stdin": "read its standard input, which is closed",
    "forbidden": "tried what the sandbox refuses: a process, a socket, a file outside",
    "bad_tests": "the tests are not Python, or hand over what can not be: a fault of the set, not of the code",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Code under test and its tests, which run in another process and call it.

    `tests` is Python that passes by reaching its end. What it uses and does not define comes from `source`: `entry`
    always (it must be there), other names unless Python, its standard library or `given` has them. `given` is code of
    the problem itself, such as helpers in a prompt, run beside the tests so that nothing under test stands in for it.
    """

    source: str
    tests: str
    entry: str = ""
    given: str = ""

    def __post_init__(self) -> None:
        if not self.tests.strip():
            raise ValueError("a program without tests passes whatever it does: give tests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one program. Processor time and memory hold for code and tests each; bytes are plain bytes."""

    cpu_s: float = 10.0
    wall_s: float = 30.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20  # of standard output and error, and of each file
    files_bytes: int = 16 << 20  # of all files in its folder
    threads: int = 16

    def __post_init__(self) -> None:
        for name in ("cpu_s", "wall_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number of seconds, got {value}")
        for name, least in (("memory_bytes", 128 << 20), ("output_bytes", 4096), ("files_bytes", 4096), ("threads", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}: Python itself needs it")

    def whole_numbers(self) -> tuple[int, int, int, int, int]:
        """As a cell takes them; the kernel counts processor time in whole seconds."""
        return math.ceil(self.cpu_s), self.memory_bytes, self.output_bytes, self.files_bytes, self.threads


@dataclass(frozen=True, slots=True)
class Outcome:
    """`seconds` from when the code began to load, by the caller's clock."""

    verdict: Verdict
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"
