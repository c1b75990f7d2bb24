"""What the compiled row attention takes: plain arrays and small integers for pages and raw tokens, no copy made.

Needs no numba until something is attended.
"""

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.formats import FP8_DTYPES, Format, static_scale
from kvlab.kernels.rowwise import Extras, Stored

F32_RAW, F16_RAW, BF16_RAW, E4M3, E5M2, AFFINE = range(6)


class Part(NamedTuple):
    """Raw tokens: `data` uint8, flat, of `kind`: `room` tokens for each head, of which the first `count` are real."""

    kind: int
    data: np.ndarray
    room: int
    count: int


class Bytes(NamedTuple):
    """One stream of K or V: `data` uint8, `row_bytes` for each token. Arrays that the kind does without are empty.

    `scale` and `zero` hold fp16 bits, flat: so many for each token, or for each whole page (`by_channel`). `exponent`
    int8 [pages * P] and `head_scale` [N] are those of fp8, `table` what its 256 bytes mean.
    """

    kind: int
    bits: int
    group: int
    by_channel: bool
    offset: float
    rotated: bool
    row_bytes: int
    data: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    exponent: np.ndarray
    head_scale: np.ndarray
    table: np.ndarray


class Pages(NamedTuple):
    """The encoded tokens of one row, as `rowwise.Stored` has them."""

    k: Bytes
    v: Bytes
    index: np.ndarray
    counts: np.ndarray
    longest: int
    page_tokens: int
    position: np.ndarray
    first: int


# Seconds of compiling after which it is said.
PATIENCE = 2.0
_LOG = logging.getLogger(__name__)
PARTS = 3  # of raw tokens: sinks, window, new
_FP8_KINDS = {"e4m3": E4M3, "e5m2": E5M2}
_KINDS = {torch.float32: F32_RAW, torch.float16: F16_RAW, torch.bfloat16: BF16_RAW}
# What stands for an array that a format, or a call, does without.
_NONE = np.empty(0, np.float32)
_NO_ROWS = np.empty((0, 0), np.float32)
_NO_WORDS = np.empty(0, np.uint16)
_NO_SIGNS = np.empty(0, np.int8)
_NO_POSITION = np.empty(0, np.int32)
_NO_BYTES = np.empty(0, np.uint8)
_NO_PART = Part(F32_RAW, _NO_BYTES, 0, 0)
NO_PARTS = _NO_PART, _NO_PART


def step(
    q: Tensor,
    stored: Stored | None,
    raw: Sequence[tuple[Part, Part]],
    dims: tuple[int, int],
    scale: float,
    extras: Extras,
    mass: bool,
    slot: int = -1,
) -> tuple[Tensor, Tensor | None]:
    """What `rowwise.attend_one` is asked for, of N KV heads and values of E channels: `dims`. Everything on the CPU.

    `raw` are sinks, window and new token, NO_PARTS for what there is none of. The new one is also put at `slot` of the
    window, if that is not negative, in the window's own dtype.
    """
    n_heads, value_dim = dims
    out = torch.empty(q.shape[0], value_dim)
    pages = _no_pages(n_heads) if stored is None else stored.arrays
    columns = pages.longest + sum(k.count for k, _ in raw)
    seen = torch.empty(n_heads, columns) if mass else None
    parts = (*raw, *[NO_PARTS] * (PARTS - len(raw)))
    _compiled()(
        q.float().contiguous().numpy(),
        scale,
        pages,
        tuple(k for k, _ in parts),
        tuple(v for _, v in parts),
        slot,
        _none_selected(n_heads) if extras.selected is None else extras.selected.long().contiguous().numpy(),
        extras.chunk,
        extras.softcap or 0.0,
        _NONE if extras.sink_logits is None else extras.sink_logits.float().contiguous().numpy(),
        _NO_ROWS if extras.drift is None else extras.drift.float().contiguous().numpy(),
        _NO_ROWS if extras.trig is None else extras.trig.float().contiguous().numpy(),
        _NO_ROWS if seen is None else seen.numpy(),
        out.numpy(),
    )
    return out, seen


@functools.cache
def _compiled() -> Callable[..., None]:
    """The compiled function, made or read from disk by a call on nothing; says so where that takes its time."""
    from kvlab.kernels.rowwise_numba import attend

    note = threading.Timer(PATIENCE, _LOG.warning, ["compiling the CPU kernel, once: the result is kept on disk"])
    note.daemon = True
    note.start()
    try:
        parts, none = (_NO_PART,) * PARTS, _none_selected(1)
        query, out = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
        attend(query, 1.0, _no_pages(1), parts, parts, -1, none, 0, 0.0, _NONE, _NO_ROWS, _NO_ROWS, _NO_ROWS, out)
    finally:
        note.cancel()
    return attend


def part(x: Tensor, count: int) -> Part:
    """Raw tokens [N, T, D], float32 or 16 bit, in the memory they are in."""
    return Part(_KINDS[x.dtype], _flat(x), x.shape[1], count)


def _flat(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).view(-1).numpy()


def pages_of(stored: Stored) -> Pages:
    """Views of the same memory."""
    heads = stored.index.shape[0]
    return Pages(
        _bytes_of(stored.key, stored.key_format, heads),
        _bytes_of(stored.value, stored.value_format, heads),
        stored.index.numpy(),
        stored.counts.numpy(),
        stored.longest,
        stored.page_tokens,
        _NO_POSITION if stored.position is None else stored.position.flatten().numpy(),
        stored.first,
    )


@functools.cache
def _no_pages(heads: int) -> Pages:
    nothing = Bytes(F32_RAW, 32, 1, False, 0.0, False, 0, _NO_BYTES, _NO_WORDS, _NO_WORDS, _NO_SIGNS, _NONE, _NONE)
    index, counts = np.zeros((heads, 0), np.int64), np.zeros(heads, np.int64)
    return Pages(nothing, nothing, index, counts, 0, 1, _NO_POSITION, 0)


@functools.cache
def _none_selected(heads: int) -> np.ndarray:
    return np.zeros((heads, 0), np.int64)


@functools.cache
def _table(name: str) -> np.ndarray:
    """What each byte of an fp8 format means."""
    return torch.arange(256).to(torch.uint8).view(FP8_DTYPES[name]).float().numpy()


def _flat_bits(x: Tensor) -> np.ndarray:
    return x.view(torch.uint16).flatten().numpy()


def _bytes_of(streams: Mapping[str, Tensor], fmt: Format, heads: int) -> Bytes:
    """One stream, sharing its memory."""
    if fmt.kind == "raw":
        x = streams["data"]
        size = x.shape[2] * x.element_size()
        kind = _KINDS[x.dtype]
        return Bytes(
            kind, fmt.bits, 1, False, 0.0, False, size, _flat(x), _NO_WORDS, _NO_WORDS, _NO_SIGNS, _NONE, _NONE
        )
    codes, size = _flat(streams["codes"]), streams["codes"].shape[2]
    if fmt.kind == "fp8":
        signs = _NO_SIGNS if fmt.exponents else streams["exponent"].flatten().numpy()
        scales = _head_scales(fmt, heads) if fmt.exponents else _NONE
        more = signs, scales, _table(fmt.fp8)
        kind = _FP8_KINDS[fmt.fp8]
        return Bytes(kind, 8, 1, False, 0.0, fmt.hadamard, size, codes, _NO_WORDS, _NO_WORDS, *more)
    scale, zero = _flat_bits(streams["scale"]), _NO_WORDS
    if fmt.mode == "asymmetric":
        zero = _flat_bits(streams["zero"])
    by_channel = fmt.axis == "channel"
    return Bytes(
        AFFINE,
        fmt.bits,
        fmt.group,
        by_channel,
        fmt.groups.offset,
        fmt.hadamard,
        size,
        codes,
        scale,
        zero,
        _NO_SIGNS,
        _NONE,
        _NONE,
    )


@functools.cache
def _head_scales(fmt: Format, heads: int) -> np.ndarray:
    return static_scale(fmt, heads, torch.float32, torch.device("cpu")).contiguous().numpy()
