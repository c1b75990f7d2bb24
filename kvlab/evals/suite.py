"""Suites as TOML: which tasks make up each family, and how long their contexts are. Checked when read.

This file refuses to know generators beyond their names and families.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvlab.evals.bundled import bundled
from kvlab.evals.item import FAMILIES, unknown
from kvlab.evals.tasks import task

_KEYS = ("name", "version", "families", "lengths")


@dataclass(frozen=True, slots=True)
class Suite:
    """`tasks` goes to `build(suite=...)` and `lengths` to `build(length=...)`."""

    name: str
    version: int
    tasks: Mapping[str, tuple[str, ...]]
    lengths: Mapping[str, int]


def load_suite(name_or_path: str | Path = "default") -> Suite:
    """A bundled suite by name, or a `.toml` file. Raises ValueError for unknown keys, families and tasks."""
    text = str(name_or_path)
    path = Path(text) if text.endswith(".toml") else bundled(f"{text}.toml")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"suite {path.name} is not valid TOML: {error}") from error
    return parse_suite(data, path.name)


def parse_suite(data: Mapping[str, Any], where: str = "suite") -> Suite:
    """Check the parsed TOML and freeze it."""
    for key in data:
        if key not in _KEYS:
            raise ValueError(f"{where}: {unknown('key', key, _KEYS)}")
    for key in _KEYS:
        if key not in data:
            raise ValueError(f"{where}: key {key!r} is missing; a suite has {', '.join(_KEYS)}")
    version = data["version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"{where}: version={version!r} must be a whole number from 1")
    tasks: dict[str, tuple[str, ...]] = {}
    for family, names in data["families"].items():
        if family not in FAMILIES:
            raise ValueError(f"{where}: {unknown('family', family, FAMILIES)}")
        if not isinstance(names, list) or not names or len(set(names)) != len(names):
            raise ValueError(f"{where}: family {family!r} must list different task names, got {names!r}")
        for name in names:
            if task(name).family != family:
                raise ValueError(f"{where}: task {name!r} belongs to family {task(name).family!r}, not {family!r}")
        tasks[family] = tuple(names)
    used = {name for names in tasks.values() for name in names}
    for name, length in data["lengths"].items():
        if name not in used:
            raise ValueError(f"{where}: {unknown('task in [lengths]', name, sorted(used))}")
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(f"{where}: length of {name!r} is {length!r}; it must be a whole number of tokens from 1")
    lengths = {name: data["lengths"].get(name, task(name).length) for name in sorted(used)}
    return Suite(str(data["name"]), version, MappingProxyType(tasks), MappingProxyType(lengths))
