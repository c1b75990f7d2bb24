"""Compiled for CPUs: attention of one query per head straight from the pages, each code unpacked once for all query
heads of its KV head. Needs numba; nothing is compiled before the first call, and the result is kept on disk.

One specialisation serves every format: bytes come in as bytes and a small integer says what they mean.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from kvlab.kernels.lanes_numba import BLOCK, LANES, fma, lane_sum, load, splat, store
from kvlab.kernels.records_numba import array_at, pages_of, raw_parts
from kvlab.kernels.shared_numba import EXACT_LEAF, FAST, LEAF, as_float, kept
from kvlab.kernels.tiles_numba import (
    aligned,
    by_token,
    dots,
    dots_nibbles,
    factors,
    in_registers,
    load_raw,
    load_stored,
    mix,
    mix_nibbles,
    padded,
    store_raw,
)

# Numbers decoded at once, 16 KiB or a third of a first-level cache, and the fewest tokens that this may mean.
TILE, LEAST = 4096, 16
SIDE = 32


@njit(inline="always")
def _exp(x):
    """exp for x <= 0, within two units in the last place: a power of two times a polynomial on half an octave."""
    low = np.float32(-87.0)
    y = low if x < low else x
    n = np.float32(np.floor(y * np.float32(1.4426950408889634) + np.float32(0.5)))
    # ln 2 in two parts, the first with so few bits that n times it is exact.
    r = (y - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    power = as_float(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
    return np.float32(0.0) if x < low else p * power


@njit(**LEAF)
def _rotate(x, rows, width, stride):
    """Each row of x times the block Hadamard matrix, in place."""
    block = width & -width
    norm = np.float32(1.0 / np.sqrt(block))
    for row in range(rows):
        y = x[row * stride : row * stride + width]
        half_block = 1
        while half_block < block:
            for start in range(0, width, 2 * half_block):
                for i in range(start, start + half_block):
                    a, b = y[i], y[i + half_block]
                    y[i], y[i + half_block] = a + b, a - b
            half_block *= 2
        y *= norm


@njit(**LEAF)
def _stretch(logits, columns, column, sums, steps, shifts, n):
    """Logits of codes into logits of tokens. `sums` are those of each query."""
    for g in range(sums.shape[0]):
        total, first = sums[g], g * columns + column
        for t in range(n):
            logits[first + t] = logits[first + t] * steps[t] + total * shifts[t]


@njit(**LEAF)
def _drift(logits, columns, column, drift, trig, position, at, row, n):
    """Add drift [G, D] . trig at each token's position: `position[row + t]`, or `at + t` where there are none."""
    for t in range(n):
        turned = trig[position[row + t] if position.shape[0] else at + t]
        for g in range(drift.shape[0]):
            pulled, term = drift[g], np.float32(0.0)
            for d in range(turned.shape[0]):
                term += pulled[d] * turned[d]
            logits[g * columns + column + t] += term


# In an order of its own, whatever the addresses: compilers add up in another where arrays might overlap.
@njit(**EXACT_LEAF)
def _weigh(probs, columns, column, steps, shifts, weights, added, n):
    """What to mix codes with, `weights` [G * n], and what the tokens' shifts add to every channel."""
    whole = n // LANES * LANES
    for g in range(added.shape[0]):
        p, into, total = g * columns + column, g * n, splat(np.float32(0.0))
        for t in range(0, whole, LANES):
            share = load(probs, p + t)
            store(weights, into + t, fma(share, load(steps, t), splat(np.float32(0.0))))
            total = fma(share, load(shifts, t), total)
        rest = lane_sum(total)
        for t in range(whole, n):
            weights[into + t] = probs[p + t] * steps[t]
            rest += probs[p + t] * shifts[t]
        added[g] += rest


@njit(**FAST)
def _softmax(row, softcap, sink, has_sink):
    """In place; with `has_sink`, `sink` is one more logit that takes probability and adds no value."""
    columns = row.shape[0]
    if softcap > 0:
        for t in range(columns):
            row[t] = softcap * np.float32(np.tanh(row[t] / softcap))
    top = sink if has_sink else np.float32(-np.inf)
    # The greatest of each of SIDE columns first: a loop over one number does not compile to vector code.
    sides = np.full(SIDE, top, np.float32)
    whole = columns // SIDE * SIDE
    for start in range(0, whole, SIDE):
        part = row[start : start + SIDE]
        for i in range(SIDE):
            sides[i] = part[i] if part[i] > sides[i] else sides[i]
    for i in range(SIDE):
        top = max(top, sides[i])
    for t in range(whole, columns):
        top = max(top, row[t])
    total = np.float32(0.0)
    for t in range(columns):
        weight = _exp(row[t] - top)
        row[t] = weight
        total += weight
    if has_sink:
        total += _exp(sink - top)
    inverse = np.float32(1.0) / total if total > 0 or total != total else np.float32(0.0)
    for t in range(columns):
        row[t] *= inverse


@njit(**LEAF)
def _share(probs, columns, column, queries, into):
    """`into` becomes the mean over query heads of what they give the columns from `column` on."""
    share = np.float32(1.0 / queries)
    for t in range(into.shape[0]):
        into[t] = 0
    for g in range(queries):
        first = g * columns + column
        for t in range(into.shape[0]):
            into[t] += probs[first + t] * share


@njit(**LEAF)
def _spans(selected, chunk, page_tokens, count, pages, joins, span, starts, sizes, rows):
    """Tokens to read of one head as `sizes` from `starts` on, which lie in `rows` on; returns how many spans.

    At most `span` long and within a page, or, if one `joins` them, within pages that follow each other.
    """
    n = 0
    unit = chunk if selected.shape[0] else page_tokens
    units = selected.shape[0] if selected.shape[0] else (count + unit - 1) // unit
    for u in range(units):
        begin = (selected[u] if selected.shape[0] else u) * unit
        end = min(begin + unit, count)
        while 0 <= begin < end:
            row, size = pages[begin // page_tokens] * page_tokens + begin % page_tokens, min(end - begin, span)
            last = n - 1
            fits = joins and n > 0 and sizes[last] + size <= span
            if fits and starts[last] + sizes[last] == begin and rows[last] + sizes[last] == row:
                sizes[last] += size
            else:
                starts[n], sizes[n], rows[n] = begin, size, row
                n += 1
            begin += size
    return n


class _Desk(NamedTuple):
    """What one head after another is worked on with: spans to read, a tile, logits that become probabilities.

    `q_raw` and `q_pages` are the head's queries, rotated in the latter where keys are; `mixed` the outputs to be.
    """

    starts: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray
    span: int
    tile: np.ndarray
    logits: np.ndarray
    columns: int
    steps: np.ndarray
    shifts: np.ndarray
    weights: np.ndarray
    sums: np.ndarray
    added: np.ndarray
    q_raw: np.ndarray
    q_pages: np.ndarray
    mixed: np.ndarray


@njit(**FAST)
def _desk(pages, group, width_k, width_v, columns, chunk, selected):
    k, v = padded(width_k), padded(width_v)
    # Whole groups of tokens, so that products may run over a span's end.
    span = max(LEAST, TILE // max(k, v) // LEAST * LEAST)
    units = max((pages.longest + pages.page_tokens - 1) // pages.page_tokens, selected)
    most = units * ((max(pages.page_tokens, chunk) + span - 1) // span)
    whole = span * max(width_k, width_v)  # at most one scale for each value
    tile, q_raw, q_pages = aligned(span * max(k, v)), aligned(group * k), aligned(group * k)
    tile[:], q_raw[:], q_pages[:] = 0, 0, 0
    return _Desk(
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), span,
        tile, aligned(group * columns), columns,
        aligned(whole), aligned(whole), aligned(group * span),
        np.empty(group, np.float32), np.empty(group, np.float32),
        q_raw, q_pages, aligned(group * v),
    )  # fmt: skip


@njit(**LEAF)
def _take(desk, q, scale, rotated):
    """The queries of a head, [G, D], times `scale` onto the desk."""
    stride = desk.q_raw.shape[0] // q.shape[0]
    for g in range(q.shape[0]):
        for d in range(q.shape[1]):
            desk.q_raw[g * stride + d] = desk.q_pages[g * stride + d] = q[g, d] * scale
    if rotated:
        _rotate(desk.q_pages, q.shape[0], q.shape[1], stride)
    for g in range(q.shape[0]):
        desk.sums[g] = desk.q_pages[g * stride : (g + 1) * stride].sum()


# Inlined, as what they call: a stream is a dozen arrays.
@njit(forceinline=True, **LEAF)
def _score_stored(desk, n, spans, pages, width, drift, trig):
    """Logits of the stored tokens of head n; returns how many."""
    queries, stride, by_its_scale, column = desk.sums.shape[0], padded(width), by_token(pages.k, width), 0
    direct = in_registers(pages.k, width)
    for s in range(spans):
        row, size = desk.rows[s], desk.sizes[s]
        blocks = size // BLOCK * BLOCK if direct else 0
        if blocks:
            data, step = pages.k.data, pages.k.row_bytes
            dots_nibbles(desk.q_pages, queries, data, step, row, blocks, stride, desk.logits, desk.columns, column)
        if blocks < size:
            more = pages.page_tokens, width, desk.tile, stride, desk.steps, desk.shifts
            load_stored(pages.k, n, row + blocks, size - blocks, *more)
            dots(desk.q_pages, queries, desk.tile, size - blocks, stride, desk.logits, desk.columns, column + blocks)
        if blocks:
            factors(pages.k, row, size, desk.steps, desk.shifts)
        if by_its_scale:
            _stretch(desk.logits, desk.columns, column, desk.sums, desk.steps, desk.shifts, size)
        if drift.shape[0]:
            at = pages.first + desk.starts[s]
            _drift(desk.logits, desk.columns, column, drift, trig, pages.position, at, row, size)
        column += size
    return column


@njit(**LEAF)
def _keep(desk, n, raw, width, slot):
    """The new token into place `slot` of the window, where it counts only later."""
    _, window, new = raw
    load_raw(new.kind, new.data, n * new.room, 1, width, desk.tile, padded(width))
    store_raw(window.kind, desk.tile, window.data, n * window.room + slot, width)


@njit(**LEAF)
def _score_raw(desk, n, raw, width, column):
    """Logits of raw tokens from `column` on; returns where they end."""
    stride = padded(width)
    for part in raw:
        for begin in range(0, part.count, desk.span):
            size = min(desk.span, part.count - begin)
            load_raw(part.kind, part.data, n * part.room + begin, size, width, desk.tile, stride)
            dots(desk.q_raw, desk.sums.shape[0], desk.tile, size, stride, desk.logits, desk.columns, column)
            column += size
    return column


@njit(forceinline=True, **LEAF)
def _mix_stored(desk, n, spans, pages, width):
    """Add the values of the stored tokens of head n to `mixed`, which is zero."""
    queries, stride, by_its_scale, column = desk.sums.shape[0], padded(width), by_token(pages.v, width), 0
    direct = in_registers(pages.v, width)
    desk.added[:] = 0
    for s in range(spans):
        row, size = desk.rows[s], desk.sizes[s]
        blocks = size // BLOCK * BLOCK if direct else 0
        if blocks < size:
            more = pages.page_tokens, width, desk.tile, stride, desk.steps, desk.shifts
            load_stored(pages.v, n, row + blocks, size - blocks, *more)
        if blocks:
            factors(pages.v, row, size, desk.steps, desk.shifts)
        if by_its_scale:
            _weigh(desk.logits, desk.columns, column, desk.steps, desk.shifts, desk.weights, desk.added, size)
            if blocks:
                data, step = pages.v.data, pages.v.row_bytes
                mix_nibbles(desk.weights, queries, data, step, row, blocks, stride, desk.mixed, size)
            mix(desk.weights, size, blocks, queries, desk.tile, size - blocks, stride, desk.mixed)
        else:
            mix(desk.logits, desk.columns, column, queries, desk.tile, size, stride, desk.mixed)
        column += size
    for g in range(queries):
        for d in range(width):
            desk.mixed[g * stride + d] += desk.added[g]
    if pages.v.rotated:
        _rotate(desk.mixed, queries, width, stride)


@njit(**LEAF)
def _mix_raw(desk, n, raw, width, column):
    stride = padded(width)
    for part in raw:
        for begin in range(0, part.count, desk.span):
            size = min(desk.span, part.count - begin)
            load_raw(part.kind, part.data, n * part.room + begin, size, width, desk.tile, stride)
            mix(desk.logits, desk.columns, column, desk.sums.shape[0], desk.tile, size, stride, desk.mixed)
            column += size


@njit(**LEAF)
def _report(desk, spans, read, longest, raw, mass):
    """What every token of one head got, at its slot; raw tokens behind the longest head's stored ones."""
    mass[:] = 0
    column = 0
    for s in range(spans):
        start, size = desk.starts[s], desk.sizes[s]
        _share(desk.logits, desk.columns, column, desk.sums.shape[0], mass[start : start + size])
        column += size
    _share(desk.logits, desk.columns, read, desk.sums.shape[0], mass[longest : longest + raw])


@kept
def attend(record, call, scale, softcap):
    """One query for each of H heads, `q` [H, D] before scaling; writes `out` [H, E] and, where asked to, `mass`.

    `record` are pages and `call` everything else, as `rowwise_arrays.step` writes them down: sinks, window and the new
    token, which is also put at `slot` of the window, if that is not negative; `selected` [N, S], chunks to read, all
    where it has no column; `drift` [H, D] and `trig`, which add a term that depends on the position to the logits of
    stored tokens. `mass` is [N, L + raw].
    """
    pages = pages_of(record)
    heads, queries, (width_k, width_v) = pages.counts.shape[0], call[0], (call[1], call[2])
    q, out = array_at(call[3], (queries, width_k), np.float32), array_at(call[4], (queries, width_v), np.float32)
    slot, chunk = call[5], call[8]
    selected = array_at(call[6], (heads, call[7]), np.int64)
    sink_logits = array_at(call[9], queries if call[9] else 0, np.float32)
    drift = array_at(call[10], (queries if call[10] else 0, width_k), np.float32)
    trig = array_at(call[11], (call[12], width_k), np.float32)
    raw_k, raw_v = raw_parts(call, 14, heads, width_k), raw_parts(call, 18, heads, width_v)
    raw = raw_k[0].count + raw_k[1].count + raw_k[2].count
    mass = array_at(call[13], (heads if call[13] else 0, pages.longest + raw), np.float32)
    group, stride = queries // heads, padded(width_v)
    joins = not (pages.k.by_channel or pages.v.by_channel)
    desk = _desk(pages, group, width_k, width_v, pages.longest + raw + 3, chunk, selected.shape[1])
    for n in range(heads):
        first, last = n * group, (n + 1) * group
        _take(desk, q[first:last], np.float32(scale), pages.k.rotated)
        spans = _spans(
            selected[n], chunk, pages.page_tokens, pages.counts[n], pages.index[n], joins, desk.span,
            desk.starts, desk.sizes, desk.rows,
        )  # fmt: skip
        read = _score_stored(desk, n, spans, pages, width_k, drift[first:last], trig)
        end = _score_raw(desk, n, raw_k, width_k, read)
        for g in range(group):
            sink = sink_logits[first + g] if sink_logits.shape[0] else np.float32(0.0)
            row = desk.logits[g * desk.columns : g * desk.columns + end]
            _softmax(row, softcap, sink, sink_logits.shape[0] > 0)
        desk.mixed[:] = 0
        _mix_stored(desk, n, spans, pages, width_v)
        _mix_raw(desk, n, raw_v, width_v, end - raw)
        for g in range(group):
            for d in range(width_v):
                out[first + g, d] = desk.mixed[g * stride + d]
        if slot >= 0:
            _keep(desk, n, raw_k, width_k, slot)
            _keep(desk, n, raw_v, width_v, slot)
        if mass.shape[0]:
            _report(desk, spans, read, pages.longest, raw, mass[n])
