"""Attention of the last queries, pooled over neighbours: SnapKV (arXiv 2404.14469)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.policies.base import Candidates, Scorer


@dataclass(frozen=True, slots=True)
class WindowAttention(Scorer):
    """Score = mean attention of the last `window` queries, average-pooled over `pool` candidates.

    A prompt of at least `window` tokens gives SnapKV's own score. While decoding, each query replaces 1/window of the
    mean, an exponential window, so that no past query needs to be stored. `value_norm` weighs the pooled mean by ||v||.
    Query-aware.
    """

    kind: ClassVar[str] = "window_attention"
    stateful: ClassVar[bool] = True
    query_agnostic: ClassVar[bool] = False
    window: int = 32
    pool: int = 5
    value_norm: bool = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1 query, got {self.window}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool must be an odd number of tokens, got {self.pool}")

    @property
    def label(self) -> str:
        return f"snapkv w{self.window}" + (f" p{self.pool}" if self.pool != 5 else "") + " |v|" * self.value_norm

    @property
    def reads_values(self) -> bool:
        return self.value_norm

    def query_weights(self, n_queries: int) -> Tensor:
        if n_queries >= self.window:
            weights = torch.zeros(n_queries, dtype=torch.float64)
            weights[-self.window :] = 1 / self.window
            return weights
        ages = torch.arange(n_queries - 1, -1, -1, dtype=torch.float64)
        return (1 - 1 / self.window) ** ages / self.window

    def carry(self, n_queries: int) -> float:
        return 0.0 if n_queries >= self.window else (1 - 1 / self.window) ** n_queries

    def score(self, candidates: Candidates) -> Tensor:
        score = self._near(candidates)
        return score * candidates.value_norms if self.value_norm else score

    def _near(self, candidates: Candidates) -> Tensor:
        mass, real = candidates.mass, candidates.real
        assert mass is not None
        if self.pool == 1 or mass.shape[-1] == 0:
            return mass
        if real is None:
            return self._pooled(mass)
        # A head's last neighbours are those it holds, not what lies in the slots behind them.
        real = real.to(mass.dtype)
        return self._pooled(mass * real) / self._pooled(real).clamp_min(1 / self.pool)

    def _pooled(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x.unsqueeze(1), self.pool, 1, self.pool // 2, count_include_pad=False).squeeze(1)
