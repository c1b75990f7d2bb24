"""A row by its definition: Python lists, one token at a time, one query at a time. Slow and obvious on purpose.

Every token is a record with its position, what K and V read back as, its attention mass and where it lives. Nothing is
shared with kvlab but the codecs and the plain numbers of the config.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from fractions import Fraction as Ratio
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs import Codec
from kvlab.config import LayerConfig
from kvlab.kernels.hadamard import hadamard_reference


@dataclass
class Token:
    position: int
    k: Tensor
    v: Tensor
    mass: float = 0.0
    range: tuple[Tensor, Tensor] | None = None


@dataclass
class Head:
    sinks: list[Token] = field(default_factory=list)
    pages: list[Token] = field(default_factory=list)
    window: list[Token] = field(default_factory=list)
    selected: list[int] | None = None
    block: int = -1

    def all(self) -> list[Token]:
        return self.sinks + self.pages + self.window


def read_back(codec: Codec, rows: list[Tensor]) -> list[Tensor]:
    if not rows:
        return []
    x = torch.stack(rows).unsqueeze(0)
    return list(codec.decode(codec.encode(x), x.shape[-1], torch.float64)[0])


class SlowRow:
    """`heads[n]` holds the tokens of KV head n."""

    def __init__(self, config: LayerConfig, kv_heads: int) -> None:
        self.config = config
        self.heads = [Head() for _ in range(kv_heads)]
        self.seen = self.forward_size = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None
    ) -> Tensor:
        """Attend, observe, evict, encode. [H, Q, D] queries and [N, Q, D] keys and values, one forward."""
        group, n_new = q.shape[0] // len(self.heads), k.shape[1]
        self.forward_size = n_new
        out = torch.zeros(q.shape[0], n_new, v.shape[2], dtype=torch.float64)
        for n, head in enumerate(self.heads):
            new = [Token(self.seen + t, k[n, t], v[n, t]) for t in range(n_new)]
            votes = []
            for t in range(n_new):
                pages = self.selected(head, q[n * group : (n + 1) * group, t], self.seen + t)
                visible = head.sinks + pages + head.window + new[: t + 1]
                mean = [0.0] * len(visible)
                for g in range(group):
                    h = n * group + g
                    sink = None if sink_logits is None else float(sink_logits[h])
                    probs = softmax([logit(q[h, t], token.k, scale, softcap) for token in visible], sink)
                    mean = [m + p / group for m, p in zip(mean, probs, strict=True)]
                    out[h, t] = sum(p * token.v for p, token in zip(probs, visible, strict=True))
                votes.append((visible, mean))
            self.observe(head.all() + new, votes)
            self.settle(head, new)
        self.seen += n_new
        return out

    def selected(self, head: Head, queries: Tensor, position: int) -> list[Token]:
        """The stored tokens a query reads; the first of a block of positions selects for the others."""
        reader: Any = self.config.reader
        if reader.kind == "dense":
            return head.pages
        chunks = [head.pages[i : i + reader.chunk] for i in range(0, len(head.pages), reader.chunk)]
        count = reader.count or math.ceil(Ratio(str(reader.fraction)) * len(chunks))
        count = max(count, 2)
        if count >= len(chunks):
            head.selected = None
            return head.pages
        if head.selected is None or position % reader.select_every == 0 or head.block != position // reader.select_every:
            scores = [self.worth(chunk, queries) for chunk in chunks]
            scores[0] = scores[-1] = math.inf
            order = sorted(range(len(chunks)), key=lambda i: (-scores[i], i))
            head.selected, head.block = sorted(order[:count]), position // reader.select_every
        return [token for i in head.selected for token in chunks[i]]

    def worth(self, chunk: list[Token], queries: Tensor) -> float:
        """What a chunk promises to the queries of a KV head, from its summary."""
        reader, codec = self.config.reader, self.config.key
        keys = torch.stack([t.k for t in chunk]).double()
        if reader.bound == "mean":  # type: ignore[union-attr]
            return float((queries @ keys.mean(0).half().double()).sum())
        low, high = keys.amin(0), keys.amax(0)
        if reader.bound == "minmax":  # type: ignore[union-attr]
            low, high = outward(low, -math.inf), outward(high, math.inf)
        else:
            low, high = chunk[0].range  # type: ignore[misc]
            queries = hadamard_reference(queries) if codec.hadamard else queries  # type: ignore[attr-defined]
        return float(torch.maximum(queries * low, queries * high).sum())

    def observe(self, tokens: list[Token], votes: list[tuple[list[Token], list[float]]]) -> None:
        scorer: Any = self.config.scorer
        if scorer.kind == "attention_mass":
            for visible, mean in votes:
                for token in tokens:
                    token.mass *= scorer.decay
                for token, p in zip(visible, mean, strict=True):
                    token.mass += p
        elif scorer.kind == "last_selected":
            for t, (visible, _) in enumerate(votes):
                for token in visible:
                    token.mass = float(self.seen + t)
        elif scorer.kind == "window_attention":
            if len(votes) >= scorer.window:
                for token in tokens:
                    token.mass = 0.0
                for visible, mean in votes[-scorer.window :]:
                    for token, p in zip(visible, mean, strict=True):
                        token.mass += p / scorer.window
                return
            for visible, mean in votes:
                for token in tokens:
                    token.mass *= 1 - 1 / scorer.window
                for token, p in zip(visible, mean, strict=True):
                    token.mass += p / scorer.window

    def settle(self, head: Head, new: list[Token]) -> None:
        config = self.config
        while new and len(head.sinks) < config.sink_tokens:
            head.sinks.append(new.pop(0))
        head.window += new
        # The forward's own size decides: `new` has lost its sinks by now.
        unit = config.page_tokens if self.forward_size == 1 else config.block_tokens
        leaving_count = max(0, len(head.window) - config.recent_tokens) // unit * unit
        if not leaving_count:
            return
        head.selected = None  # pages are about to change
        leaving, head.window = head.window[:leaving_count], head.window[leaving_count:]
        limit = self.limit(head, len(leaving))
        if config.block_tokens > 1:
            self.settle_blocks(head, leaving, limit)
            return
        if config.budget.revisits:
            stay = best(head.pages + leaving, limit, self.scores)
        else:
            stay = head.pages + best(leaving, limit - len(head.pages), self.scores)
        entering = [t for t in stay if t in leaving]
        self.encode(entering)
        head.pages = stay

    def settle_blocks(self, head: Head, leaving: list[Token], limit: int) -> None:
        """Whole pages: thin what leaves by token, encode it, then weigh page against page."""
        size = self.config.block_tokens
        limit = limit // size * size
        if limit == 0 and not head.sinks and not head.window:
            limit = size
        room = limit if self.config.budget.revisits else limit - len(head.pages)
        entering = best(leaving, min(len(leaving), room), self.scores)
        for start in range(0, len(entering), size):
            self.encode(entering[start : start + size])
        tokens = head.pages + entering
        if len(tokens) > limit:
            score = self.scores(tokens)
            pages = [tokens[i : i + size] for i in range(0, len(tokens), size)]
            means = [sum(score[i : i + size]) / size for i in range(0, len(tokens), size)]
            order = sorted(range(len(pages)), key=lambda i: (means[i], i))
            tokens = [token for i in sorted(order[len(order) - limit // size :]) for token in pages[i]]
        head.pages = tokens

    def encode(self, tokens: list[Token]) -> None:
        self.note_range(tokens)
        keys = read_back(self.config.key, [t.k for t in tokens])
        values = read_back(self.config.value, [t.v for t in tokens])
        for token, k, v in zip(tokens, keys, values, strict=True):
            token.k, token.v = k, v

    def note_range(self, tokens: list[Token]) -> None:
        """What the codes of a channel page can stand for: all of their bits 0, and all of them 1."""
        codec: Any = self.config.key
        if not tokens or codec.kind != "affine" or codec.axis != "channel":
            return
        plain = dataclasses.replace(codec, hadamard=False)
        for start in range(0, len(tokens), codec.group):
            page = tokens[start : start + codec.group]
            packed = codec.encode(torch.stack([t.k for t in page]).unsqueeze(0))
            ends = [
                plain.decode(packed | {"codes": torch.full_like(packed["codes"], bits)}, len(page[0].k), torch.float64)
                for bits in (0, 255)
            ]
            low, high = (x[0, 0] for x in ends)
            for token in page:
                token.range = (low, -low if codec.mode == "symmetric" else high)

    def limit(self, head: Head, leaving: int) -> int:
        """Encoded tokens that may stay."""
        budget: Any = self.config.budget
        seen = self.seen + self.forward_size
        protected, candidates = len(head.sinks) + len(head.window), len(head.pages) + leaving
        if budget.kind == "unlimited":
            return candidates
        if budget.kind == "threshold":
            kept = leaving - int(Ratio(str(budget.quantile)) * leaving)
            return len(head.pages) + (kept if kept or protected or head.pages else 1)
        whole = budget.tokens if budget.kind == "tokens" else math.ceil(Ratio(str(budget.fraction)) * seen)
        return max(0 if protected else 1, min(candidates, whole - protected))

    def scores(self, tokens: list[Token]) -> list[float]:
        scorer: Any = self.config.scorer
        if scorer.kind == "recency":
            return [float(t.position) for t in tokens]
        mass = [t.mass for t in tokens]
        if scorer.kind in ("attention_mass", "last_selected"):
            return mass
        reach = scorer.pool // 2
        around = [mass[max(0, i - reach) : i + reach + 1] for i in range(len(mass))]
        return [sum(near) / len(near) for near in around]


def outward(x: Tensor, towards: float) -> Tensor:
    """The nearest fp16 number not on the inner side of x."""
    near = x.numpy().astype(np.float16)
    inner = near.astype(np.float64) > x.numpy() if towards < 0 else near.astype(np.float64) < x.numpy()
    return torch.from_numpy(np.where(inner, np.nextafter(near, np.float16(towards)), near).astype(np.float64))


def logit(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> float:
    x = float(q @ k) * scale
    return x if softcap is None else softcap * math.tanh(x / softcap)


def softmax(logits: list[float], sink: float | None) -> list[float]:
    top = max(logits if sink is None else [*logits, sink])
    weights = [math.exp(x - top) for x in logits]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
    return [w / total for w in weights]


def best(tokens: list[Token], count: int, scores: Any) -> list[Token]:
    """The `count` highest scores in position order; among equals the later token."""
    score = scores(tokens)
    order = sorted(range(len(tokens)), key=lambda i: (score[i], i))
    return [tokens[i] for i in sorted(order[len(order) - count :])]
