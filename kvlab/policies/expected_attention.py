"""Expected attention: what queries yet to come are likely to attend to (arXiv 2510.00636)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.kernels.rope import Rotary
from kvlab.policies.base import Candidates, Expected, Scorer


@dataclass(frozen=True, slots=True)
class ExpectedAttention(Scorer):
    """Score = softmax over candidates of mu . k + k^T Sigma k / 2, times ||v|| if `value_norm` (as in the paper).

    mu and Sigma are mean and covariance of all queries so far before RoPE, the query heads of a KV head taken as one
    population, scaled as logits are and turned by the mean rotation of the next `horizon` positions. That is all it
    knows of queries: a question inside the prompt moves the mean a little, and so it is not called query-agnostic.
    Sums of queries are kept for each KV head, (D + 1) x D numbers in float32, and counted.
    """

    kind: ClassVar[str] = "expected_attention"
    stateful: ClassVar[bool] = True
    query_agnostic: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = True
    reads_queries: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    horizon: int = 512
    value_norm: bool = True

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"horizon must be at least 1 position, got {self.horizon}")

    @property
    def label(self) -> str:
        horizon = f" h{self.horizon}" if self.horizon != 512 else ""
        return "expected" + horizon + ("" if self.value_norm else " no |v|")

    @property
    def reads_values(self) -> bool:
        return self.value_norm

    def expect(self, sums: Float[Tensor, "N D1 D"], seen: int, rotary: Rotary) -> Expected:
        """Mean and covariance of the next queries of a sequence of `seen` tokens, from the sums of `query_sums`."""
        mean = sums[:, :1] / seen
        covariance = sums[:, 1:] / seen - mean.mT @ mean
        ahead = torch.arange(seen, seen + self.horizon, device=sums.device)
        turn = rotary.trig(ahead, torch.float64).mean(0).to(sums.dtype)
        turned = rotary.turn(rotary.turn(covariance, turn).mT, turn)
        return Expected(rotary.turn(mean, turn).squeeze(1), turned)

    def score(self, candidates: Candidates) -> Tensor:
        keys, expected, real = candidates.keys, candidates.expected, candidates.real
        assert keys is not None
        assert expected is not None
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
        mean, covariance = (x.to(keys.dtype) for x in expected)
        logits = (keys @ mean.unsqueeze(-1)).squeeze(-1) + ((keys @ covariance) * keys).sum(-1) / 2
        score = (logits if real is None else logits.masked_fill(~real, -torch.inf)).softmax(-1)
        return score * candidates.value_norms if self.value_norm else score


def query_sums(
    q: Float[Tensor, "H Q D"], first: int, scale: float, rotary: Rotary, kv_heads: int
) -> Float[Tensor, "N D1 D"]:
    """Sum of scaled queries before RoPE, and below it the sum of their outer products, each a mean over a KV head's
    query heads. `first` is the position of the first query.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    trig = rotary.opposite(rotary.table(first + q.shape[1], wide)[first:])
    plain = rotary.turn(q.to(wide) * scale, trig)
    grouped = plain.unflatten(0, (kv_heads, -1))
    share = 1 / grouped.shape[1]
    folded = grouped.flatten(1, 2)
    return torch.cat([folded.sum(1, keepdim=True), folded.mT @ folded], dim=1).float() * share
