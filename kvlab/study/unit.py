"""A unit of work, what came of it, and what an objective is. Plain data; knows no storage."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# What a unit that cannot be computed may raise; anything else is a fault of the program and ends the worker.
FAILURES = (ValueError, RuntimeError, MemoryError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One unit as it is posted. `key` is its content: of two with one key, one is done.

    `params` are what tools for Optuna show of it: each a value, and all its choices as text, the same in a whole study.
    `violation` is by how much it breaks its constraint, where that is known before any work.
    """

    key: str
    body: Mapping[str, Any]
    params: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    violation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit as it is claimed. `done` holds what earlier owners have finished of it, by address."""

    trial_id: int
    number: int
    attempt: int
    key: str
    body: Mapping[str, Any]
    done: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The value of a finished unit, lower is better.

    `violation` is by how much it breaks its constraint, where only the work could tell; 0 or less breaks nothing.
    """

    value: float
    violation: float | None = None


class Objective(Protocol):
    """What units compute. Deterministic: whoever computes a piece gets the same."""

    def prefers(self, body: Mapping[str, Any]) -> bool:
        """Whether this process would be quicker with it than another one."""
        ...

    def pieces(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parts of a unit by address. An address says all that the part's result depends on."""
        ...

    def run(self, body: Mapping[str, Any], piece: Any) -> Any:
        """Compute one part; the result is plain JSON. May raise FAILURES."""
        ...

    def outcome(self, body: Mapping[str, Any], results: Sequence[Any]) -> Outcome:
        """From the results of all parts, in their order."""
        ...


def address(*parts: Any) -> str:
    """Content address: 16 hex digits of the canonical JSON of what a result depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def trial_seed(study: str, number: int) -> int:
    """The seed of a trial: by study and number, never by process or time."""
    return int.from_bytes(hashlib.sha256(f"{study}|{number}".encode()).digest()[:8], "big")
