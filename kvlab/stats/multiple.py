"""Corrections for asking more than one question. Knows p-values and passes, nothing of where they come from."""

from collections.abc import Mapping, Sequence


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm step-down adjusted p-values, in the order given. Source: Holm (1979)."""
    for name, p in p_values.items():
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p-value of {name!r} must be in [0, 1], got {p}")
    adjusted: dict[str, float] = {}
    running = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = running
    return {name: adjusted[name] for name in p_values}


def fixed_sequence(passes: Sequence[bool]) -> tuple[bool, ...]:
    """Claims allowed when tests run in an order fixed beforehand, each at full alpha: all before the first failure.

    A later pass after a failure is not a claim. Source: Maurer, Hothorn and Lehmacher (1995).
    """
    allowed = True
    claims = []
    for passed in passes:
        allowed = allowed and bool(passed)
        claims.append(allowed)
    return tuple(claims)
