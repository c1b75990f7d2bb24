"""What the compiled row attention takes: pages and raw tokens as addresses, sizes and small integers, no copy made.

All of it goes over in two arrays of integers, one made when pages move and one for each call: handing over every array
by itself took longer than a short row's attention. Needs no numba until something is attended.
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
    """Raw tokens: `data` of `kind`, contiguous from `address` on: `room` tokens for each head, the first `count` real.

    Whoever has the address keeps the data.
    """

    data: Tensor
    address: int
    kind: int
    room: int
    count: int


class Bytes(NamedTuple):
    """One stream of K or V: `data` uint8, `row_bytes` for each token. Arrays that the kind does without are empty.

    `scale` and `zero` hold fp16 bits, flat: so many for each token, or for each whole page (`by_channel`). Codes are
    `twice_offset` / 2 above zero. `exponent` int8 [pages * P] and `head_scale` [N] are those of fp8, `table` what its
    256 bytes mean.
    """

    kind: int
    bits: int
    group: int
    by_channel: bool
    twice_offset: int
    rotated: bool
    row_bytes: int
    data: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    exponent: np.ndarray
    head_scale: np.ndarray
    table: np.ndarray


class Pages(NamedTuple):
    """The encoded tokens of one row, as `rowwise.Stored` has them: `index` [N, M], `counts` [N]."""

    k: Bytes
    v: Bytes
    index: np.ndarray
    counts: np.ndarray
    longest: int
    page_tokens: int
    position: np.ndarray
    first: int


class Record(NamedTuple):
    """Pages as the integers compiled code reads them from, in the order of the fields; an array is address and size."""

    numbers: np.ndarray
    pages: Pages  # what the addresses are of


# Seconds of compiling after which it is said.
PATIENCE = 2.0
_LOG = logging.getLogger(__name__)
PARTS = 3  # of raw tokens: sinks, window, new
_FP8_KINDS = {"e4m3": E4M3, "e5m2": E5M2}
_KINDS = {torch.float32: F32_RAW, torch.float16: F16_RAW, torch.bfloat16: BF16_RAW}
# What stands for an array that a format, or a call, does without.
_NONE = np.empty(0, np.float32)
_NO_WORDS = np.empty(0, np.uint16)
_NO_SIGNS = np.empty(0, np.int8)
_NO_POSITION = np.empty(0, np.int32)
_NO_BYTES = np.empty(0, np.uint8)
_NO_PART = Part(torch.empty(0), 0, F32_RAW, 0, 0)
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

    The query [H, D], or [H, 1, D], as the output is then.

    `raw` are sinks, window and new token, NO_PARTS for what there is none of. The new one is also put at `slot` of the
    window, if that is not negative, in the window's own dtype.
    """
    n_heads, value_dim = dims
    record = _no_pages(n_heads) if stored is None else stored.record
    columns = record.pages.longest + sum([k.count for k, _ in raw])
    # Named, since what has an address must outlive the call.
    query, selected = _plain(q, torch.float32), _plain(extras.selected, torch.long)
    sinks, drift, trig = (_plain(x, torch.float32) for x in (extras.sink_logits, extras.drift, extras.trig))
    out, seen = torch.empty(*q.shape[:-1], value_dim), torch.empty(n_heads, columns) if mass else None
    call = [
        *(q.shape[0], q.shape[-1], value_dim, _address(query), out.data_ptr(), slot),
        *(_address(selected), 0 if selected is None else selected.shape[1], extras.chunk),
        *(_address(sinks), _address(drift), _address(trig), 0 if trig is None else trig.shape[0], _address(seen)),
    ]
    for pair in (*raw, *[NO_PARTS] * (PARTS - len(raw))):
        for part in pair:
            call += part[1:]
    _compiled()(record.numbers, np.array(call), scale, extras.softcap or 0.0)
    return out, seen


def _plain(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or (x.dtype == dtype and x.is_contiguous()) else x.to(dtype).contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@functools.cache
def _compiled() -> Callable[..., None]:
    """The compiled function, made or read from disk by a call on nothing; says so where that takes its time."""
    from kvlab.kernels.rowwise_numba import attend

    note = threading.Timer(PATIENCE, _LOG.warning, ["compiling the CPU kernel, once: the result is kept on disk"])
    note.daemon = True
    note.start()
    try:
        query, out = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
        call = [1, 1, 1, query.ctypes.data, out.ctypes.data, -1, *[0] * 8, *[0] * (2 * PARTS * len(_NO_PART[1:]))]
        attend(_no_pages(1).numbers, np.array(call), 1.0, 0.0)
    finally:
        note.cancel()
    return attend


def part(x: Tensor, count: int) -> Part:
    """Raw tokens [N, T, D], float32 or 16 bit, in the memory they are in."""
    data = x.contiguous()
    return Part(data, data.data_ptr(), _KINDS[x.dtype], x.shape[1], count)


def _flat(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).view(-1).numpy()


def record_of(stored: Stored) -> Record:
    """Addresses in the same memory."""
    heads = stored.index.shape[0]
    return _record(
        Pages(
            _bytes_of(stored.key, stored.key_format, heads),
            _bytes_of(stored.value, stored.value_format, heads),
            stored.index.long().contiguous().numpy(),
            stored.counts.long().contiguous().numpy(),
            stored.longest,
            stored.page_tokens,
            _NO_POSITION if stored.position is None else stored.position.flatten().numpy(),
            stored.first,
        )
    )


def _record(pages: Pages) -> Record:
    return Record(np.array(_integers(pages), np.int64), pages)


def _integers(fields: tuple) -> list[int]:
    found: list[int] = []
    for x in fields:
        if isinstance(x, tuple):
            found += _integers(x)
        else:
            found += [x.ctypes.data, x.size] if isinstance(x, np.ndarray) else [int(x)]
    return found


@functools.cache
def _no_pages(heads: int) -> Record:
    nothing = Bytes(F32_RAW, 32, 1, False, 0, False, 0, _NO_BYTES, _NO_WORDS, _NO_WORDS, _NO_SIGNS, _NONE, _NONE)
    index, counts = np.zeros((heads, 0), np.int64), np.zeros(heads, np.int64)
    return _record(Pages(nothing, nothing, index, counts, 0, 1, _NO_POSITION, 0))


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
        return Bytes(kind, fmt.bits, 1, False, 0, False, size, _flat(x), _NO_WORDS, _NO_WORDS, _NO_SIGNS, _NONE, _NONE)
    codes, size = _flat(streams["codes"]), streams["codes"].shape[2]
    if fmt.kind == "fp8":
        signs = _NO_SIGNS if fmt.exponents else streams["exponent"].flatten().numpy()
        scales = _head_scales(fmt, heads) if fmt.exponents else _NONE
        more = signs, scales, _table(fmt.fp8)
        kind = _FP8_KINDS[fmt.fp8]
        return Bytes(kind, 8, 1, False, 0, fmt.hadamard, size, codes, _NO_WORDS, _NO_WORDS, *more)
    scale, zero = _flat_bits(streams["scale"]), _NO_WORDS
    if fmt.mode == "asymmetric":
        zero = _flat_bits(streams["zero"])
    by_channel = fmt.axis == "channel"
    return Bytes(
        AFFINE,
        fmt.bits,
        fmt.group,
        by_channel,
        int(2 * fmt.groups.offset),
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
