"""The rotation of `hadamard` in registers, for kernels to call; and as a launch of its own, for head dims that are no
power of two. Also what such launches share: tokens of one head as float32, given exponents, the size of a tile.
"""

# The compiler takes any tensor or number where these annotations say constexpr, and calls what looks uncallable.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels.aot import AotVariant, variant_of
from kvlab.kernels.hadamard import block_of

# Strides of tokens x and of what is taken off: batch row, head, token. Whole tokens are multiples of 16 elements.
STRIDES = ("xb", "xn", "xt", "mb", "mn", "mt")
_TILE = 4096


@triton.jit
def rotate(x, ROWS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr):
    """Walsh-Hadamard along the last axis of [ROWS, D], D = 2**STEPS, in the butterfly order of the torch path."""
    for step in tl.static_range(STEPS):
        pairs = tl.reshape(x, (ROWS, D // 2 ** (step + 1), 2, 2**step))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(joined, (0, 1, 3, 2)), (ROWS, D))
    return tl.div_rn(x, tl.full((ROWS, D), ROOT, tl.float32))


@triton.jit
def load_tokens(x, minus, xb, xn, xt, xd, mb, mn, mt, md, pair, N, token, channel, real, MINUS: tl.constexpr):
    """float32 tokens of one head less what is to be taken off; zeros where not `real`."""
    b, n = (pair // N).to(tl.int64), (pair % N).to(tl.int64)
    token = token.to(tl.int64)
    value = tl.load(x + b * xb + n * xn + token * xt + channel * xd, mask=real, other=0.0).to(tl.float32)
    if MINUS:
        taken = tl.load(minus + b * mb + n * mn + token * mt + channel * md, mask=real, other=0.0)
        value = value - taken.to(tl.float32)
    return value


@triton.jit
def _rotate_kernel(
    x, minus, out, xb, xn, xt, xd, mb, mn, mt, md, N, T,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    MINUS: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """float32 [pairs, T, D] rotated in blocks, for head dims that are no power of two."""
    pair = tl.program_id(0)
    token, block = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCKS)
    channel = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = (token < T)[:, None, None] & (channel < D)[None, :, :]
    token, channel = token[:, None, None], channel[None, :, :]
    value = load_tokens(x, minus, xb, xn, xt, xd, mb, mn, mt, md, pair, N, token, channel, real, MINUS)
    value = rotate(tl.reshape(value, (ROWS * BLOCKS, BLOCK)), ROWS * BLOCKS, BLOCK, STEPS, ROOT)
    value = tl.reshape(value, (ROWS, BLOCKS, BLOCK))
    tl.store(out + (pair.to(tl.int64) * T + token) * D + channel, value, mask=real)


def rows_of(elements: int, tokens: int) -> int:
    """Tokens of a tile: no more than there are, and about 32 elements for each of 128 threads."""
    return max(1, min(_TILE // elements, triton.next_power_of_2(tokens)))


def warps_of(elements: int) -> int:
    return max(1, min(8, elements // 1024))


@functools.cache
def given_exponents(exponents: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied to the device once: a copy at each call would stall the host, and no graph could capture it."""
    return torch.tensor(exponents, dtype=torch.int32, device=device)


def _constants(head_dim: int, tokens: int) -> dict[str, Any]:
    block = block_of(head_dim)
    blocks = triton.next_power_of_2(head_dim // block)
    return {
        "D": head_dim, "BLOCK": block, "BLOCKS": blocks, "ROWS": rows_of(blocks * block, tokens),
        "STEPS": block.bit_length() - 1, "ROOT": math.sqrt(block),
    }  # fmt: skip


def _options(constants: dict[str, Any]) -> dict[str, Any]:
    elements = constants["ROWS"] * constants["BLOCKS"] * constants["BLOCK"]
    return {"num_warps": warps_of(elements), "num_stages": 1, "enable_fp_fusion": False}


def rotated(x: Tensor, minus: Tensor | None) -> Tensor:
    """float32 rotation of x - minus, [B, N, T, D]."""
    B, N, T, D = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    constants, other = _constants(D, T), x if minus is None else minus
    grid = (B * N, triton.cdiv(T, constants["ROWS"]))
    _rotate_kernel[grid](
        x, other, out, *x.stride(), *other.stride(), N, T,
        MINUS=minus is not None, **constants, **_options(constants),
    )  # fmt: skip
    return out


def aot_variants() -> list[AotVariant]:
    """Head dims of 80 and 96, 16-bit input."""
    types = {"x": "*fp16", "minus": "*fp16", "out": "*fp32", **dict.fromkeys(("N", "T", *STRIDES), "i32")}
    variants = []
    for head_dim in (80, 96):
        constants = _constants(head_dim, 512)
        fixed = {"xd": 1, "md": 1, "MINUS": False, **constants}
        variants.append(variant_of(_rotate_kernel, f"D{head_dim}", types, fixed, _options(constants), STRIDES))
    return variants
