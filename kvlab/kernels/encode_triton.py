"""Encode and append in one launch: tokens are read once, rotated and quantized in registers, and stored as bytes.

Codes, scales, zeros and exponents equal those of the float32 torch path on the CPU bit for bit: the same operations
in the same order, divisions rounded to nearest and no multiply-add contracted. Input of 16 bits is widened first, as
there. Tiles keep the split planes of `pack`, [rows, planes, bytes]: a byte collects its planes.
"""

# The compiler takes any tensor or number where these annotations say constexpr, and calls what looks uncallable.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels import rotate_triton
from kvlab.kernels.aot import AotVariant, variant_of
from kvlab.kernels.formats import FP8_DTYPES, RAW, Format
from kvlab.kernels.hadamard import block_of
from kvlab.kernels.rotate_triton import STRIDES, given_exponents, load_tokens, rotate, rotated, rows_of, warps_of

_MODES = {"asymmetric": 0, "symmetric": 1, "midrise": 2}
_PLANES = {8: 1, 4: 2, 3: 8, 2: 4}


@triton.jit
def _saturate(x, limit):
    """Comparisons and not minimum: NaN passes."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _rows(index, start, pair, M, token, alive, P: tl.constexpr):
    """Row of each token in streams seen as [pages * P, width]."""
    slot = tl.load(start + pair).to(tl.int32) + token
    page = tl.load(index + pair.to(tl.int64) * M + slot // P, mask=alive, other=0).to(tl.int64)
    return page * P + slot % P


@triton.jit
def _scale_zero(low, high, clip, BITS: tl.constexpr, MODE: tl.constexpr):
    """Scale and zero of a group as they are stored, in float32. `high` is infinite where the group holds NaN."""
    top: tl.constexpr = 2**BITS - 1
    if MODE == 0:
        middle, half = (low + high) / 2, (high - low) / 2 * clip
        zero = (middle - half).to(tl.float16).to(tl.float32)
        span = middle + half - zero
        scale = tl.div_rn(tl.where(span < 0, 0.0, span), tl.full(low.shape, top, tl.float32))
        scale = tl.where(scale > 65504.0, 65504.0, scale)
    else:
        steps: tl.constexpr = 2.0 ** (BITS - 1) - 1 if MODE == 1 else top / 2
        zero = tl.zeros(low.shape, tl.float32)
        scale = tl.div_rn(tl.maximum(high, -low) * clip, tl.full(low.shape, steps, tl.float32))
    scale = scale.to(tl.float16).to(tl.float32)
    return tl.where(high == float("inf"), float("nan"), scale), zero


@triton.jit
def _codes(value, scale, zero, BITS: tl.constexpr, MODE: tl.constexpr):
    """Codes as int32, clamped before they are rounded: the ends are integers, so the order makes no difference."""
    shifted = value - zero if MODE == 0 else value
    ratio = tl.where(scale > 0, tl.div_rn(shifted, tl.maximum(scale, 1.1754943508222875e-38)), 0.0)
    if MODE == 2:
        half: tl.constexpr = 2.0 ** (BITS - 1)
        return (tl.floor(tl.minimum(tl.maximum(ratio, -half), half - 1)) + half).to(tl.int32)
    offset: tl.constexpr = 2.0 ** (BITS - 1) - 1 if MODE == 1 else 0.0
    top: tl.constexpr = 2 * offset if MODE == 1 else 2.0**BITS - 1
    ratio = tl.minimum(tl.maximum(ratio, -offset), top - offset)
    # 1.5 * 2**23: floats there are integers apart, and additions round to nearest even.
    return ((ratio + 12582912.0) - 12582912.0 + offset).to(tl.int32)


@triton.jit
def _store_codes(
    codes, at, width, byte, alive, code,
    ROWS: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Collect [ROWS, PLANES, BYTES] codes in bytes and write them; `width` bytes are real. See `pack`."""
    inside = alive[:, None] & (byte < width)[None, :]
    plane = tl.arange(0, PLANES)[None, :, None]
    if BITS == 3:
        # Eight planes: two of them side by side make a quarter, whose low bits fill a byte four by four.
        low = tl.reshape(code & 3, (ROWS, 4, 2, BYTES)) << (tl.arange(0, 4) * 2)[None, :, None, None]
        target = at[:, None, None] + (tl.arange(0, 2) * width)[None, :, None] + byte[None, None, :]
        tl.store(codes + target, tl.sum(low, 1).to(tl.uint8), mask=inside[:, None, :])
        high = tl.sum((code >> 2) << plane, 1)
        tl.store(codes + at[:, None] + 2 * width + byte[None, :], high.to(tl.uint8), mask=inside)
    else:
        packed = tl.sum(code << (plane * BITS), 1)
        tl.store(codes + at[:, None] + byte[None, :], packed.to(tl.uint8), mask=inside)


@triton.jit
def _affine_kernel(
    x, minus, codes, scale, zero, index, start, lengths, xb, xn, xt, xd, mb, mn, mt, md, N, M, T, clip,
    P: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr,
    LAYOUT: tl.constexpr, PLANES: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr,
    MINUS: tl.constexpr, RAGGED: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head. LAYOUT says how groups lie in a tile, see `_layout`."""
    pair, first = tl.program_id(0), tl.program_id(1) * ROWS
    count = T
    if RAGGED:
        count = tl.load(lengths + pair).to(tl.int32)
    if first >= count:
        return
    width: tl.constexpr = D // PLANES
    token, byte = first + tl.arange(0, ROWS), tl.arange(0, BYTES)
    alive = token < count
    channel = tl.arange(0, PLANES)[:, None] * width + byte[None, :]
    inside = (byte < width)[None, None, :]
    value = load_tokens(
        x, minus, xb, xn, xt, xd, mb, mn, mt, md, pair, N, token[:, None, None], channel[None, :, :],
        alive[:, None, None] & inside, MINUS,
    )  # fmt: skip
    if STEPS > 0:
        value = tl.reshape(rotate(tl.reshape(value, (ROWS, D)), ROWS, D, STEPS, ROOT), (ROWS, PLANES, BYTES))
    value = _saturate(value, 65504.0)
    row = _rows(index, start, pair, M, token, alive, P)
    # A NaN must show in its group's scale, whatever a reduction makes of it.
    seen = tl.where(value == value, value, float("inf"))
    n_groups: tl.constexpr = D // GROUP
    if LAYOUT == "page":
        step, base = _scale_zero(tl.min(seen, 0), tl.max(seen, 0), clip, BITS, MODE)
        page = tl.load(index + pair.to(tl.int64) * M + (tl.load(start + pair).to(tl.int32) + first) // P).to(tl.int64)
        at, held = page * D + channel, (byte < width)[None, :] & (channel < D)
        tl.store(scale + at, step.to(tl.float16), mask=held)
        if MODE == 0:
            tl.store(zero + at, base.to(tl.float16), mask=held)
        step, base = step[None, :, :], base[None, :, :]
    elif LAYOUT == "even":
        seen = tl.reshape(seen, (ROWS, n_groups, GROUP))
        step, base = _scale_zero(tl.min(seen, 2), tl.max(seen, 2), clip, BITS, MODE)
        at, held = row[:, None] * n_groups + tl.arange(0, n_groups)[None, :], alive[:, None]
        tl.store(scale + at, step.to(tl.float16), mask=held)
        if MODE == 0:
            tl.store(zero + at, base.to(tl.float16), mask=held)
        step = tl.reshape(tl.broadcast_to(step[:, :, None], (ROWS, n_groups, GROUP)), (ROWS, PLANES, BYTES))
        base = tl.reshape(tl.broadcast_to(base[:, :, None], (ROWS, n_groups, GROUP)), (ROWS, PLANES, BYTES))
    else:
        step, base = tl.zeros((ROWS, PLANES, BYTES), tl.float32), tl.zeros((ROWS, PLANES, BYTES), tl.float32)
        for g in range(n_groups):
            member = (channel // GROUP == g)[None, :, :] & inside
            low = tl.min(tl.min(tl.where(member, seen, float("inf")), 2), 1)
            high = tl.max(tl.max(tl.where(member, seen, float("-inf")), 2), 1)
            one_step, one_base = _scale_zero(low, high, clip, BITS, MODE)
            tl.store(scale + row * n_groups + g, one_step.to(tl.float16), mask=alive)
            if MODE == 0:
                tl.store(zero + row * n_groups + g, one_base.to(tl.float16), mask=alive)
            step = tl.where(member, one_step[:, None, None], step)
            base = tl.where(member, one_base[:, None, None], base)
    code = _codes(value, step, base, BITS, MODE)
    _store_codes(codes, row * (D * BITS // 8), width, byte, alive, code, ROWS, BITS, PLANES, BYTES)


@triton.jit
def _fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr):
    """Bits of the nearest fp8 number, ties to even; saturates, keeps NaN. No target's own fp8 types are used."""
    bits = _saturate(x, LIMIT).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((magnitude >> shift) & 1) + (2 ** (shift - 1) - 1)) >> shift
    # Subnormals are multiples of 2**-step: where floats are that far apart, an addition rounds to them.
    step: tl.constexpr = BIAS - 1 + MANTISSA
    absolute = magnitude.to(tl.float32, bitcast=True)
    small = (absolute + 2.0 ** (23 - step)).to(tl.int32, bitcast=True) - ((127 + 23 - step) << 23)
    code = tl.where(absolute < 2.0 ** (1 - BIAS), small, normal - ((127 - BIAS) << MANTISSA))
    return tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def _fp8_kernel(
    x, minus, codes, exponent, index, start, lengths, xb, xn, xt, xd, mb, mn, mt, md, N, M, T, per_head,
    P: tl.constexpr, D: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
    DYNAMIC: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr,
    MINUS: tl.constexpr, RAGGED: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head. `exponent` is the stream to write, or the given ones, int32 [1] or [N]."""
    pair, first = tl.program_id(0), tl.program_id(1) * ROWS
    count = T
    if RAGGED:
        count = tl.load(lengths + pair).to(tl.int32)
    if first >= count:
        return
    token, byte = first + tl.arange(0, ROWS), tl.arange(0, BYTES)
    alive = token < count
    real = alive[:, None] & (byte < D)[None, :]
    value = load_tokens(
        x, minus, xb, xn, xt, xd, mb, mn, mt, md, pair, N, token[:, None], byte[None, :], real, MINUS
    )  # fmt: skip
    if STEPS > 0:
        value = rotate(value, ROWS, D, STEPS, ROOT)
    row = _rows(index, start, pair, M, token, alive, P)
    if DYNAMIC:
        peak = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # magnitudes are ordered like their bits
        largest = tl.minimum(peak, 0x7F7FFFFF).to(tl.float32, bitcast=True)
        ratio = tl.maximum(tl.div_rn(largest, tl.full((ROWS,), LIMIT, tl.float32)), 2.0**-120).to(
            tl.int32, bitcast=True
        )
        power = tl.minimum((ratio >> 23) - 127 + tl.where((ratio & 0x7FFFFF) != 0, 1, 0), 120)
        power = tl.where((peak == 0) | (peak > 0x7F800000), 0, power)
        tl.store(exponent + row, power.to(tl.int8), mask=alive)
        factor = ((127 - power) << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        power = tl.load(exponent + (pair % N) * per_head)
        factor = ((127 - power) << 23).to(tl.float32, bitcast=True)
    bits = _fp8_bits(value * factor, MANTISSA, BIAS, LIMIT)
    tl.store(codes + row[:, None] * D + byte[None, :], bits.to(tl.uint8), mask=real)


@triton.jit
def _raw_kernel(
    x, minus, data, index, start, lengths, xb, xn, xt, xd, mb, mn, mt, md, N, M, T,
    P: tl.constexpr, D: tl.constexpr, LIMIT: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr,
    MINUS: tl.constexpr, RAGGED: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head. LIMIT is the stream's largest number, or 0 where it holds all of x's."""
    pair, first = tl.program_id(0), tl.program_id(1) * ROWS
    count = T
    if RAGGED:
        count = tl.load(lengths + pair).to(tl.int32)
    if first >= count:
        return
    token, byte = first + tl.arange(0, ROWS), tl.arange(0, BYTES)
    alive = token < count
    real = alive[:, None] & (byte < D)[None, :]
    value = load_tokens(
        x, minus, xb, xn, xt, xd, mb, mn, mt, md, pair, N, token[:, None], byte[None, :], real, MINUS
    )  # fmt: skip
    if STEPS > 0:
        value = rotate(value, ROWS, D, STEPS, ROOT)
    if LIMIT > 0:
        value = _saturate(value, LIMIT)
    row = _rows(index, start, pair, M, token, alive, P)
    tl.store(data + row[:, None] * D + byte[None, :], value.to(data.dtype.element_ty), mask=real)


def _layout(fmt: Format, head_dim: int) -> str:
    """How groups lie in a tile: "page" along tokens; "even" where reshaping finds them; "any" one after the other."""
    if fmt.axis == "channel":
        return "page"
    return "even" if block_of(head_dim) == head_dim and block_of(fmt.group) == fmt.group else "any"


def _rotation(fmt: Format, head_dim: int) -> dict[str, Any]:
    """The rotation that is part of the launch: STEPS is 0 for none."""
    fused = fmt.hadamard and block_of(head_dim) == head_dim
    return {"STEPS": head_dim.bit_length() - 1 if fused else 0, "ROOT": math.sqrt(head_dim)}


def _affine_constants(fmt: Format, head_dim: int, page: int, tokens: int) -> dict[str, Any]:
    planes = _PLANES[fmt.bits]
    width = triton.next_power_of_2(head_dim // planes)
    layout = _layout(fmt, head_dim)
    rows = page if layout == "page" else rows_of(planes * width, tokens)
    return {
        "P": page, "D": head_dim, "BITS": fmt.bits, "GROUP": fmt.group, "MODE": _MODES[fmt.mode],
        "LAYOUT": layout, "PLANES": planes, "BYTES": width, "ROWS": rows,
    }  # fmt: skip


def _fp8_constants(fmt: Format, head_dim: int, page: int, tokens: int) -> dict[str, Any]:
    mantissa, bias = (3, 7) if fmt.fp8 == "e4m3" else (2, 15)
    width = triton.next_power_of_2(head_dim)
    return {
        "P": page, "D": head_dim, "MANTISSA": mantissa, "BIAS": bias,
        "LIMIT": torch.finfo(FP8_DTYPES[fmt.fp8]).max, "DYNAMIC": not fmt.exponents,
        "BYTES": width, "ROWS": rows_of(width, tokens),
    }  # fmt: skip


def _raw_constants(head_dim: int, page: int, tokens: int, given: torch.dtype, stored: torch.dtype) -> dict[str, Any]:
    limit, width = torch.finfo(stored).max, triton.next_power_of_2(head_dim)
    return {
        "P": page, "D": head_dim, "LIMIT": limit if limit < torch.finfo(given).max else 0.0,
        "BYTES": width, "ROWS": rows_of(width, tokens),
    }  # fmt: skip


def _options(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Contracting a product and a sum would round once where the definition rounds twice."""
    elements = constants["ROWS"] * constants["BYTES"] * constants.get("PLANES", 1)
    # Scales and zeros of all elements stay in registers where groups come one after the other.
    elements *= 2 if constants.get("LAYOUT") == "any" else 1
    return {"num_warps": warps_of(elements), "num_stages": 1, "enable_fp_fusion": False}


def append_triton(
    x: Tensor,
    streams: Mapping[str, Tensor],
    fmt: Format,
    index: Tensor,
    start: Tensor,
    lengths: Tensor | None,
    minus: Tensor | None,
) -> None:
    """As `encode.append`, for float32 or narrower x; streams are contiguous."""
    loose = [name for name in fmt.names if not streams[name].is_contiguous()]
    if loose:
        raise ValueError(f"streams must be contiguous to be written in place, got views for {loose}")
    (B, N, T, D), page = x.shape, streams[fmt.names[0]].shape[1]
    if min(x.shape) == 0:
        return
    minus = None if minus is None else minus.expand(x.shape)
    if fmt.hadamard and block_of(D) != D:
        x, minus = rotated(x, minus), None
    other, ragged = (x if minus is None else minus), lengths is not None
    table = [index.contiguous(), start.contiguous(), lengths.contiguous() if lengths is not None else start]
    sizes = [*x.stride(), *other.stride(), N, index.shape[-1], T]
    shared = {"MINUS": minus is not None, "RAGGED": ragged, **_rotation(fmt, D)}
    if fmt.kind == "affine":
        constants = _affine_constants(fmt, D, page, T)
        scale = streams["scale"]
        kernel, tail = _affine_kernel, [fmt.clip]
        written = [streams["codes"], scale, streams.get("zero", scale)]
    elif fmt.kind == "fp8":
        constants = _fp8_constants(fmt, D, page, T)
        given = given_exponents(fmt.exponents, x.device) if fmt.exponents else streams["exponent"]
        kernel, tail = _fp8_kernel, [int(len(fmt.exponents) > 1)]
        written = [streams["codes"], given]
    else:
        constants = _raw_constants(D, page, T, x.dtype, streams["data"].dtype)
        kernel, tail, written = _raw_kernel, [], [streams["data"]]
    grid = (B * N, triton.cdiv(T, constants["ROWS"]))
    kernel[grid](x, other, *written, *table, *sizes, *tail, **constants, **shared, **_options(constants))


def aot_variants() -> list[AotVariant]:
    """Formats a search tries, with 16-bit input, for pages of 16 to 64 tokens and heads of 64 to 256."""
    formats = {
        "int8 D128": (Format("affine", 8, "token", 128, "symmetric"), 128, 16, 512),
        "int4 g32 D128": (Format("affine", 4, "token", 32, "asymmetric"), 128, 16, 512),
        "int4 mid rot D128": (Format("affine", 4, "token", 128, "midrise", 0.88, hadamard=True), 128, 16, 512),
        "int4 mid rot D64 step": (Format("affine", 4, "token", 64, "midrise", 0.88, hadamard=True), 64, 16, 1),
        "int4 g16 D80": (Format("affine", 4, "token", 16, "asymmetric"), 80, 16, 512),
        "int4 mid rot D256": (Format("affine", 4, "token", 256, "midrise", 0.88, hadamard=True), 256, 32, 512),
        "int3 g32 D128": (Format("affine", 3, "token", 32, "asymmetric"), 128, 32, 512),
        "int2 g32 D128": (Format("affine", 2, "token", 32, "asymmetric"), 128, 32, 512),
        "int4 channel g16 D64": (Format("affine", 4, "channel", 16, "asymmetric"), 64, 16, 512),
        "int4 channel g64 D128": (Format("affine", 4, "channel", 64, "asymmetric"), 128, 64, 512),
        "int2 channel rot g32 D128": (
            Format("affine", 2, "channel", 32, "asymmetric", 0.6, hadamard=True),
            128,
            32,
            512,
        ),
        "int4 channel g64 D256": (Format("affine", 4, "channel", 64, "asymmetric"), 256, 64, 512),
        "e4m3 D128": (Format("fp8", 8, fp8="e4m3", exponents=(0,)), 128, 16, 512),
        "e5m2 dynamic D80": (Format("fp8", 8, fp8="e5m2"), 80, 16, 512),
        "e4m3 dynamic rot D128": (Format("fp8", 8, fp8="e4m3", hadamard=True), 128, 16, 512),
        "raw D128": (RAW, 128, 16, 512),
    }
    return [_variant(name, *about) for name, about in formats.items()] + rotate_triton.aot_variants()


def _variant(name: str, fmt: Format, head_dim: int, page: int, tokens: int) -> AotVariant:
    types = {"x": "*fp16", "minus": "*fp16", "index": "*i32", "start": "*i32", "lengths": "*i32"}
    types |= {"codes": "*u8", "scale": "*fp16", "zero": "*fp16", "data": "*fp16", "clip": "fp32", "per_head": "i32"}
    types |= {"exponent": "*i8" if fmt.kind == "fp8" and not fmt.exponents else "*i32"}
    types |= dict.fromkeys(("N", "M", "T", *STRIDES), "i32")
    if fmt.kind == "affine":
        kernel, constants = _affine_kernel, _affine_constants(fmt, head_dim, page, tokens)
    elif fmt.kind == "fp8":
        kernel, constants = _fp8_kernel, _fp8_constants(fmt, head_dim, page, tokens)
    else:
        kernel, constants = _raw_kernel, _raw_constants(head_dim, page, tokens, torch.float16, torch.float16)
    options = _options(constants)
    constants = {"xd": 1, "md": 1, "MINUS": False, "RAGGED": True, **constants, **_rotation(fmt, head_dim)}
    return variant_of(kernel, name, types, constants, options, aligned=STRIDES)
