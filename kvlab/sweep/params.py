"""Parameters as papermill or a person types them, each brought to the type of its field or refused by name.

papermill passes unknown names with a warning and leaves "false", "[8,4]" and nan as they come. Knows kinds of values,
not what they are for.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from kvlab.search.settings import UsageError
from kvlab.search.sizes import parse_budget

Kind = tuple[str, Callable[[Any], Any]]


class Params:
    """What settings that come from a notebook share. A subclass is a frozen dataclass; KINDS says how each field is
    read. `out`, the folder for run folders, decides no result and is no part of the identity."""

    __slots__ = ()
    KINDS: ClassVar[Mapping[str, Kind]]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The parameters, in order."""
        return tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """The config of named values, each brought to its type. Raises UsageError for an unknown name, a value of the
        wrong type, or one that is not finite."""
        known = cls.names()
        for name in params:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1, cutoff=0.0)
                raise UsageError(f"unknown parameter {name!r}; did you mean {near[0]!r}? Known: {', '.join(known)}")
        return cls(**{name: _typed(cls.KINDS[name], name, value) for name, value in params.items()})

    def to_dict(self) -> dict[str, Any]:
        """What decides the result: everything but where it is written."""
        body = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {n: list(v) if isinstance(v, tuple) else v for n, v in body.items() if n != "out"}

    def to_params(self) -> dict[str, str | int | float | bool]:
        """The same as plain parameters, lists as comma-separated text; `from_params` gives this config back."""
        body = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {n: ",".join(map(_short, v)) if isinstance(v, tuple) else v for n, v in body.items()}


def _short(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _typed(kind: Kind, name: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} is {value}: a parameter must be finite")
    what, read = kind
    found = read(value)
    if found is None:
        raise UsageError(f"{name} must be {what}, got {value!r} ({type(value).__name__})")
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


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    fine = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    return float(value) if fine else None


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


def _each(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...] | None]:
    """A list of what `read` reads, or one alone."""

    def listed(value: Any) -> tuple[Any, ...] | None:
        parts = value if isinstance(value, list | tuple) else _names(str(value))
        found = tuple(map(read, parts or ()))
        return None if None in found else found

    return listed


def _share(value: Any) -> float | None:
    """A share of one, also in percent."""
    if isinstance(value, str) and value.strip().endswith("%"):
        found = _number(value.strip().removesuffix("%"))
        return None if found is None else found / 100
    return _number(value)


TEXT: Kind = ("text", _text)
WHOLE: Kind = ("a whole number", _whole)
WHOLES: Kind = ("whole numbers separated by commas", _each(_whole))
NUMBER: Kind = ("a number", _number)
SHARES: Kind = ("shares such as 0.5,0.25 or 50%,25%", _each(_share))
GIGABYTES: Kind = ("a number of GB", _gigabytes)
SWITCH: Kind = ("True or False", _switch)
NAMES: Kind = ("names separated by commas", _names)
