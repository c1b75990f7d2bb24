"""A study as plain data: counts, who works on what, what failed and why, the best that is feasible, and the front.

The best is never a trial that breaks its constraint, whatever its value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from kvlab.study.board import LEASE, REASON, SPEC, WORK, Board
from kvlab.study.storages import Storage

SCHEMA = "kvlab.study/1"
BEST, MOST_POINTS = 10, 200  # shown of what is feasible, and of what is complete


def summary(board: Board) -> dict[str, Any]:
    """What `python -m kvlab study status` prints."""
    trials, spec = board.trials(), board.spec()
    feasible = [t for t in trials if t.state == TrialState.COMPLETE and violation(t) <= 0]
    best = min(feasible, key=lambda t: (t.value, t.number), default=None)
    misses = [t for t in trials if t.state == TrialState.COMPLETE and violation(t) > 0]
    nearest = min(misses, key=lambda t: (violation(t), t.number), default=None)
    return {
        "schema": SCHEMA,
        "study": board.name,
        "objective": spec["objective"],
        "sealed": board.sealed,
        "trials": counts(trials),
        "running": [_running(t) for t in trials if t.state == TrialState.RUNNING],
        "failed": [_failed(t) for t in trials if t.state == TrialState.FAIL],
        "best": None if best is None else _row(best),
        "nearest_miss": None if best is not None or nearest is None else _row(nearest),
    }


def document(board: Board) -> dict[str, Any]:
    """The summary and what a picture of the study needs; a storage behind a network is not asked for it.

    `StudyView(summary(board) | pictured(board))` asks, once.
    """
    if board.storage.url.startswith("journal:"):
        return summary(board) | pictured(board)
    return {"schema": SCHEMA, "study": board.name, "objective": None, "storage": board.storage.url}


def view(board: Board) -> "StudyView":
    """The study as it stands now, read once from its storage wherever that is."""
    return StudyView(summary(board) | pictured(board))


@dataclass(frozen=True, slots=True)
class StudyView:
    """A study at one moment. Shows itself without asking its storage again."""

    document: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"StudyView({self.document['study']}, {self.document['trials']})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        return bundle("study", self.document)


def pictured(board: Board) -> dict[str, Any]:
    """Duplicates, the best of what is feasible, best first, and (violation, value) of what is complete."""
    trials = board.trials()
    done = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None]
    feasible = sorted((t for t in done if violation(t) <= 0), key=lambda t: (t.value, t.number))
    step = max(1, -(-len(done) // MOST_POINTS))
    return {
        "duplicates": sum(t.user_attrs.get(REASON, {}).get("kind") == "duplicate" for t in trials),
        "feasible": [_row(t) for t in feasible[:BEST]],
        "points": [[violation(t), t.value] for t in done[::step]],
        "front": front(trials),
    }


def counts(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    return {s.name.lower(): sum(t.state == s for t in trials) for s in TrialState}


def listing(storage: Storage) -> list[dict[str, Any]]:
    """One line for each study of a storage that kvlab made."""
    out = []
    for study in storage.ask(storage.direct.get_all_studies):
        if (spec := study.user_attrs.get(SPEC)) is not None:
            board = Board(storage, study.study_name)
            out.append({"study": board.name, "objective": spec["objective"], **counts(board.trials())})
    return out


def violation(trial: FrozenTrial) -> float:
    """By how much a trial breaks its constraint; one that has none breaks nothing."""
    return trial.constraints.get("violation", 0.0)


def front(trials: Sequence[FrozenTrial]) -> list[tuple[float, float]]:
    """(constraint, value) of complete trials that no other beats in both, smallest first."""
    done = sorted((violation(t), t.value) for t in trials if t.state == TrialState.COMPLETE and t.value is not None)
    out: list[tuple[float, float]] = []
    for used, value in done:
        if not out or value < out[-1][1]:
            out.append((used, value))
    return out


def _row(trial: FrozenTrial) -> dict[str, Any]:
    return {"number": trial.number, "value": trial.value, "violation": violation(trial), "config": _config(trial)}


def _config(trial: FrozenTrial) -> Mapping[str, Any]:
    """What was tried: its parameters where it has some, else the work as it was posted."""
    return trial.params or trial.user_attrs.get(WORK, {}).get("body", {})


def _running(trial: FrozenTrial) -> dict[str, Any]:
    lease = trial.user_attrs.get(LEASE, {})
    return {"number": trial.number, **{k: lease.get(k) for k in ("owner", "attempt", "renewed")}}


def _failed(trial: FrozenTrial) -> dict[str, Any]:
    reason = trial.user_attrs.get(REASON, {"kind": "unknown", "said": "ended by another program"})
    return {"number": trial.number, "config": _config(trial), **reason}
