"""Key norm: short keys draw attention, so they stay (arXiv 2406.11430)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.policies.base import Candidates, Scorer


@dataclass(frozen=True, slots=True)
class KeyNorm(Scorer):
    """Score = -||k||. RoPE changes no norm, so positions do not matter. Query-agnostic; nothing is tracked."""

    kind: ClassVar[str] = "key_norm"
    stateful: ClassVar[bool] = False
    query_agnostic: ClassVar[bool] = True
    reads_keys: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "knorm"

    def score(self, candidates: Candidates) -> Tensor:
        keys = candidates.keys
        assert keys is not None
        return -keys.to(torch.promote_types(keys.dtype, torch.float32)).norm(dim=-1)
