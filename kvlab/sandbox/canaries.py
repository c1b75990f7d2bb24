"""Programs whose verdicts are known, run with every evaluation: a sandbox that runs nothing, or lets something through,
looks just like a model that got better or worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.sandbox.program import Limits, Outcome, Program, Verdict

_TESTS = "assert double(2) == 4\nassert double([1]) == [1, 1]"
_RIGHT = "def double(x):\n    return x + x\n"


@dataclass(frozen=True, slots=True)
class Canary:
    """A program and the verdict it has to get. `wall_s` bounds those that are meant to be cut off."""

    name: str
    source: str
    verdict: Verdict
    wall_s: float | None = None

    @property
    def program(self) -> Program:
        return Program(source=self.source, tests=_TESTS, entry="double")

    def limits(self, limits: Limits) -> Limits:
        """Room enough for a right program, whatever the evaluation allows; its own time where it has one."""
        return Limits(wall_s=self.wall_s or max(limits.wall_s, 30.0), output_bytes=limits.output_bytes)


class CanaryError(RuntimeError):
    """A canary got another verdict than it must: no verdict of this evaluation can be believed."""


def _inside(statement: str) -> str:
    """A right solution that does something it must not, when it is called."""
    return f"def double(x):\n    {statement}\n    return x + x\n"


# A file of this package: outside, and a folder that is inside, read-only.
_HERE = str(Path(__file__).resolve())
# Small and few: no other limit must be what stops them.
_THREADS = "for _ in range(100): t.Thread(target=t.Event().wait).start()"
_LIBRARY_FILE = "os.path.join(os.path.dirname(os.__file__), 'kvlab_canary')"

CANARIES: tuple[Canary, ...] = (
    Canary("right", _RIGHT, "passed"),
    Canary("wrong", "def double(x):\n    return x\n", "wrong"),
    Canary("syntax", "def double(x) return x + x\n", "syntax"),
    Canary("exit", _RIGHT + "exit(0)\n", "exited_early"),
    Canary("stdin", _inside("input()"), "stdin"),
    Canary("output", _inside("for _ in range(4096): print('x' * 65536)"), "output_limit"),
    Canary("sleep", _inside("import time; time.sleep(3600)"), "timeout", wall_s=0.5),
    Canary("process", _inside("import os; os.fork()"), "forbidden"),
    Canary(
        "threads",
        _inside("import threading as t; [t.Thread(target=t.Event().wait).start() for _ in range(999)]"),
        "forbidden",
    ),
    Canary("network", _inside("import socket; socket.create_connection(('127.0.0.1', 9), 1)"), "forbidden"),
    Canary("write", _inside(f"import os; open({_LIBRARY_FILE}, 'w')"), "forbidden"),
    Canary("read", _inside(f"open({_HERE!r})"), "crashed"),
    Canary("forge", "class Yes(list):\n    __eq__ = lambda *_: True\ndef double(x):\n    return Yes()\n", "wrong"),
)


def check(outcomes: Sequence[Outcome]) -> None:
    """Raise CanaryError unless each canary got its verdict; `outcomes` in the order of CANARIES."""
    for canary, outcome in zip(CANARIES, outcomes, strict=True):
        if outcome.verdict != canary.verdict:
            raise CanaryError(
                f"canary {canary.name!r} must be {canary.verdict!r} and was {outcome.verdict!r} ({outcome.detail}): "
                f"the sandbox does not work here, and no verdict of this evaluation counts"
            )
