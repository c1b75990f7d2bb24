"""A stand-in for a model: item scores by formula, so that a test decides what a search should find."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlab.book import ScoreBook, StopFlag
from kvlab.config import KVConfig
from kvlab.evals.item import FAMILIES, EvalSet, Item
from kvlab.evals.subject import ItemScore
from kvlab.layer import ModelShape
from kvlab.progress import Progress
from kvlab.runs import Run
from kvlab.snapshot import SnapshotStore
from kvlab.subject import BASELINE, Counters, Timing

Formula = Callable[[KVConfig, Item], float]


def luck(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts only."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:6], "big") / 2**48


def items(split: str, n: int, families: Sequence[str] = FAMILIES) -> EvalSet:
    """`n` small items for each family, families taking turns."""
    made = [
        Item(
            id=f"{family}-task/{split}/0/{i}",
            task=f"{family}-task",
            family=family,
            context=f"context {i}",
            question="?",
            answers=(" yes",),
            cluster=f"{family}/{split}/{i}",
        )
        for i in range(n)
        for family in families
    ]
    return EvalSet(f"standin/{split}", 1, tuple(made))


def index(item: Item) -> int:
    return int(item.id.rsplit("/", 1)[1])


class StandIn:
    """Scores by formulas. `nll` may return NaN or raise, which is how configs fail."""

    def __init__(
        self,
        shape: ModelShape,
        nll: Formula,
        score: Formula = lambda config, item: 1.0,
        kl: Formula = lambda config, item: 0.0,
    ) -> None:
        self.name, self.shape = "standin", shape
        self._nll, self._score, self._kl = nll, score, kl
        self.counters = Counters()
        self.asked: list[tuple[str, str]] = []

    def score(self, items: Sequence[Item], configs: Sequence[KVConfig], *, persist: bool = True) -> Iterator[ItemScore]:
        for item in items:
            self.counters.prefills += item.id not in self.counters.items
            self.counters.items.add(item.id)
            for config in configs:
                self.asked.append((config.id, item.id))
                yield self._row(item, config)

    def _row(self, item: Item, config: KVConfig) -> ItemScore:
        size = config.predicted_bytes(self.shape, 64)
        whole = config == BASELINE
        return ItemScore(
            config_id=config.id,
            item_id=item.id,
            task=item.task,
            family=item.family,
            cluster=item.cluster,
            split=item.split,
            mode="forked",
            form=item.form,
            score=self._score(config, item),
            exact=0.0,
            token_accuracy=0.0,
            nll=self._nll(config, item),
            kl=None if whole else self._kl(config, item),
            top1=None if whole else 1.0,
            prediction="",
            context_tokens=64,
            answer_tokens=1,
            measured_bytes=size,
            predicted_bytes=size,
            raw16_bytes=self.shape.raw_bytes(64),
            seconds=0.0,
        )

    @property
    def most_asked(self) -> int:
        """How often one item was scored under one config, at most."""
        return max(Counter(self.asked).values())


def book(root: Path, subject: Any, run: Run | None = None) -> ScoreBook:
    """A book on a fresh run, or on a given one."""
    run = run or Run.create(root, "search", {"schema": "test"})
    return ScoreBook(run, subject, StopFlag(), Progress(1, quiet=True))


def damage(config: KVConfig) -> float:
    """Extra nats that grow as bits and kept tokens shrink, the mean of two layers; no two schemes alike."""
    lost = 0.0
    for layer in (config.at(0), config.at(1)):
        for weight, codec in ((0.5, layer.key), (0.25, layer.value)):
            bits = getattr(codec, "bits", {"raw": 16, "fp8": 7.5}.get(codec.kind, 16))
            lost += weight * 2.0 ** (1 - bits)
    return lost + 0.4 * (1 - getattr(config.budget, "fraction", 1.0)) + 1e-3 * luck(config.id)


def harmed(config: KVConfig, item: Item) -> float:
    """Nats of an item: its own difficulty, the config's damage, and a little of both."""
    own = 1 + luck("item", item.id)
    return own if config == BASELINE else own + damage(config) * (0.9 + 0.2 * luck(config.id, item.id))


def nan(config: KVConfig, item: Item) -> float:
    return math.nan


class StandInSession(StandIn):
    """The same with what a whole search asks of a subject besides scores."""

    plan = SimpleNamespace(mode="packed", compressed=(0, 1), reason="")
    tokenizer = SimpleNamespace(encode=lambda text: list(range(64)))

    def __init__(self, shape: ModelShape, nll: Formula, score: Formula) -> None:
        super().__init__(shape, nll, score, kl=lambda config, item: damage(config))
        self.store = SnapshotStore("standin")

    def time(self, configs: Sequence[KVConfig], prompt: Sequence[int], steps: int, repeats: int) -> list[Timing]:
        return [Timing(1.0, 0.5, len(prompt), steps) for _ in configs]


LOADED = SimpleNamespace(
    name="standin",
    revision=None,
    weights_sha256="0" * 64,
    dtype="float32",
    device="cpu",
    layers=2,
    kv_heads=1,
    head_dim=64,
    trained_context=4096,
    cache_root=None,
)
