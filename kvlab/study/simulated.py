"""An objective that costs a chosen time and nothing else: for trying out storages and workers, and for their bench.

Its configs have bytes and a loss by formula, so that the front of a study is known whoever computed it.
"""

import dataclasses
import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.study.unit import Outcome, Work, address, trial_seed

NAME = "simulated"
# Strings, as Optuna gives them back from every storage.
SPACE: dict[str, tuple[str, ...]] = {
    "scheme": ("raw", "fp8", "k8v8", "k8v4", "k4v4", "k4v2", "k2v2"),
    "group": ("32", "64", "128"),
    "keep": tuple(str(n) for n in range(10, 101, 5)),
}
_BITS = {"raw": 16.0, "fp8": 8.0, "k8v8": 8.0, "k8v4": 6.0, "k4v4": 4.0, "k4v2": 3.0, "k2v2": 2.0}
_LARGEST = len(SPACE["scheme"]) * len(SPACE["group"]) * len(SPACE["keep"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`trials` distinct configs of `pieces` parts that take `seconds` together; over `budget` bytes is infeasible."""

    trials: int = 40
    seconds: float = 0.0
    pieces: int = 2
    budget: int = 1 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("trials", 1, _LARGEST), ("pieces", 1, 1000), ("seconds", 0, 86400)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"--{name} must lie between {low} and {high}, got {getattr(self, name)}")

    def to_dict(self) -> dict[str, Any]:
        return {"objective": NAME, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any]) -> "Settings":
        return cls(**{f.name: spec[f.name] for f in dataclasses.fields(cls)})


def space_hash() -> str:
    """Changes when a config of this space could come out differently."""
    return hashlib.sha256(repr((SPACE, _BITS)).encode()).hexdigest()[:12]


def plan(study: str, settings: Settings) -> list[Work]:
    """The configs of a study: each drawn by the seed of its number, drawn again while one before is the same."""
    works: dict[str, Work] = {}
    for number in range(settings.trials):
        draw = random.Random(trial_seed(f"{study}|{settings.seed}", number))
        while True:
            config = {name: draw.choice(choices) for name, choices in SPACE.items()}
            key = address(NAME, config)
            if key not in works:
                break
        over = float(size(config) - settings.budget)
        works[key] = Work(key=key, body=config, params={n: (config[n], SPACE[n]) for n in SPACE}, violation=over)
    return list(works.values())


def size(config: Mapping[str, Any]) -> int:
    """Bytes of a million values."""
    return round((_BITS[config["scheme"]] + 32 / int(config["group"])) * 125_000 * int(config["keep"]) / 100)


class Simulated:
    """The objective. Every piece sleeps its share and adds its part of the loss."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def prefers(self, body: Mapping[str, Any]) -> bool:
        return False

    def pieces(self, body: Mapping[str, Any]) -> Mapping[str, int]:
        return {address(NAME, dict(body), n): n for n in range(self.settings.pieces)}

    def run(self, body: Mapping[str, Any], piece: int) -> dict[str, float]:
        time.sleep(self.settings.seconds / self.settings.pieces)
        luck = int(address("luck", dict(body), piece), 16) / 16**16
        return {"loss": 2.0 ** -_BITS[body["scheme"]] + (100 - int(body["keep"])) / 400 + luck / 100}

    def outcome(self, body: Mapping[str, Any], results: Sequence[Mapping[str, float]]) -> Outcome:
        return Outcome(sum(r["loss"] for r in results) / len(results))
