"""Recency: the latest tokens matter most. With sinks, StreamingLLM (arXiv 2309.17453) with absolute positions."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvlab.policies.base import Candidates, Scorer


@dataclass(frozen=True, slots=True)
class Recency(Scorer):
    """Score = position. Query-agnostic."""

    kind: ClassVar[str] = "recency"
    stateful: ClassVar[bool] = False
    query_agnostic: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "window"

    def score(self, candidates: Candidates) -> Tensor:
        return candidates.positions.float()
