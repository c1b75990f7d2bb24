"""Decode attention of one new token per row, straight from pages: stored tokens as they lie, then the raw window.

The reference gathers one head at a time and multiplies out by definition. The Triton path (`paged_triton`) reads each
page once for all query heads of its KV head, splits the tokens over the device and merges by log-sum-exp; no value of
a tensor reaches the host, so a call can be captured in a CUDA graph. Knows no codec and no cache.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from kvlab.kernels.dispatch import Impl, choose
from kvlab.kernels.formats import Format, restored_values

AVAILABLE = ("triton", "reference")


class Pages(NamedTuple):
    """The stored tokens of B rows with N KV heads each. Page ids are those of the streams' first axis.

    `k` and `v` hold the tensors of their formats without the "k." and "v." of the pool, each [pages, rows, width];
    `index` the ids of a head's pages in order, padded with any valid id; `counts` its tokens. A token lies at its
    `position` where the pool keeps one, else at `first` plus its slot.
    """

    k: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    index: Int32[Tensor, "B N M"]
    counts: Int32[Tensor, "B N"]
    page_tokens: int
    position: Int32[Tensor, "pages P 1"] | None = None
    first: int = 0


class Fresh(NamedTuple):
    """The tokens not stored yet, the new one last: the first `counts[b]` of row b, none where `k` has no slot."""

    k: Float[Tensor, "B N R D"]
    v: Float[Tensor, "B N R E"]
    counts: Int32[Tensor, " B"]


class Chosen(NamedTuple):
    """The chunks of `tokens` slots that are read, where not all are: `chunks[b, n]` of them, -1 for none. A chunk may
    appear once; `tokens` divides the page or is a multiple of it.
    """

    chunks: Int32[Tensor, "B N S"]
    tokens: int


class Centring(NamedTuple):
    """What centred keys lack: stored tokens get drift . trig[position] added to their scaled logit."""

    drift: Float[Tensor, "B H D"]
    trig: Float[Tensor, "Tmax D"]


class LaunchOptions(NamedTuple):
    """How the Triton path is launched; changes speed only. `splits=None` fills the device."""

    tile: int
    warps: int
    stages: int
    splits: int | None = None
    compute: torch.dtype | None = None  # of quantized streams; None is float16


class Decoded(NamedTuple):
    """`lse` is the natural log of each query's softmax denominator, -inf without any key. `mass` is each key's
    probability, mean over the query heads of its KV head: M * P slots of pages, then R raw tokens; zero where unread.
    """

    out: Float[Tensor, "B H E"]
    lse: Float[Tensor, "B H"]
    mass: Float[Tensor, "B N T"] | None


def _check(q: Tensor, pages: Pages, key: Format, value: Format, raw: Fresh, chosen: Chosen | None) -> None:
    """Raise ValueError for shapes and formats that do not fit together."""
    heads, kv_heads = q.shape[1], pages.index.shape[1]
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads, got {heads} query and {kv_heads} KV heads")
    if raw.k.shape[3] != q.shape[2]:
        raise ValueError(f"q and raw K must have one head dim, got {q.shape[2]} and {raw.k.shape[3]}")
    for side, fmt, held in (("k", key, pages.k), ("v", value, pages.v)):
        missing = set(fmt.names) - set(held)
        if missing:
            raise ValueError(f"pages.{side} lacks {sorted(missing)}, which its format {fmt.kind!r} is read from")
        if fmt.kind == "affine" and fmt.axis == "channel" and fmt.group != pages.page_tokens:
            raise ValueError(f"a channel group must be one page, got {fmt.group} and {pages.page_tokens} tokens")
        if fmt.kind == "fp8" and len(fmt.exponents) not in (0, 1, kv_heads):
            raise ValueError(f"fp8 exponents must be 1 or one per KV head ({kv_heads}), got {len(fmt.exponents)}")
    if chosen is not None and chosen.tokens % pages.page_tokens and pages.page_tokens % chosen.tokens:
        raise ValueError(f"a chunk must divide a page or be whole pages, got {chosen.tokens} and {pages.page_tokens}")


def _gathered(held: Mapping[str, Tensor], fmt: Format, ids: Tensor, head: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[tokens, D] of one head's pages, rotated back."""
    streams = {name: held[name][ids].flatten(0, 1).unsqueeze(0) for name in fmt.names}
    if len(fmt.exponents) > 1:
        fmt = fmt._replace(exponents=(fmt.exponents[head],))
    return restored_values(streams, fmt, dim, dtype)[0]


def _slots_read(row: int, head: int, count: int, chosen: Chosen | None, device: torch.device) -> Tensor:
    if chosen is None:
        return torch.arange(count, device=device)
    chunks = chosen.chunks[row, head].long()
    slots = chunks[chunks >= 0, None] * chosen.tokens + torch.arange(chosen.tokens, device=device)
    return slots.flatten()[slots.flatten() < count]


def decode_reference(
    q: Float[Tensor, "B H D"],
    pages: Pages,
    key: Format,
    value: Format,
    raw: Fresh,
    scale: float,
    *,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
    centring: Centring | None = None,
    chosen: Chosen | None = None,
    mass: bool = False,
) -> Decoded:
    """By definition, in float32 or float64 as q has it. Reads lengths on the host."""
    _check(q, pages, key, value, raw, chosen)
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows, heads, dim = q.shape
    kv_heads, wide = pages.index.shape[1], pages.index.shape[2] * pages.page_tokens
    group, window = heads // kv_heads, raw.k.shape[2]
    out = torch.zeros(rows, heads, raw.v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=dtype, device=q.device)
    masses = torch.zeros(rows, kv_heads, wide + window, dtype=dtype, device=q.device)
    for row in range(rows):
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            ids = pages.index[row, head].long()
            slots = _slots_read(row, head, int(pages.counts[row, head]), chosen, q.device)
            fresh = int(raw.counts[row])
            k = _gathered(pages.k, key, ids, head, dim, dtype)[slots]
            v = _gathered(pages.v, value, ids, head, raw.v.shape[3], dtype)[slots]
            query = q[row, mine].to(dtype)
            logits = query @ torch.cat([k, raw.k[row, head, :fresh].to(dtype)]).mT * scale
            if centring is not None:
                at = slots + pages.first
                if pages.position is not None:
                    at = pages.position[ids].flatten()[slots].long()
                logits[:, : len(slots)] += centring.drift[row, mine].to(dtype) @ centring.trig[at].to(dtype).mT
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            denominator = logits
            if sink_logits is not None:
                denominator = torch.cat([logits, sink_logits[mine].to(dtype).unsqueeze(1)], dim=1)
            if denominator.shape[1] == 0:
                continue
            lse[row, mine] = denominator.logsumexp(-1)
            probs = (logits - lse[row, mine].unsqueeze(1)).exp()
            out[row, mine] = probs @ torch.cat([v, raw.v[row, head, :fresh].to(dtype)])
            masses[row, head, slots] = probs[:, : len(slots)].mean(0)
            masses[row, head, wide : wide + fresh] = probs[:, len(slots) :].mean(0)
    return Decoded(out.to(q.dtype), lse, masses if mass else None)


def decode(
    q: Float[Tensor, "B H D"],
    pages: Pages,
    key: Format,
    value: Format,
    raw: Fresh,
    scale: float,
    *,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
    centring: Centring | None = None,
    chosen: Chosen | None = None,
    mass: bool = False,
    options: LaunchOptions | None = None,
    impl: Impl = "auto",
) -> Decoded:
    """Attention of one new token per row; query head h reads KV head h // (H / N). Its own key is the last raw one.

    `scale` multiplies q.k before everything else. `softcap` is Gemma 2's cap * tanh(logit / cap); `sink_logits` take
    probability and add no value (GPT-OSS). A row with no key at all gives zeros. Raises ValueError where shapes,
    formats and `impl` do not fit; `resolved` says beforehand what would run. A CUDA graph can capture the second call
    with the same formats and options: the first compiles, and copies exponents to the device.
    """
    if resolved(q, impl) == "reference":
        return decode_reference(
            q, pages, key, value, raw, scale,
            softcap=softcap, sink_logits=sink_logits, centring=centring, chosen=chosen, mass=mass,
        )  # fmt: skip
    _check(q, pages, key, value, raw, chosen)
    from kvlab.kernels import paged_triton

    return paged_triton.launch(q, pages, key, value, raw, scale, softcap, sink_logits, centring, chosen, mass, options)


def resolved(q: Tensor, impl: Impl = "auto") -> str:
    """The implementation `decode` would run on q's device."""
    return choose(impl, AVAILABLE, q.device)
