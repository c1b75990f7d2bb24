"""Encode and append compiled for CPUs: integer codes with groups along a token, the bits of the torch path, but for the
sign of a zero.

No flag here lets the compiler reorder or contract: a code that lies between two steps would fall to the other side.
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor

from kvlab.kernels.formats import Format
from kvlab.kernels.shared_numba import EXACT, half, half_bits, kept_exact

ASYMMETRIC, SYMMETRIC, MIDRISE = range(3)
_MODES = {"asymmetric": ASYMMETRIC, "symmetric": SYMMETRIC, "midrise": MIDRISE}
_MOST = np.float32(65504.0)  # the greatest fp16


def append_numba(
    x: Float[Tensor, "B N T D"],
    streams: Mapping[str, Tensor],
    fmt: Format,
    index: Int[Tensor, "B N M"],
    start: Int[Tensor, "B N"],
    lengths: Int[Tensor, "B N"] | None,
) -> None:
    """As `encode.append`, for formats that `encode.compiles`, in float32."""
    page = streams["codes"].shape[1]
    flat = {name: streams[name].view(-1, streams[name].shape[2]) for name in fmt.names}
    scale = flat["scale"].view(torch.uint16).numpy()
    counts = torch.full_like(start, x.shape[2]) if lengths is None else lengths
    limit = 2 * fmt.groups.offset if fmt.mode == "symmetric" else 2**fmt.bits - 1
    append(
        x.float().contiguous().flatten(0, 1).numpy(),
        flat["codes"].numpy(),
        scale,
        flat["zero"].view(torch.uint16).numpy() if "zero" in flat else scale[:0],
        index.flatten(0, 1).long().numpy(),
        start.flatten().long().numpy(),
        counts.flatten().long().numpy(),
        page,
        fmt.bits,
        fmt.group,
        _MODES[fmt.mode],
        fmt.clip,
        fmt.groups.offset,
        limit,
    )


@njit(**EXACT)
def _range(x):
    """Least and greatest of one group, saturated to fp16; NaN if any is."""
    low = high = min(max(x[0], -_MOST), _MOST)
    unknown = False
    for d in range(x.shape[0]):
        value = min(max(x[d], -_MOST), _MOST)
        unknown |= x[d] != x[d]
        low, high = min(low, value), max(high, value)
    nan = np.float32(np.nan)
    return (nan, nan) if unknown else (low, high)


@njit(**EXACT)
def _rule(low, high, mode, clip, bits, offset):
    """fp16 bits of the scale and zero of a group, as `affine.quantize` has them."""
    top = np.float32(2**bits - 1)
    if mode == ASYMMETRIC:
        middle, reach = (low + high) / np.float32(2), (high - low) / np.float32(2) * clip
        zero = half_bits(middle - reach)
        span = middle + reach - half(zero)
        # A NaN stays one.
        span = np.float32(0) if span < 0 else span
        step = span / top
        return half_bits(_MOST if step > _MOST else step), zero
    steps = offset if mode == SYMMETRIC else top / np.float32(2)
    return half_bits(max(abs(low), abs(high)) * clip / steps), np.uint16(0)


@njit(**EXACT)
def _quantize(x, codes, step, zero, mode, offset, limit):
    """Codes of one group against its stored scale and zero."""
    for d in range(x.shape[0]):
        shifted = min(max(x[d], -_MOST), _MOST) - zero
        ratio = shifted / step if step > 0 else np.float32(0)
        code = np.floor(ratio) + offset + np.float32(0.5) if mode == MIDRISE else np.rint(ratio) + offset
        codes[d] = np.uint8(min(max(code, np.float32(0)), limit))


@njit(**EXACT)
def _pack(codes, bits, out):
    """One token's codes into bytes, planes as `pack` lays them out."""
    width = codes.shape[0]
    if bits == 8:
        out[:] = codes
    elif bits == 4:
        part = width // 2
        for j in range(part):
            out[j] = codes[j] | codes[j + part] << np.uint8(4)
    else:
        part = width // 4
        for j in range(part):
            byte = np.uint8(0)
            for i in range(4):
                byte |= (codes[i * part + j] & np.uint8(3)) << np.uint8(2 * i)
            out[j] = byte
    if bits == 3:
        part, top = width // 4, width // 8
        for j in range(top):
            byte = np.uint8(0)
            for i in range(8):
                byte |= (codes[i * top + j] >> np.uint8(2)) << np.uint8(i)
            out[part + j] = byte


@kept_exact
def append(x, codes, scale, zero, index, start, counts, page, bits, group, mode, clip, offset, limit):
    """The first `counts[n]` tokens of x [N, T, D] into rows of `codes`, `scale` and `zero` that `index` points to."""
    width = x.shape[2]
    clip, offset, limit = np.float32(clip), np.float32(offset), np.float32(limit)
    unpacked = np.empty(width, np.uint8)
    for n in range(x.shape[0]):
        for t in range(counts[n]):
            slot = start[n] + t
            row = index[n, slot // page] * page + slot % page
            for g in range(width // group):
                part = x[n, t, g * group : (g + 1) * group]
                low, high = _range(part)
                step, shift = _rule(low, high, mode, clip, bits, offset)
                scale[row, g] = step
                if mode == ASYMMETRIC:
                    zero[row, g] = shift
                into = unpacked[g * group : (g + 1) * group]
                _quantize(part, into, half(step), half(shift), mode, offset, limit)
            _pack(unpacked, bits, codes[row])
