"""Rows to test on, and random sequences to feed them."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvlab.centre import Centre
from kvlab.config import KVConfig
from kvlab.kernels.dispatch import Impl
from kvlab.kernels.rope import Rotary
from kvlab.layer import LayerShape
from kvlab.row import Row
from kvlab.store import PagePool

CPU = torch.device("cpu")


def make_row(
    config: KVConfig,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float64,
    layer: int = 0,
    pool: PagePool | None = None,
    impl: Impl = "auto",
    device: torch.device = CPU,
) -> Row:
    """An empty row of `layer`, on a pool of its own if none is given."""
    rule, raw = config.at(layer), config.raw(dtype)
    pool = pool or PagePool(rule.streams(LayerShape(heads, head_dim, head_dim), raw), rule.page_tokens, device, impl)
    centre = make_centre(heads, head_dim, pool.device)
    return Row(rule, pool, heads, raw, None if config.centring == "none" else centre, centre.rotary)


def make_centre(heads: int, head_dim: int, device: torch.device = CPU) -> Centre:
    """A centre a good deal louder than the keys, whose last two dims do not turn."""
    mu = 4 * torch.randn(heads, head_dim, generator=torch.Generator().manual_seed(17))
    pairs = head_dim // 2 - 1
    return Centre(mu.to(device), Rotary((100.0 ** -(torch.arange(pairs) / pairs)).to(device), head_dim))


def term_of(centre: Centre, head: int, position: int) -> Tensor:
    """R_p(mu) by its definition, one pair at a time."""
    out, pairs = centre.mu[head].double().clone(), centre.rotary.pairs
    for j in range(pairs):
        angle = float(torch.tensor(float(position)) * centre.rotary.inv_freq[j])
        a, b = float(centre.mu[head, j]), float(centre.mu[head, j + pairs])
        turned = complex(a, b) * complex(math.cos(angle), math.sin(angle))
        out[j], out[j + pairs] = turned.real, turned.imag
    return out


class Sequence:
    """Q, K and V of one random sequence, dealt out forward by forward."""

    def __init__(
        self, tokens: int, heads: int, query_heads: int, head_dim: int, seed: int, dtype: torch.dtype = torch.float64
    ) -> None:
        self._rng = torch.Generator().manual_seed(seed)
        self.q = torch.randn(query_heads, tokens, head_dim, dtype=dtype, generator=self._rng)
        self.k, self.v = (torch.randn(heads, tokens, head_dim, dtype=dtype, generator=self._rng) for _ in range(2))

    def sink_logits(self) -> Tensor:
        return torch.randn(self.q.shape[0], dtype=self.q.dtype, generator=self._rng)

    def forwards(self, parts: list[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        start = 0
        for part in parts:
            at = slice(start, start + part)
            yield self.q[:, at], self.k[:, at], self.v[:, at]
            start += part
