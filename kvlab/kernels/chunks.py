"""Which chunks of stored keys a query should read: summaries of a chunk, scores from summaries alone, selection.

A chunk is a run of tokens of one KV head. "minmax" (Quest, arXiv 2406.10774) keeps each channel's least and greatest
key; sum_d max(q_d m_d, q_d M_d) is then never below q . k of any key of the chunk. "mean" keeps the average key: a
guess, not a bound. "codec" takes m and M from the scales and zeros of per-channel pages, which already say what range
their codes cover. Scores are summed over the query heads of a KV head, which reads one set of chunks for all of them
(The Sparse Frontier, 2504.17768). Knows nothing of where chunks lie.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.kernels.affine import Groups
from kvlab.kernels.dispatch import Impl, choose

Bound = Literal["minmax", "mean", "codec"]
# Chunks of a row that the Triton selection can hold at once.
MOST_CHUNKS = 8192
_FP16_MAX = 65504.0


class Bounds(NamedTuple):
    """Least and greatest key of each channel of each chunk, [*N, C, D]. Stored ones are fp16, rounded outward."""

    low: Tensor
    high: Tensor


def _outward(x: Tensor, up: bool) -> Tensor:
    """The fp16 number next to x that is not below it (`up`) or not above it; infinity where there is no finite one."""
    half = x.half()
    back = half.to(x.dtype)
    bits = half.view(torch.int16)
    # Magnitudes are ordered like their bits: one more is away from zero. From +-0 the way out is the least number.
    away, least = (half > 0, 0x0001) if up else (half < 0, -0x7FFF)
    moved = torch.where(half == 0, least, torch.where(away, bits + 1, bits - 1)).to(torch.int16).view(torch.float16)
    return torch.where(back < x if up else back > x, moved, half)


def _chunked(keys: Tensor, chunk: int, counts: Tensor | None, missing: float) -> Tensor:
    """[*N, T, D] -> [*N, C, chunk, D] in float32 or wider, with `missing` in slots that hold no token."""
    tokens = keys.shape[-2]
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if counts is not None:
        real = torch.arange(tokens, device=keys.device) < counts.unsqueeze(-1)
        keys = torch.where(real.unsqueeze(-1), keys, missing)
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -tokens % chunk), value=missing)
    return keys.unflatten(-2, (-1, chunk))


def bounds(keys: Float[Tensor, "*N T D"], chunk: int, counts: Int[Tensor, "*N"] | None = None) -> Bounds:
    """fp16 bounds of the keys as they are read back. `counts[n]` tokens are real; a chunk without any gets zeros.

    The last chunk may be short. Beyond fp16 a bound is infinite, and its chunk's score with it.
    """
    low = _outward(_chunked(keys, chunk, counts, torch.inf).amin(-2), up=False)
    high = _outward(_chunked(keys, chunk, counts, -torch.inf).amax(-2), up=True)
    if counts is None:
        return Bounds(low, high)
    some = (torch.arange(low.shape[-2], device=low.device) * chunk < counts.unsqueeze(-1)).unsqueeze(-1)
    return Bounds(torch.where(some, low, 0.0), torch.where(some, high, 0.0))


def means(
    keys: Float[Tensor, "*N T D"], chunk: int, counts: Int[Tensor, "*N"] | None = None
) -> Float[Tensor, "*N C D"]:
    """fp16 average key of each chunk, over its real tokens; zeros for a chunk without any."""
    total = _chunked(keys, chunk, counts, 0.0).sum(-2)
    tokens = torch.full(keys.shape[:-2], keys.shape[-2], device=keys.device) if counts is None else counts
    held = tokens.unsqueeze(-1) - torch.arange(total.shape[-2], device=keys.device) * chunk
    return (total / held.clamp(1, chunk).unsqueeze(-1)).clamp(-_FP16_MAX, _FP16_MAX).half()


def codec_bounds(scale: Float[Tensor, "*N C D"], zero: Float[Tensor, "*N C D"] | None, spec: Groups) -> Bounds:
    """Bounds that per-channel scales and zeros imply: the values of the least and the greatest code, in float32.

    A key rotated by its codec is bounded in the rotated space, so its queries must be rotated before they are scored.
    Raises ValueError for groups along the head dim, whose scales say nothing about channels.
    """
    if spec.axis != "channel":
        raise ValueError(f"codec bounds need axis='channel' codes, got axis={spec.axis!r}: use 'minmax' or 'mean'")
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32))
    # The arithmetic of `dequantize`, whose rounding is monotone: no stored key lies outside by even one ulp.
    top = 2 * spec.offset if spec.mode == "symmetric" else 2**spec.bits - 1
    low, high = (0 - spec.offset) * scale, (top - spec.offset) * scale
    return Bounds(low, high) if zero is None else Bounds(low + zero.to(scale.dtype), high + zero.to(scale.dtype))


def _heads_summed(x: Float[Tensor, "*B H Q D"], n_kv: int) -> Float[Tensor, "*B N Q D"]:
    if x.shape[-3] % n_kv:
        raise ValueError(f"query heads must be a multiple of KV heads, got {x.shape[-3]} query and {n_kv} KV heads")
    return x.unflatten(-3, (n_kv, -1)).sum(-3)


def bound_scores(
    q: Float[Tensor, "*B H Q D"], bounds: Bounds, counts: Int[Tensor, "*B N"] | None = None
) -> Float[Tensor, "*B N Q C"]:
    """sum over query heads and channels of max(q m, q M), in float32 or wider. `counts` is chunks per head.

    Chunks beyond the count get -inf. Where a bound is infinite or unknown (NaN), the score is +inf: read it.
    """
    low, high = bounds
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    # M meets the positive part of q and m the negative one, so the sum over heads can be taken first.
    up, down = (_heads_summed(part, low.shape[-3]) for part in (q.clamp_min(0), q.clamp_max(0)))
    scores = up @ high.to(q.dtype).mT + down @ low.to(q.dtype).mT
    return _beyond(scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), counts)


def mean_scores(
    q: Float[Tensor, "*B H Q D"], mean: Float[Tensor, "*B N C D"], counts: Int[Tensor, "*B N"] | None = None
) -> Float[Tensor, "*B N Q C"]:
    """sum over query heads of q . mean key, in float32 or wider; -inf beyond `counts` chunks."""
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    return _beyond(_heads_summed(q, mean.shape[-3]) @ mean.to(q.dtype).mT, counts)


def _beyond(scores: Tensor, counts: Tensor | None) -> Tensor:
    if counts is None:
        return scores
    missing = torch.arange(scores.shape[-1], device=scores.device) >= counts[..., None, None]
    return scores.masked_fill(missing, -torch.inf)


def width_of(
    n_chunks: int, *, k: int | None = None, fraction: float | None = None, forced_first: int, forced_last: int
) -> int:
    """Columns `select` returns for C chunks: the budget of a head that fills them all. From shapes only."""
    if (k is None) == (fraction is None):
        raise ValueError(f"give either k or fraction, got k={k} and fraction={fraction}")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1 chunk, got {k}")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}: 1 reads every chunk")
    if forced_first < 0 or forced_last < 0:
        raise ValueError(f"forced chunks must not be negative, got first {forced_first} and last {forced_last}")
    budget = k if fraction is None else _share(n_chunks, fraction)
    assert budget is not None
    return min(n_chunks, max(budget, forced_first + forced_last))


def _share(n_chunks: int, fraction: float) -> int:
    """ceil(fraction * C), but 0.1 of 30 is 3: a product a hair above an integer is that integer."""
    return max(1, math.ceil(n_chunks * fraction - 1e-6))


def select(
    scores: Float[Tensor, "*N C"],
    counts: Int[Tensor, "*N"],
    *,
    k: int | None = None,
    fraction: float | None = None,
    forced_first: int = 1,
    forced_last: int = 2,
    impl: Impl = "auto",
) -> Int[Tensor, "*N K"]:
    """The chunks with the highest scores: int32 slots, ascending, -1 behind the last.

    A head of `counts` chunks gets k of them, or ceil(fraction * count); its first and last ones count towards that and
    are read in any case. Equal scores: the earlier chunk. K comes from shapes, nothing is read back from the device.
    """
    width = width_of(scores.shape[-1], k=k, fraction=fraction, forced_first=forced_first, forced_last=forced_last)
    if choose(impl, _selectors(scores), scores.device) == "triton":
        from kvlab.kernels.select_triton import select_triton

        return select_triton(scores, counts, width, forced_first, forced_last, fraction=fraction)
    if fraction is None:
        budget = torch.full_like(counts, width)
    else:
        share = (counts.double() * fraction - 1e-6).ceil().to(counts.dtype)
        budget = share.clamp_min(max(1, forced_first + forced_last))
    order = _order(scores, counts, forced_first, forced_last)
    return _first(order[..., :width], counts, budget)


def select_mass(
    scores: Float[Tensor, "*N C"],
    counts: Int[Tensor, "*N"],
    *,
    p: float,
    width: int,
    forced_first: int = 1,
    forced_last: int = 2,
    impl: Impl = "auto",
) -> Int[Tensor, "*N K"]:
    """The fewest chunks whose softmax weights reach `p` (Twilight, arXiv 2502.02770), at most `width`; as `select`.

    Scores are logits here: scale them (by scale / G for the mean of G query heads). Forced chunks come first and count
    with their weight.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p must lie in (0, 1], got {p}: 1 reads every chunk")
    width = width_of(scores.shape[-1], k=width, forced_first=forced_first, forced_last=forced_last)
    if choose(impl, _selectors(scores), scores.device) == "triton":
        from kvlab.kernels.select_triton import select_triton

        return select_triton(scores, counts, width, forced_first, forced_last, p=p)
    order = _order(scores, counts, forced_first, forced_last)
    real = torch.arange(scores.shape[-1], device=scores.device) < counts.unsqueeze(-1)
    limit = torch.finfo(scores.dtype).max
    logits = scores.nan_to_num(nan=limit, posinf=limit, neginf=-limit).masked_fill(~real, -torch.inf)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0).gather(-1, order)
    # Weights that add up to 1 before the last chunk, by rounding, must not end the list when p is 1.
    budget = counts if p == 1 else (weights.cumsum(-1) - weights < p).sum(-1)
    return _first(order[..., :width], counts, budget.clamp_min(forced_first + forced_last))


def _selectors(scores: Tensor) -> tuple[str, ...]:
    """Triton's keys are the bits of float32, a whole row of them in one program."""
    fits = scores.dtype == torch.float32 and scores.shape[-1] <= MOST_CHUNKS
    return ("triton", "torch") if fits else ("torch",)


def _order(scores: Tensor, counts: Tensor, forced_first: int, forced_last: int) -> Tensor:
    """Chunks by rank: forced, then by falling score, then what lies beyond the count. Ties in order of slots."""
    slot = torch.arange(scores.shape[-1], device=scores.device)
    count = counts.unsqueeze(-1)
    limit = torch.finfo(scores.dtype).max
    keys = scores.nan_to_num(nan=limit, posinf=limit, neginf=-limit)
    keys = torch.where((slot < forced_first) | (slot >= count - forced_last), torch.inf, keys)
    keys = keys.masked_fill(slot >= count, -torch.inf)
    return keys.sort(dim=-1, descending=True, stable=True).indices


def _first(order: Tensor, counts: Tensor, budget: Tensor) -> Tensor:
    """The first `budget` of an order, as ascending int32 slots padded with -1."""
    rank = torch.arange(order.shape[-1], device=order.device)
    beyond = torch.iinfo(torch.int32).max
    kept = order.to(torch.int32).masked_fill(rank >= torch.minimum(budget, counts).unsqueeze(-1), beyond)
    kept = kept.sort(dim=-1).values
    return torch.where(kept == beyond, -1, kept)
