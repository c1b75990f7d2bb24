"""Accumulated attention with exponential forgetting: heavy hitters, as in H2O (arXiv 2306.14048)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.policies.base import Candidates, Scorer


@dataclass(frozen=True, slots=True)
class AttentionMass(Scorer):
    """Score = sum over all queries of decay**age times the attention paid to the token.

    Every query of a forward counts, the prompt's own included, so a question inside the prompt steers what is kept;
    asked after compression it cannot. decay 1 is H2O itself; `value_norm` multiplies by ||v||, what the token
    can add to an output. Query-aware.
    """

    kind: ClassVar[str] = "attention_mass"
    stateful: ClassVar[bool] = True
    query_agnostic: ClassVar[bool] = False
    decay: float = 1.0
    value_norm: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay!r}: 1 never forgets")

    @property
    def label(self) -> str:
        return "h2o" + (f" d{self.decay:g}" if self.decay != 1 else "") + " |v|" * self.value_norm

    @property
    def reads_values(self) -> bool:
        return self.value_norm

    def query_weights(self, n_queries: int) -> Tensor:
        return self.decay ** torch.arange(n_queries - 1, -1, -1, dtype=torch.float64)

    def carry(self, n_queries: int) -> float:
        return self.decay**n_queries

    def score(self, candidates: Candidates) -> Tensor:
        assert candidates.mass is not None
        return candidates.mass * candidates.value_norms if self.value_norm else candidates.mass
