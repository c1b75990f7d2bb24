"""StackedCache: several compressed caches as one batch. Linear layers run on all rows at once, attention row by row."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlab.attending import AttentionCall, SeamError, attend_rows
from kvlab.cache import UNATTENDED, Handle, KVCache, KVLayer
from kvlab.launching import Launch
from kvlab.once import on_host
from kvlab.row import Row


class StackedLayer(CacheLayerMixin):
    """The same layer of several caches, row under row."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, parts: list[KVLayer], owner: "StackedCache") -> None:
        super().__init__()
        self.parts, self.owner = parts, owner
        self.is_initialized = True
        self._pending: Handle | None = None
        self._launches: dict[int, Launch] = {}

    @property
    def rows(self) -> list[Row]:
        return [row for part in self.parts for row in part.rows]

    def check(self, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Raise SeamError for a mask, which rows of different length cannot share, and for one count of positions."""
        if attention_mask is not None:
            raise SeamError("a stacked cache takes no attention mask: say with `expect` which new tokens are padding")
        if position_ids is not None and position_ids.shape[0] == 1 and len({row.seen for row in self.rows}) > 1:
            raise SeamError("rows of a stacked cache differ in length: pass `position_ids` from `positions`")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._pending is not None and not self._pending.consumed:
            raise SeamError(UNATTENDED)
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        self._pending = Handle(self, key_states, value_states)
        self._pending.publish(kwargs.get("kwargs"))
        return key_states, value_states

    def attend(self, call: AttentionCall) -> Tensor:
        owner = self.owner
        rows = self.rows
        valid = None if owner.valid is None else on_host(owner.valid, rows[0].seen)
        out = attend_rows(rows, call._replace(valid=valid), owner.read_only, launches=self._launches)
        if not owner.read_only:
            first = 0
            for part in self.parts:
                # A cache of one row takes its real tokens, so that it can go on alone without a mask.
                real = None if valid is None or len(part.rows) > 1 else valid[first]
                part.seen += call.q.shape[2] if real is None else int(real.sum())
                first += len(part.rows)
                part.settle()
        self._pending = None
        return out

    def get_seq_length(self) -> int:
        return max(part.seen for part in self.parts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class StackedCache(Cache):
    """Caches with different configs and lengths as one batch: linear layers run on all rows, attention row by row.

    Rows differ in length, so every forward needs explicit `position_ids` and no attention mask; `expect` says which new
    tokens are padding. `read_only` leaves every cache as it is, so one cache may serve several rows: what a score pass
    over a question and its answers needs.
    """

    def __init__(self, caches: Sequence[KVCache], read_only: bool = False) -> None:
        self.read_only = read_only
        for cache in caches:
            if len(cache.compressed) != len(cache.layers):
                stock = [i for i in range(len(cache.layers)) if i not in cache.compressed]
                raise ValueError(f"only caches compressed in every layer can be stacked, layers {stock} keep their own")
        self.valid: Bool[Tensor, "B Q"] | None = None
        layers = [
            StackedLayer([c.layers[i] for c in caches], self)  # type: ignore[misc]
            for i in range(len(caches[0].layers))
        ]
        super().__init__(layers=layers)  # type: ignore[arg-type]

    def expect(self, valid: Bool[Tensor, "B Q"] | None) -> None:
        """Which of the next forward's tokens are real; the others enter no row."""
        self.valid = valid

    def positions(self, valid: Bool[Tensor, "B Q"]) -> Tensor:
        """`position_ids` of the next forward: each row goes on from its own length; padding gets position 0."""
        seen = torch.tensor([row.seen for row in self.layers[0].rows], device=valid.device)  # type: ignore[union-attr]
        return ((valid.cumsum(1) - 1 + seen.unsqueeze(1)) * valid).long()
