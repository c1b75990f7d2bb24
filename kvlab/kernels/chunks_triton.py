"""Chunk summaries and scores straight from pages.

Bounds equal those of the torch path in float32 on the CPU bit for bit: keys are read back with the same operations in
the same order. Means and scores differ by the order of a sum. Selection is in `select_triton`.
"""

# The compiler takes any tensor or number where these annotations say constexpr, and has two returns for one name.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels import select_triton
from kvlab.kernels.aot import AotVariant, variant_of
from kvlab.kernels.formats import RAW, Format
from kvlab.kernels.hadamard import block_of
from kvlab.kernels.rotate_triton import given_exponents, rotate, warps_of

_KINDS = {"raw": 0, "fp8": 1, "affine": 2}
_TILE = 4096


@triton.jit
def _plane(codes, row, channel, mask, WIDTH: tl.constexpr, START: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """The bits that one plane of `pack` holds of each code."""
    size: tl.constexpr = D * BITS // 8
    byte = tl.load(codes + row * WIDTH + START + channel % size, mask=mask, other=0).to(tl.int32)
    return (byte >> (channel // size * BITS)) & (2**BITS - 1)


@triton.jit
def _stored(
    body, scale, zero, row, page, channel, mask, head,
    KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr,
    OFFSET: tl.constexpr, ZERO: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    """What rows of a stream stand for, float32 [ROWS, channels], still rotated. See `formats.stored_values`."""
    if KIND == 0:
        return tl.load(body + row * D + channel, mask=mask, other=0.0).to(tl.float32)
    elif KIND == 1:
        byte = tl.load(body + row * D + channel, mask=mask, other=0).to(tl.int32)
        # As half-precision bits: e5m2 is their upper byte; e4m3 (BITS of exponent: 4) lacks one, 2**8 in value.
        if BITS == 4:
            value = ((byte & 0x7F) << 7 | (byte & 0x80) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value * 256.0)
        else:
            value = (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        power = tl.load(scale + row, mask=mask, other=0).to(tl.int32) if DYNAMIC else tl.load(scale + head)
        return value * ((power + 127) << 23).to(tl.float32, bitcast=True)
    else:
        width: tl.constexpr = D * BITS // 8
        if BITS == 3:
            low = _plane(body, row, channel, mask, width, 0, D, 2)
            code = low | _plane(body, row, channel, mask, width, D // 4, D, 1) << 2
        else:
            code = _plane(body, row, channel, mask, width, 0, D, BITS)
        at = page * D + channel if CHANNEL else row * (D // GROUP) + channel // GROUP
        step = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
        value = (code.to(tl.float32) - OFFSET) * step
        if ZERO:
            value = value + tl.load(zero + at, mask=mask, other=0.0).to(tl.float32)
        return value


@triton.jit
def _outward(value, UP: tl.constexpr):
    """The next fp16 number that is not below (UP) or not above; see `chunks.bounds`."""
    half = value.to(tl.float16)
    back = half.to(tl.float32)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    if UP:
        moved = tl.where(back == 0, 1, tl.where(back > 0, bits + 1, bits - 1))
        inside = back < value
    else:
        moved = tl.where(back == 0, -0x7FFF, tl.where(back < 0, bits + 1, bits - 1))
        inside = back > value
    return tl.where(inside, moved.to(tl.int16).to(tl.float16, bitcast=True), half)


@triton.jit
def _summary_kernel(
    body, scale, zero, added, low, high, index, start, counts, ab, an, at, ad, N, M, per_head,
    P: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, MEAN: tl.constexpr,
    ADDED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr,
    KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr,
    OFFSET: tl.constexpr, ZERO: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: low and high of its keys, or with MEAN their average, into `low`."""
    pair = tl.program_id(1)
    begin, count = tl.load(start + pair).to(tl.int32), tl.load(counts + pair).to(tl.int32)
    first = begin // CHUNK * CHUNK + tl.program_id(0) * CHUNK
    if (first >= count) | (begin >= count):
        return
    page = tl.load(index + pair.to(tl.int64) * M + first // P).to(tl.int64)
    token, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    real = (token < CHUNK) & (first + token < count)
    mask = real & (channel < D)
    row = page * P + first % P + token
    value = _stored(
        body, scale, zero, row, page, channel, mask, pair % N * per_head,
        KIND, D, BITS, GROUP, CHANNEL, OFFSET, ZERO, DYNAMIC,
    )  # fmt: skip
    if STEPS > 0:
        blocks: tl.constexpr = WIDTH // BLOCK
        value = tl.reshape(value, (ROWS * blocks, BLOCK))
        value = tl.reshape(rotate(value, ROWS * blocks, BLOCK, STEPS, ROOT), (ROWS, WIDTH))
    if ADDED:
        b, n = (pair // N).to(tl.int64), (pair % N).to(tl.int64)
        at_token = (first - begin + token).to(tl.int64) * at + channel * ad
        value = value + tl.load(added + b * ab + n * an + at_token, mask=mask & (first + token >= begin), other=0.0).to(
            tl.float32
        )
    wide, out = tl.arange(0, WIDTH), (page * (P // CHUNK) + first % P // CHUNK) * D
    if MEAN:
        held = tl.minimum(count - first, CHUNK).to(tl.float32)
        mean = tl.div_rn(tl.sum(tl.where(real, value, 0.0), 0), tl.full((WIDTH,), 1.0, tl.float32) * held)
        mean = tl.where(mean > 65504.0, 65504.0, tl.where(mean < -65504.0, -65504.0, mean))
        tl.store(low + out + wide, mean.to(tl.float16), mask=wide < D)
    else:
        least = tl.min(tl.where(real, value, float("inf")), 0)
        most = tl.max(tl.where(real, value, float("-inf")), 0)
        tl.store(low + out + wide, _outward(least, False), mask=wide < D)
        tl.store(high + out + wide, _outward(most, True), mask=wide < D)


@triton.jit
def _score_kernel(
    q, low, high, index, counts, out, qb, qh, qq, Q, N, M, C, scale,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BOUND: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    ZERO: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """A tile of chunks of one head for one query token. For "codec" `low` is the scales and `high` the zeros."""
    pair, one = tl.program_id(0), tl.program_id(1)
    chunk = tl.program_id(2) * CHUNKS + tl.arange(0, CHUNKS)
    count = (tl.load(counts + pair).to(tl.int32) + CHUNK - 1) // CHUNK
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    b, n = (pair // N).to(tl.int64), (pair % N).to(tl.int64)
    at = b * qb + (n * G + head) * qh + one.to(tl.int64) * qq + channel
    query = tl.load(q + at, mask=(head < G) & (channel < D), other=0.0).to(tl.float32)
    if STEPS > 0:
        blocks: tl.constexpr = WIDTH // BLOCK
        query = tl.reshape(query, (HEADS * blocks, BLOCK))
        query = tl.reshape(rotate(query, HEADS * blocks, BLOCK, STEPS, ROOT), (HEADS, WIDTH))
    here = chunk < count
    page = tl.load(index + pair.to(tl.int64) * M + chunk // PER_PAGE, mask=here, other=0).to(tl.int64)
    at = (page * PER_PAGE + chunk % PER_PAGE)[:, None] * D + channel
    mask = here[:, None] & (channel < D)
    first = tl.load(low + at, mask=mask, other=0.0).to(tl.float32)
    if BOUND == "mean":
        score = tl.sum(first * tl.sum(query, 0)[None, :], 1)
    else:
        least, most = first, first
        if BOUND == "codec":
            least, most = first * LOWEST, first * HIGHEST
            if ZERO:
                base = tl.load(high + at, mask=mask, other=0.0).to(tl.float32)
                least, most = least + base, most + base
        else:
            most = tl.load(high + at, mask=mask, other=0.0).to(tl.float32)
        up, down = tl.sum(tl.maximum(query, 0.0), 0)[None, :], tl.sum(tl.minimum(query, 0.0), 0)[None, :]
        score = tl.sum(up * most + down * least, 1)
        score = tl.where(score == score, score, float("inf"))
    score = tl.where(here, score * scale, float("-inf"))
    tl.store(out + (pair.to(tl.int64) * Q + one) * C + chunk, score, mask=chunk < C)


def _rotation(fmt: Format, head_dim: int) -> dict[str, Any]:
    block = block_of(head_dim)
    steps = block.bit_length() - 1 if fmt.hadamard else 0
    return {"BLOCK": block, "STEPS": steps, "ROOT": math.sqrt(block)}


def _summary_constants(fmt: Format, head_dim: int, page: int, chunk: int, mean: bool) -> dict[str, Any]:
    affine, width = fmt.kind == "affine", triton.next_power_of_2(head_dim)
    bits = {"raw": 16, "fp8": 4 if fmt.fp8 == "e4m3" else 5, "affine": fmt.bits}[fmt.kind]
    return {
        "P": page, "CHUNK": chunk, "ROWS": triton.next_power_of_2(chunk), "WIDTH": width, "MEAN": mean,
        "KIND": _KINDS[fmt.kind], "D": head_dim, "BITS": bits, "GROUP": fmt.group or head_dim,
        "CHANNEL": fmt.axis == "channel", "OFFSET": fmt.groups.offset if affine else 0.0,
        "ZERO": "zero" in fmt.names, "DYNAMIC": fmt.kind == "fp8" and not fmt.exponents, **_rotation(fmt, head_dim),
    }  # fmt: skip


def _options(elements: int) -> dict[str, Any]:
    """Contracting a product and a sum would give another key than the one that is read back."""
    return {"num_warps": warps_of(elements), "num_stages": 1, "enable_fp_fusion": False}


def summarise_triton(
    streams: Mapping[str, Tensor],
    fmt: Format,
    index: Tensor,
    start: Tensor,
    counts: Tensor,
    tokens: int,
    chunk: int,
    added: Tensor | None,
    page: int,
    names: tuple[str, ...],
) -> None:
    """As `chunk_pages.summarise`; streams are contiguous."""
    loose = [name for name in (*fmt.names, *names) if not streams[name].is_contiguous()]
    if loose:
        raise ValueError(f"streams must be contiguous to be written in place, got views for {loose}")
    (B, N, M), body = index.shape, streams[fmt.names[0]]
    head_dim = streams[names[0]].shape[2]
    constants = _summary_constants(fmt, head_dim, page, chunk, names == ("mean",))
    scale, zero = body, body
    if fmt.kind == "affine":
        scale, zero = streams["scale"], streams.get("zero", body)
    elif fmt.kind == "fp8":
        scale = given_exponents(fmt.exponents, index.device) if fmt.exponents else streams["exponent"]
    extra = streams[names[0]] if added is None else added.expand(B, N, -1, -1)
    strides = (0, 0, 0, 0) if added is None else extra.stride()
    # A chunk more: the first token may stand anywhere in one.
    _summary_kernel[triton.cdiv(tokens, chunk) + 1, B * N](
        body, scale, zero, extra, streams[names[0]], streams[names[-1]], index.contiguous(), start.contiguous(),
        counts.contiguous(), *strides, N, M, int(len(fmt.exponents) > 1), ADDED=added is not None,
        **constants, **_options(2 * constants["ROWS"] * constants["WIDTH"]),
    )  # fmt: skip


def _score_constants(fmt: Format, head_dim: int, page: int, chunk: int, bound: str, group: int) -> dict[str, Any]:
    width = triton.next_power_of_2(head_dim)
    codec = bound == "codec"
    offset = fmt.groups.offset if codec else 0.0
    top = 2 * offset if fmt.mode == "symmetric" else 2.0**fmt.bits - 1
    still = _rotation(RAW, head_dim)
    return {
        "G": group, "HEADS": triton.next_power_of_2(group), "D": head_dim, "WIDTH": width,
        "PER_PAGE": page // chunk, "CHUNK": chunk, "CHUNKS": max(1, _TILE // width), "BOUND": bound,
        "LOWEST": -offset, "HIGHEST": top - offset, "ZERO": codec and "zero" in fmt.names,
        **(_rotation(fmt, head_dim) if codec else still),
    }  # fmt: skip


def scores_triton(
    q: Tensor,
    streams: Mapping[str, Tensor],
    fmt: Format,
    index: Tensor,
    counts: Tensor,
    chunk: int,
    bound: str,
    scale: float,
    page: int,
) -> Tensor:
    """As `chunk_pages.scores`."""
    (B, H, Q, D), (_, N, M) = q.shape, index.shape
    if H % N:
        raise ValueError(f"query heads must be a multiple of KV heads, got {H} query and {N} KV heads")
    constants = _score_constants(fmt, D, page, chunk, bound, H // N)
    names = {"mean": ("mean", "mean"), "minmax": ("min", "max"), "codec": ("scale", "zero")}[bound]
    low = streams[names[0]]
    high = streams.get(names[1], low)
    q = q if q.stride(3) == 1 else q.contiguous()
    n_chunks = M * constants["PER_PAGE"]
    out = torch.empty(B, N, Q, n_chunks, dtype=torch.float32, device=q.device)
    _score_kernel[B * N, Q, triton.cdiv(n_chunks, constants["CHUNKS"])](
        q, low, high, index.contiguous(), counts.contiguous(), out, *q.stride()[:3], Q, N, M, n_chunks, scale,
        **constants, **_options(constants["CHUNKS"] * constants["WIDTH"]),
    )  # fmt: skip
    return out


def aot_variants() -> list[AotVariant]:
    """Summaries of each kind of stream, scores by each bound, selections of 2048 and of 8192 chunks."""
    return [*_summary_variants(), *_score_variants(), *select_triton.aot_variants()]


def _summary_variants() -> list[AotVariant]:
    formats = {
        "raw D128": (RAW, 128, False),
        "int4 g32 D128": (Format("affine", 4, "token", 32, "asymmetric"), 128, False),
        "int4 mid rot D128": (Format("affine", 4, "token", 128, "midrise", hadamard=True), 128, False),
        "int3 channel rot D80": (Format("affine", 3, "channel", 32, "asymmetric", hadamard=True), 80, True),
        "e4m3 D128": (Format("fp8", 8, fp8="e4m3", exponents=(0,)), 128, False),
        "e5m2 dynamic D256": (Format("fp8", 8, fp8="e5m2"), 256, True),
    }
    variants = []
    for name, (fmt, head_dim, mean) in formats.items():
        body = "*fp16" if fmt.kind == "raw" else "*u8"
        given = "*i32" if fmt.exponents else "*i8"
        types = {"body": body, "scale": "*fp16" if fmt.kind != "fp8" else given, "zero": "*fp16", "added": "*fp32"}
        types |= {"low": "*fp16", "high": "*fp16", **dict.fromkeys(("index", "start", "counts"), "*i32")}
        types |= dict.fromkeys(("ab", "an", "at", "ad", "N", "M", "per_head"), "i32")
        constants = _summary_constants(fmt, head_dim, 32, 16 if fmt.axis == "token" else 32, mean)
        options = _options(2 * constants["ROWS"] * constants["WIDTH"])
        fixed = {"ADDED": fmt.hadamard, **constants}
        variants.append(variant_of(_summary_kernel, f"{name} {'mean' if mean else 'minmax'}", types, fixed, options))
    return variants


def _score_variants() -> list[AotVariant]:
    codec = Format("affine", 4, "channel", 32, "asymmetric", hadamard=True)
    cases = {
        "minmax D128 G4": (RAW, 128, "minmax", 4),
        "mean D64 G3": (RAW, 64, "mean", 3),
        "codec rot D128 G4": (codec, 128, "codec", 4),
        "codec rot D80 G7": (codec, 80, "codec", 7),
        "minmax D256 G8": (RAW, 256, "minmax", 8),
    }
    types = {"q": "*fp16", "low": "*fp16", "high": "*fp16", "index": "*i32", "counts": "*i32", "out": "*fp32"}
    types |= {**dict.fromkeys(("qb", "qh", "qq", "Q", "N", "M", "C"), "i32"), "scale": "fp32"}
    variants = []
    for name, (fmt, head_dim, bound, group) in cases.items():
        constants = _score_constants(fmt, head_dim, 32, 32, bound, group)
        options = _options(constants["CHUNKS"] * constants["WIDTH"])
        variants.append(variant_of(_score_kernel, name, types, constants, options, ("qb", "qh", "qq")))
    return variants
