"""What CPU kernels compiled by numba share: how they are compiled, where they are kept, fp16 bits as float32.

numba notices a change of the file a kernel is in, not of those it takes from: after a change here, or of tiles and
lanes, delete the kept results (`*.nbi` in `__pycache__`).
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic

# Sums may be reordered; NaN and infinity keep their meaning.
FAST: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "nogil": True,
    "error_model": "numpy",
}
# Where every bit is defined: nothing may be reordered or contracted.
EXACT: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
# For functions that make no array: counting references of slices took a fifth of a step.
LEAF: dict[str, Any] = {**FAST, "_nrt": False}
EXACT_LEAF: dict[str, Any] = {**EXACT, "_nrt": False}


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at its first call and kept on disk, where numba finds a place that can be written."""
    return _kept(function, FAST)


def kept_exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `kept`, with the flags of EXACT."""
    return _kept(function, EXACT)


def _kept(function: Callable[..., Any], flags: dict[str, Any]) -> Callable[..., Any]:
    try:
        return njit(cache=True, **flags)(function)
    except RuntimeError as error:
        logging.getLogger(__name__).warning("compiled anew in every process: %s", error)
        return njit(**flags)(function)


@njit(inline="always")
def as_float(bits):
    """uint32 bits as the float32 they are."""
    return np.uint32(bits).view(np.float32)


@njit(inline="always")
def bf16_bits(x):
    """The bfloat16 nearest to a finite float32 or NaN, ties to even, as its bits."""
    bits = np.float32(x).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16((bits | np.uint32(0x400000) if x != x else rounded) >> np.uint32(16))


@njit(inline="always")
def _half_by_bits(h):
    """Exact; the subnormals by a subtraction, since multiplying them would trap to microcode."""
    x = np.uint32(h)
    magnitude = np.uint32(np.uint32(x & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(magnitude & np.uint32(0x0F800000))
    value = (
        as_float(magnitude + np.uint32(112 << 23))
        if exponent
        else as_float(magnitude + np.uint32(113 << 23)) - np.float32(2.0**-14)
    )
    value = as_float(magnitude | np.uint32(0x7F800000)) if exponent == np.uint32(0x0F800000) else value
    return -value if x & np.uint32(0x8000) else value


@intrinsic
def _half_by_cpu(typingctx, h):
    """The CPU's own conversion."""

    def generate(context, builder, signature, args):
        bits = builder.trunc(args[0], ir.IntType(16)) if args[0].type.width > 16 else args[0]
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())

    return types.float32(h), generate


@njit(inline="always")
def _half_bits_by_hand(x):
    """Rounding by adding: to a subnormal a half, whose last bit is that of the result; else just under half a step."""
    bits = np.float32(x).view(np.uint32)
    sign, magnitude = bits >> np.uint32(16) & np.uint32(0x8000), bits & np.uint32(0x7FFFFFFF)
    small = np.uint32(np.float32(as_float(magnitude) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
    odd = magnitude >> np.uint32(13) & np.uint32(1)
    result = np.uint32(magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    result = small if magnitude < np.uint32(0x38800000) else result
    result = np.uint32(0x7C00) if magnitude >= np.uint32(0x477FF000) else result
    return np.uint16(sign | (np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else result))


@intrinsic
def _half_bits_by_cpu(typingctx, x):
    def generate(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


# Without such an instruction LLVM would call a function that need not be there.
HAS_HALVES = bool(get_host_cpu_features().get("f16c"))
half: Any = _half_by_cpu if HAS_HALVES else _half_by_bits
# The fp16 nearest to a float32, ties to even, as its bits.
half_bits: Any = _half_bits_by_cpu if HAS_HALVES else _half_bits_by_hand
