"""The search stage: batches of trials on growing item sets, the clearly worse ones stopped, every score paired.

Optuna proposes and learns; kvlab decides which items are spent. Deterministic for a seed: replayed over a book that
holds the scores already, it takes the same steps and scores nothing.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna

from kvlab.book import ScoreBook, UnscorableError
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet, Item
from kvlab.search.space import Space
from kvlab.subject import BASELINE

ROLE = "search"
# A trial is stopped when it is worse than the best by this many standard errors of the paired difference.
_CLEARLY_WORSE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One config the search has looked at. `value` is its optimistic search score, lower is better; None: unscored."""

    number: int
    config: KVConfig | None
    state: str  # scored | repeat | infeasible | failed
    value: float | None
    items: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Race:
    """Trials in the order asked, and item counts per family of each rung."""

    trials: tuple[Trial, ...]
    rungs: tuple[int, ...]

    def feasible(self) -> dict[str, Trial]:
        """Distinct scored configs by id."""
        return {t.config.id: t for t in self.trials if t.state == "scored" and t.config is not None}


class Racer:
    """Runs the race of one space on one book."""

    def __init__(self, space: Space, book: ScoreBook, items: EvalSet, *, n_items: int, seed: int) -> None:
        self.space, self.book, self.items = space, book, items
        self.rungs = tuple(dict.fromkeys(max(1, math.ceil(n_items / d)) for d in (4, 2, 1)))
        sampler = optuna.samplers.TPESampler(seed=seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(direction="minimize", sampler=sampler)
        for params in space.first_trials():
            self.study.enqueue_trial(params)
        self._sd: dict[str, float] = {}

    def run(self, n_trials: int, batch: int, references: Sequence[KVConfig], previous: KVConfig | None) -> Race:
        """Race `n_trials` trials in batches. `references` are scored on all items for comparison, first of all."""
        whole = self.items.items
        self.book.progress.at("search: baseline and anchors")
        self.book.ensure(ROLE, whole, [BASELINE, *references])
        if BASELINE.id in self.book.failures:
            raise UnscorableError(f"the uncompressed baseline cannot be scored: {self.book.failures[BASELINE.id]}")
        for family in self.items.families:
            nlls = [self.book.get(ROLE, BASELINE, i).nll for i in whole if i.family == family]
            self._sd[family] = max(float(np.std(nlls)), 1e-6)
        trials: list[Trial] = []
        if previous is not None and self.space.workload.bytes(previous, self.space.shape) <= self.space.budget:
            trials += self._score_batch([(None, previous)], trials)
        while len(trials) < n_trials:
            self.book.progress.at(f"search: trial {len(trials) + 1} of {n_trials}")
            trials += self._ask_and_score(min(batch, n_trials - len(trials)), trials)
        self._promote(trials)
        trials = [self._refreshed(t) for t in trials]
        return Race(tuple(trials), self.rungs)

    def _ask_and_score(self, count: int, before: Sequence[Trial]) -> list[Trial]:
        known = {t.config.id for t in before if t.config is not None and t.state != "failed"}
        fresh: list[tuple[optuna.Trial, KVConfig]] = []
        done: list[Trial] = []
        while len(fresh) + len(done) < count:
            asked = self.study.ask()
            config = self.space.config(asked)
            if config is None or (size := self.space.workload.bytes(config, self.space.shape)) > self.space.budget:
                # Feasibility first: TPE ranks a pruned trial by its constraint, at no cost of items.
                asked.set_constraint("bytes", 1.0 if config is None else float(size - self.space.budget))
                self.study.tell(asked, state=optuna.trial.TrialState.PRUNED)
                done.append(Trial(number=asked.number, config=config, state="infeasible", value=None, items=0))
                continue
            asked.set_constraint("bytes", float(size - self.space.budget))
            if config.id in known or any(config.id == c.id for _, c in fresh):
                value = self.value(config) if config.id in known else None
                self._tell(asked, value)
                done.append(Trial(number=asked.number, config=config, state="repeat", value=value, items=0))
                continue
            fresh.append((asked, config))
        return done + self._score_batch(fresh, before)

    def _score_batch(
        self, batch: Sequence[tuple[optuna.Trial | None, KVConfig]], before: Sequence[Trial]
    ) -> list[Trial]:
        alive = [config for _, config in batch]
        incumbent = min((t for t in before if t.value is not None), key=lambda t: t.value or 0.0, default=None)
        for n, rung in enumerate(self.rungs):
            self.book.ensure(ROLE, self.items.head(rung).items, alive)
            alive = [c for c in alive if c.id not in self.book.failures]
            if n + 1 < len(self.rungs):
                alive = self._survivors(alive, rung, incumbent.config if incumbent else None)
        out = []
        for asked, config in batch:
            reason = self.book.failures.get(config.id, "")
            value = None if reason else self.value(config)
            if asked is not None:
                self._tell(asked, value)
            out.append(
                Trial(
                    number=-1 if asked is None else asked.number,
                    config=config,
                    state="failed" if reason else "scored",
                    value=value,
                    items=len(self._scored(config)),
                    reason=reason,
                )
            )
        return out

    def _survivors(self, alive: list[KVConfig], rung: int, incumbent: KVConfig | None) -> list[KVConfig]:
        """The better half, less those clearly worse than the best so far on the same items."""
        items = self.items.head(rung).items
        ranked = sorted(alive, key=lambda c: self._mean(c, items))
        half = ranked[: max(1, math.ceil(len(ranked) / 2))]
        if incumbent is None or any((ROLE, incumbent.id, i.id) not in self.book.rows for i in items):
            return half
        return [c for c in half if not self._clearly_worse(c, incumbent, items)]

    def _clearly_worse(self, config: KVConfig, best: KVConfig, items: Sequence[Item]) -> bool:
        diffs = [self._delta(config, i) - self._delta(best, i) for i in items]
        error = float(np.std(diffs, ddof=1)) / math.sqrt(len(diffs)) if len(diffs) > 1 else math.inf
        return float(np.mean(diffs)) > _CLEARLY_WORSE * error

    def _promote(self, trials: Sequence[Trial]) -> None:
        """The best few get all items, so that finalists are compared on equal footing."""
        ranked = sorted((t for t in trials if t.state == "scored"), key=lambda t: t.value or 0.0)
        best = [t.config for t in ranked[:4] if t.config is not None]
        self.book.progress.at("search: finalists on all items")
        self.book.ensure(ROLE, self.items.items, best)

    def _refreshed(self, trial: Trial) -> Trial:
        if trial.state != "scored" or trial.config is None or trial.config.id in self.book.failures:
            return trial
        return dataclasses.replace(trial, value=self.value(trial.config), items=len(self._scored(trial.config)))

    def _tell(self, asked: optuna.Trial, value: float | None) -> None:
        if value is None:
            self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(asked, value)

    # -- scores --------------------------------------------------------------------------------------------------

    def _scored(self, config: KVConfig) -> list[Item]:
        return [i for i in self.items.items if (ROLE, config.id, i.id) in self.book.rows]

    def _delta(self, config: KVConfig, item: Item) -> float:
        """Extra nats per answer token against the full cache, in baseline standard deviations of the family."""
        extra = self.book.get(ROLE, config, item).nll - self.book.get(ROLE, BASELINE, item).nll
        return extra / self._sd[item.family]

    def _mean(self, config: KVConfig, items: Sequence[Item]) -> float:
        """Family-balanced mean over items."""
        by_family = self.by_family(items)
        return float(np.mean([np.mean([self._delta(config, i) for i in group]) for group in by_family.values()]))

    @staticmethod
    def by_family(items: Sequence[Item]) -> Mapping[str, list[Item]]:
        groups: dict[str, list[Item]] = {}
        for item in items:
            groups.setdefault(item.family, []).append(item)
        return groups

    def value(self, config: KVConfig) -> float:
        """The search score over every item this config was given. Optimistic: the best of many is lucky."""
        return self._mean(config, self._scored(config))


def finalists(race: Race, n_items: int, size: Mapping[str, int], limit: int = 3) -> list[KVConfig]:
    """At most `limit` configs of the bytes-score front, among those scored on all items, from largest to smallest.

    The best score comes first on the front; each further one is smaller. `size` maps config id to workload bytes.
    """
    full = [t for t in race.feasible().values() if t.items >= n_items and t.config is not None and t.value is not None]
    ranked = sorted(full, key=lambda t: (t.value or 0.0, size[t.config.id]))  # type: ignore[union-attr]
    front: list[Trial] = []
    for trial in ranked:
        if not front or size[trial.config.id] < size[front[-1].config.id]:  # type: ignore[union-attr]
            front.append(trial)
    return [t.config for t in front[:limit] if t.config is not None]
