"""Recency: the latest tokens matter most. With sinks, StreamingLLM (arXiv 2309.17453) with absolute positions."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvlab.policies.base import Scorer


@dataclass(frozen=True, slots=True)
class Recency(Scorer):
    """Score = position. Query-agnostic."""

    kind: ClassVar[str] = "recency"
    stateful: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return "window"

    def score(self, mass: Tensor, positions: Tensor) -> Tensor:
        return positions.float()
