"""Reading: one attention call over what a row holds, encoded pages as they are and raw tokens beside them."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.codecs import Packed
from kvlab.config import LayerConfig
from kvlab.kernels import attend as kernel
from kvlab.store import PageTable


class Reading:
    """K and V of one attention call: encoded pages as they are, raw tokens and new ones side by side."""

    def __init__(
        self, config: LayerConfig, table: PageTable, packed: tuple[Packed, Packed], raw: list[tuple[Tensor, Tensor]]
    ) -> None:
        """`raw` are K and V of sinks, window and new tokens, the new ones last."""
        self.config, self.table = config, table
        self.dtype = torch.promote_types(raw[-1][0].dtype, torch.float32)
        self.n_new, self.length = raw[-1][0].shape[1], table.length
        self.packed = packed if self.length else None
        self.k, self.v = (torch.cat([part[i].to(self.dtype) for part in raw], dim=1) for i in (0, 1))

    def probabilities(
        self, q: Tensor, start: int, scale: float, softcap: float | None, sink_logits: Tensor | None
    ) -> Float[Tensor, "N R T"]:
        """Attention probabilities of queries start, start + 1, ... over stored | sinks | window | new."""
        folded = kernel.fold_heads(q.to(self.dtype) * scale, self.k.shape[0])
        logits = folded @ self.k.mT
        if self.packed is not None:
            logits = torch.cat([self.config.key.scores(folded, self.packed[0]), logits], dim=-1)
        forbidden = self._forbidden(q.shape[1], start, logits.shape[-1], q.device)
        return kernel.probabilities(logits, forbidden, softcap, sink_logits, q.shape[1])

    def _forbidden(self, n_queries: int, start: int, columns: int, device: torch.device) -> Tensor | None:
        """Later new tokens, and slots past a shorter head's count. None when everything may be read."""
        forbidden = None
        if start + 1 < self.n_new:
            forbidden = torch.zeros(n_queries, columns, dtype=torch.bool, device=device)
            rank = torch.arange(self.n_new, device=device)
            forbidden[:, columns - self.n_new :] = rank > rank[start : start + n_queries].unsqueeze(1)
        if self.table.ragged:
            counts = torch.tensor(self.table.counts, device=device)
            past = torch.zeros(len(counts), n_queries, columns, dtype=torch.bool, device=device)
            past[..., : self.length] = (torch.arange(self.length, device=device) >= counts.unsqueeze(1)).unsqueeze(1)
            forbidden = past if forbidden is None else past | forbidden
        return forbidden

    def mix(self, probs: Float[Tensor, "N R T"]) -> Float[Tensor, "N R D"]:
        """Probability-weighted values."""
        out = probs[..., self.length :] @ self.v
        if self.packed is not None:
            out = out + self.config.value.mix(probs[..., : self.length], self.packed[1], self.v.shape[2])
        return out
