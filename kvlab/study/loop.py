"""What every worker does: claim a unit, work on its pieces under a lease, record it, until the study is over."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvlab.study.board import Board
from kvlab.study.lease import PIECE_LIMIT_S, Lease
from kvlab.study.unit import FAILURES, Objective, Outcome, Unit

IDLE_S = 1800.0
_SHORT_S, _LONG_S = 0.05, 2.0


class Stop(Protocol):
    """Says whether to stop."""

    asked: bool


@dataclass(slots=True)
class Tally:
    """What one worker did. `why` it left: over, idle or stopped."""

    units: int = 0
    reaped: int = 0
    why: str = ""


def work(
    board: Board,
    objective: Objective,
    *,
    stop: Stop,
    idle_s: float = IDLE_S,
    limit_s: float = PIECE_LIMIT_S,
    say: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Work until the study is over, a stop is asked for, or nothing has come for `idle_s`.

    A unit under way when a stop is asked for goes back to the board, with the pieces it has.
    """
    tally, idle = Tally(), Idle()
    while True:
        if stop.asked:
            tally.why = "stopped"
            return tally
        unit = board.claim(objective.prefers)
        if unit is not None:
            idle = Idle()
            ended = run_unit(board, objective, unit, stop, limit_s)
            tally.units += ended
            say(f"trial {unit.number}: {'done' if ended else 'given back'}")
            continue
        if given := board.reap():
            tally.reaped += len(given)
            say(f"trials {', '.join(map(str, given))} were lost and go back")
        elif board.over():
            tally.why = "over"
            return tally
        elif idle.seconds > idle_s:
            tally.why = "idle"
            return tally
        else:
            idle.wait()


def run_unit(board: Board, objective: Objective, unit: Unit, stop: Stop, limit_s: float = PIECE_LIMIT_S) -> bool:
    """Work on one claimed unit; False where it was given back or lost, and is somebody else's to finish."""
    with Lease(board, unit, limit_s) as lease:
        try:
            outcome = _outcome(board, objective, unit, stop, lease)
        except _FailedError as failed:
            board.fail(unit.trial_id, "error", str(failed))
            return True
        if lease.lost:
            board.abandon(unit)
        elif outcome is None:
            board.release(unit)
        else:
            board.finish(unit, outcome)
            return True
    return False


class _FailedError(Exception):
    """What an objective said when it could not. Not one of FAILURES, which a storage may raise as well."""


def _outcome(board: Board, objective: Objective, unit: Unit, stop: Stop, lease: Lease) -> Outcome | None:
    """Every piece that is missing, saved one by one; None where it ended early."""
    with _told():
        pieces = objective.pieces(unit.body)
    results = []
    for name, piece in pieces.items():
        if name in unit.done:
            results.append(unit.done[name])
            continue
        if stop.asked or lease.lost:
            return None
        lease.begin()
        with _told():
            results.append(objective.run(unit.body, piece))
        board.save(unit, name, results[-1])
    with _told():
        return objective.outcome(unit.body, results)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise _FailedError(f"{type(error).__name__}: {error}") from error


class Idle:
    """Waits a little longer each time."""

    def __init__(self) -> None:
        self._since, self._pause = time.monotonic(), _SHORT_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def wait(self) -> None:
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _LONG_S)
