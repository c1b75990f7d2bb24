"""Key difference: keys that point away from the mean direction stay (KeyDiff, arXiv 2504.15364)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.policies.base import Candidates, Scorer


@dataclass(frozen=True, slots=True)
class KeyDiff(Scorer):
    """Score = -cos(k, mean of k / ||k||), keys as attention sees them, the mean over the head's candidates.

    Query-agnostic; nothing is tracked. Sinks and recent tokens are not in the mean: they are no candidates.
    """

    kind: ClassVar[str] = "key_diff"
    stateful: ClassVar[bool] = False
    query_agnostic: ClassVar[bool] = True
    reads_keys: ClassVar[bool] = True
    relative: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "keydiff"

    def score(self, candidates: Candidates) -> Tensor:
        keys, real = candidates.keys, candidates.real
        assert keys is not None
        directions = F.normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
        # A mean's length does not change a cosine: the sum will do.
        total = (directions if real is None else directions * real.unsqueeze(-1)).sum(1, keepdim=True)
        return -(directions * F.normalize(total, dim=-1)).sum(-1)
