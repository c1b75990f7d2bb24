"""A row by its definition: Python lists, one token at a time, one query at a time. Slow and obvious on purpose.

Every token is a record with its position, what K and V read back as, its attention mass and where it lives. Nothing is
shared with kvlab but the codecs and the plain numbers of the config.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction as Ratio
from typing import Any

import numpy as np
import torch
from rows import make_centre
from torch import Tensor

from kvlab.codecs import Codec
from kvlab.kernels.hadamard import hadamard_reference
from kvlab.layer import LayerConfig


@dataclass
class Token:
    position: int
    k: Tensor
    v: Tensor
    mass: float = 0.0
    range: tuple[Tensor, Tensor] | None = None
    term: Tensor | float = 0.0  # what is taken out of k before it is encoded


@dataclass
class Head:
    sinks: list[Token] = field(default_factory=list)
    pages: list[Token] = field(default_factory=list)
    window: list[Token] = field(default_factory=list)
    queries: list[list[Tensor]] = field(default_factory=list)  # of every token, before RoPE
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
    """`heads[n]` holds the tokens of KV head n. `term(n, position)` is the constant part of its key there."""

    def __init__(self, config: LayerConfig, kv_heads: int, term: Callable[[int, int], Tensor] | None = None) -> None:
        self.config, self.term = config, term
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
            for token in new:
                token.term = self.term(n, token.position) if self.term else 0.0
            votes = []
            if self.config.scorer.reads_queries:
                head.queries += [
                    [turned(scale * q[h, t], -(self.seen + t)) for h in range(n * group, (n + 1) * group)]
                    for t in range(n_new)
                ]
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
            while new and len(head.sinks) < self.config.sink_tokens:
                head.sinks.append(new.pop(0))
            head.window += new
        self.seen += n_new
        if self.config.scope == "head":
            for head in self.heads:
                self.flush([head])
        elif self.config.scope == "layer":
            self.flush(self.heads)
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
        if (
            head.selected is None
            or position % reader.select_every == 0
            or head.block != position // reader.select_every
        ):
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
        low, high, more = keys.amin(0), keys.amax(0), 0.0
        if reader.bound == "minmax":  # type: ignore[union-attr]
            low, high = outward(low, -math.inf), outward(high, math.inf)
        else:
            low, high = chunk[0].range  # type: ignore[misc]
            more = max(float((queries * t.term).sum()) for t in chunk)
            queries = hadamard_reference(queries) if codec.hadamard else queries  # type: ignore[attr-defined]
        return float(torch.maximum(queries * low, queries * high).sum()) + more

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

    def flush(self, heads: list[Head]) -> None:
        """Evict among heads that share a budget, then encode those that stay."""
        config, size = self.config, self.config.page_tokens
        # The forward's own size decides, sinks included.
        unit = size if self.forward_size == 1 or config.scope != "head" else config.block_tokens
        count = max(0, len(heads[0].window) - config.recent_tokens) // unit * unit
        if not count:
            return
        leaving = []
        for head in heads:
            head.selected = None  # pages are about to change
            leaving.append(head.window[:count])
            head.window = head.window[count:]
        limit, floor = self.limit(heads, count)
        revisits = config.budget.revisits
        if not revisits:
            limit -= sum(len(head.pages) for head in heads)
        ranked = [self.ranked(head, new) for head, new in zip(heads, leaving, strict=True)]
        if config.scope != "head":
            units = 1 if config.block_tokens > 1 else size
            worth = [[mean(s for s, _ in r[i : i + units]) for i in range(0, len(r), units)] for r in ranked]
            room = [pages * units for pages in allot(worth, limit // size, floor)]
        else:
            room = [limit // config.block_tokens]
        for head, new, best, kept in zip(heads, leaving, ranked, room, strict=True):
            stay = {token.position for _, tokens in best[:kept] for token in tokens}
            entering = [t for t in new if t.position in stay]
            step = config.block_tokens if config.block_tokens > 1 else max(1, len(entering))
            for start in range(0, len(entering), step):
                self.encode(entering[start : start + step])
            head.pages = [t for t in head.pages if not revisits or t.position in stay] + entering

    def ranked(self, head: Head, new: list[Token]) -> list[tuple[float, list[Token]]]:
        """What may stay of a head as one, best first, with its score: tokens, or pages where those are encoded as one.

        Stored pages are what they are; new tokens make pages in the order of their scores.
        """
        stored = head.pages if self.config.budget.revisits else []
        others = head.pages if self.config.scorer.relative else stored
        score = self.scores(head, others + new)[len(others) - len(stored) :]
        single = [(s, [t]) for s, t in zip(score, stored + new, strict=True)]
        if self.config.block_tokens == 1:
            return falling(single)
        size = self.config.page_tokens
        pages = [single[i : i + size] for i in range(0, len(stored), size)]
        best = falling(single[len(stored) :])
        # Worst first: should all tie, the page of the later tokens is the later page.
        pages += [best[i : i + size] for i in range(0, len(best), size)][::-1]
        return falling([(mean(s for s, _ in page), [t for _, ts in page for t in ts]) for page in pages])

    def encode(self, tokens: list[Token]) -> None:
        for token in tokens:
            token.k = token.k - token.term
        self.note_range(tokens)
        keys = read_back(self.config.key, [t.k for t in tokens])
        values = read_back(self.config.value, [t.v for t in tokens])
        for token, k, v in zip(tokens, keys, values, strict=True):
            token.k, token.v = k + token.term, v

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

    def limit(self, heads: list[Head], leaving: int) -> tuple[int, int]:
        """Encoded tokens of all these heads that may stay, and pages that each gets in any case."""
        budget, page, n = self.config.budget, self.config.page_tokens, len(heads)  # type: Any, int, int
        stored, protected = sum(len(head.pages) for head in heads), len(heads[0].sinks) + len(heads[0].window)
        if budget.kind == "unlimited":
            return stored + leaving, 0
        if budget.kind == "threshold":
            part = (1 - Ratio(str(budget.quantile))) * self.config.share
            most = stored + min(n * leaving, math.ceil(part * n * leaving))
        else:
            whole = budget.tokens if budget.kind == "tokens" else math.ceil(Ratio(str(budget.fraction)) * self.seen)
            most = max(0, math.floor(self.config.share * n * (whole - protected)))
        most = min(most, stored + n * leaving)
        shared = budget.scope != "head"
        unit = page if shared else self.config.block_tokens
        needy = not stored if shared and budget.kind == "threshold" else not protected
        most = max(most // unit * unit, min(n * unit, stored + n * leaving) if needy else 0)
        new_pages = (most - (stored if budget.kind == "threshold" else 0)) // page
        return most, max(int(Ratio(str(budget.floor)) * new_pages / n), int(needy))

    def scores(self, head: Head, tokens: list[Token]) -> list[float]:
        scorer: Any = self.config.scorer
        if scorer.kind == "recency":
            return [float(t.position) for t in tokens]
        if scorer.kind == "key_norm":
            return [-float(t.k.norm()) for t in tokens]
        if scorer.kind == "key_diff":
            ways = [t.k / max(t.k.norm(), 1e-12) for t in tokens]  # two bits may read back as nothing
            middle = torch.stack(ways).sum(0)
            return [-float(way @ middle / middle.norm()) for way in ways]
        if scorer.kind == "expected_attention":
            asked = torch.stack([q for token in head.queries for q in token]).double()
            spread, dim = torch.cov(asked.T, correction=0), asked.shape[1]
            ahead = [
                torch.stack([turned(e, self.seen + j) for e in torch.eye(dim).double()], 1)
                for j in range(scorer.horizon)
            ]
            turn = sum(ahead) / scorer.horizon
            middle, spread = turn @ asked.mean(0), turn @ spread @ turn.T
            logits = [float(t.k.double() @ middle + t.k.double() @ spread @ t.k.double() / 2) for t in tokens]
            probs = softmax(logits, None)
            return [p * float(t.v.norm()) if scorer.value_norm else p for p, t in zip(probs, tokens, strict=True)]
        mass = [t.mass for t in tokens]
        if scorer.kind == "last_selected":
            return mass
        if scorer.kind == "window_attention":
            reach = scorer.pool // 2
            mass = [mean(mass[max(0, i - reach) : i + reach + 1]) for i in range(len(mass))]
        return [m * float(t.v.norm()) if scorer.value_norm else m for m, t in zip(mass, tokens, strict=True)]


def outward(x: Tensor, towards: float) -> Tensor:
    """The nearest fp16 number not on the inner side of x."""
    near = x.numpy().astype(np.float16)
    inner = near.astype(np.float64) > x.numpy() if towards < 0 else near.astype(np.float64) < x.numpy()
    return torch.from_numpy(np.where(inner, np.nextafter(near, np.float16(towards)), near).astype(np.float64))


def turned(x: Tensor, position: int) -> Tensor:
    """R_p x, pair by pair, for the rotary embedding that rows are tested with."""
    rotary, out = make_centre(1, len(x)).rotary, x.double().clone()
    for j in range(rotary.pairs):
        angle = float(torch.tensor(float(position)) * rotary.inv_freq[j])
        number = complex(float(x[j]), float(x[j + rotary.pairs])) * complex(math.cos(angle), math.sin(angle))
        out[j], out[j + rotary.pairs] = number.real, number.imag
    return out


def logit(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> float:
    x = float(q @ k) * scale
    return x if softcap is None else softcap * math.tanh(x / softcap)


def softmax(logits: list[float], sink: float | None) -> list[float]:
    top = max(logits if sink is None else [*logits, sink])
    weights = [math.exp(x - top) for x in logits]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
    return [w / total for w in weights]


def mean(numbers: Iterable[float]) -> float:
    return statistics.fmean(numbers)


def falling(scored: list[tuple[float, list[Token]]]) -> list[tuple[float, list[Token]]]:
    """Best first; among equals the later one."""
    order = sorted(range(len(scored)), key=lambda i: (-scored[i][0], -i))
    return [scored[i] for i in order]


def allot(worth: list[list[float]], total: int, floor: int) -> list[int]:
    """Pages of each head, `floor` first and then one by one to the head whose next page is worth most."""
    taken = [min(floor, len(pages)) for pages in worth]
    while sum(taken) < total:
        able = [n for n, pages in enumerate(worth) if taken[n] < len(pages)]
        taken[max(able, key=lambda n: (worth[n][taken[n]], -taken[n], -n))] += 1
    return taken
