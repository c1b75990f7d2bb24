"""Codecs and policies as plain data and back: a dict with a `kind`, every field in its own type. Knows their registries
only as it is given them.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvlab.codecs import Codec
from kvlab.policies import Budget, Reader, Scorer


def plain(value: Any) -> Any:
    if isinstance(value, (Codec, Scorer, Budget, Reader)):
        own = {f.name: plain(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]
        return {"kind": value.kind} | own
    return [plain(v) for v in value] if isinstance(value, tuple) else value


def normal(part: Any, base: type, where: str) -> Any:
    """`part` with every field in its own type, so that equal settings have equal JSON: 1.0 for 1, 0.0 for -0.0."""
    if not isinstance(part, base):
        raise ValueError(f"{where} must be a {base.__name__}, got {part!r}")
    own = {f.name: typed(getattr(part, f.name), f.default, f"{where}.{f.name}") for f in fields(part)}  # type: ignore[arg-type]
    return type(part)(**own)


def refuse_unknown(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys are {sorted(known)}"
            raise ValueError(f"unknown key {key!r} in {where}: {hint}")


def build(registry: Mapping[str, type], data: Any, where: str) -> Any:
    """One codec, scorer or budget from its plain form."""
    if not isinstance(data, Mapping) or "kind" not in data:
        raise ValueError(f"{where} must be a table with a 'kind', one of {sorted(registry)}, got {data!r}")
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in registry:
        near = difflib.get_close_matches(str(kind), registry, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known kinds are {sorted(registry)}"
        raise ValueError(f"unknown kind {kind!r} in {where}: {hint}")
    own = {k: v for k, v in data.items() if k != "kind"}
    defaults = {f.name: f.default for f in dataclasses.fields(registry[kind])}
    refuse_unknown(own, set(defaults), f"{where} ({kind})")
    for name, value in own.items():
        own[name] = typed(value, defaults[name], f"{where}.{name}")
    return registry[kind](**own)


def typed(value: Any, default: Any, where: str) -> Any:
    """`value` in the type of the field's default. Bools are no numbers, NaN and infinity are no values."""
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):
        return tuple(typed(v, default[0], where) for v in value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        raise ValueError(f"{where} must be {type(default).__name__}, got {value!r}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} must be a finite number, got {value!r}")
        return value + 0.0  # no minus zero
    return value
