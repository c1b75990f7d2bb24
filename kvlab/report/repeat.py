"""The flip floor in words: what the baseline against itself says of how small a difference may mean something.

The full cache is scored twice, beside other rows the second time. Documents from before shares were noted have counts
only.
"""

from collections.abc import Mapping
from typing import Any


def flip_floor(again: Mapping[str, Any]) -> str:
    """One clause from the A/A control of a result document."""
    n, flips = again["n"], again["flips"]
    return f"baseline again in other batches, {flips} of {n} answers flip{_share(again)}{_apart(again)}"


def reading(again: Mapping[str, Any]) -> str:
    """What follows from it."""
    return f"no smaller difference counts{_share(again)}" if again["flips"] else f"ok{_apart(again)}"


def _share(again: Mapping[str, Any]) -> str:
    return f" ({again['flips'] / again['n']:.1%})" if again["flips"] else ""


def _apart(again: Mapping[str, Any]) -> str:
    apart = again.get("dnll")
    return "" if apart is None else f", nats per token apart by {apart:.1g} at most"
