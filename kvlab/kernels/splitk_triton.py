"""Triton kernels of decode attention over pages: split-K with online softmax, a merge by log-sum-exp, and the
attention mass of each key.

Scores are computed transposed, keys x query heads: a tensor-core tile then holds 8 query heads and not 16, which
halves the softmax of a small GQA group. Knows tensors and constants only: `paged_triton` turns formats into them.
"""

# Constants arrive as plain values; the checker takes them for `tl.constexpr`.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from kvlab.kernels.rotate_triton import rotate
from kvlab.kernels.tiles_triton import channels, locate, tile

LOG2E = tl.constexpr(1.4426950408889634)
# Probabilities are kept as multiples of 2**-8: fp16 then reaches 256 times further down before they vanish.
SHIFT = tl.constexpr(8.0)
# Numbers that grow while a model generates are not specialized: each 16th would compile another kernel.


@triton.jit
def rotate_rows(
    x, out, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr
):
    """out[i] = H x[i] in float32, one row of WIDTH to a program."""
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    values = tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    values = rotate(tl.reshape(values, (SIZE // BLOCK, BLOCK)), SIZE // BLOCK, BLOCK, STEPS, ROOT)
    tl.store(out + row * WIDTH + at, tl.reshape(values, (SIZE,)), mask=at < WIDTH)


@triton.jit
def _queries(q, channel, there, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr):
    """The G query heads of a KV head as [columns, GP], each with its largest entry in [1, 2), and what takes it back.

    A power of two costs no bit, and keeps fp16 in range.
    """
    head = tl.arange(0, GP)
    inside = there[:, None] & (head < G)[None, :]
    x = tl.load(q + head[None, :] * D + channel[:, None], mask=inside, other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) >> 23
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (x * shrink[None, :]).to(DTYPE), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _base2(s, valid, softcap):
    """Natural logits to base 2, soft-capped, -inf where there is no key."""
    if softcap is not None:
        # tanh by exp2; the quotient goes to 0 and 2 at the ends.
        s = softcap * (1 - 2 / (1 + tl.exp2(s * (2 * LOG2E / softcap))))
    return tl.where(valid[:, None], s * LOG2E, float("-inf"))


@triton.jit
def _step(s, v, m, total, acc):
    """One tile of online softmax. s [TILE, GP] base-2 logits, v [TILE, E]; m, total [GP]; acc [E, GP].

    Probabilities are relative to `m - SHIFT`. Without any key so far m stays -inf and all else zero.
    """
    best = tl.maximum(m, tl.max(s, 0))
    safe = tl.where(best == float("-inf"), 0.0, best)
    p = tl.exp2(s - (safe - SHIFT)[None, :])
    fade = tl.exp2(m - safe)
    total = total * fade + tl.sum(p, 0)
    acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * fade[None, :], input_precision="ieee")
    return p, best, total, acc


@triton.jit
def _keep(stash, tops, row, p, top, offsets, G: tl.constexpr, GP: tl.constexpr, TILE: tl.constexpr):
    """Write a tile's probabilities and what they are relative to, for `masses`."""
    head = tl.arange(0, GP)
    at = (row * TILE + offsets).to(tl.int64)[:, None] * G + head[None, :]
    tl.store(stash + at, p.to(tl.float16), mask=(offsets >= 0)[:, None] & (head < G)[None, :])
    tl.store(tops + row * G + head, tl.where(top == float("-inf"), 0.0, top) - SHIFT, mask=head < G)


@triton.jit
def _stored(
    q, index, count, selected, position, drift, trig, k, k_scale, k_zero, factor, v, v_scale, v_zero,
    acc_out, stash, tops, softcap, first, chunks_wide, begin, end,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_MODE: tl.constexpr, K_GROUP: tl.constexpr, K_CHANNEL: tl.constexpr,
    K_ROW: tl.constexpr, K_WIDTH: tl.constexpr, K_PLANES: tl.constexpr, K_UNIT: tl.constexpr, K_COLS: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_MODE: tl.constexpr, V_GROUP: tl.constexpr, V_CHANNEL: tl.constexpr,
    V_ROW: tl.constexpr, V_WIDTH: tl.constexpr, V_PLANES: tl.constexpr, V_UNIT: tl.constexpr, V_COLS: tl.constexpr,
    V_DTYPE: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, DRIFT_PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Tiles begin..end of one head's stored tokens. Pointers are this head's own; writes acc, returns m and total."""
    offsets, heads, wide = tl.arange(0, TILE), tl.arange(0, GP), tl.arange(0, DP)
    channel, there = channels(K_WIDTH, K_PLANES, D)
    query, back = _queries(q, channel, there, D, G, GP, K_DTYPE)
    factor = back * factor
    if drift is not None:
        own = (heads < G)[None, :] & (wide < D)[:, None]
        turn = tl.load(drift + heads[None, :] * D + wide[:, None], mask=own, other=0.0)
    m, total = tl.full((GP,), float("-inf"), tl.float32), tl.zeros((GP,), tl.float32)
    acc = tl.zeros((V_PLANES * V_WIDTH, GP), tl.float32)
    for i in range(begin, end):
        page, slot, valid = locate(index, selected, i * TILE + offsets, count, chunks_wide, PAGE, CHUNK)
        # Where a scale belongs to many tokens, it is found from their first.
        k_page, k_slot, k_valid = page, slot, valid
        if K_UNIT > 1:
            t = i * TILE + tl.arange(0, TILE // K_UNIT) * K_UNIT
            k_page, k_slot, k_valid = locate(index, selected, t, count, chunks_wide, PAGE, CHUNK)
        v_page, v_slot, v_valid = page, slot, valid
        if V_UNIT > 1:
            t = i * TILE + tl.arange(0, TILE // V_UNIT) * V_UNIT
            v_page, v_slot, v_valid = locate(index, selected, t, count, chunks_wide, PAGE, CHUNK)
        keys = tile(
            k, k_scale, k_zero, page, slot, valid, k_page, k_slot, k_valid,
            K_KIND, K_BITS, K_MODE, K_GROUP, K_CHANNEL, D, K_ROW, K_WIDTH, K_PLANES, K_UNIT, K_COLS, PAGE, TILE,
            K_DTYPE, PTX,
        )  # fmt: skip
        values = tile(
            v, v_scale, v_zero, page, slot, valid, v_page, v_slot, v_valid,
            V_KIND, V_BITS, V_MODE, V_GROUP, V_CHANNEL, E, V_ROW, V_WIDTH, V_PLANES, V_UNIT, V_COLS, PAGE, TILE,
            V_DTYPE, PTX,
        )  # fmt: skip
        s = tl.dot(keys, query, input_precision="ieee") * factor[None, :]
        if drift is not None:
            at = first + slot
            if position is not None:
                at = tl.load(position + page.to(tl.int64) * PAGE + slot % PAGE, mask=valid, other=0)
            inside = valid[:, None] & (wide < D)[None, :]
            turns = tl.load(trig + at.to(tl.int64)[:, None] * D + wide[None, :], mask=inside, other=0.0)
            s += tl.dot(turns, turn, input_precision=DRIFT_PRECISION)
        p, m, total, acc = _step(_base2(s, valid, softcap), values, m, total, acc)
        if stash is not None:
            _keep(stash, tops, i, p, m, offsets, G, GP, TILE)
    channel, there = channels(V_WIDTH, V_PLANES, E)
    tl.store(acc_out + heads[None, :] * E + channel[:, None], acc, mask=there[:, None] & (heads < G)[None, :])
    return m, total


@triton.jit
def _fresh(
    q, k, v, count, acc_out, stash, tops, scale, softcap, stride_k, stride_v,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The raw window of one head, as `_stored`. Its tiles are smaller: it is short, and must not cost the registers of
    those that read pages.
    """
    offsets, heads, wide, high = tl.arange(0, TILE), tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, EP)
    query, back = _queries(q, wide, wide < D, D, G, GP, k.dtype.element_ty)
    factor = back * scale
    m, total = tl.full((GP,), float("-inf"), tl.float32), tl.zeros((GP,), tl.float32)
    acc = tl.zeros((EP, GP), tl.float32)
    # No loads ahead: the pass is short, and its buffers would cost every program their shared memory.
    for i in tl.range(0, tl.cdiv(count, TILE), num_stages=1):
        slot = i * TILE + offsets
        valid = slot < count
        at = slot.to(tl.int64)[:, None]
        keys = tl.load(k + at * stride_k + wide[None, :], mask=valid[:, None] & (wide < D)[None, :], other=0.0)
        values = tl.load(v + at * stride_v + high[None, :], mask=valid[:, None] & (high < E)[None, :], other=0.0)
        s = tl.dot(keys, query, input_precision="ieee") * factor[None, :]
        p, m, total, acc = _step(_base2(s, valid, softcap), values, m, total, acc)
        if stash is not None:
            _keep(stash, tops, i, p, m, offsets, G, GP, TILE)
    tl.store(acc_out + heads[None, :] * E + high[:, None], acc, mask=(high < E)[:, None] & (heads < G)[None, :])
    return m, total


@triton.jit(do_not_specialize=["splits", "pages_wide", "chunks_wide", "first", "window"])
def split(
    q, q_pages, index, counts, selected, position, drift, trig,
    k, k_scale, k_zero, k_factor, v, v_scale, v_zero, raw_k, raw_v, raw_counts,
    acc_out, ml_out, stash, tops,
    scale, softcap, splits, pages_wide, chunks_wide, first, window,
    stride_kb, stride_kn, stride_kr, stride_vb, stride_vn, stride_vr,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_MODE: tl.constexpr, K_GROUP: tl.constexpr, K_CHANNEL: tl.constexpr,
    K_ROW: tl.constexpr, K_WIDTH: tl.constexpr, K_PLANES: tl.constexpr, K_UNIT: tl.constexpr, K_COLS: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_MODE: tl.constexpr, V_GROUP: tl.constexpr, V_CHANNEL: tl.constexpr,
    V_ROW: tl.constexpr, V_WIDTH: tl.constexpr, V_PLANES: tl.constexpr, V_UNIT: tl.constexpr, V_COLS: tl.constexpr,
    V_DTYPE: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, FRESH_TILE: tl.constexpr,
    DRIFT_PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (row * N + head, part): part `splits` reads the raw window, part s < splits the s-th share of the tiles
    of this head's own pages. Writes acc [E], m and total of each query head; a part without a key has m = -inf.
    """
    pair, part = tl.program_id(0), tl.program_id(1)
    row, head = pair // N, pair % N
    out_at = (pair * (splits + 1) + part).to(tl.int64) * G
    acc_out += out_at * E
    reach = pages_wide * PAGE
    if CHUNK > 0:
        reach = chunks_wide * CHUNK
        selected += pair * chunks_wide
    page_tiles = tl.cdiv(reach, TILE)
    if stash is not None:
        fresh_tiles = tl.cdiv(window, FRESH_TILE)
        stash += pair.to(tl.int64) * (page_tiles * TILE + fresh_tiles * FRESH_TILE) * G
        tops += pair * (page_tiles + fresh_tiles) * G
    if part < splits:
        count = tl.load(counts + pair)
        factor = scale
        if k_factor is not None:
            factor = scale * tl.load(k_factor + head)
        if drift is not None:
            drift += pair * G * D
        tiles = page_tiles
        if CHUNK == 0:
            tiles = tl.cdiv(count, TILE)
        m, total = _stored(
            q_pages + pair * G * D, index + pair * pages_wide, count, selected, position, drift, trig,
            k, k_scale, k_zero, factor, v, v_scale, v_zero, acc_out, stash, tops, softcap, first, chunks_wide,
            part * tiles // splits, (part + 1) * tiles // splits,
            K_KIND, K_BITS, K_MODE, K_GROUP, K_CHANNEL, K_ROW, K_WIDTH, K_PLANES, K_UNIT, K_COLS, K_DTYPE,
            V_KIND, V_BITS, V_MODE, V_GROUP, V_CHANNEL, V_ROW, V_WIDTH, V_PLANES, V_UNIT, V_COLS, V_DTYPE,
            G, GP, D, DP, E, PAGE, CHUNK, TILE, DRIFT_PRECISION, PTX,
        )  # fmt: skip
    else:
        if stash is not None:
            stash += page_tiles * TILE * G
            tops += page_tiles * G
        m, total = _fresh(
            q + pair * G * D,
            raw_k + row.to(tl.int64) * stride_kb + head.to(tl.int64) * stride_kn,
            raw_v + row.to(tl.int64) * stride_vb + head.to(tl.int64) * stride_vn,
            tl.load(raw_counts + row), acc_out, stash, tops, scale, softcap, stride_kr, stride_vr,
            G, GP, D, DP, E, EP, FRESH_TILE,
        )  # fmt: skip
    heads = tl.arange(0, GP)
    tl.store(ml_out + (out_at + heads) * 2, m, mask=heads < G)
    tl.store(ml_out + (out_at + heads) * 2 + 1, total, mask=heads < G)


@triton.jit(do_not_specialize=["splits"])
def merge(
    acc, ml, sinks, v_factor, out, lse, splits,
    N: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """Program (row * H + query head): all parts by their log-sum-exp. The pages' share is turned back where BLOCK > 0,
    and scaled where fp8 has a scale per head.
    """
    query = tl.program_id(0)
    pair, g = query // G, query % G
    acc += (pair * (splits + 1) * G + g).to(tl.int64) * E
    ml += (pair * (splits + 1) * G + g) * 2
    part = tl.arange(0, PARTS)
    m = tl.load(ml + part * 2 * G, mask=part <= splits, other=float("-inf"))
    total = tl.load(ml + part * 2 * G + 1, mask=part <= splits, other=0.0)
    best = tl.max(m, 0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + query % (N * G)).to(tl.float32) * LOG2E
        best = tl.maximum(best, sink + SHIFT)
    safe = tl.where(best == float("-inf"), 0.0, best)
    denominator = tl.sum(tl.exp2(m - safe) * total, 0) + tl.exp2(sink + SHIFT - safe)
    column = tl.arange(0, EP)
    pages = tl.zeros((EP,), tl.float32)
    for start in range(0, splits, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        weight = tl.exp2(tl.load(ml + some * 2 * G, mask=some < splits, other=float("-inf")) - safe)
        share = tl.load(
            acc + some.to(tl.int64)[:, None] * G * E + column[None, :],
            mask=(some < splits)[:, None] & (column < E)[None, :], other=0.0,
        )  # fmt: skip
        pages += tl.sum(share * weight[:, None], 0)
    if BLOCK > 0:
        pages = tl.reshape(rotate(tl.reshape(pages, (EP // BLOCK, BLOCK)), EP // BLOCK, BLOCK, STEPS, ROOT), (EP,))
    if v_factor is not None:
        pages *= tl.load(v_factor + pair % N)
    weight = tl.exp2(tl.load(ml + splits * 2 * G) - safe)
    raw = tl.load(acc + splits * G * E + column, mask=column < E, other=0.0)
    full = denominator > 0
    denominator = tl.where(full, denominator, 1.0)
    result = (pages + raw * weight) / denominator
    tl.store(out + query.to(tl.int64) * E + column, result.to(out.dtype.element_ty), mask=column < E)
    # Totals are relative to m - SHIFT, so what `safe` stands for lies SHIFT lower.
    tl.store(lse + query, tl.where(full, (safe - SHIFT + tl.log2(denominator)) / LOG2E, float("-inf")))


@triton.jit(do_not_specialize=["pages_wide", "chunks_wide", "window"])
def masses(
    stash, tops, lse, counts, selected, raw_counts, out, pages_wide, chunks_wide, window,
    N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    FRESH_TILE: tl.constexpr,
):  # fmt: skip
    """Program (row * N + head, tile): probabilities of one tile, now that the whole denominator is known, averaged over
    the query heads. Writes only keys that were read.
    """
    pair, i = tl.program_id(0), tl.program_id(1)
    offsets, heads = tl.arange(0, TILE), tl.arange(0, GP)
    reach = chunks_wide * CHUNK if CHUNK > 0 else pages_wide * PAGE
    page_tiles = tl.cdiv(reach, TILE)
    fresh_tiles = tl.cdiv(window, FRESH_TILE)
    t = i * TILE + offsets
    top_at = i + offsets * 0
    if i >= page_tiles:
        t -= page_tiles * TILE
        top_at = page_tiles + t // FRESH_TILE
        valid = t < tl.load(raw_counts + pair // N)
        slot = t + pages_wide * PAGE
    else:
        count = tl.load(counts + pair)
        slot = t
        valid = t < count
        if CHUNK > 0:
            chunk = tl.load(selected + pair * chunks_wide + t // CHUNK, mask=t < reach, other=-1)
            slot = chunk * CHUNK + t % CHUNK
            valid = (chunk >= 0) & (slot < count)
    inside = valid[:, None] & (heads < G)[None, :]
    row = pair.to(tl.int64) * (page_tiles * TILE + fresh_tiles * FRESH_TILE) + i * TILE + offsets
    p = tl.load(stash + row[:, None] * G + heads[None, :], mask=inside, other=0.0).to(tl.float32)
    row = pair * (page_tiles + fresh_tiles) + top_at
    top = tl.load(tops + row[:, None] * G + heads[None, :], mask=inside, other=0.0)
    end = tl.load(lse + pair * G + heads, mask=heads < G, other=float("inf")) * LOG2E
    end = tl.where(end == float("-inf"), float("inf"), end)
    mean = tl.sum(p * tl.exp2(top - end[None, :]), 1) / G
    tl.store(out + pair.to(tl.int64) * (pages_wide * PAGE + window) + slot, mean, mask=valid)
