"""Compaction as row copies. In place, one program takes a head's rows from front to back: kept slots ascend, so what
it overwrites has been read. To other pages, all rows move at once.
"""

# The compiler takes any tensor or number where these annotations say constexpr.
# pyright: reportArgumentType=false

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels.aot import AotVariant, variant_of

# A row of a stream is moved as the widest of these that divides it.
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
# In place: words per program. Programs share a head's rows by columns, and 32 bytes is what memory hands out.
_COLUMNS = 8
_TILE = 4096


@triton.jit
def _compact_kernel(
    stream, index, target, kept, lengths, M, L, K,
    P: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Columns of one head: all rows in turn, or one tile of them."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = 0, tl.load(lengths + pair).to(tl.int32)
    if not IN_PLACE:
        first = tl.program_id(2) * ROWS
        last = tl.minimum(last, first + ROWS)
    at = first
    while at < last:
        slot = at + tl.arange(0, ROWS)
        moves = slot < last
        source = tl.load(kept + pair * K + slot, mask=moves, other=0).to(tl.int32)
        if IN_PLACE:
            moves = moves & (source != slot)
        old = tl.load(index + pair * M + source // P, mask=moves, other=0).to(tl.int64) * P + source % P
        new = tl.load(target + pair * L + slot // P, mask=moves, other=0).to(tl.int64) * P + slot % P
        mask = moves[:, None] & (column < WIDTH)[None, :]
        rows = tl.load(stream + old[:, None] * WIDTH + column[None, :], mask=mask)
        if IN_PLACE:
            # A row of this tile may be another's destination: every warp has read before any writes.
            tl.debug_barrier()
        tl.store(stream + new[:, None] * WIDTH + column[None, :], rows, mask=mask)
        at += ROWS


def _constants(width: int, page: int, tokens: int, in_place: bool) -> dict[str, Any]:
    """Of a stream with rows of `width` words."""
    widest = triton.next_power_of_2(width)
    columns = min(_COLUMNS, widest) if in_place else min(128, widest)
    rows = min(_TILE // 2 // columns if in_place else min(512, _TILE // columns), triton.next_power_of_2(tokens))
    return {"P": page, "WIDTH": width, "COLUMNS": columns, "ROWS": rows, "IN_PLACE": in_place}


def _options(constants: Mapping[str, Any]) -> dict[str, int]:
    return {"num_warps": max(1, min(4, constants["ROWS"] * constants["COLUMNS"] // 512)), "num_stages": 1}


def compact_triton(
    streams: Mapping[str, Tensor], index: Tensor, kept: Tensor, lengths: Tensor, target: Tensor | None, page: int
) -> None:
    """As `compact.compact`; streams are contiguous."""
    loose = [name for name, s in streams.items() if not s.is_contiguous()]
    if loose:
        raise ValueError(f"streams must be contiguous to be written in place, got views for {loose}")
    index, kept, lengths = index.contiguous(), kept.contiguous(), lengths.contiguous()
    place = index if target is None else target.contiguous()
    pairs, tokens = lengths.numel(), kept.shape[-1]
    for stream in streams.values():
        row_bytes = stream.shape[2] * stream.element_size()
        word = next(size for size in _WORDS if row_bytes % size == 0)
        constants = _constants(row_bytes // word, page, tokens, target is None)
        tiles = 1 if target is None else triton.cdiv(tokens, constants["ROWS"])
        grid = (pairs, triton.cdiv(constants["WIDTH"], constants["COLUMNS"]), tiles)
        _compact_kernel[grid](
            stream.view(_WORDS[word]), index, place, kept, lengths, index.shape[-1], place.shape[-1], tokens,
            **constants, **_options(constants),
        )  # fmt: skip


def aot_variants() -> list[AotVariant]:
    """Rows of int4 codes, fp16 scales and raw keys of heads of 128, and a mass of one float."""
    rows = {"int4 D128": (16, "*i32"), "int4 D80": (10, "*i32"), "scale": (1, "*i16"), "raw D128": (64, "*i32")}
    rows["mass"] = (1, "*i32")
    variants = []
    for name, (width, kind) in rows.items():
        for in_place in (True, False):
            types = {"stream": kind, **dict.fromkeys(("index", "target", "kept", "lengths"), "*i32")}
            types |= dict.fromkeys(("M", "L", "K"), "i32")
            constants = _constants(width, 16, 4096, in_place)
            variant = f"{name} {'in place' if in_place else 'to others'}"
            variants.append(variant_of(_compact_kernel, variant, types, constants, _options(constants)))
    return variants
