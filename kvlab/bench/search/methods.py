"""Eviction methods that kvlab and kvpress both have, at the same number of kept tokens, and where their definitions
part.
"""

from dataclasses import dataclass
from typing import Any

from kvlab.config import KVConfig
from kvlab.policies import ExpectedAttention, Fraction, KeyNorm, Recency, Scorer, WindowAttention

LEAST_KEPT, MOST_KEPT = 0.2, 0.8
SINKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method on both sides. `same` says that both keep the very same tokens, rounding of scores apart."""

    name: str
    scorer: Scorer
    sinks: int
    recent: int
    settings: dict[str, Any]
    same: bool
    difference: str

    def config(self, share: float) -> KVConfig:
        """kvlab's config that keeps `share` of the context, everything else raw."""
        return KVConfig(scorer=self.scorer, budget=Fraction(share), sink_tokens=self.sinks, recent_tokens=self.recent)


def methods(context_tokens: int) -> list[Method]:
    """The four methods. SnapKV's window is kvpress's default of 64 where the context is long enough for it."""
    window = max(1, min(64, context_tokens // 6))
    return [
        Method(
            name="key_norm",
            scorer=KeyNorm(),
            sinks=0,
            recent=0,
            settings={},
            same=True,
            difference="none: the keys of least norm, nothing protected",
        ),
        Method(
            name="snapkv",
            scorer=WindowAttention(window=window, pool=5),
            sinks=0,
            recent=window,
            settings={"window_size": window, "kernel_size": 5},
            same=False,
            difference="pooling at both ends of the candidates: kvpress counts two zeros beyond each end, kvlab takes "
            "the mean of the neighbours there are",
        ),
        Method(
            name="expected_attention",
            scorer=ExpectedAttention(),
            sinks=SINKS,
            recent=0,
            settings={"n_sink": SINKS, "n_future_positions": 512},
            same=False,
            difference="kvpress models each query head, averages the heads of a KV head afterwards and leaves the "
            "queries of the sinks out; kvlab models the queries of a KV head as one population, sinks included. The "
            "former makes most of the difference",
        ),
        Method(
            name="streaming",
            scorer=Recency(),
            sinks=SINKS,
            recent=0,
            settings={"n_sink": SINKS},
            same=True,
            difference="none: the first tokens and the latest, at their own positions",
        ),
    ]


@dataclass(frozen=True, slots=True)
class Arm:
    """A config of ours, and its method for the peer."""

    method: Method
    share: float
    config: KVConfig

    def kept(self, tokens: int) -> int:
        """Tokens each head holds of a context of `tokens`: what the peer is asked to keep too."""
        return self.config.at(0).occupancy(tokens).kept


def arms(count: int, context_tokens: int) -> list[Arm]:
    """`count` arms, the methods taking equal parts, each over shares from LEAST_KEPT to MOST_KEPT."""
    known = methods(context_tokens)
    found = []
    for rank, method in enumerate(known):
        own = count // len(known) + (rank < count % len(known))
        for i in range(own):
            share = LEAST_KEPT + (MOST_KEPT - LEAST_KEPT) * ((i / (own - 1)) if own > 1 else 0.5)
            found.append(Arm(method, round(share, 4), method.config(round(share, 4))))
    return found
