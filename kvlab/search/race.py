"""The search stage: batches of trials on growing item sets, the worse ones deferred or stopped, every score paired.

Optuna proposes and learns; kvlab decides which items are spent. The better half of a batch goes on to more items, if it
is not far behind the best so far; the others wait, and may be given more in the end: they are behind, and not shown to
be worse. A trial is stopped for good by a paired test that may be looked at after every rung. Deterministic for a seed:
replayed over a book that holds the scores already, it takes the same steps and scores nothing.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import optuna

from kvlab.book import ScoreBook, UnscorableError
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet, Item
from kvlab.search.choice import dominators
from kvlab.search.elimination import lost
from kvlab.search.space import Space
from kvlab.subject import BASELINE

ROLE = "search"
# A trial waits when it is behind its rival by this many standard errors of the paired difference.
_FAR_BEHIND = 2.0
# Scores no further apart than this many are not told from each other (the one-standard-error rule of model selection).
_ALIKE = 1.0
# How many of the best get all items in the end; where a whole front is wanted, as many again.
_PROMOTED = 4
_DIRECTIONS: tuple[Literal["minimize"], ...] = ("minimize", "minimize")  # the score; bytes and score


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One config the search has looked at. `value` is its optimistic search score, lower is better; None: unscored.

    `stopped_by` is the id of the config that it was shown to be worse than.
    """

    number: int
    config: KVConfig | None
    state: str  # scored | repeat | infeasible | failed
    value: float | None
    items: int
    reason: str = ""
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Race:
    """Trials in the order asked, and item counts per family of each rung."""

    trials: tuple[Trial, ...]
    rungs: tuple[int, ...]

    def feasible(self) -> dict[str, Trial]:
        """Distinct scored configs by id."""
        return {t.config.id: t for t in self.trials if t.state == "scored" and t.config is not None}


class Racer:
    """Runs the race of one space on one book: for the best score within the budget, or, with `front`, for the best
    score of every size up to it.
    """

    def __init__(
        self, space: Space, book: ScoreBook, items: EvalSet, *, n_items: int, seed: int, front: bool = False
    ) -> None:
        self.space, self.book, self.items, self.front = space, book, items, front
        self.rungs = tuple(dict.fromkeys(max(1, math.ceil(n_items / d)) for d in (4, 2, 1)))
        sampler = optuna.samplers.TPESampler(seed=seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(directions=_DIRECTIONS[: 1 + front], sampler=sampler)
        for params in space.spread_trials() if front else space.first_trials():
            self.study.enqueue_trial(params)
        self.stopped: dict[str, str] = {}
        self._sd: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._planned = 1

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
        self._planned = n_trials
        trials: list[Trial] = []
        if previous is not None and self.size(previous) <= self.space.budget:
            trials += self._score_batch([(None, previous)], trials)
        while len(trials) < n_trials:
            self.book.progress.at(f"search: trial {len(trials) + 1} of {n_trials}")
            trials += self._ask_and_score(min(batch, n_trials - len(trials)), trials)
        self._promote(trials)
        trials = [self._refreshed(t) for t in trials]
        return Race(tuple(trials), self.rungs)

    def size(self, config: KVConfig) -> int:
        """Bytes of the workload."""
        if config.id not in self._sizes:
            self._sizes[config.id] = self.space.workload.bytes(config, self.space.shape)
        return self._sizes[config.id]

    def _ask_and_score(self, count: int, before: Sequence[Trial]) -> list[Trial]:
        known = {t.config.id for t in before if t.config is not None and t.state != "failed"}
        fresh: list[tuple[optuna.Trial, KVConfig]] = []
        again: list[tuple[optuna.Trial, KVConfig]] = []
        done: list[Trial] = []
        while len(fresh) + len(again) + len(done) < count:
            asked = self.study.ask()
            space = self.space.sized(asked) if self.front else self.space
            config = space.config(asked)
            if config is None or self.size(config) > space.budget:
                # Feasibility first: TPE ranks a pruned trial by its constraint, at no cost of items.
                asked.set_constraint("bytes", 1.0 if config is None else float(self.size(config) - space.budget))
                self.study.tell(asked, state=optuna.trial.TrialState.PRUNED)
                done.append(Trial(number=asked.number, config=config, state="infeasible", value=None, items=0))
                continue
            asked.set_constraint("bytes", float(self.size(config) - space.budget))
            repeat = config.id in known or any(config.id == c.id for _, c in fresh)
            (again if repeat else fresh).append((asked, config))
        done += self._score_batch(fresh, before)
        done += [self._repeated(asked, config) for asked, config in again]
        return sorted(done, key=lambda t: t.number)

    def _repeated(self, asked: optuna.Trial, config: KVConfig) -> Trial:
        """A config that was tried before, or in this very batch: the sampler learns its value, and no item is spent."""
        value = None if config.id in self.book.failures else self.value(config)
        self._tell(asked, config, value)
        return Trial(number=asked.number, config=config, state="repeat", value=value, items=0)

    def _score_batch(
        self, batch: Sequence[tuple[optuna.Trial | None, KVConfig]], before: Sequence[Trial]
    ) -> list[Trial]:
        alive = [config for _, config in batch]
        earlier = {t.config.id: t.config for t in before if t.state == "scored" and t.config is not None}
        for n, rung in enumerate(self.rungs):
            self.book.ensure(ROLE, self.items.head(rung).items, alive)
            alive = [c for c in alive if c.id not in self.book.failures]
            if n + 1 < len(self.rungs):
                alive = self._survivors(alive, rung, list(earlier.values()))
        out = []
        for asked, config in batch:
            reason = self.book.failures.get(config.id, "")
            value = None if reason else self.value(config)
            if asked is not None:
                self._tell(asked, config, value)
            out.append(
                Trial(
                    number=-1 if asked is None else asked.number,
                    config=config,
                    state="failed" if reason else "scored",
                    value=value,
                    items=len(self._scored(config)),
                    reason=reason,
                    stopped_by=self.stopped.get(config.id),
                )
            )
        return out

    def _survivors(self, alive: list[KVConfig], rung: int, earlier: Sequence[KVConfig]) -> list[KVConfig]:
        """The better half, less those far behind an earlier one on the same items; those shown worse are stopped."""
        items = self.items.head(rung).items
        mean = {c.id: self._mean(c, items) for c in [*earlier, *alive] if self._has(c, items)}
        rivals = [c for c in [*earlier, *alive] if c.id in mean]
        known = [c for c in earlier if c.id in mean]
        left = []
        for config in alive:
            rival = self._rival(config, rivals, mean)
            if rival and lost(self._rounds(config, rival, items), self._planned):
                self.stopped[config.id] = rival.id
                continue
            rival = self._rival(config, known, mean)
            if rival is None or _behind(self._rounds(config, rival, items)) <= _FAR_BEHIND:
                left.append(config)
        half = max(1, math.ceil(len(alive) / 2))
        if not self.front:
            return sorted(left, key=lambda c: mean[c.id])[:half]
        beaten = dominators({c.id: (self.size(c), mean[c.id]) for c in rivals})
        ranked = sorted(left, key=lambda c: (beaten[c.id], mean[c.id]))
        return [c for n, c in enumerate(ranked) if n < half or not beaten[c.id]]

    def _rival(self, config: KVConfig, rivals: Sequence[KVConfig], mean: Mapping[str, float]) -> KVConfig | None:
        """The best on these items; where every size counts, the best that is no larger."""
        others = [
            c for c in rivals if mean[c.id] < mean[config.id] and (not self.front or self.size(c) <= self.size(config))
        ]
        return min(others, key=lambda c: mean[c.id], default=None)

    def _rounds(self, config: KVConfig, rival: KVConfig, items: Sequence[Item]) -> list[tuple[float, ...]]:
        """Paired differences, one of each family a round."""
        groups = self.by_family(items).values()
        return [
            tuple(self._delta(config, i) - self._delta(rival, i) for i in row) for row in zip(*groups, strict=False)
        ]

    def _promote(self, trials: Sequence[Trial]) -> None:
        """The best few get all items, so that finalists are compared on equal footing."""
        open_ = [t for t in trials if t.state == "scored" and t.stopped_by is None and t.config is not None]
        ranked = sorted(open_, key=lambda t: t.value or 0.0)
        if self.front:
            at = {t.config.id: (self.size(t.config), t.value or 0.0) for t in ranked if t.config is not None}
            beaten = dominators(at)
            ranked = sorted(ranked, key=lambda t: beaten[t.config.id] if t.config else 0)
        best = [t.config for t in ranked[: _PROMOTED * (1 + self.front)] if t.config is not None]
        self.book.progress.at("search: finalists on all items")
        self.book.ensure(ROLE, self.items.items, best)

    def _refreshed(self, trial: Trial) -> Trial:
        if trial.state != "scored" or trial.config is None or trial.config.id in self.book.failures:
            return trial
        return dataclasses.replace(trial, value=self.value(trial.config), items=len(self._scored(trial.config)))

    def _tell(self, asked: optuna.Trial, config: KVConfig, value: float | None) -> None:
        if value is None:
            self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(asked, [float(self.size(config)), value] if self.front else value)

    def safest(self, race: Race) -> KVConfig | None:
        """Of the trials whose score is not told from the best one's, the nearest to the full cache by KL; the better
        score where KL is equal, or unknown as of decoded answers. None where no trial saw every item.

        The best of many scores is lucky, by large swings of a few answers. KL is taken over all answer tokens and grows
        with the damage itself, so it tells apart what scores cannot.
        """
        complete = [t for t in race.feasible().values() if t.config is not None and self.complete(t.config)]
        scored = {t.config: t.value for t in complete if t.config and t.value is not None and math.isfinite(t.value)}
        if not scored:
            return None
        best = min(scored, key=lambda c: scored[c])
        alike = [c for c in scored if _behind(self._rounds(c, best, self.items.items)) <= _ALIKE]
        return min(alike, key=lambda c: (self.distance(c), scored[c]))

    # -- scores --------------------------------------------------------------------------------------------------

    def _scored(self, config: KVConfig) -> list[Item]:
        return [i for i in self.items.items if (ROLE, config.id, i.id) in self.book.rows]

    def complete(self, config: KVConfig) -> bool:
        """Whether a config was scored on every item."""
        return self._has(config, self.items.items)

    def _has(self, config: KVConfig, items: Sequence[Item]) -> bool:
        return all((ROLE, config.id, i.id) in self.book.rows for i in items)

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

    def distance(self, config: KVConfig) -> float:
        """Family-balanced mean KL to the full cache over all items, in nats; infinite where a row has none."""
        groups = self.by_family(self.items.items).values()
        kls = [[self.book.get(ROLE, config, i).kl for i in group] for group in groups]
        return float(np.mean([np.mean([math.inf if kl is None else kl for kl in group]) for group in kls]))

    def value(self, config: KVConfig) -> float:
        """The search score over every item this config was given. Optimistic: the best of many is lucky."""
        return self._mean(config, self._scored(config))


def _behind(rounds: Sequence[Sequence[float]]) -> float:
    """Mean of paired differences in standard errors over items; 0 of fewer than two. No test: it claims nothing."""
    differences = [d for row in rounds for d in row]
    if len(differences) < 2:
        return 0.0
    mean, error = float(np.mean(differences)), float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
