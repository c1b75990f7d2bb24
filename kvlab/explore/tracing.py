"""One forward of a prompt with everything attention saw kept: tokens, queries, K and V of every layer.

The model runs uncompressed. This file watches; what the numbers mean is for others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.attach import attach, cache_kwarg
from kvlab.attending import AttentionCall
from kvlab.cache import KVCache, KVLayer
from kvlab.kernels.attend import fold_heads, probabilities, unfold_heads
from kvlab.subject import BASELINE, LocalSubject


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What one layer's attention was asked: queries [H, T, D], keys [N, T, D], values [N, T, E], after RoPE."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    def attention(self, queries: slice = slice(None), keys: Tensor | None = None) -> Tensor:
        """Causal probabilities [H, Q, T] of some of the queries, over other `keys` than the own ones if given."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        k = (self.k if keys is None else keys).to(wide)
        asked = torch.arange(self.tokens)[queries]
        logits = fold_heads(self.q[:, asked].to(wide) * self.scale, k.shape[0]) @ k.mT
        later = torch.arange(self.tokens) > asked.unsqueeze(1)
        found = probabilities(logits, later, self.softcap, self.sink_logits, len(asked))
        return unfold_heads(found, self.q.shape[0])

    def outputs(self, queries: slice, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """Attention outputs [H, Q, E] of some of the queries, over other K or V if given."""
        probs = self.attention(queries, keys)
        v = (self.v if values is None else values).to(probs.dtype)
        return unfold_heads(fold_heads(probs, v.shape[0]) @ v, probs.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A prompt as tokens, and what each layer with a full cache saw of it."""

    text: str
    tokens: tuple[str, ...]
    layers: dict[int, Seen]

    def span(self, part: str) -> slice:
        """The tokens that spell `part` of the text, where it stands first. Raises ValueError where it does not."""
        return span_of(self.text, self.tokens, part)


@torch.no_grad()
def trace(subject: LocalSubject, text: str, tokens: int = 1024) -> Trace:
    """Run `text`, cut to so many tokens, and keep what attention saw.

    Memory is that of Q, K and V: 3 x tokens x heads x head dim x layers numbers at most.
    """
    ids = subject.tokenizer.encode(text)[:tokens]
    with attach(subject.model, BASELINE, plan=subject.plan) as attachment:
        cache = attachment.cache()
        with watched(cache) as calls:
            _forward(subject, ids, cache)
    layers = {i: _seen(call) for i, (call,) in calls.items()}
    return Trace(text, words(subject, ids), layers)


def words(subject: LocalSubject, ids: list[int]) -> tuple[str, ...]:
    """Each token as the text it stands for."""
    return tuple(subject.tokenizer.decode([i]) for i in ids)


def span_of(text: str, tokens: tuple[str, ...], part: str) -> slice:
    """The tokens that cover `part`, by adding up how much text each stands for.

    A tokenizer may put something in front of the text; what it puts there is passed over.
    """
    at = text.find(part)
    if at < 0 or not part:
        raise ValueError(f"the prompt does not contain {part!r}: give a part of it as it is written there")
    ahead = max("".join(tokens).find(text[: len(text) // 2]), 0)
    begin, end, past = at + ahead, at + ahead + len(part), 0
    covered = []
    for n, token in enumerate(tokens):
        if past < end and past + len(token) > begin:
            covered.append(n)
        past += len(token)
    if not covered:
        raise ValueError(f"{part!r} lies beyond the {len(tokens)} tokens of this prompt")
    return slice(covered[0], covered[-1] + 1)


@contextmanager
def watched(cache: KVCache) -> Iterator[dict[int, list[AttentionCall]]]:
    """Collects what each compressed layer of the cache is asked, while it serves as ever."""
    calls: dict[int, list[AttentionCall]] = {}
    layers = {i: layer for i in cache.compressed if isinstance(layer := cache.layers[i], KVLayer)}
    for i, layer in layers.items():
        calls[i] = []
        # On this one object only: other caches of the model are served as they are.
        vars(layer)["attend"] = _noted(layer.attend, calls[i])
    try:
        yield calls
    finally:
        for layer in layers.values():
            vars(layer).pop("attend")


def _noted(attend: Callable[[AttentionCall], Tensor], calls: list[AttentionCall]) -> Callable[[AttentionCall], Tensor]:
    def noting(call: AttentionCall) -> Tensor:
        calls.append(call)
        return attend(call)

    return noting


def _forward(subject: LocalSubject, ids: list[int], cache: KVCache) -> None:
    if not ids:
        raise ValueError("nothing to look at: the prompt has no tokens")
    asked = torch.tensor([ids], device=subject.model.device)
    subject.model.base_model(input_ids=asked, use_cache=True, **{cache_kwarg(): cache})


def _seen(call: AttentionCall) -> Seen:
    q, k, v = (x[0].detach().cpu() for x in (call.q, call.k, call.v))
    sink_logits = None if call.sink_logits is None else call.sink_logits.cpu()
    return Seen(q, k, v, call.scale, call.softcap, sink_logits)
