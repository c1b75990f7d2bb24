"""Whole searches on simulated scores: the real race, choice of finalists, confirmation, replication and sequence.

Nothing of the verdict is imitated here; only the model is. An item's outcomes under all configs lean the same way (some
items are frail), so that the luck of the best of many is as in life. Knows what is true of every config, which no real
search can, and counts how often a claim is false.
"""

import functools
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import torch
from scipy.special import ndtr

from kvlab import confirm, stats
from kvlab.book import ScoreBook, StopFlag
from kvlab.config import KVConfig
from kvlab.evals.item import FAMILIES, EvalSet, Item
from kvlab.evals.subject import ItemScore
from kvlab.layer import LayerShape, ModelShape
from kvlab.progress import Progress
from kvlab.search.choice import finalists
from kvlab.search.race import ROLE as SEARCH
from kvlab.search.race import Racer
from kvlab.search.space import Space
from kvlab.search.workload import Workload
from kvlab.subject import BASELINE

_CONFIRM_ITEMS = 59  # the fewest for 5 points
ACCURACY = 0.65  # of the uncompressed cache
_LEAN = math.sqrt(0.5)  # how much of a flip's luck belongs to the item, as a correlation of two configs' flips of .5
_SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
_WORKLOAD = Workload(4096, 1)
_SPLITS = {SEARCH: "search", confirm.ROLE: "confirm", confirm.AA_ROLE: "confirm", confirm.REPLICATE_ROLE: "replicate"}


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of one config in one family: the share of items on which it differs from the uncompressed cache,
    and the mean difference. `nats` is its true extra loss per token, which the search sees through noise."""

    discordance: float
    diff: float = 0.0
    nats: float = 0.0

    def __post_init__(self) -> None:
        if not abs(self.diff) <= self.discordance <= 1:
            raise ValueError(f"a difference of {self.diff} needs at least as much discordance, got {self.discordance}")


@dataclass(frozen=True, slots=True)
class World:
    """One kind of study: what is true of a config in a family, and the sizes of a search."""

    name: str
    truth: Callable[[KVConfig, str], Truth]
    search_items: int = 16
    confirm_items: int = _CONFIRM_ITEMS
    trials: int = 16
    batch: int = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one study said: finalists in order, with their verdicts; the int8 reference; trials stopped for good."""

    finalists: tuple[tuple[KVConfig, str], ...]
    reference: str
    stopped: int

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for _, word in self.finalists)


class SimulatedBook(ScoreBook):
    """A book that draws scores instead of asking a model, and keeps them in memory only.

    Scores depend on the seed, the config and the item, not on what was asked before.
    """

    def __init__(self, world: World, seed: Sequence[int]) -> None:
        nowhere: Any = SimpleNamespace(path=Path("nowhere"), status={}, rows=pandas.DataFrame)
        super().__init__(nowhere, None, StopFlag(), Progress(1, quiet=True))  # type: ignore[arg-type]
        self.world, self.seed = world, tuple(seed)
        self._drawn: dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]] = {}

    def ensure(
        self, role: str, items: Sequence[Item], configs: Iterable[KVConfig], *, persist: bool = True, anew: bool = False
    ) -> None:
        for config in configs:
            for item in items:
                key = (role, config.id, item.id)
                if key not in self.rows:
                    self.rows[key] = self._row(config, item, _SPLITS[role])

    def save(self) -> None:
        return None

    def _row(self, config: KVConfig, item: Item, split: str) -> ItemScore:
        scores, nats = self._draw(config, item.family, split)
        at = int(item.id.rsplit("/", 1)[1])
        return ItemScore(
            config_id=config.id, item_id=item.id, task=item.task, family=item.family, cluster=item.cluster, split=split,
            mode="forked", form="greedy", score=float(scores[at]), exact=float(scores[at]), token_accuracy=0.0,
            nll=float(nats[at]), kl=None, top1=None, prediction="", context_tokens=64, answer_tokens=1,
            measured_bytes=1, predicted_bytes=1, raw16_bytes=1, seconds=0.0,
        )  # fmt: skip

    def _draw(self, config: KVConfig, family: str, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Scores and nats of a whole split of a family under one config, drawn once."""
        key = (config.id, family, split)
        if key not in self._drawn:
            n = self.world.search_items if split == "search" else self.world.confirm_items
            shared = self._rng(family, split)
            right, frail, hard = shared.random(n) < ACCURACY, shared.standard_normal(n), 1 + shared.random(n)
            if config == BASELINE:
                self._drawn[key] = right.astype(float), hard
            else:
                truth, own = self.world.truth(config, family), self._rng(config.id, family, split)
                scores = _flipped(right, frail, truth, own)
                self._drawn[key] = scores, hard + truth.nats + 0.1 * own.standard_normal(n)
        return self._drawn[key]

    def _rng(self, *names: str) -> np.random.Generator:
        return np.random.default_rng([*self.seed, *(zlib.crc32(name.encode()) for name in names)])


def _flipped(right: np.ndarray, frail: np.ndarray, truth: Truth, own: np.random.Generator) -> np.ndarray:
    """Right answers lost and wrong ones gained at the true rates; frail items lose first and gain last."""
    losses, gains = (truth.discordance - truth.diff) / 2, (truth.discordance + truth.diff) / 2
    luck = ndtr(_LEAN * frail + math.sqrt(1 - _LEAN**2) * own.standard_normal(len(right)))
    lost, gained = right & (luck < losses / ACCURACY), ~right & (luck > 1 - gains / (1 - ACCURACY))
    return (right & ~lost | gained).astype(float)


@functools.cache
def _items(split: str, n: int) -> EvalSet:
    made = [
        Item(
            id=f"{family}-task/{split}/0/{i}", task=f"{family}-task", family=family, context="c", question="?",
            answers=(" a",), cluster=f"{family}/{split}/{i}",
        )
        for i in range(n)
        for family in FAMILIES
    ]  # fmt: skip
    return EvalSet(f"simulated/{split}", 1, tuple(made))


@functools.cache
def space() -> Space:
    """A third of the uncompressed bytes, so that trials have to choose."""
    return Space(_SHAPE, _WORKLOAD, _WORKLOAD.bytes(KVConfig(raw_dtype="float16"), _SHAPE) // 3, "float16")


def study(world: World, seed: Sequence[int]) -> Outcome:
    """One search, from its first trial to its verdicts."""
    book = SimulatedBook(world, seed)
    where, anchors = space(), space().anchors()
    searched = _items("search", world.search_items)
    racer = Racer(where, book, searched, n_items=world.search_items, seed=sum(seed) % 2**31)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optuna's, about what is experimental
        race = racer.run(world.trials, world.batch, list(anchors.values()), None)
    size = {t.config.id: where.workload.bytes(t.config, where.shape) for t in race.trials if t.config}
    chosen = finalists(race, len(searched), size, first=racer.safest(race))
    fresh, margin = _items("confirm", world.confirm_items), confirm.Margin.planned(world.confirm_items)
    verdicts = confirm.judge_arms(book, fresh, [*chosen, anchors["int8"]], where.control(), margin)
    again = functools.partial(_items, "replicate", world.confirm_items)
    verdicts = confirm.replicate_rises(book, fresh, again, chosen, verdicts)
    judged = confirm.in_sequence(chosen, verdicts)
    return Outcome(
        tuple((c, judged[c.id].verdict) for c in chosen),
        verdicts.judged[anchors["int8"].id].verdict,
        sum(t.stopped_by is not None for t in race.trials),
    )


# -- worlds ------------------------------------------------------------------------------------------------------------


def _with_control(truth: Callable[[KVConfig, str], Truth]) -> Callable[[KVConfig, str], Truth]:
    """The known-bad control loses half of everything wherever the world is; else all would be INSENSITIVE."""
    bad = space().control().id
    return lambda config, family: Truth(0.5, -0.4, 1.0) if config.id == bad else truth(config, family)


def margin(world: World) -> float:
    return confirm.Margin.planned(world.confirm_items).value


def is_planted(config: KVConfig) -> bool:
    """Whether a config is one of the bad ones of the planted world: keys of 4 bits or fewer."""
    return getattr(config.key, "bits", 16) <= 4


def worlds() -> Mapping[str, World]:
    """Every kind of study that the bench counts, by a short name."""
    width = stats.planned_margin(_CONFIRM_ITEMS)
    lossless, quiet, loud = Truth(0.0), Truth(0.01), Truth(0.15)

    def equal(config: KVConfig, family: str) -> Truth:
        # One family flips a lot, so that some config is lucky in it; the others little, so that luck may be claimed.
        return loud if family == "math" else quiet

    def at_margin(config: KVConfig, family: str) -> Truth:
        # One family is enough to make HOLDS false, and the hardest to notice.
        return Truth(0.10, -width) if family == "math" else lossless

    def planted(config: KVConfig, family: str) -> Truth:
        # The search is made to believe that these are the best.
        return Truth(0.25, -4 * width, -0.5) if is_planted(config) and family == "code" else quiet

    return {
        "equal": World("every config equals the full cache, with flips", _with_control(equal)),
        "lossless": World("every config is the full cache", _with_control(lambda c, f: lossless)),
        "margin": World("every config loses the margin in one family", _with_control(at_margin), trials=24),
        "planted": World("the seeming best lose four margins", _with_control(planted)),
    }


def check_verdicts(outcomes: Iterable[Outcome]) -> None:
    """Raise ValueError for a verdict that is no word of kvlab.stats."""
    for outcome in outcomes:
        strange = {*outcome.words, outcome.reference} - set(stats.VERDICTS)
        if strange:
            raise ValueError(f"verdicts must be among {stats.VERDICTS}, got {sorted(strange)}")
