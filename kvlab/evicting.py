"""Evicting: what leaves a row's window is weighed against what is stored; those that stay are encoded and paged.

Choosing is pure: scores in, who stays out. `flush` alone touches a table. It knows no attention and no sequence, only
candidates.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.centre import Centre
from kvlab.codecs.base import to_raw
from kvlab.kernels.dispatch import Impl
from kvlab.kernels.encode import append, compiles
from kvlab.kernels.formats import Format
from kvlab.kernels.rowwise import runs_compiled
from kvlab.layer import LayerConfig
from kvlab.policies import Candidates, Scorer
from kvlab.policies.base import Expected, taken
from kvlab.reading import pages
from kvlab.selecting import summarise
from kvlab.store import PagePool, PageTable


class Leaving(NamedTuple):
    """Raw tokens on their way from the window into pages, in ascending position."""

    keys: Float[Tensor, "N T D"]
    values: Float[Tensor, "N T E"]
    positions: Int[Tensor, "N T"]
    mass: Float[Tensor, "N T"] | None


Known = dict[tuple[Scorer, int, int], Tensor]
"""Scores of the first tokens to leave a prompt's window, by scorer, first position and count. No budget and no codec
changes them, so the caches made of one prompt may share them.
"""


def flush(
    config: LayerConfig,
    table: PageTable,
    leaving: Leaving,
    protected: int,
    seen: int,
    raw: torch.dtype,
    centre: Centre | None = None,
    group: int | None = None,
    expected: Callable[[], Expected | None] = lambda: None,
    known: Known | None = None,
) -> None:
    """Evict among stored and leaving tokens, then encode those that stay.

    `protected` counts the sinks and recent tokens beside them, `seen` every token of the sequence so far. `group` heads
    in a row share a budget, where budgets are shared at all: by default all heads of the table. `expected` gives the
    queries to come, for a scorer that asks for them. `known` are scores of this prompt that were taken before.
    """
    group = (group or len(table.counts)) if config.ragged else 1
    stored, new = sum(table.counts[:group]), leaving.keys.shape[1]
    kept = config.keep(stored, new, protected, seen, group)
    stands = min(table.counts)  # up to this slot, tokens stay where they are
    lengths = None
    if kept < stored + group * new:
        old, fresh = _scored(config, table, leaving, centre, expected, known)
        count = kept if old is not None else kept - stored
        secures = config.secures(stored, protected)
        choose = choose_pages if config.block_tokens > 1 else choose_tokens
        old_stays, stays = choose(config, old, fresh, Room(count, group, secures))
        if old_stays is not None:
            stands = _drop(table, old_stays, config.block_tokens)
        index, lengths = listed(stays)
        leaving = Leaving(*(None if x is None else taken(x, index) for x in leaving))  # type: ignore[arg-type]
    if leaving.keys.shape[1]:
        _store(config, table, leaving, lengths, seen, raw, centre)
    summarise(config, table, raw, stands, centre)


def _store(
    config: LayerConfig,
    table: PageTable,
    tokens: Leaving,
    lengths: list[int] | None,
    seen: int,
    raw: torch.dtype,
    centre: Centre | None,
) -> None:
    """Append the first `lengths` of each head's tokens."""
    sides = {
        "k": (config.key, tokens.keys if centre is None else centre.take_out(tokens.keys, tokens.positions, seen)),
        "v": (config.value, tokens.values),
    }
    packed = {"position": tokens.positions.unsqueeze(-1)} if config.budget.evicts else {}
    packed |= {} if tokens.mass is None else {"mass": tokens.mass.unsqueeze(-1)}
    formats = {side: codec.stored_as(x.shape[2]) for side, (codec, x) in sides.items()}
    written: dict[str, Impl] = {side: _writer(table.pool, fmt, tokens.keys.dtype) for side, fmt in formats.items()}
    for side, (codec, x) in sides.items():
        if written[side] == "torch":
            streams = {f"{side}.{name}": y for name, y in codec.encode(x).items()}
            packed |= {name: to_raw(y, raw) if name.endswith(".data") else y for name, y in streams.items()}
    lengths = [tokens.keys.shape[1]] * len(table.counts) if lengths is None else lengths
    start = table.extend(lengths)
    for name, rows in packed.items():
        table.place(name, rows, start, lengths)
    if all(how == "torch" for how in written.values()):
        return
    where = (table.index()[None], *(torch.tensor([xs], device=table.device) for xs in (start, lengths)))
    for side, (_, x) in sides.items():
        if written[side] != "torch":
            streams = {name: table.pool.streams[f"{side}.{name}"] for name in formats[side].names}
            append(x[None], streams, formats[side], *where, impl=written[side])


def _writer(pool: PagePool, fmt: Format, dtype: torch.dtype) -> Impl:
    """What encodes tokens of `dtype` and writes them in one go, or "torch", which does one after the other."""
    if pool.works(dtype) == "triton":
        return "triton"
    return "numba" if runs_compiled(pool.impl, pool.device, dtype) and compiles(fmt) else "torch"


def _scored(
    config: LayerConfig,
    table: PageTable,
    leaving: Leaving,
    centre: Centre | None,
    expected: Callable[[], Expected | None],
    known: Known | None,
) -> tuple[Float[Tensor, "N S"] | None, Float[Tensor, "N T"]]:
    """Scores of stored tokens, if those may go too, and of leaving ones; -inf in slots that hold none."""
    scorer, stored, revisits = config.scorer, table.length, config.budget.revisits
    name = scorer, int(leaving.positions[0, 0]), leaving.keys.shape[1]
    if known is not None and not stored and name in known:
        return None, known[name]
    new = Candidates(
        leaving.positions,
        leaving.mass,
        leaving.keys if scorer.reads_keys else None,
        leaving.values if scorer.reads_values else None,
        expected=expected(),
    )
    if not stored or not (revisits or scorer.relative):
        scores = scorer.score(new)
        if known is not None and not stored:
            known[name] = scores
        return None, scores
    held = _held(config, table, leaving, centre)
    scores = scorer.score(held.then(new))
    if held.counts is None or held.real is None:
        return scores[:, :stored] if revisits else None, scores[:, stored:]
    behind = held.counts.unsqueeze(1) + torch.arange(new.positions.shape[1], device=scores.device)
    old = scores[:, :stored].masked_fill(~held.real, -torch.inf)
    return old if revisits else None, scores.gather(1, behind)


def _held(config: LayerConfig, table: PageTable, like: Leaving, centre: Centre | None) -> Candidates:
    """The stored tokens as candidates, K and V as attention reads them."""
    held = table.gather(["position", *(["mass"] if config.tracks_mass else [])])
    positions, keys, values = held["position"][..., 0], None, None
    if config.scorer.reads_keys or config.scorer.reads_values:
        k, v = pages(table)
        if config.scorer.reads_keys:
            keys = config.key.decode(k, like.keys.shape[2], like.keys.dtype)[:, : table.length]
            keys = keys if centre is None else centre.put_back(keys, positions.long().clamp_min(0))
        if config.scorer.reads_values:
            values = config.value.decode(v, like.values.shape[2], like.values.dtype)[:, : table.length]
    counts = table.sizes() if table.ragged else None
    return Candidates(positions, held["mass"][..., 0] if config.tracks_mass else None, keys, values, counts)


def _drop(table: PageTable, stays: Bool[Tensor, "N U"], unit_tokens: int) -> int:
    """Keep the stored units that stay. Returns the slot up to which nothing has to be summarised again."""
    index, lengths = listed(stays)
    if [n * unit_tokens for n in lengths] == table.counts:
        return min(table.counts)
    table.keep(index, unit_tokens, lengths)
    # Whole pages take their summaries along; tokens that move do not.
    return min(table.counts) if unit_tokens > 1 else 0


class Room(NamedTuple):
    """`tokens` may stay among the candidates of each `group` heads; each of them must if the flush `secures` them."""

    tokens: int
    group: int
    secures: bool


def choose_tokens(
    config: LayerConfig, old: Float[Tensor, "N S"] | None, new: Float[Tensor, "N T"], room: Room
) -> tuple[Bool[Tensor, "N S"] | None, Bool[Tensor, "N T"]]:
    """Who stays, token by token: the best of each head; among equals the later token."""
    stored = 0 if old is None else old.shape[1]
    scores = (new if old is None else torch.cat([old, new], dim=1)).double()
    order = _best_first(scores)
    counts: int | Tensor = room.tokens
    if config.ragged:
        worth = scores.gather(1, order).unflatten(1, (-1, config.page_tokens)).mean(-1)
        counts = allot(worth, *_pages_of(config, room)) * config.page_tokens
    stays = _first(order, counts)
    return (None if old is None else stays[:, :stored]), stays[:, stored:]


def choose_pages(
    config: LayerConfig, old: Float[Tensor, "N S"] | None, new: Float[Tensor, "N T"], room: Room
) -> tuple[Bool[Tensor, "N P"] | None, Bool[Tensor, "N T"]]:
    """Who stays where pages are encoded as one: stored pages by their mean score against new tokens, best page first.

    Of the stored ones whole pages stay, of the new ones tokens.
    """
    size = config.page_tokens
    order = _best_first(new.double())
    worth = new.double().gather(1, order).unflatten(1, (-1, size)).mean(-1)
    stored = 0
    if old is not None:
        stored = old.shape[1] // size
        worth = torch.cat([old.double().unflatten(1, (-1, size)).mean(-1), worth], dim=1)
    best = _best_first(worth)
    counts: int | Tensor = room.tokens // size
    if config.ragged:
        counts = allot(worth.gather(1, best), *_pages_of(config, room))
    stays = _first(best, counts)
    fresh = stays[:, stored:].sum(1, keepdim=True) * size
    return (None if old is None else stays[:, :stored]), _first(order, fresh)


def _pages_of(config: LayerConfig, room: Room) -> tuple[int, int, int]:
    """Total pages, heads that share them, and pages each head gets in any case."""
    total = room.tokens // config.page_tokens
    return total, room.group, config.floor_pages(total, room.group, room.secures)


def allot(worth: Float[Tensor, "N P"], total: int, group: int, floor: int) -> Int[Tensor, "N 1"]:
    """How many of its pages, best first, each head keeps: `floor`, and then the best of its group's, `total` in all.

    `worth` is -inf where a head has no more pages. Among equals a page that is better placed in its own head goes
    first, then that of the earlier head.
    """
    rank = torch.arange(worth.shape[1], device=worth.device)
    first = worth.masked_fill((rank < floor) & (worth > -torch.inf), torch.inf)
    side_by_side = first.unflatten(0, (-1, group)).mT.flatten(1)
    order = torch.sort(side_by_side, dim=1, descending=True, stable=True).indices
    return _first(order, total).unflatten(1, (-1, group)).sum(1).view(-1, 1)


def _best_first(scores: Float[Tensor, "N T"]) -> Int[Tensor, "N T"]:
    """Indices by falling score; among equals the later one first."""
    return torch.sort(scores, dim=1, stable=True).indices.flip(1)


def _first(order: Int[Tensor, "N T"], counts: "int | Tensor") -> Bool[Tensor, "N T"]:
    """Where the first `counts` of each head's `order` are."""
    rank = torch.arange(order.shape[1], device=order.device)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, (rank < counts).expand_as(order))


def listed(stays: Bool[Tensor, "N T"]) -> tuple[Int[Tensor, "N K"], list[int]]:
    """Ascending indices of those that stay, and how many there are for each head; what lies beyond means nothing."""
    lengths = stays.sum(1).tolist()
    order = torch.argsort((~stays).to(torch.int8), dim=1, stable=True)
    return order[:, : max(lengths)], lengths
