"""ScoreBook: every score of a run, by role, config and item. What is in the book, or in a memo of earlier runs, is
never scored again.

It is the only place of the search that calls the subject, the only one that writes rows, and the one that stops when
asked to: between items, with everything saved.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvlab import room
from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.evals.subject import ItemScore
from kvlab.memo import Memo
from kvlab.progress import Progress
from kvlab.recorded import record, recorded
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


# Of a confirmation: a baseline and its repeat meet the same snapshots while these are still in memory.
_ITEMS_AT_ONCE = 24


class ScoreBook:
    """Rows of one run in memory and on disk. `role` tells apart passes over the same items: search, confirm, aa, ..."""

    def __init__(
        self, run: Run, subject: Scoring, stop: StopFlag, progress: Progress, memo: Memo | None = None
    ) -> None:
        self.run, self.subject, self.stop, self.progress, self.memo = run, subject, stop, progress, memo
        # More where many processes hold them between them.
        self.items_at_once: int = getattr(subject, "items_at_once", _ITEMS_AT_ONCE)
        self.rows: dict[Key, ItemScore] = {}
        self.failures: dict[str, str] = {}
        self.configs = recorded(run)
        self.remembered = 0
        self._unsaved: list[dict[str, Any]] = []
        self._unkept: list[tuple[Item, ItemScore]] = []
        self._saved_at = self._begun = time.monotonic()
        self._worked = 0.0  # seconds at work before a resume
        # A kill may have come between a prefill and the status that counts it; its snapshot is there all the same.
        on_disk = len(list((run.path / "snapshots").glob("*.safetensors")))
        self._prefills_before = max(run.status.get("prefills", 0), on_disk)
        self._corrupt_before = run.status.get("corrupt_snapshots", 0)
        self._load()

    def _load(self) -> None:
        names = {f.name for f in dataclasses.fields(ItemScore)}
        for told in self.run.rows().to_dict("records"):
            row: dict[str, Any] = {str(k): None if v != v else v for k, v in told.items() if k in names}
            row["nll"] = math.nan if row["nll"] is None else row["nll"]  # of generated answers, which force nothing
            self.rows[(told["role"], row["config_id"], row["item_id"])] = ItemScore(**row)
            # A run that names no other has scored the row itself; older runs have no such column.
            self.remembered += isinstance(told.get("scored_in"), str)
            self._worked = max(self._worked, told.get("elapsed_s") or 0.0)

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

    def ensure(
        self,
        role: str,
        items: Sequence[Item],
        configs: Iterable[KVConfig],
        *,
        persist: bool = True,
        anew: bool = False,
    ) -> None:
        """Score what is missing, items that miss the same configs together; `anew` even where a memo has it.

        A config that cannot be scored is set aside in `failures` with its reason and does not stop the others. Raises
        Interrupted between items when a stop was asked for.
        """
        wanted = {c.id: c for c in configs}
        self._tell(wanted)
        if not anew:
            self._recall(role, items, wanted)
        groups: dict[tuple[str, ...], list[Item]] = {}
        for item in items:
            missing = tuple(i for i in wanted if (role, i, item.id) not in self.rows and i not in self.failures)
            if missing:
                groups.setdefault(missing, []).append(item)
        for ids, group in groups.items():
            self._score(role, group, [wanted[i] for i in ids], persist)
        self.save()

    def _tell(self, configs: Mapping[str, KVConfig]) -> None:
        """Put configs on record, before any row of theirs."""
        if configs.keys() - self.configs.keys():
            self.configs |= configs
            record(self.run, self.configs)

    def _recall(self, role: str, items: Sequence[Item], wanted: Mapping[str, KVConfig]) -> None:
        """Take from the memo what it has, noting which run scored it."""
        if self.memo is None:
            return
        for item, (config_id, config) in itertools.product(items, wanted.items()):
            key = (role, config_id, item.id)
            if key in self.rows or config_id in self.failures or (held := self.memo.get(config_id, item)) is None:
                continue
            self.rows[key], scored_in = held
            self._note(role, config, self.rows[key], scored_in)
            self.remembered += 1
            self.progress.add()

    def _note(self, role: str, config: KVConfig, row: ItemScore, scored_in: str | None) -> None:
        taken, elapsed = room.taken(), self._worked + time.monotonic() - self._begun
        more = {"role": role, "label": config.label, "scored_in": scored_in, "elapsed_s": round(elapsed, 3)}
        self._unsaved.append(dataclasses.asdict(row) | more | taken._asdict())

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
        by_id, asked = {c.id: c for c in configs}, {i.id: i for i in items}
        for n, row in enumerate(self.subject.score(items, configs, persist=persist), start=1):
            self.rows[(role, row.config_id, row.item_id)] = row
            self._note(role, by_id[row.config_id], row, None)
            self._unkept.append((asked[row.item_id], row))
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
        # After the run's own rows: what a memo holds of a run, the run holds too.
        if self._unkept and self.memo is not None:
            self.memo.put(self._unkept, self.run.path.name)
        self._unkept = []
        self._saved_at = time.monotonic()
