"""Sizes as people write them and read them. Knows no model."""

import math
import re

_UNITS = {"": 10**9, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def parse_budget(text: str) -> int:
    """Bytes of `6` (GB = 10**9), `6GB`, `6GiB` (2**30), `800MiB`. Raises ValueError for anything else, or below 1."""
    match = re.fullmatch(r"\s*([+-]?[\d.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"a budget is a number of GB or a size such as 6GiB or 800MB, got {text!r}")
    try:
        amount = float(match[1])
    except ValueError:
        raise ValueError(f"a budget is a number of GB or a size such as 6GiB or 800MB, got {text!r}") from None
    size = amount * _UNITS[unit]
    if not math.isfinite(size) or size < 1:
        raise ValueError(f"a budget must be positive, got {text!r}: give the memory that K and V may take")
    return int(size)


def human(size: float) -> str:
    """Bytes for people, decimal units as in budgets: 24.2 GB."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= power:
            return f"{size / power:.3g} {unit}"
    return f"{size:.0f} B"
