"""One search over many processes: what is shared are rows, not trials.

The process that starts a search races, asks and judges exactly as it would alone; only where it would score items does
it post them, each with the configs that want it, and take its own share of the work. So the search takes the same steps
with any number of workers, a rung is as parallel as it has items, and an item's prefill is shared by its configs as it
is in one process. Whole trials as units would leave every worker to prefill every item, would make the race depend on
who is quicker, and would leave workers waiting for the longest trial of a batch.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optuna.trial import FrozenTrial, TrialState

from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.evals.subject import ItemScore
from kvlab.memo import code_version
from kvlab.models import BrokenBaseline
from kvlab.runs import Run
from kvlab.search import engine
from kvlab.search.engine import Session
from kvlab.search.settings import Request, UsageError
from kvlab.stopping import Interrupted, StopFlag
from kvlab.study.board import PIECE, REASON, Board, create
from kvlab.study.loop import Idle, run_unit
from kvlab.study.storages import Storage
from kvlab.study.unit import Outcome, Work, address
from kvlab.subject import Counters, LocalSubject

OBJECTIVE = "search"
# Scored before the next are begun: enough for many workers, while baseline and its repeat still find their snapshots.
ITEMS_AT_ONCE = 96


def facts(session: Session) -> dict[str, Any]:
    """What must be the same in every process for their rows to belong together."""
    return session.identity() | {"device": session.loaded.device, "code": code_version()}


@dataclass(frozen=True, slots=True)
class Share:
    """A search whose items other processes help to score."""

    session: Session
    board: Board

    @property
    def invitation(self) -> str:
        """What to run on another machine."""
        return f"python -m kvlab.worker --study {self.board.name} --storage {self.board.storage.url}"

    def subject(self, stop: StopFlag) -> "SharedSubject":
        return SharedSubject(self.session.subject, self.board, stop)


def start(session: Session, run: Run, storage: Storage, name: str | None) -> Share:
    """The study of this run, made or found again. Raises UsageError for the study of another run."""
    name = name or run.status.get("study") or run.path.name
    full = f"{name}-{session.space.hash}"
    sizes = run.config["sizes"]
    counts = {"search": sizes["search_items"], "confirm": sizes["confirm_items"], "replicate": sizes["confirm_items"]}
    spec = {
        "objective": OBJECTIVE,
        "run": run.path.name,
        "request": session.request.to_dict(),
        "facts": facts(session),
        "items": {split: [n, session.items(split, n).sha256] for split, n in counts.items()},
        "threads": run.config["threads"],
    }
    create(storage, full, spec)
    board = Board(storage, full)
    if (other := board.spec().get("run")) != run.path.name:
        raise UsageError(f"--study {name!r} is the study of {other}, not of {run.path.name}: choose another name")
    _refuse(full, board.spec()["facts"], spec["facts"])
    board.withdraw()  # what an earlier process of this run left behind; what was done of it is in the run
    run.set_status("running", study=name)
    return Share(session, board)


def joined(board: Board, spec: Mapping[str, Any], *, model: str | None, threads: int | None) -> "SearchObjective":
    """Load the study's model here and take part. Raises UsageError naming all that differs from the study."""
    here = {"code": code_version(), "versions": engine.versions()}
    _refuse(board.name, {k: spec["facts"][k] for k in here}, here)
    request = Request.from_dict(spec["request"])
    try:
        session = engine.open_session(dataclasses.replace(request, model=model) if model else request)
    except BrokenBaseline as error:
        raise UsageError(f"this process cannot join {board.name}: {error}") from error
    _refuse(board.name, spec["facts"], facts(session))
    sets = {split: session.items(split, n) for split, (n, _) in spec["items"].items()}
    asked = {split: digest for split, (_, digest) in spec["items"].items()}
    _refuse(board.name, asked, {split: found.sha256 for split, found in sets.items()})
    torch.set_num_threads(threads or spec["threads"])
    return SearchObjective(session.subject, [i for found in sets.values() for i in found.items], board.me)


def _refuse(study: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    different = [f"{k}: {there.get(k)} there, {here[k]} here" for k in here if there.get(k) != here[k]]
    if different:
        raise UsageError(
            f"this process cannot join {study}, its scores would not compare: {'; '.join(different)}. Install the "
            "study's versions and use its model on the same kind of device"
        )


class SearchObjective:
    """Rows of one context's items under some configs, on the model of this process."""

    def __init__(self, subject: LocalSubject, items: Iterable[Item], me: str) -> None:
        self.subject, self.me = subject, me
        self._items = {item.id: item for item in items}

    def learn(self, items: Iterable[Item]) -> None:
        self._items |= {item.id: item for item in items}

    def prefers(self, body: Mapping[str, Any]) -> bool:
        """Items prefilled here before."""
        return all(i in self.subject.counters.items for i in body["items"])

    def pieces(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        ids = sorted(config["id"] for config in body["configs"])
        return {address(self.subject.loaded.weights_sha256, body["items"], ids): body}

    def run(self, body: Mapping[str, Any], piece: Any) -> dict[str, Any]:
        configs = [KVConfig.from_dict(config["config"]) for config in body["configs"]]
        changed = [c.id for c, there in zip(configs, body["configs"], strict=True) if c.id != there["id"]]
        if changed:
            raise ValueError(f"configs {changed} have other ids here: the processes run different code")
        before = self.subject.counters.prefills
        items = [self._items[i] for i in body["items"]]
        rows = list(self.subject.score(items, configs, persist=body["persist"]))
        made = self.subject.counters.prefills - before
        return {"rows": [dataclasses.asdict(row) for row in rows], "prefills": made, "by": self.me}

    def outcome(self, body: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Outcome:
        """The mean nats of its rows: for those who look at the study, nothing is chosen by it."""
        nlls = [row["nll"] for result in results for row in result["rows"]]
        return Outcome(sum(nlls) / len(nlls))


class SharedSubject:
    """Scores items by posting them and working beside all others until every row is there."""

    items_at_once = ITEMS_AT_ONCE

    def __init__(self, subject: LocalSubject, board: Board, stop: StopFlag) -> None:
        self.subject, self.board, self.stop = subject, board, stop
        self.objective = SearchObjective(subject, (), board.me)
        self._elsewhere = 0
        self._asked: Counter[str] = Counter()

    @property
    def counters(self) -> Counters:
        """Those of this process, with the prefills of all."""
        own = self.subject.counters
        return dataclasses.replace(own, prefills=own.prefills + self._elsewhere)

    def score(self, items: Sequence[Item], configs: Sequence[KVConfig], *, persist: bool = True) -> Iterator[ItemScore]:
        """Rows as they come, all configs of an item together. What fails elsewhere is tried here, and fails here too
        if it is the config's fault.
        """
        self.objective.learn(items)
        works = [(group, self._work(group, configs, persist)) for group in _by_context(items)]
        posted = self.board.post(work for _, work in works)
        pending = {posted[work.key]: group for group, work in works}
        while pending:
            for trial in self._ended(pending):
                group = pending.pop(trial._trial_id)
                if trial.state == TrialState.COMPLETE:
                    yield from self._rows(trial)
                elif trial.user_attrs.get(REASON, {}).get("kind") == "lost":
                    raise RuntimeError(trial.user_attrs[REASON]["said"])
                else:
                    yield from self.subject.score(group, configs, persist=persist)
            if pending:
                self._help(pending)

    def _work(self, items: Sequence[Item], configs: Sequence[KVConfig], persist: bool) -> Work:
        """A unit of its own each time: who scores the same twice wants to know whether it comes out the same."""
        ids = [item.id for item in items]
        content = address(ids, sorted(c.id for c in configs))
        self._asked[content] += 1
        named = [{"id": c.id, "config": c.to_dict()} for c in configs]
        body = {"items": ids, "configs": named, "persist": persist}
        return Work(key=f"{self.board.me}/{content}/{self._asked[content]}", body=body)

    def _ended(self, pending: Mapping[int, Any]) -> list[FrozenTrial]:
        ended = self.board.trials(TrialState.COMPLETE, TrialState.FAIL)
        return [t for t in ended if t._trial_id in pending]

    def _help(self, pending: Mapping[int, Any]) -> None:
        """One unit of work, or a wait for somebody else's."""
        idle = Idle()
        while not self._ended(pending):
            if self.stop.asked:
                raise Interrupted
            unit = self.board.claim(self.objective.prefers)
            if unit is not None:
                run_unit(self.board, self.objective, unit, self.stop)
                return
            if not self.board.reap():
                idle.wait()

    def _rows(self, trial: FrozenTrial) -> Iterator[ItemScore]:
        for name, result in trial.user_attrs.items():
            if name.startswith(PIECE):
                self._elsewhere += result["prefills"] if result["by"] != self.board.me else 0
                yield from (ItemScore(**row) for row in result["rows"])


def _by_context(items: Sequence[Item]) -> list[list[Item]]:
    """Items that share a prefill together, in their order."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.context, []).append(item)
    return list(groups.values())
