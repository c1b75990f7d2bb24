"""The board of one study: units are posted once, claimed by one worker at a time, and end once.

A unit is an Optuna trial. Three operations that every Optuna storage does atomically carry everything: a new trial has
a number of its own, a waiting trial starts for one caller only, and a trial ends once. The owner of a running trial
renews a lease; who sees the same beat for a whole lease gives the trial back to be claimed again. Beats are watched on
the watcher's own clock, so that no two clocks are ever compared. A worker that was away for longer finds that its unit
has another owner; what it had saved is the same as the other's, and is stored under the same address.
"""

import difflib
import math
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from optuna.distributions import CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from kvlab.study.storages import Storage, StorageError
from kvlab.study.unit import Outcome, Unit, Work

LEASE_S = 60.0
MOST_ATTEMPTS = 3
_MAKING_S = 10.0  # between a study's name and its spec lies one write
SPEC, SEALED, WORK, LEASE, REASON = "kvlab.spec", "kvlab.sealed", "kvlab.work", "kvlab.lease", "kvlab.reason"
PIECE = "kvlab.piece:"
ENDED = (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)


class StudyError(StorageError):
    """A study that cannot be used as asked; the message names it, the rule and the fix."""


def create(storage: Storage, name: str, spec: Mapping[str, Any]) -> bool:
    """Make a study that says what it is about; False where it exists already."""
    try:
        study = storage.ask(storage.direct.create_new_study, [StudyDirection.MINIMIZE], name)
    except DuplicatedStudyError:
        # Its maker may have died before it could say what it is for.
        if Board(storage, name).said(_MAKING_S) is not None:
            return False
        study = storage.ask(storage.direct.get_study_id_from_name, name)
    storage.ask(storage.direct.set_study_user_attr, study, SPEC, dict(spec))
    return True


def find(storage: Storage, name: str) -> str:
    """The full name of the one study that begins with `name`. Raises StudyError naming the nearest."""
    names = [s.study_name for s in storage.ask(storage.direct.get_all_studies)]
    hashed = re.compile(re.escape(name) + "-[0-9a-f]{12}")
    found = [n for n in names if n == name] or [n for n in names if hashed.fullmatch(n)]
    found = found or [n for n in names if n.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise StudyError(f"--study {name!r} begins {len(found)} studies: {', '.join(sorted(found)[:5])}. Give more")
    near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    hint = f"nearest is {near[0]!r}" if near else "the storage holds none; its address may be another"
    raise StudyError(f"no study {name!r} in {storage.url}: {hint}")


def owner() -> str:
    """Who this is: host, process, and what no other process has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Board:
    """One study as one process sees it. Safe to use from the thread that renews a lease beside the one that works."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        *,
        lease_s: float = LEASE_S,
        me: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.storage, self.name, self.lease_s, self.me = storage, name, lease_s, me or owner()
        self.id = storage.ask(storage.direct.get_study_id_from_name, name)
        self._clock = clock
        self._waiting: list[FrozenTrial] = []
        self._running: list[FrozenTrial] = []
        self._looked = self._reaped = -math.inf
        self._order = random.Random(self.me)
        self._watched: dict[int, tuple[Any, float]] = {}
        self._lost: set[int] = set()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle
        from kvlab.study.summary import document

        return bundle("study", document(self))

    # -- the study -------------------------------------------------------------------------------------------------

    def spec(self) -> Mapping[str, Any]:
        """What the study is about. Raises StudyError where it does not say."""
        spec = self.said(_MAKING_S)
        if spec is None:
            raise StudyError(f"study {self.name!r} was not made by kvlab: it does not say what its trials are")
        return spec

    def said(self, patience_s: float) -> Mapping[str, Any] | None:
        """What the study is about, once whoever is just making it has said so; None where nobody does."""
        until = self._clock() + patience_s
        while (spec := self._attrs().get(SPEC)) is None and self._clock() < until:
            time.sleep(0.05)
        return spec

    def seal(self) -> None:
        """Nothing more will be posted: workers may leave when all is done.

        Where two processes posted the same, one having taken the other for dead, one of two waiting trials ends here.
        """
        first: dict[str, int] = {}
        for trial in self.trials():
            key = trial.user_attrs.get(WORK, {}).get("key", "")
            if first.setdefault(key, trial.number) != trial.number and trial.state == TrialState.WAITING:
                self.fail(trial._trial_id, "duplicate", f"the same as trial {first[key]}")
        self._ask(self.storage.direct.set_study_user_attr, self.id, SEALED, True)

    def filled(self) -> bool:
        """Wait for the process that made the study to post everything and seal it; False where it must have died."""
        # Counting reads every trial, so it is done once in a lease only.
        count, since = -1, self._clock()
        while not self.sealed:
            if self._clock() - since >= self.lease_s:
                if (now := len(self.trials())) == count:
                    return False
                count, since = now, self._clock()
            time.sleep(0.1)
        return True

    @property
    def sealed(self) -> bool:
        return bool(self._attrs().get(SEALED))

    def over(self) -> bool:
        """Sealed, and nothing waits or runs."""
        if self._waiting or self._running or not self.sealed:
            return False
        # Seen before it was sealed is not seen: something may have been posted in between.
        self.look()
        return not self._waiting and not self._running

    def look(self, prefers: Callable[[Mapping[str, Any]], bool] = lambda body: False) -> None:
        """See what waits and what runs."""
        self._looked = self._clock()
        trials = [t for t in self._listed(TrialState.WAITING, TrialState.RUNNING) if WORK in t.user_attrs]
        self._running = [t for t in trials if t.state == TrialState.RUNNING]
        waiting = [t for t in trials if t.state == TrialState.WAITING]
        # Each process in an order of its own, so that they seldom ask for the same trial.
        self._order.shuffle(waiting)
        self._waiting = sorted(waiting, key=lambda t: not prefers(t.user_attrs[WORK]["body"]))

    def post(self, works: Iterable[Work]) -> dict[str, int]:
        """Trial ids by key. What was posted before and has not failed is not posted again."""
        known: dict[str, int] = {}
        for trial in self.trials():
            if trial.state != TrialState.FAIL and WORK in trial.user_attrs:
                known.setdefault(trial.user_attrs[WORK]["key"], trial._trial_id)
        out: dict[str, int] = {}
        for work in works:
            if work.key not in known:
                known[work.key] = self._ask(self.storage.direct.create_new_trial, self.id, _template(work))
            out[work.key] = known[work.key]
        return out

    def withdraw(self) -> None:
        """End everything that waits: whoever posted it no longer wants it."""
        for trial in self._listed(TrialState.WAITING):
            self.fail(trial._trial_id, "withdrawn", "posted by a process that ended before it was done")

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Every trial, or those in some states, those that have ended from memory."""
        return self._ask(self.storage.cached.get_all_trials, self.id, deepcopy=False, states=states or None)

    # -- a unit ------------------------------------------------------------------------------------------------------

    def claim(self, prefers: Callable[[Mapping[str, Any]], bool] = lambda body: False) -> Unit | None:
        """A waiting unit for this process alone, one it prefers if there is one; None where none waits."""
        while True:
            # Taken by others several times in a row: most of this list is old. A longer one costs more to read again.
            for trial in self._waiting[: 2 + len(self._waiting) // 16]:
                self._waiting.remove(trial)
                if self._start(trial._trial_id) and (unit := self._claimed(trial)) is not None:
                    return unit
            self.look(prefers)
            if not self._waiting:
                return None

    def _start(self, trial_id: int) -> bool:
        try:
            return self._ask(self.storage.direct.set_trial_state_values, trial_id, TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return False

    def _claimed(self, trial: FrozenTrial) -> Unit | None:
        trial_id = trial._trial_id
        # Seen waiting and never leased, less than a lease ago: nobody can have had it and lost it since.
        if LEASE in trial.user_attrs or self._clock() - self._looked >= self.lease_s / 2:
            trial = self._ask(self.storage.direct.get_trial, trial_id)
        attempt = trial.user_attrs.get(LEASE, {}).get("attempt", 0) + 1
        self._set(trial_id, LEASE, self._lease(attempt, 0))
        if trial_id in self._lost:
            # A journal takes a process that owned a trial once for its owner still; whoever leased last is.
            trial = self._ask(self.storage.direct.get_trial, trial_id)
            if trial.user_attrs[LEASE]["owner"] != self.me:
                return None
        done = {k.removeprefix(PIECE): v for k, v in trial.user_attrs.items() if k.startswith(PIECE)}
        work = trial.user_attrs[WORK]
        return Unit(
            trial_id=trial_id,
            number=trial.number,
            attempt=attempt,
            key=work["key"],
            body=work["body"],
            done=done,
        )

    def _lease(self, attempt: int, beat: int) -> dict[str, Any]:
        renewed = datetime.now(UTC).isoformat(timespec="seconds")  # for people; no program compares it
        return {"owner": self.me, "attempt": attempt, "beat": beat, "seconds": self.lease_s, "renewed": renewed}

    def renew(self, unit: Unit, beat: int) -> bool:
        """Another beat of the lease; False where the unit has ended or belongs to somebody else."""
        # Asked once only, not patiently: the next beat comes soon, and the owner must not hang on this one.
        direct = self.storage.direct
        try:
            trial = direct.get_trial(unit.trial_id)
            if trial.state != TrialState.RUNNING or trial.user_attrs.get(LEASE, {}).get("owner") != self.me:
                return False
            direct.set_trial_user_attr(unit.trial_id, LEASE, self._lease(unit.attempt, beat))
        except (UpdateFinishedTrialError, KeyError):
            return False
        return True

    def save(self, unit: Unit, address: str, result: Any) -> None:
        """Keep one part's result. Saved twice, it is there once."""
        self._set(unit.trial_id, PIECE + address, result)

    def finish(self, unit: Unit, outcome: Outcome) -> None:
        """End a unit with its value. A value or constraint that is no number fails it, with what it was."""
        if not math.isfinite(outcome.value) or not math.isfinite(outcome.violation or 0.0):
            said = f"value {outcome.value}, constraint {outcome.violation}: both must be finite numbers"
            self.fail(unit.trial_id, "error", said)
            return
        for name, value in _constrained(outcome.violation).items():
            self._quietly(self.storage.direct.set_trial_system_attr, unit.trial_id, name, value)
        self._quietly(self.storage.direct.set_trial_state_values, unit.trial_id, TrialState.COMPLETE, [outcome.value])

    def fail(self, trial_id: int, kind: str, said: str) -> None:
        """End a unit without a value: `error` it raised, `lost` its workers died, `duplicate`, `withdrawn`."""
        self._set(trial_id, REASON, {"kind": kind, "said": said[:2000]})
        self._quietly(self.storage.direct.set_trial_state_values, trial_id, TrialState.FAIL)

    def release(self, unit: Unit) -> None:
        """Give a unit back of one's own accord: the attempt does not count."""
        self._set(unit.trial_id, LEASE, self._lease(unit.attempt - 1, 0) | {"owner": ""})
        self._wait_again(unit.trial_id)

    def abandon(self, unit: Unit) -> None:
        """This process leaves a unit that it no longer owns."""
        self._lost.add(unit.trial_id)

    # -- the dead ------------------------------------------------------------------------------------------------------

    def reap(self, *, at_once: bool = False) -> list[int]:
        """Give back units whose lease has not moved for its whole length while this process looked; their numbers.

        `at_once` takes every running unit for lost. A unit that was lost `MOST_ATTEMPTS` times fails for good.
        """
        now, running = self._clock(), self._running
        if now - self._reaped > self.lease_s / 2:
            # Away itself: on a machine that slept, the owners slept as well.
            self._watched.clear()
        self._reaped = now
        self._watched = {i: seen for i, seen in self._watched.items() if i in {t._trial_id for t in running}}
        given = []
        for trial in running:
            lease = trial.user_attrs.get(LEASE, {})
            # The start too: a trial claimed again an instant ago still shows the lease of the owner before.
            beat = (trial.datetime_start, lease.get("owner"), lease.get("attempt"), lease.get("beat"))
            before, since = self._watched.setdefault(trial._trial_id, (beat, now))
            if before != beat:
                self._watched[trial._trial_id] = (beat, now)
            elif at_once or now - since >= lease.get("seconds", self.lease_s):
                self._give_back(trial, lease)
                given.append(trial.number)
        return given

    def running(self) -> int:
        """How many units were under way at the last look."""
        return len(self._running)

    def longest_lease(self, otherwise: float) -> float:
        """Seconds after which every unit under way would have shown a beat, had its owner lived."""
        leases = [t.user_attrs.get(LEASE, {}) for t in self._running]
        return max((lease.get("seconds", otherwise) for lease in leases), default=0.0)

    def again(self) -> list[int]:
        """Post what went wrong once more; numbers of the failed trials."""
        wrong = ("error", "lost")
        failed = [t for t in self.trials(TrialState.FAIL) if t.user_attrs.get(REASON, {}).get("kind") in wrong]
        works = {t.user_attrs[WORK]["key"]: (t, t.user_attrs[WORK]) for t in failed if WORK in t.user_attrs}
        before = {t.number for t in self.trials()}
        self.post(
            Work(
                key=work["key"],
                body=work["body"],
                params={
                    n: (t.params[n], tuple(map(str, d.choices)))
                    for n, d in t.distributions.items()
                    if isinstance(d, CategoricalDistribution)
                },
            )
            for t, work in works.values()
        )
        posted = {t.user_attrs[WORK]["key"] for t in self.trials() if t.number not in before}
        return [t.number for key, (t, _) in works.items() if key in posted]

    def _give_back(self, trial: FrozenTrial, lease: Mapping[str, Any]) -> None:
        self._watched.pop(trial._trial_id, None)
        if lease.get("attempt", 0) >= MOST_ATTEMPTS:
            said = f"{MOST_ATTEMPTS} workers died on it, the last one {lease.get('owner')}"
            self.fail(trial._trial_id, "lost", said)
        else:
            self._wait_again(trial._trial_id)

    def _wait_again(self, trial_id: int) -> None:
        self._quietly(self.storage.direct.set_trial_state_values, trial_id, TrialState.WAITING)

    # -- the storage ---------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return self.storage.ask(call, *args, **named)
        except KeyError:
            raise StudyError(f"study {self.name!r} is gone from {self.storage.url}: it was deleted") from None

    def _quietly(self, call: Callable[..., Any], *args: Any) -> None:
        """A change to a trial; nothing where it has ended meanwhile: the end it has is as good."""
        try:
            self._ask(call, *args)
        except UpdateFinishedTrialError:
            return

    def _set(self, trial_id: int, name: str, value: Any) -> None:
        self._quietly(self.storage.direct.set_trial_user_attr, trial_id, name, value)

    def _attrs(self) -> Mapping[str, Any]:
        return self._ask(self.storage.direct.get_study_user_attrs, self.id)

    def _listed(self, *states: TrialState) -> list[FrozenTrial]:
        return self._ask(self.storage.direct.get_all_trials, self.id, deepcopy=False, states=states)


def _template(work: Work) -> FrozenTrial:
    """A waiting trial. Its parameters are for those who look at the study; what counts is in the body."""
    return create_trial(
        state=TrialState.WAITING,
        params={name: value for name, (value, _) in work.params.items()},
        distributions={name: CategoricalDistribution(choices) for name, (_, choices) in work.params.items()},
        user_attrs={WORK: {"key": work.key, "body": dict(work.body)}},
        system_attrs=_constrained(work.violation),
    )


def _constrained(violation: float | None) -> dict[str, Any]:
    """How Optuna keeps a constraint."""
    trial = create_trial(state=TrialState.RUNNING)
    if violation is not None:
        trial.set_constraint("violation", violation)
    return trial.system_attrs
