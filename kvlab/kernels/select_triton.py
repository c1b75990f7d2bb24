"""Selection without a sort: the k-th largest score is built bit by bit from its top, 32 counts of a row that stays in
registers, whatever k is. Top-p finds its k the same way, with weights in place of counts; where p falls within rounding
of a sum it may take one chunk more or less than the sort does. Nothing is read back.
"""

# The compiler takes any tensor or number where these annotations say constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels.aot import AotVariant, variant_of
from kvlab.kernels.chunks import MOST_CHUNKS


@triton.jit
def _kth(key, weight, wanted):
    """The largest number that still has keys of `wanted` weight together at or above it. Keys are uint32."""
    found, bit = tl.full((), 0, tl.uint32), tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        trial = found | bit
        found = tl.where(tl.sum(tl.where(key >= trial, weight, 0), 0) >= wanted, trial, found)
        bit = bit >> 1
    return found


@triton.jit
def _select_kernel(
    scores, counts, out, C, share, p,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SIZE: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """One row of scores. RULE says what sets the budget: "k" (WIDTH), "share" in units of 2**-40, or "mass"."""
    pair, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    count = tl.minimum(tl.load(counts + pair).to(tl.int32), C)
    here = slot < count
    score = tl.load(scores + pair * C + slot, mask=here, other=0.0).to(tl.float32)
    score = tl.where(score == score, score, float("inf"))
    # + 0.0: negative zero is zero.
    score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    # Unsigned integers in the order of the floats; 0 for what is not there, the most for what is forced.
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    key = tl.where((slot < FIRST) | (slot >= count - LAST), 0xFFFFFFFF, key).to(tl.uint32)
    key = tl.where(here, key, 0).to(tl.uint32)
    budget = tl.full((), WIDTH, tl.int32)
    if RULE == "share":
        exact = count.to(tl.int64) * share - 1099512  # 1e-6: see `chunks.width_of`
        budget = ((exact + 1099511627775) >> 40).to(tl.int32)
        budget = tl.maximum(budget, tl.full((), FIRST + LAST if FIRST + LAST > 1 else 1, tl.int32))
    elif RULE == "mass":
        top = tl.max(tl.where(here, score, -3.4028234663852886e38), 0)
        weight = tl.where(here, tl.exp(tl.where(here, score - top, 0.0)), 0.0)
        wanted = tl.sum(weight, 0) * p
        edge = _kth(key, weight, wanted)
        missing = wanted - tl.sum(tl.where(key > edge, weight, 0.0), 0)
        equal = tl.max(tl.where(key == edge, weight, 0.0), 0)
        ties = tl.sum((key == edge).to(tl.int32), 0)
        more = tl.minimum(tl.ceil(missing / tl.maximum(equal, 1e-37)), 65536.0).to(tl.int32)
        budget = tl.sum((key > edge).to(tl.int32), 0) + tl.minimum(tl.maximum(more, 1), ties)
        budget = tl.maximum(budget, FIRST + LAST)
        budget = tl.where(p >= 1.0, count, budget)
    budget = tl.minimum(tl.minimum(budget, WIDTH), count)
    edge = _kth(key, tl.full((SIZE,), 1, tl.int32), budget)
    above, equal = (key > edge).to(tl.int32), (key == edge).to(tl.int32)
    left = budget - tl.sum(above, 0)
    kept = here & ((above > 0) | ((equal > 0) & (tl.cumsum(equal, 0) <= left)))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(out + pair * WIDTH + place, slot, mask=kept)
    behind = tl.arange(0, SIZE)
    tl.store(out + pair * WIDTH + behind, tl.full((SIZE,), -1, tl.int32), mask=(behind >= budget) & (behind < WIDTH))


def _select_constants(n_chunks: int, width: int, forced_first: int, forced_last: int, rule: str) -> dict[str, Any]:
    size = max(triton.next_power_of_2(n_chunks), triton.next_power_of_2(width))
    return {"WIDTH": width, "FIRST": forced_first, "LAST": forced_last, "SIZE": size, "RULE": rule}


def select_triton(
    scores: Tensor,
    counts: Tensor,
    width: int,
    forced_first: int,
    forced_last: int,
    fraction: float | None = None,
    p: float | None = None,
) -> Tensor:
    """As `chunks.select`, or with `p` as `chunks.select_mass`; no more than MOST_CHUNKS chunks."""
    out = torch.empty(*scores.shape[:-1], width, dtype=torch.int32, device=scores.device)
    if out.numel() == 0:
        return out
    rule = "mass" if p is not None else "k" if fraction is None else "share"
    constants = _select_constants(scores.shape[-1], width, forced_first, forced_last, rule)
    share = 0 if fraction is None else round(fraction * 2**40)
    _select_kernel[(out.numel() // width,)](
        scores.contiguous(), counts.expand(scores.shape[:-1]).contiguous(), out, scores.shape[-1], share,
        1.0 if p is None else p, **constants, **_select_options(constants["SIZE"]),
    )  # fmt: skip
    return out


def _select_options(size: int) -> dict[str, Any]:
    return {"num_warps": max(1, min(8, size // 512)), "num_stages": 1}


def aot_variants() -> list[AotVariant]:
    """Selections of 2048 and of 8192 chunks."""
    types = {"scores": "*fp32", "counts": "*i32", "out": "*i32", "C": "i32", "share": "i64", "p": "fp32"}
    variants = []
    for n_chunks, rule in ((2048, "share"), (2048, "mass"), (MOST_CHUNKS, "k"), (MOST_CHUNKS, "mass")):
        constants = _select_constants(n_chunks, n_chunks // 8, 1, 2, rule)
        variants.append(variant_of(_select_kernel, f"{n_chunks} {rule}", types, constants, _select_options(n_chunks)))
    return variants
