"""ScoreBook: every score of a run, by role, config and item. What is in the book is never scored again.

It is the only place of the search that calls the subject, the only one that writes rows, and the one that stops when
asked to: between items, with everything saved.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.evals.subject import ItemScore
from kvlab.progress import Progress
from kvlab.runs import Run
from kvlab.stopping import Interrupted, StopFlag
from kvlab.subject import Counters

Key = tuple[str, str, str]
_SAVE_EVERY_S = 5.0
# What a config that cannot be scored may raise; anything else is a fault of the program and ends it.
SCORE_ERRORS = (ValueError, RuntimeError, MemoryError, ArithmeticError)


class UnscorableError(RuntimeError):
    """The baseline or a control cannot be scored, so nothing can be compared with it."""


class Scoring(Protocol):
    """Whatever gives rows: a model here, or a model shared with other processes."""

    @property
    def counters(self) -> Counters: ...

    def score(
        self, items: Sequence[Item], configs: Sequence[KVConfig], *, persist: bool = True
    ) -> Iterator[ItemScore]: ...


class ScoreBook:
    """Rows of one run in memory and on disk. `role` tells apart passes over the same items: search, confirm, aa, ..."""

    def __init__(self, run: Run, subject: Scoring, stop: StopFlag, progress: Progress) -> None:
        self.run, self.subject, self.stop, self.progress = run, subject, stop, progress
        self.rows: dict[Key, ItemScore] = {}
        self.failures: dict[str, str] = {}
        self._unsaved: list[dict[str, Any]] = []
        self._saved_at = time.monotonic()
        # A kill may have come between a prefill and the status that counts it; its snapshot is there all the same.
        on_disk = len(list((run.path / "snapshots").glob("*.safetensors")))
        self._prefills_before = max(run.status.get("prefills", 0), on_disk)
        self._corrupt_before = run.status.get("corrupt_snapshots", 0)
        self._load()

    def _load(self) -> None:
        names = {f.name for f in dataclasses.fields(ItemScore)}
        for record in self.run.rows().to_dict("records"):
            row: dict[str, Any] = {str(k): None if v != v else v for k, v in record.items() if k in names}
            self.rows[(record["role"], row["config_id"], row["item_id"])] = ItemScore(**row)

    @property
    def prefills(self) -> int:
        """Prefills of this run, those before a resume included."""
        return self._prefills_before + self.subject.counters.prefills

    @property
    def corrupt_snapshots(self) -> int:
        """Damaged snapshots of this run that were dropped and made again, those before a resume included."""
        return self._corrupt_before + self.subject.counters.corrupt_snapshots

    def counts(self) -> dict[str, int]:
        """What the run's status keeps, so that a resume goes on counting."""
        return {"prefills": self.prefills, "corrupt_snapshots": self.corrupt_snapshots}

    def get(self, role: str, config: KVConfig, item: Item) -> ItemScore:
        return self.rows[(role, config.id, item.id)]

    def ensure(self, role: str, items: Sequence[Item], configs: Iterable[KVConfig], *, persist: bool = True) -> None:
        """Score what is missing, items that miss the same configs together.

        A config that cannot be scored is set aside in `failures` with its reason and does not stop the others. Raises
        Interrupted between items when a stop was asked for.
        """
        wanted = {c.id: c for c in configs}
        groups: dict[tuple[str, ...], list[Item]] = {}
        for item in items:
            missing = tuple(i for i in wanted if (role, i, item.id) not in self.rows and i not in self.failures)
            if missing:
                groups.setdefault(missing, []).append(item)
        for ids, group in groups.items():
            self._score(role, group, [wanted[i] for i in ids], persist)
        self.save()

    def _score(self, role: str, items: Sequence[Item], configs: list[KVConfig], persist: bool) -> None:
        try:
            self._pass(role, items, configs, persist)
        except SCORE_ERRORS as error:
            if len(configs) == 1:
                self.failures[configs[0].id] = f"{type(error).__name__}: {error}"
                return
            # One of several configs failed: each alone, so that only the culprit is set aside.
            for config in configs:
                left = [i for i in items if (role, config.id, i.id) not in self.rows]
                if left:
                    self._score(role, left, [config], persist)

    def _pass(self, role: str, items: Sequence[Item], configs: list[KVConfig], persist: bool) -> None:
        labels = {c.id: c.label for c in configs}
        for n, row in enumerate(self.subject.score(items, configs, persist=persist), start=1):
            self.rows[(role, row.config_id, row.item_id)] = row
            self._unsaved.append(dataclasses.asdict(row) | {"role": role, "label": labels[row.config_id]})
            self.progress.add()
            if n % len(configs) == 0:
                self._pause()

    def _pause(self) -> None:
        if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self.save()
        if self.stop.asked:
            self.save()
            raise Interrupted

    def save(self) -> None:
        """Write rows and counters; afterwards they survive a kill."""
        if self._unsaved:
            self.run.append(self._unsaved)
            self._unsaved = []
            self.run.set_status("running", **self.counts())
        self._saved_at = time.monotonic()
