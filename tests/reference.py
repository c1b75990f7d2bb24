"""Slow references for a compressed cache, on transformers' own cache and explicit masks; and how tests feed models.

Nothing here goes through kvlab's store or attention. Quantization: tokens are replaced by what their codec reads back
as they leave the recent window. Eviction: every token stays, and a mask says which ones a head may still read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvlab.attach import cache_kwarg
from kvlab.config import KVConfig

# What each head of each row of each layer held: [layer][row][head] -> slots, ascending.
Held = dict[int, list[list[list[int]]]]


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Tensor, cuts: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Logits [B, T, V] of `ids`, given to the model in pieces of `cuts` tokens."""
    logits, start = [], cache.get_seq_length()
    assert start + sum(cuts) <= ids.shape[1]
    for count in cuts:
        logits.append(step(model, cache, ids, start, start + count, mask))
        start += count
    return torch.cat(logits, dim=1)


@torch.no_grad()
def step(model: Any, cache: Any, ids: Tensor, start: int, stop: int, mask: Tensor | None = None) -> Tensor:
    """Logits of one forward over `ids[:, start:stop]`."""
    padded = {}
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        padded = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
    return model(input_ids=ids[:, start:stop], use_cache=True, **padded, **{cache_kwarg(): cache}).logits


def left_padded(ids: Tensor, pads: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Ids with row b's first `pads[b]` tokens turned into padding, and the mask."""
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(pads).unsqueeze(1)).long()
    return ids * mask, mask


def kept(row: Any, head: int) -> list[int]:
    """Positions a head holds: sinks, encoded tokens, recent window."""
    count = row.table.counts[head]
    if "position" in row.table.pool.layout and count:
        stored = row.table.gather(["position"])["position"][head, :count, 0].tolist()
    else:
        stored = list(range(row.n_sinks, row.n_sinks + count))
    return [*range(row.n_sinks), *stored, *range(row.seen - row.n_window, row.seen)]


def held(cache: Any) -> Held:
    """Slots held now. Padding on the left of a row shifts its slots against its positions."""
    slots = {}
    for i in cache.compressed:
        layer = cache.layers[i]
        slots[i] = [
            [[layer.seen - row.seen + p for p in kept(row, head)] for head in range(len(row.table.counts))]
            for row in layer.rows
        ]
    return slots


def feed_and_watch(
    model: Any, cache: Any, ids: Tensor, cuts: Sequence[int], mask: Tensor | None = None
) -> tuple[Tensor, list[Held]]:
    """As `feed`, and what was held before each forward."""
    logits, before, start = [], [], 0
    for count in cuts:
        before.append(held(cache) if start else {})
        logits.append(step(model, cache, ids, start, start + count, mask))
        start += count
    return torch.cat(logits, dim=1), before


@contextmanager
def only(model: Any, allowed: Held) -> Iterator[None]:
    """The model on plain softmax attention, where past tokens that are not in `allowed` cannot be read.

    The dict is read at each call, so a test may change it between forwards.
    """

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **kwargs: Any) -> Any:
        group, past = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
        mask = mask.expand(q.shape[0], k.shape[1], -1, -1).clone()
        for b, heads in enumerate(allowed.get(module.layer_idx, [])):
            for n, slots in enumerate(heads):
                readable = torch.zeros(past, dtype=torch.bool)
                readable[slots] = True
                mask[b, n, :, :past] &= readable
        k, v, mask = (x.repeat_interleave(group, dim=1) for x in (k, v, mask))
        logits = q @ k.mT * scaling
        if (cap := kwargs.get("softcap")) is not None:
            logits = torch.tanh(logits / cap) * cap
        probs = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1).nan_to_num(0.0)
        return (probs @ v).transpose(1, 2), None

    def full_mask(**kwargs: Any) -> Tensor | None:
        return sdpa_mask(**kwargs | {"allow_is_causal_skip": False})

    before = model.config._attn_implementation
    AttentionInterface.register("reference", attention)
    AttentionMaskInterface.register("reference", full_mask)
    try:
        model.set_attn_implementation("reference")
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop("reference", None)
        AttentionMaskInterface._global_mapping.pop("reference", None)


def masked_logits(
    model: Any, cache: Any, ids: Tensor, cuts: Sequence[int], before: Sequence[Held], mask: Tensor | None = None
) -> Tensor:
    """Logits on a cache that keeps everything, each forward reading only what `before` says was held."""
    logits, start, allowed = [], 0, {}
    with only(model, allowed):
        for count, slots in zip(cuts, before, strict=True):
            allowed.clear()
            allowed.update(slots)
            logits.append(step(model, cache, ids, start, start + count, mask))
            start += count
    return torch.cat(logits, dim=1)


class RoundTripLayer(DynamicLayer):
    """transformers' own layer, whose tokens turn into what their codec reads back as they leave the recent window."""

    def __init__(self, config: KVConfig, index: int, pads: Sequence[int]) -> None:
        super().__init__()
        self.layer, self.pads = config.at(index), pads
        self.encoded = [0] * len(pads)
        self.last = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.last:
            self._encode()
        self.last = key_states.shape[2]
        return super().update(key_states, value_states)

    def _encode(self) -> None:
        """A forward of several tokens fills the window exactly (in whole blocks); a single step moves whole pages."""
        unit = self.layer.page_tokens if self.last == 1 else self.layer.block_tokens
        self.keys, self.values = self.keys.clone(), self.values.clone()
        for b, pad in enumerate(self.pads):
            first = pad + min(self.layer.sink_tokens, self.keys.shape[2] - pad) + self.encoded[b]
            overflow = max(0, self.keys.shape[2] - first - self.layer.recent_tokens) // unit * unit
            for x, codec in ((self.keys, self.layer.key), (self.values, self.layer.value)):
                block = x[b, :, first : first + overflow]
                x[b, :, first : first + overflow] = codec.decode(codec.encode(block), x.shape[3], x.dtype)
            self.encoded[b] += overflow


def round_trip_cache(model: Any, config: KVConfig, pads: Sequence[int] = (0,)) -> DynamicCache:
    """The model's own cache with quantized full-attention layers."""
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = RoundTripLayer(config, i, pads)
    return cache
