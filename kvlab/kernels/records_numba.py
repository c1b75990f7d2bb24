"""What `rowwise_arrays` writes down as integers, read back in compiled code as arrays over the same memory."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

from kvlab.kernels.rowwise_arrays import Bytes, Pages
from kvlab.kernels.shared_numba import FAST

# A checker of types sees the first argument, which no caller gives.
intrinsic: Any = _intrinsic


@intrinsic
def _pointer(typingctx, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


@njit(forceinline=True, **FAST)
def array_at(address, shape, dtype) -> Any:
    """The array that begins at an address, contiguous; whoever gave the address keeps the memory."""
    return carray(_pointer(address), shape, dtype)


class Raw(NamedTuple):
    """Raw tokens: `data` uint8, flat, of `kind`: `room` tokens for each head, of which the first `count` are real."""

    data: np.ndarray
    kind: int
    room: int
    count: int


@njit(forceinline=True, **FAST)
def raw_parts(call, at, heads, width):
    """Sinks, window and new token, whose fields are four numbers each, those of K and of V in turn."""
    bytes_ = 4 * heads * width  # of one token at most, which is as much as matters: nothing asks for an array's end
    return (
        Raw(array_at(call[at], call[at + 2] * bytes_, np.uint8), call[at + 1], call[at + 2], call[at + 3]),
        Raw(array_at(call[at + 8], call[at + 10] * bytes_, np.uint8), call[at + 9], call[at + 10], call[at + 11]),
        Raw(array_at(call[at + 16], call[at + 18] * bytes_, np.uint8), call[at + 17], call[at + 18], call[at + 19]),
    )


@njit(forceinline=True, **FAST)
def _stream(record, at):
    """`Bytes`, of the numbers from `at` on."""
    return Bytes(
        record[at], record[at + 1], record[at + 2], record[at + 3] != 0, record[at + 4], record[at + 5] != 0,
        record[at + 6],
        array_at(record[at + 7], record[at + 8], np.uint8),
        array_at(record[at + 9], record[at + 10], np.uint16),
        array_at(record[at + 11], record[at + 12], np.uint16),
        array_at(record[at + 13], record[at + 14], np.int8),
        array_at(record[at + 15], record[at + 16], np.float32),
        array_at(record[at + 17], record[at + 18], np.float32),
    )  # fmt: skip


@njit(forceinline=True, **FAST)
def pages_of(record):
    """`Pages`, of a `Record`'s numbers."""
    heads = record[41]
    return Pages(
        _stream(record, 0), _stream(record, 19),
        array_at(record[38], (heads, record[39] // heads), np.int64),
        array_at(record[40], heads, np.int64),
        record[42], record[43], array_at(record[44], record[45], np.int32), record[46],
    )  # fmt: skip
