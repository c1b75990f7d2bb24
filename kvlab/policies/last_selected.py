"""Least recently selected: what a sparse reader has not chosen for longest goes first (LRU over chunks)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.policies.base import Candidates, Scorer


@dataclass(frozen=True, slots=True)
class LastSelected(Scorer):
    """Score = position of the last query that read the token. Query-aware: what queries choose is all it knows.

    A prompt reads all of itself, so after it every token ties and the oldest go first; from then on selection decides.
    Needs a reader that selects; it turns sparse reading into memory.
    """

    kind: ClassVar[str] = "last_selected"
    stateful: ClassVar[bool] = True
    query_agnostic: ClassVar[bool] = False
    query_agnostic: ClassVar[bool] = False
    reads_selection: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "lru"

    def fold(self, mass: Tensor, observed: Tensor, n_queries: int) -> Tensor:
        return torch.maximum(mass, observed.to(mass.dtype))

    def score(self, candidates: Candidates) -> Tensor:
        assert candidates.mass is not None
        return candidates.mass
