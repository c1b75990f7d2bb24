"""Reading: one attention call over what a row holds, encoded pages as they are and raw tokens beside them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlab.centre import KeyTerm
from kvlab.codecs import Packed
from kvlab.kernels import attend as kernel
from kvlab.layer import LayerConfig
from kvlab.selecting import Choice
from kvlab.store import PageTable


def pages(table: PageTable, choice: Choice | None = None) -> tuple[Packed, Packed]:
    """Streams of K and of V, of all encoded tokens or of the chunks that the one query of `choice` reads."""
    names = [name for name, stream in table.pool.layout.items() if name[:2] in ("k.", "v.") and not stream.derived]
    if choice is None:
        packed = table.gather(names)
    else:
        packed = table.take(choice.chunks[:, 0].long().clamp_min(0), choice.size, names)
    split: tuple[Packed, Packed] = ({}, {})
    for name, rows in packed.items():
        split[name[0] == "v"][name[2:]] = rows
    return split


class Reading:
    """K and V of one attention call: encoded pages as they are, raw tokens and new ones side by side.

    With a `choice`, one query gathers its chunks and nothing else; several, whose chunks differ, gather all and each
    masks what it does not read.
    """

    def __init__(
        self,
        config: LayerConfig,
        table: PageTable,
        raw: list[tuple[Tensor, Tensor]],
        choice: Choice | None = None,
        key_term: KeyTerm | None = None,
    ) -> None:
        """`raw` are K and V of sinks, window and new tokens, the new ones last."""
        self.config, self.table, self.choice, self.key_term = config, table, choice, key_term
        self.dtype = torch.promote_types(raw[-1][0].dtype, torch.float32)
        self.n_new, self.length = raw[-1][0].shape[1], table.length
        self.slots: Tensor | None = None  # where the gathered tokens lie in the table; None where they lie in order
        if choice is not None and self.n_new == 1:
            self.slots = choice.slots()
            self.length = self.slots.shape[1]
        self.packed = pages(table, None if self.slots is None else choice) if self.length else None
        self.k, self.v = (torch.cat([part[i].to(self.dtype) for part in raw], dim=1) for i in (0, 1))

    def probabilities(
        self, q: Tensor, start: int, scale: float, softcap: float | None, sink_logits: Tensor | None
    ) -> Float[Tensor, "N R T"]:
        """Attention probabilities of queries start, start + 1, ... over stored | sinks | window | new."""
        folded = kernel.fold_heads(q.to(self.dtype) * scale, self.k.shape[0])
        logits = folded @ self.k.mT
        if self.packed is not None:
            stored = self.config.key.scores(folded, self.packed[0])
            if self.key_term is not None:
                stored = stored + self.key_term.logits(folded, self.slots)
            logits = torch.cat([stored, logits], dim=-1)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        self._forbid(logits.unflatten(1, (-1, q.shape[1])), start)
        # Every query reads itself at least, so that no row is empty.
        return kernel.probabilities(logits, None, None, sink_logits, q.shape[1])

    def _forbid(self, logits: Float[Tensor, "N G Q T"], start: int) -> None:
        """Strike out later new tokens, and slots past a shorter head's count."""
        n_queries = logits.shape[2]
        if start + 1 < self.n_new:
            rank = torch.arange(self.n_new, device=logits.device)
            later = rank > rank[start : start + n_queries].unsqueeze(1)
            logits[..., logits.shape[3] - self.n_new :].masked_fill_(later, -torch.inf)
        hidden = self._hidden(slice(start, start + n_queries), logits.device)
        if hidden is not None:
            logits[..., : self.length].masked_fill_(hidden.unsqueeze(1), -torch.inf)

    def _hidden(self, queries: slice, device: torch.device) -> Bool[Tensor, "N Q T"] | None:
        """Gathered slots that hold no token or are not chosen by a query; None when all may be read."""
        chosen = self.choice is not None
        if not self.table.ragged and not (chosen and (self.slots is None or self.table.length % self.choice.size)):  # type: ignore[union-attr]
            return None
        counts = self.table.sizes().unsqueeze(1)
        slots = torch.arange(self.length, device=device) if self.slots is None else self.slots
        hidden = ((slots >= counts) | (slots < 0)).unsqueeze(1)
        if self.choice is None or self.slots is not None:
            return hidden
        return hidden | ~self.choice.allowed(queries, self.length)

    def spread(self, mass: Float[Tensor, "N L"]) -> Float[Tensor, "N T"]:
        """Mass of what was read, as columns of everything stored | sinks | window | new; zero for what was not."""
        if self.slots is None:
            return mass
        stored = mass.new_zeros(mass.shape[0], self.table.length)
        at = self.slots.clamp(0, self.table.length - 1)
        stored = stored.scatter_add(1, at, mass[:, : self.length])
        return torch.cat([stored, mass[:, self.length :]], dim=1)

    def mix(self, probs: Float[Tensor, "N R T"]) -> Float[Tensor, "N R D"]:
        """Probability-weighted values."""
        out = probs[..., self.length :] @ self.v
        if self.packed is not None:
            out = out + self.config.value.mix(probs[..., : self.length], self.packed[1], self.v.shape[2])
        return out
