"""What a search was asked to do. Checked before anything heavy is loaded; knows no model."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.evals.item import FAMILIES, unknown
from kvlab.evals.sampling import Sampling
from kvlab.search.sizes import parse_budget

MODES = ("best", "map", "smallest")
"""`best`: the best score within the budget. `map`: the best score of every size up to it. `smallest`: the fewest bytes
that are shown to hold."""
LAYERS = ("auto", "uniform")
"""`auto`: formats may differ by layer, as far as the layers' sensitivities can be measured in the time."""


class UsageError(ValueError):
    """A request that cannot be carried out as written; the message says what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One search as asked for. `mode` says what is looked for, see MODES; `layers` whether formats may differ by layer.
    `minutes` sizes the run; `trials` and `items` override what it would choose."""

    budget_bytes: int
    model: str = "smollm2-135m"
    context: int = 131072
    concurrency: int = 8
    families: tuple[str, ...] = FAMILIES
    sets: tuple[str, ...] = ("default",)
    minutes: float = 6.0
    trials: int | None = None
    items: int | None = None
    seed: int = 0
    generate: bool = False
    allow_code_exec: bool = False
    samples: int = 1
    temperature: float = 0.0
    mode: str = "best"
    layers: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("context", 1), ("concurrency", 1), ("trials", 1), ("items", 2), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name} must be at least {least}, got {value}")
        for name, value, known in (("mode", self.mode, MODES), ("layers", self.layers, LAYERS)):
            if value not in known:
                raise UsageError(f"--{name}: {unknown(name, value, known)}")
        if not 0 < self.minutes < 100_000:
            raise UsageError(f"--minutes must be a positive number, got {self.minutes}")
        if self.generate and self.items is None:
            raise UsageError("--generate decodes answers, whose time cannot be planned: say how many with --items")
        if self.allow_code_exec and not self.generate:
            raise UsageError("--allow-code-exec runs generated code, and nothing is generated: add --generate")
        if (self.samples, self.temperature) != (1, 0.0) and not self.generate:
            raise UsageError("--samples and --temperature draw answers, and nothing is generated: add --generate")
        try:
            _ = self.sampling
        except ValueError as error:
            raise UsageError(f"--samples, --temperature: {error}") from None
        if not self.families:
            raise UsageError(f"--families needs at least one of {', '.join(FAMILIES)}")
        for family in self.families:
            if family not in FAMILIES:
                raise UsageError(str(unknown("family", family, FAMILIES)))
        if len(set(self.families)) != len(self.families):
            raise UsageError(f"--families names one twice: {','.join(self.families)}")

    @property
    def sampling(self) -> Sampling:
        """How decoded answers are drawn."""
        return Sampling(temperature=self.temperature, samples=self.samples, seed=self.seed)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"families": list(self.families), "sets": list(self.sets)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Request":
        values: dict[str, Any] = {k: tuple(v) if k in ("families", "sets") else v for k, v in data.items()}
        return cls(**values)

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """Where explicitly given values differ from this request."""
        own = dataclasses.asdict(self)
        return [f"{k}: this run has {own[k]}, asked for {v}" for k, v in given.items() if own[k] != v]


def budget(text: str) -> int:
    """Bytes of a --budget-gb value."""
    try:
        return parse_budget(text)
    except ValueError as error:
        raise UsageError(f"--budget-gb: {error}") from None


def names(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def writable(root: Path) -> None:
    """Raise UsageError when a run could not be written under `root`."""
    place = root
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"--out {root}: {place} is a file; choose a folder")
    try:
        probe = place / f".kvlab-{id(root)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out {root} cannot be written: {error.strerror}; choose another folder") from None
