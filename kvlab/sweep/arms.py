"""What a sweep compares: every format with everyone who may be evicted and everything that may be read.

Names and configs of arms. Knows the search space for sinks, window and 16-bit bytes; no model, no items, no scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlab.config import KVConfig
from kvlab.kernels.chunks import Bound
from kvlab.policies import (
    AttentionMass,
    ExpectedAttention,
    Fraction,
    KeyDiff,
    KeyNorm,
    Recency,
    Scorer,
    TopK,
    WindowAttention,
)
from kvlab.policies.base import Scope
from kvlab.search.space import PAGE_TOKENS, Space
from kvlab.sweep.formats import FORMATS

if TYPE_CHECKING:
    from kvlab.sweep.settings import SweepConfig

EVICTERS: dict[str, Scorer] = {
    "window": Recency(),
    "h2o": AttentionMass(),
    "snapkv": WindowAttention(window=16),
    "keynorm": KeyNorm(),
    "keydiff": KeyDiff(),
    "expected": ExpectedAttention(),
}
# To these a position says everything: all heads keep the same, whoever shares the budget.
_ALIKE = ("window",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One config by what tells it apart: a format, who is kept (`keep` 1: everyone), what is read (`read` 1: all)."""

    format: str
    scorer: str = ""
    keep: float = 1.0
    scope: Scope = "head"
    read: float = 1.0
    chunk: int = 0
    bound: Bound = "minmax"

    @property
    def name(self) -> str:
        """Unlike that of any other arm of a sweep."""
        parts = [self.format]
        if self.keep < 1:
            scope = "" if self.scope == "head" else f" {self.scope}"
            parts.append(f"{self.scorer} {self.keep * 100:g}%{scope}")
        if self.read < 1:
            parts.append(
                f"read {self.read * 100:g}% c{self.chunk}" + (f" {self.bound}" if self.bound != "minmax" else "")
            )
        return " + ".join(parts)

    def axes(self) -> dict[str, Any]:
        """Where it stands on every axis that means something to it."""
        evicts = {"scorer": self.scorer, "scope": self.scope} if self.keep < 1 else {}
        reads = {"chunk": self.chunk, "bound": self.bound} if self.read < 1 else {}
        return {"format": self.format, "keep": self.keep, **evicts, "read": self.read, **reads}

    def build(self, space: Space) -> KVConfig:
        """The config. Raises ValueError for parts that do not go together, naming them."""
        form = FORMATS[self.format]
        page = form.page if form.page > 1 else self.chunk or PAGE_TOKENS
        kept = (EVICTERS[self.scorer], Fraction(self.keep, scope=self.scope)) if self.keep < 1 else (None, None)
        config = space.build(form.key, form.value, *kept, page_tokens=page, centring=form.centring)
        if self.read < 1:
            config = replace(config, reader=TopK(fraction=self.read, chunk=self.chunk, bound=self.bound))
        return config


def arms(config: "SweepConfig") -> tuple[Arm, ...]:
    """Every format with every way to keep and every way to read, in the order asked; each once."""
    made = (
        Arm(format=name, **kept, **read) for name in config.formats for kept in _kept(config) for read in _read(config)
    )
    return tuple(dict.fromkeys(made))


def _kept(config: "SweepConfig") -> Iterator[dict[str, Any]]:
    for keep in config.keep:
        if keep == 1:
            yield {}
            continue
        for scorer in config.scorers:
            for scope in ("head",) if scorer in _ALIKE else config.scopes:
                yield {"scorer": scorer, "keep": keep, "scope": scope}


def _read(config: "SweepConfig") -> Iterator[dict[str, Any]]:
    for read in config.read:
        if read == 1:
            yield {}
            continue
        for bound in config.bounds:
            for chunk in config.chunks:
                yield {"read": read, "chunk": chunk, "bound": bound}
