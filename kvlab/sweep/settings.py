"""What a sweep was asked to do, from parameters as papermill or a person types them. Checked before a model is loaded.

papermill passes unknown names with a warning and leaves "false", "[8,4]" and nan as they come; here each value becomes
the type of its field or an error that names the parameter. Knows no model.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.evals.item import FAMILIES, unknown
from kvlab.evals.sets import DEFAULT, families_of
from kvlab.search.settings import UsageError
from kvlab.search.sizes import parse_budget
from kvlab.sweep.formats import FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """One sweep. `budget_gb` in 10**9 bytes, `items` per family, `out` the folder for run folders ("": the default).

    `sets` are names as `kvlab.evals.sets` takes them. With `generate` answers are decoded and graded, not forced;
    generated code runs only with `allow_code_exec`.
    """

    model: str = "smollm2-135m"
    budget_gb: float = 6.0
    context: int = 131072
    concurrency: int = 8
    formats: tuple[str, ...] = ("raw", "fp8_e4m3", "fp8_e5m2", "int8")
    families: tuple[str, ...] = FAMILIES
    sets: tuple[str, ...] = DEFAULT
    items: int = 64
    seed: int = 0
    query_aware: bool = False
    generate: bool = False
    allow_code_exec: bool = False
    out: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("model is empty: give an alias, hub id, folder or .gguf file")
        for name, least in (("context", 1), ("concurrency", 1), ("items", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.budget_gb < 1e9 or self.budget_bytes < 1:
            raise UsageError(f"budget_gb must be a positive number of GB, got {self.budget_gb}")
        for kind, names, known in (("format", self.formats, tuple(FORMATS)), ("family", self.families, FAMILIES)):
            for name in names:
                if name not in known:
                    raise UsageError(str(unknown(kind, name, known)))
            if not names or len(set(names)) != len(names):
                raise UsageError(f"name every {kind} once and at least one, got {','.join(names) or 'none'}")

        try:
            there = families_of(self.sets)
        except ValueError as error:
            raise UsageError(f"sets: {error}") from None
        missing = [family for family in self.families if family not in there]
        if missing:
            raise UsageError(
                f"sets {','.join(self.sets)} have no items of family {', '.join(missing)}: pass families "
                f"{','.join(there)}, or more sets"
            )
        if self.allow_code_exec and not self.generate:
            raise UsageError("allow_code_exec runs generated code, and nothing is generated: pass generate True too")

    @property
    def budget_bytes(self) -> int:
        return round(self.budget_gb * 1e9)

    def answers(self) -> dict[str, bool]:
        """How answers are scored, as `kvlab.answering.scoring` takes it."""
        return {"generate": self.generate, "allow_code_exec": self.allow_code_exec}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The parameters, in order."""
        return tuple(f.name for f in dataclasses.fields(cls))

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "SweepConfig":
        """The config of named values, each brought to its type. Raises UsageError for an unknown name, a value of the
        wrong type, or one that is not finite."""
        for name in params:
            if name not in cls.names():
                near = difflib.get_close_matches(str(name), cls.names(), 1, cutoff=0.0)
                raise UsageError(
                    f"unknown parameter {name!r}; did you mean {near[0]!r}? Known: {', '.join(cls.names())}"
                )
        return cls(**{name: _typed(name, value) for name, value in params.items()})

    def to_dict(self) -> dict[str, Any]:
        """What decides the result: everything but where it is written."""
        body = dataclasses.asdict(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in body.items() if n != "out"}

    def to_params(self) -> dict[str, str | int | float | bool]:
        """The same as plain parameters, lists as comma-separated text; `from_params` gives this config back."""
        body = dataclasses.asdict(self)
        return {n: ",".join(v) if isinstance(v, tuple) else v for n, v in body.items()}


def _typed(name: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} is {value}: a parameter must be finite")
    kind, read = _KINDS[name]
    found = read(value)
    if found is None:
        raise UsageError(f"{name} must be {kind}, got {value!r} ({type(value).__name__})")
    return found


# Readers give None for what they cannot read. Python counts True as 1, people do not.


def _text(value: Any) -> str | None:
    return value.strip() if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+(_\d+)*\s*", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return None
    return int(value)


def _gigabytes(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            return parse_budget(value) / 1e9
        except ValueError as error:
            raise UsageError(f"budget_gb: {error}") from None
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def _switch(value: Any) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def _names(value: Any) -> tuple[str, ...] | None:
    """A list of names, also as text: `a,b`, `[a, b]` or `["a", "b"]`."""
    if isinstance(value, str):
        text = value.strip()
        bracketed = re.fullmatch(r"\[(.*)\]|\((.*)\)", text)
        inside = next(g for g in bracketed.groups() if g is not None) if bracketed else text
        value = [part.strip().strip("\"'") for part in inside.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        return None
    return tuple(value)


_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "model": ("text", _text),
    "budget_gb": ("a number of GB", _gigabytes),
    "context": ("a whole number", _whole),
    "concurrency": ("a whole number", _whole),
    "formats": ("names separated by commas", _names),
    "families": ("names separated by commas", _names),
    "sets": ("names separated by commas", _names),
    "items": ("a whole number", _whole),
    "seed": ("a whole number", _whole),
    "query_aware": ("True or False", _switch),
    "generate": ("True or False", _switch),
    "allow_code_exec": ("True or False", _switch),
    "out": ("text", _text),
}
