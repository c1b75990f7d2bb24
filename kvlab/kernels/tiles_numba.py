"""Tiles: a span of tokens as float32 rows in a first-level cache, made from what pages or raw tokens hold, and its
products with queries and probabilities. Compiled for CPUs.

A tile is flat; its rows are `stride` apart, a multiple of LANES, and what lies between a row's values and the next row
is zero. The branch for a format is taken once for a span and costs nothing.
"""

import numpy as np
from numba import njit

from kvlab.kernels.lanes_numba import (
    BLOCK,
    BLOCK_BYTES,
    LANES,
    block_dots,
    block_mix,
    codes,
    e4m3,
    e5m2,
    fma,
    halves,
    load,
    nibbles,
    prefetch,
    splat,
    store,
    store_sums,
)
from kvlab.kernels.rowwise_arrays import AFFINE, E4M3, E5M2, F16_RAW, F32_RAW
from kvlab.kernels.shared_numba import FAST, HAS_HALVES, LEAF, as_float, bf16_bits, half, half_bits

# Bytes between what is unpacked and what is asked for: the next span, where pages follow each other.
AHEAD = 2048
_LINE = 64  # bytes of a cache line; a vector that lies across two costs twice


@njit(**FAST)
def aligned(count):
    """Room for float32 from the start of a cache line on."""
    room = np.empty(count + _LINE // 4, np.float32)
    past = room.ctypes.data % _LINE
    first = (_LINE - past) % _LINE // 4
    return room[first : first + count]


@njit(forceinline=True, **LEAF)
def padded(width):
    """Numbers from one row of a tile to the next."""
    return (width + LANES - 1) // LANES * LANES


@njit(**LEAF)
def _plane(data, first, step, n, shift, mask, count, tile, into, stride):
    """`count` codes of each of n tokens: bits of as many bytes, which begin `step` apart, into rows of the tile."""
    whole = count // LANES * LANES
    for t in range(n):
        src, dst = first + t * step, into + t * stride
        prefetch(data, src + AHEAD)
        for j in range(0, whole, LANES):
            store(tile, dst + j, codes(data, src + j, shift, mask))
        for j in range(whole, count):
            tile[dst + j] = np.float32((np.int32(data[src + j]) >> shift) & mask)


@njit(**LEAF)
def _add_top_bits(data, first, step, n, width, tile, stride):
    """The third bits of 3-bit codes: bit i of byte j belongs to code i * width / 8 + j."""
    top = width // 8
    for t in range(n):
        src, dst = first + t * step, t * stride
        for i in range(8):
            for j in range(top):
                bit = (np.int32(data[src + j]) >> np.int32(i)) & np.int32(1)
                tile[dst + i * top + j] += np.float32(bit << np.int32(2))


@njit(forceinline=True, **LEAF)
def _unpack(data, step, row, n, bits, width, tile, stride):
    """Codes of n tokens from `row` on as floats, planes as `pack` lays them out."""
    first = row * step
    if bits == 8:
        _plane(data, first, step, n, 0, 255, width, tile, 0, stride)
    elif bits == 4:
        _plane(data, first, step, n, 0, 15, width // 2, tile, 0, stride)
        _plane(data, first, step, n, 4, 15, width // 2, tile, width // 2, stride)
    else:
        part = width // 4
        for i in range(4):
            _plane(data, first, step, n, 2 * i, 3, part, tile, i * part, stride)
    if bits == 3:
        _add_top_bits(data, first + width // 4, step, n, width, tile, stride)


@njit(**LEAF)
def _widen(bits, first, count, out, into):
    """fp16 bits as float32."""
    whole = count // LANES * LANES if HAS_HALVES else 0
    for i in range(0, whole, LANES):
        store(out, into + i, halves(bits, first + i))
    for i in range(whole, count):
        out[into + i] = half(bits[first + i])


@njit(**LEAF)
def _factors(scale, zero, first, many, offset, steps, shifts):
    """fp16 bits of scales, and of zeros if there are any, as x = code * step + shift."""
    _widen(scale, first, many, steps, 0)
    if zero.shape[0]:
        _widen(zero, first, many, shifts, 0)
    else:
        for i in range(many):
            shifts[i] = -offset * steps[i]


@njit(**LEAF)
def _scale_channels(tile, n, width, stride, steps, shifts):
    """Codes into values, one step and shift for each channel."""
    whole = width // LANES * LANES
    for t in range(n):
        row = t * stride
        for d in range(0, whole, LANES):
            store(tile, row + d, fma(load(tile, row + d), load(steps, d), load(shifts, d)))
        for d in range(whole, width):
            tile[row + d] = tile[row + d] * steps[d] + shifts[d]


@njit(**LEAF)
def _scale_groups(tile, n, width, stride, steps, shifts, group):
    """Codes into values, one step and shift for each group of channels of each token."""
    whole = group // LANES * LANES
    i = 0
    for t in range(n):
        for first in range(t * stride, t * stride + width, group):
            step, shift = splat(steps[i]), splat(shifts[i])
            for d in range(first, first + whole, LANES):
                store(tile, d, fma(load(tile, d), step, shift))
            for d in range(first + whole, first + group):
                tile[d] = tile[d] * steps[i] + shifts[i]
            i += 1


@njit(forceinline=True, **LEAF)
def _load_affine(stream, row, n, page_tokens, width, tile, stride, steps, shifts):
    """Group-wise codes into values; into codes where one scale serves a whole token."""
    group = stream.group
    first = row // page_tokens * width if stream.by_channel else row * (width // group)
    many = width if stream.by_channel else n * (width // group)
    _factors(stream.scale, stream.zero, first, many, np.float32(0.5) * np.float32(stream.twice_offset), steps, shifts)
    _unpack(stream.data, stream.row_bytes, row, n, stream.bits, width, tile, stride)
    if stream.by_channel:
        _scale_channels(tile, n, width, stride, steps, shifts)
    elif group != width:
        _scale_groups(tile, n, width, stride, steps, shifts, group)


@njit(**LEAF)
def _load_fp8(kind, bytes_, row, n, exponent, scale, table, width, tile, stride, steps, shifts):
    """Values before scaling; `table` says what each byte means."""
    whole = width // LANES * LANES if HAS_HALVES else 0
    for t in range(n):
        step = scale
        if exponent.shape[0]:
            step = as_float(np.uint32(np.int32(exponent[row + t]) + np.int32(127)) << np.uint32(23))
        steps[t], shifts[t] = step, np.float32(0.0)
        src, dst = (row + t) * width, t * stride
        prefetch(bytes_, src + AHEAD)
        if kind == E4M3:
            for d in range(0, whole, LANES):
                store(tile, dst + d, e4m3(bytes_, src + d))
        else:
            for d in range(0, whole, LANES):
                store(tile, dst + d, e5m2(bytes_, src + d))
        for d in range(whole, width):
            tile[dst + d] = table[bytes_[src + d]]


@njit(**LEAF)
def load_raw(kind, data, first, n, width, tile, stride):
    """Uncompressed tokens from number `first` of `data`, flat bytes, on."""
    if kind == F32_RAW:
        words32 = data.view(np.float32)
        for t in range(n):
            src, dst = (first + t) * width, t * stride
            for d in range(width):
                tile[dst + d] = words32[src + d]
        return
    words16 = data.view(np.uint16)
    for t in range(n):
        src, dst = (first + t) * width, t * stride
        if kind == F16_RAW:
            _widen(words16, src, width, tile, dst)
        else:
            for d in range(width):
                tile[dst + d] = as_float(np.uint32(words16[src + d]) << np.uint32(16))


@njit(**LEAF)
def store_raw(kind, tile, data, first, width):
    """One token of `tile`, its first row, into place number `first` of `data`; too narrow a format saturates."""
    at = first * width
    if kind == F32_RAW:
        words = data.view(np.float32)
        for d in range(width):
            words[at + d] = tile[d]
        return
    narrow = data.view(np.uint16)
    most = np.float32(65504.0) if kind == F16_RAW else np.float32(3.3895314e38)
    for d in range(width):
        x = tile[d]
        x = most if x > most else (-most if x < -most else x)
        narrow[at + d] = half_bits(x) if kind == F16_RAW else bf16_bits(x)


@njit(forceinline=True, **LEAF)
def by_token(stream, width):
    """Whether a token has one step and shift, which `load_stored` then leaves for logits and probabilities."""
    return (
        stream.kind == E4M3
        or stream.kind == E5M2
        or (stream.kind == AFFINE and not stream.by_channel and stream.group == width)
    )


# Inlined: a stream is a dozen arrays, too many to hand over for every span.
@njit(forceinline=True, **LEAF)
def load_stored(stream, head, row, n, page_tokens, width, tile, stride, steps, shifts):
    """Values of the tokens in rows `row`, `row` + 1, ... into `tile`; see `by_token`."""
    if stream.kind == AFFINE:
        _load_affine(stream, row, n, page_tokens, width, tile, stride, steps, shifts)
    elif stream.kind == E4M3 or stream.kind == E5M2:
        scale = np.float32(1.0) if stream.exponent.shape[0] else stream.head_scale[head]
        more = stream.exponent, scale, stream.table
        _load_fp8(stream.kind, stream.data, row, n, *more, width, tile, stride, steps, shifts)
    else:
        load_raw(stream.kind, stream.data, row, n, width, tile, stride)


@njit(forceinline=True, **LEAF)
def in_registers(stream, width):
    """Whether products can be had from codes as they lie, without a tile: 4 bits, and a step and shift for a token."""
    return by_token(stream, width) and stream.bits == 4 and stream.row_bytes % BLOCK_BYTES == 0


@njit(forceinline=True, **LEAF)
def factors(stream, row, n, steps, shifts):
    """Steps and shifts of n tokens from `row` on, of a stream with one for a token."""
    _factors(stream.scale, stream.zero, row, n, np.float32(0.5) * np.float32(stream.twice_offset), steps, shifts)


@njit(**LEAF)
def dots_nibbles(q, queries, data, step, row, n, stride, logits, columns, column):
    """As `dots`, of n tokens from `row` on, a multiple of BLOCK; `step` bytes of 4-bit codes for each."""
    for t in range(0, n, BLOCK):
        first = (row + t) * step
        for part in range(0, step, BLOCK_BYTES):
            found = nibbles(data, first + part, step)
            prefetch(data, first + 2 * part + AHEAD)
            prefetch(data, first + 2 * part + AHEAD + _LINE)
            for g in range(queries):
                block_dots(found, q, g * stride + part, step, logits, g * columns + column + t, part > 0)


@njit(**LEAF)
def mix_nibbles(weights, queries, data, step, row, n, stride, out, columns):
    """As `mix`, of n tokens from `row` on, a multiple of BLOCK; `step` bytes of 4-bit codes for each."""
    for t in range(0, n, BLOCK):
        first = (row + t) * step
        for part in range(0, step, BLOCK_BYTES):
            found = nibbles(data, first + part, step)
            prefetch(data, first + 2 * part + AHEAD)
            prefetch(data, first + 2 * part + AHEAD + _LINE)
            for g in range(queries):
                block_mix(found, weights, g * columns + t, out, g * stride + part, step)


@njit(**LEAF)
def dots(q, queries, tile, n, stride, logits, columns, column):
    """logits[g * columns + column + t] = q[g] . tile[t], four tokens at a time: up to three more are written."""
    for t in range(0, n, 4):
        row = t * stride
        for g in range(queries):
            a = b = c = d = splat(np.float32(0.0))
            for i in range(0, stride, LANES):
                x = load(q, g * stride + i)
                a = fma(x, load(tile, row + i), a)
                b = fma(x, load(tile, row + stride + i), b)
                c = fma(x, load(tile, row + 2 * stride + i), c)
                d = fma(x, load(tile, row + 3 * stride + i), d)
            store_sums(logits, g * columns + column + t, a, b, c, d)


@njit(**LEAF)
def mix(probs, columns, column, queries, tile, n, stride, out):
    """out[g] += sum over t of probs[g * columns + column + t] * tile[t], eight tokens at a time."""
    whole = n // 8 * 8
    for t in range(0, whole, 8):
        row = t * stride
        for g in range(queries):
            p, into = g * columns + column + t, g * stride
            p0, p1, p2, p3 = splat(probs[p]), splat(probs[p + 1]), splat(probs[p + 2]), splat(probs[p + 3])
            p4, p5, p6, p7 = splat(probs[p + 4]), splat(probs[p + 5]), splat(probs[p + 6]), splat(probs[p + 7])
            for i in range(row, row + stride, LANES):
                x = fma(p0, load(tile, i), load(out, into))
                x = fma(p1, load(tile, i + stride), x)
                x = fma(p2, load(tile, i + 2 * stride), x)
                x = fma(p3, load(tile, i + 3 * stride), x)
                x = fma(p4, load(tile, i + 4 * stride), x)
                x = fma(p5, load(tile, i + 5 * stride), x)
                x = fma(p6, load(tile, i + 6 * stride), x)
                store(out, into, fma(p7, load(tile, i + 7 * stride), x))
                into += LANES
    for t in range(whole, n):
        for g in range(queries):
            p = splat(probs[g * columns + column + t])
            for i in range(0, stride, LANES):
                store(out, g * stride + i, fma(p, load(tile, t * stride + i), load(out, g * stride + i)))
