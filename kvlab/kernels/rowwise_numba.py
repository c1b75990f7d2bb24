"""Compiled for CPUs: attention of one query per head straight from the pages, each code unpacked once for all query
heads of its KV head. Needs numba; nothing is compiled before the first call, and the result is kept on disk. All but
`shared_numba` is one file because a change of this file is what makes the kept result void.

One specialisation serves every format: bytes come in as bytes and a small integer says what they mean, so the branch
is taken once for a span of tokens and costs nothing. Loops run over slices, from zero, four tokens at a time: the forms
that compile to vector code.
"""

import numpy as np
from numba import njit

from kvlab.kernels.rowwise_arrays import AFFINE, F16_RAW, F32_RAW, FP8
from kvlab.kernels.shared_numba import FAST, LEAF, as_float, half, kept

# Numbers decoded at once, 16 KiB or a third of a first-level cache, and the fewest tokens that this may mean.
TILE, LEAST = 4096, 16
LANES = 32


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


@njit(**FAST)
def _rotate(x):
    """Each row of x times the block Hadamard matrix, in place."""
    width = x.shape[1]
    block = width & -width
    for row in range(x.shape[0]):
        y = x[row]
        half = 1
        while half < block:
            for start in range(0, width, 2 * half):
                for i in range(start, start + half):
                    a, b = y[i], y[i + half]
                    y[i], y[i + half] = a + b, a - b
            half *= 2
        y *= np.float32(1.0 / np.sqrt(block))


@njit(**LEAF)
def _unpack(data, bits, tile):
    """Codes as floats. data [n, bytes], planes as `pack` lays them out."""
    n, width = tile.shape[0], tile.shape[1]
    if bits == 8:
        for t in range(n):
            src, dst = data[t], tile[t]
            for j in range(width):
                dst[j] = np.float32(np.int32(src[j]))
    elif bits == 4:
        part = width // 2
        for t in range(n):
            src, dst = data[t], tile[t]
            for j in range(part):
                byte = np.int32(src[j])
                dst[j] = np.float32(np.int32(byte & 15))
                dst[j + part] = np.float32(np.int32(byte >> 4))
    else:
        part = width // 4
        for t in range(n):
            src, dst = data[t], tile[t]
            for j in range(part):
                byte = np.int32(src[j])
                dst[j] = np.float32(np.int32(byte & 3))
                dst[j + part] = np.float32(np.int32(np.int32(byte >> 2) & 3))
                dst[j + 2 * part] = np.float32(np.int32(np.int32(byte >> 4) & 3))
                dst[j + 3 * part] = np.float32(np.int32(byte >> 6))
    if bits == 3:
        part, top = width // 4, width // 8
        for t in range(n):
            src, dst = data[t, part : part + top], tile[t]
            for i in range(8):
                for j in range(top):
                    dst[i * top + j] += np.float32(np.int32(((np.int32(src[j]) >> np.int32(i)) & 1) << 2))


@njit(**LEAF)
def _factors(scale, zero, offset, steps, shifts):
    """fp16 bits of scales, and of zeros if there are any, as x = code * step + shift."""
    for i in range(scale.shape[0]):
        steps[i] = half(scale[i])
    if zero.shape[0]:
        for i in range(zero.shape[0]):
            shifts[i] = half(zero[i])
    else:
        for i in range(scale.shape[0]):
            shifts[i] = -offset * steps[i]


@njit(**LEAF)
def _scale_channels(tile, steps, shifts):
    """Codes in `tile` into values, one step and shift for each channel."""
    for t in range(tile.shape[0]):
        dst = tile[t]
        for d in range(dst.shape[0]):
            dst[d] = dst[d] * steps[d] + shifts[d]


@njit(**LEAF)
def _scale_groups(tile, steps, shifts, group):
    """Codes in `tile` into values, one step and shift for each group of channels of each token."""
    i = 0
    for t in range(tile.shape[0]):
        row = tile[t]
        for g in range(row.shape[0] // group):
            step, shift = steps[i], shifts[i]
            dst = row[g * group : (g + 1) * group]
            for d in range(dst.shape[0]):
                dst[d] = dst[d] * step + shift
            i += 1


# Inlined, here and in `_load`: a stream is a dozen arrays, too many to hand over for every span.
@njit(forceinline=True, **FAST)
def _load_affine(stream, row, page_tokens, data, tile, steps, shifts):
    """Group-wise codes into values; into codes where one scale serves a whole token."""
    n, width, group = tile.shape[0], tile.shape[1], stream.group
    first = row // page_tokens * width if stream.by_channel else row * (width // group)
    many = width if stream.by_channel else n * (width // group)
    zero = stream.zero[first : first + many] if stream.zero.shape[0] else stream.zero
    _factors(stream.scale[first : first + many], zero, np.float32(stream.offset), steps, shifts)
    _unpack(data, stream.bits, tile)
    if stream.by_channel:
        _scale_channels(tile, steps, shifts)
    elif group != width:
        _scale_groups(tile, steps, shifts, group)


@njit(**LEAF)
def _load_raw(kind, data, tile):
    """Uncompressed tokens, data uint8 [n, bytes], into `tile` [n, D]."""
    n, width = tile.shape[0], tile.shape[1]
    if kind == F32_RAW:
        words = data.view(np.float32)
        for t in range(n):
            src, dst = words[t], tile[t]
            for d in range(width):
                dst[d] = src[d]
        return
    halves = data.view(np.uint16)
    for t in range(n):
        bits, dst = halves[t], tile[t]
        if kind == F16_RAW:
            for d in range(width):
                dst[d] = half(bits[d])
        else:
            for d in range(width):
                dst[d] = as_float(np.uint32(bits[d]) << np.uint32(16))


@njit(forceinline=True, **FAST)
def _by_token(stream, width):
    """Whether a token has one step and shift, which `_load` then leaves to be put on logits and probabilities."""
    return stream.kind == FP8 or (stream.kind == AFFINE and not stream.by_channel and stream.group == width)


@njit(forceinline=True, **FAST)
def _load(stream, head, row, page_tokens, tile, steps, shifts):
    """Values of the tokens in rows `row`, `row` + 1, ... into `tile` [n, D]; see `_by_token`."""
    n, width = tile.shape[0], tile.shape[1]
    data = stream.data[row : row + n]
    if stream.kind == AFFINE:
        _load_affine(stream, row, page_tokens, data, tile, steps, shifts)
    elif stream.kind == FP8:
        for t in range(n):
            step = stream.head_scale[head]
            if stream.exponent.shape[0]:
                step = as_float(np.uint32(np.int32(stream.exponent[row + t]) + np.int32(127)) << np.uint32(23))
            steps[t], shifts[t] = step, np.float32(0.0)
            src, dst = data[t], tile[t]
            for d in range(width):
                dst[d] = stream.table[src[d]]
    else:
        _load_raw(stream.kind, data, tile)


@njit(**LEAF)
def _stretch(logits, column, sums, steps, shifts, n):
    """Logits of codes into logits of tokens. `sums` are those of each query."""
    for g in range(logits.shape[0]):
        row, total = logits[g, column : column + n], sums[g]
        for t in range(n):
            row[t] = row[t] * steps[t] + total * shifts[t]


@njit(**LEAF)
def _weigh(probs, column, steps, shifts, weights, added):
    """What to mix codes with, and what the tokens' shifts add to every channel."""
    n = weights.shape[1]
    for g in range(weights.shape[0]):
        p, into, total = probs[g, column : column + n], weights[g], np.float32(0.0)
        for t in range(n):
            into[t] = p[t] * steps[t]
            total += p[t] * shifts[t]
        added[g] += total


@njit(**LEAF)
def _dots(q, tile, logits, column):
    """logits[g, column + t] = q[g] . tile[t], four tokens at a time."""
    n, width = tile.shape[0], tile.shape[1]
    t = 0
    while t + 4 <= n:
        r0, r1, r2, r3 = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
        for g in range(q.shape[0]):
            row = q[g]
            a0 = a1 = a2 = a3 = np.float32(0.0)
            for d in range(width):
                x = row[d]
                a0 += x * r0[d]
                a1 += x * r1[d]
                a2 += x * r2[d]
                a3 += x * r3[d]
            out = logits[g, column + t : column + t + 4]
            out[0], out[1], out[2], out[3] = a0, a1, a2, a3
        t += 4
    while t < n:
        r0 = tile[t]
        for g in range(q.shape[0]):
            row = q[g]
            a0 = np.float32(0.0)
            for d in range(width):
                a0 += row[d] * r0[d]
            logits[g, column + t] = a0
        t += 1


@njit(**LEAF)
def _mix(probs, column, tile, out):
    """out[g] += sum over t of probs[g, column + t] * tile[t], four tokens at a time."""
    n, width = tile.shape[0], tile.shape[1]
    t = 0
    while t + 4 <= n:
        r0, r1, r2, r3 = tile[t], tile[t + 1], tile[t + 2], tile[t + 3]
        for g in range(out.shape[0]):
            p = probs[g, column + t : column + t + 4]
            p0, p1, p2, p3 = p[0], p[1], p[2], p[3]
            row = out[g]
            for d in range(width):
                row[d] += p0 * r0[d] + p1 * r1[d] + p2 * r2[d] + p3 * r3[d]
        t += 4
    while t < n:
        r0 = tile[t]
        for g in range(out.shape[0]):
            p0, row = probs[g, column + t], out[g]
            for d in range(width):
                row[d] += p0 * r0[d]
        t += 1


@njit(**FAST)
def _softmax(logits, columns, softcap, sinks):
    """In place over the first `columns`; `sinks` [G] take probability and add no value, [0] for none."""
    lanes = np.empty(LANES, np.float32)
    for g in range(logits.shape[0]):
        row = logits[g, :columns]
        if softcap > 0:
            for t in range(columns):
                row[t] = softcap * np.float32(np.tanh(row[t] / softcap))
        top = sinks[g] if sinks.shape[0] else np.float32(-np.inf)
        # The greatest of each of LANES columns first: a loop over one number does not compile to vector code.
        lanes[:] = top
        whole = columns // LANES * LANES
        for start in range(0, whole, LANES):
            part = row[start : start + LANES]
            for i in range(LANES):
                lanes[i] = part[i] if part[i] > lanes[i] else lanes[i]
        for i in range(LANES):
            top = max(top, lanes[i])
        for t in range(whole, columns):
            top = max(top, row[t])
        total = np.float32(0.0)
        for t in range(columns):
            weight = _exp(row[t] - top)
            row[t] = weight
            total += weight
        if sinks.shape[0]:
            total += _exp(sinks[g] - top)
        inverse = np.float32(1.0) / total if total > 0 or total != total else np.float32(0.0)
        for t in range(columns):
            row[t] *= inverse


@njit(**LEAF)
def _share(probs, column, share, into):
    """`into` += `share` of what all query heads give the columns from `column` on."""
    for g in range(probs.shape[0]):
        row = probs[g, column : column + into.shape[0]]
        for t in range(into.shape[0]):
            into[t] += row[t] * share


@njit(**FAST)
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


@kept
def attend(q, pages, raw_k, raw_v, selected, chunk, softcap, sink_logits, drift, trig, mass, out):
    """One query for each of H heads, `q` [H, D] scaled already; writes `out` [H, E] and, if it has rows, `mass`.

    `raw_k` and `raw_v` are PARTS parts each. `selected` [N, S] are chunks to read, all where it has no column; `drift`
    [H, D] and `trig` add a term that depends on the position to the logits of stored tokens. `mass` is [N, L + raw].
    """
    k, v, index, counts, longest, page_tokens, position, first = pages
    heads, width = counts.shape[0], out.shape[1]
    group = q.shape[0] // heads
    span = max(LEAST, TILE // max(q.shape[1], width))
    total_raw = raw_k[0].count + raw_k[1].count + raw_k[2].count
    units = max((longest + page_tokens - 1) // page_tokens, selected.shape[1])
    most = units * ((max(page_tokens, chunk) + span - 1) // span)
    starts, sizes, rows = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    joins = not (k.by_channel or v.by_channel)
    logits = np.empty((group, longest + total_raw), np.float32)
    k_tile = np.empty((span, q.shape[1]), np.float32)
    v_tile = np.empty((span, width), np.float32)
    most = span * max(q.shape[1], width)
    steps, shifts = np.empty(most, np.float32), np.empty(most, np.float32)
    weights, sums, added = np.empty((group, span), np.float32), np.empty(group, np.float32), np.empty(group, np.float32)
    k_by_token, v_by_token = _by_token(k, q.shape[1]), _by_token(v, width)
    for n in range(heads):
        q_n = q[n * group : (n + 1) * group]
        q_pages = q_n.copy()
        if k.rotated:
            _rotate(q_pages)
        for g in range(group):
            sums[g] = q_pages[g].sum()
        spans = _spans(selected[n], chunk, page_tokens, counts[n], index[n], joins, span, starts, sizes, rows)
        column = 0
        for s in range(spans):
            size = sizes[s]
            tile = k_tile[:size]
            _load(k, n, rows[s], page_tokens, tile, steps, shifts)
            _dots(q_pages, tile, logits, column)
            if k_by_token:
                _stretch(logits, column, sums, steps, shifts, size)
            if drift.shape[0]:
                for t in range(size):
                    at = position[rows[s] + t] if position.shape[0] else first + starts[s] + t
                    for g in range(group):
                        a, b, term = drift[n * group + g], trig[at], np.float32(0.0)
                        for d in range(b.shape[0]):
                            term += a[d] * b[d]
                        logits[g, column + t] += term
            column += size
        read = column
        for part in raw_k:
            for begin in range(0, part.count, span):
                size = min(span, part.count - begin)
                tile = k_tile[:size]
                _load_raw(part.kind, part.data[n, begin : begin + size], tile)
                _dots(q_n, tile, logits, column)
                column += size
        sinks = sink_logits[n * group : (n + 1) * group] if sink_logits.shape[0] else sink_logits
        _softmax(logits, column, softcap, sinks)
        mixed = out[n * group : (n + 1) * group]
        mixed[:] = 0
        added[:] = 0
        column = 0
        for s in range(spans):
            size = sizes[s]
            tile = v_tile[:size]
            _load(v, n, rows[s], page_tokens, tile, steps, shifts)
            if v_by_token:
                _weigh(logits, column, steps, shifts, weights[:, :size], added)
                _mix(weights, 0, tile, mixed)
            else:
                _mix(logits, column, tile, mixed)
            column += size
        if v_by_token:
            for g in range(group):
                mixed[g] += added[g]
        if v.rotated:
            _rotate(mixed)
        for part in raw_v:
            for begin in range(0, part.count, span):
                size = min(span, part.count - begin)
                tile = v_tile[:size]
                _load_raw(part.kind, part.data[n, begin : begin + size], tile)
                _mix(logits, column, tile, mixed)
                column += size
        if mass.shape[0]:
            share = np.float32(1.0 / group)
            into = mass[n]
            into[:] = 0
            column = 0
            for s in range(spans):
                _share(logits, column, share, into[starts[s] : starts[s] + sizes[s]])
                column += sizes[s]
            _share(logits, read, share, into[longest : longest + total_raw])
