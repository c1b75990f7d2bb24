"""Evicting: what leaves a row's window is weighed against what is stored; those that stay are encoded and paged.

Choosing is pure: scores in, who stays out. `flush` alone touches a table. It knows no attention and no sequence, only
candidates.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from kvlab.centre import Centre
from kvlab.codecs.base import to_raw
from kvlab.config import LayerConfig
from kvlab.policies import Candidates
from kvlab.selecting import summarise
from kvlab.store import PageTable


class Leaving(NamedTuple):
    """Raw tokens on their way from the window into pages, in ascending position."""

    keys: Float[Tensor, "N T D"]
    values: Float[Tensor, "N T E"]
    positions: Int[Tensor, "N T"]
    mass: Float[Tensor, "N T"] | None


def flush(
    config: LayerConfig,
    table: PageTable,
    leaving: Leaving,
    protected: int,
    seen: int,
    raw: torch.dtype,
    centre: Centre | None = None,
) -> None:
    """Evict among stored and leaving tokens, then encode those that stay.

    `protected` counts the sinks and recent tokens beside them, `seen` every token of the sequence so far.
    """
    stored, new = table.length, leaving.keys.shape[1]
    kept = config.keep(stored, new, protected, seen)
    stand = min(table.counts)  # slots whose tokens stay where they are
    lengths = None
    if kept < stored + new:
        chosen, lengths = _select(config, table, leaving, kept)
        leaving = Leaving(*(None if x is None else _taken(x, chosen) for x in leaving))  # type: ignore[arg-type]
    if leaving.keys.shape[1]:
        table.append(encoded(config, leaving, raw, centre), lengths)
    # Where lengths are given, stored tokens moved too. Whole pages that go below take their summaries along.
    summarise(config, table, raw, stand if lengths is None else 0)
    if table.length > kept:
        _evict_pages(config, table, kept)


def encoded(config: LayerConfig, tokens: Leaving, raw: torch.dtype, centre: Centre | None = None) -> dict[str, Tensor]:
    """Every stream of `tokens`, as pages hold them."""
    keys = tokens.keys if centre is None else centre.take_out(tokens.keys, tokens.positions)
    packed = {f"k.{name}": x for name, x in config.key.encode(keys).items()}
    packed |= {f"v.{name}": x for name, x in config.value.encode(tokens.values).items()}
    packed = {name: to_raw(x, raw) if name.endswith(".data") else x for name, x in packed.items()}
    if config.budget.evicts:
        packed["position"] = tokens.positions.unsqueeze(-1)
    if tokens.mass is not None:
        packed["mass"] = tokens.mass.unsqueeze(-1)
    return packed


def _held(config: LayerConfig, table: PageTable) -> Candidates:
    """The stored tokens as candidates."""
    held = table.gather(["position", *(["mass"] if config.tracks_mass else [])])
    return Candidates(held["position"][..., 0], held["mass"][..., 0] if config.tracks_mass else None)


def _select(
    config: LayerConfig, table: PageTable, leaving: Leaving, kept: int
) -> tuple[Int[Tensor, "N K"], list[int] | None]:
    """Choose who stays, dropping stored tokens that do not.

    Returns the indices of leaving tokens that stay and how many of them count for each head.
    """
    stored, new = table.length, leaving.keys.shape[1]
    candidates = Candidates(leaving.positions, leaving.mass)
    if config.block_tokens > 1:
        # Whole pages only: thin the new tokens here; `_evict_pages` then weighs page against page.
        room = kept if config.budget.revisits else kept - stored
        return best(config.scorer.score(candidates), min(new, room)), None
    if not config.budget.revisits or not stored:
        return best(config.scorer.score(candidates), kept - stored), None
    candidates = _held(config, table).then(candidates)
    stays = staying(config.scorer.score(candidates), kept)
    old, n_old = listed(stays[:, :stored])
    table.keep(old, lengths=n_old)
    return listed(stays[:, stored:])


def _evict_pages(config: LayerConfig, table: PageTable, kept: int) -> None:
    """Drop whole pages, lowest mean score first."""
    size = config.page_tokens
    scores = config.scorer.score(_held(config, table)).unflatten(1, (-1, size)).mean(-1)
    table.keep(best(scores, kept // size), unit_tokens=size)


def best(scores: Float[Tensor, "N T"], count: int) -> Int[Tensor, "N K"]:
    """Ascending indices of the `count` highest scores; among equals the later token stays."""
    order = torch.sort(scores, dim=1, stable=True).indices
    return order[:, order.shape[1] - count :].sort(dim=1).values


def staying(scores: Float[Tensor, "N T"], count: int) -> Bool[Tensor, "N T"]:
    """Where the `count` highest scores of each head are; among equals the later token stays."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best(scores, count), True)


def listed(stays: Bool[Tensor, "N T"]) -> tuple[Int[Tensor, "N K"], list[int]]:
    """Ascending indices of those that stay, and how many there are for each head; what lies beyond means nothing."""
    lengths = stays.sum(1).tolist()
    order = torch.argsort((~stays).to(torch.int8), dim=1, stable=True)
    return order[:, : max(lengths)], lengths


def _taken(x: Shaped[Tensor, "N T ..."], index: Int[Tensor, "N K"]) -> Shaped[Tensor, "N K ..."]:
    return x.gather(1, index if x.ndim == 2 else index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
