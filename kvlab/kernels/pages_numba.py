"""Single steps on the pages of one row besides attention, compiled for CPUs: attention mass added up where it lies, and
the chunks a query should read, scored from summaries where they lie. The definitions are those of `chunks`.
"""

import numpy as np
from numba import njit

from kvlab.kernels.shared_numba import FAST, LEAF, half, kept

MEAN, MINMAX = range(2)


@njit(**LEAF)
def _fold(held, seen, carry):
    for t in range(held.shape[0]):
        held[t] = held[t] * carry + seen[t]


@kept
def fold(mass, index, counts, page_tokens, carry, seen):
    """Each stored token's `mass` [pages * P] becomes carry times itself plus what was `seen` [N, T] of it."""
    for n in range(counts.shape[0]):
        for begin in range(0, counts[n], page_tokens):
            size = min(page_tokens, counts[n] - begin)
            row = index[n, begin // page_tokens] * page_tokens
            _fold(mass[row : row + size], seen[n, begin : begin + size], np.float32(carry))


@njit(**LEAF)
def _mean_score(q, mean):
    total = np.float32(0.0)
    for d in range(q.shape[0]):
        total += q[d] * half(mean[d])
    return total


@njit(**LEAF)
def _bound_score(up, down, low, high):
    total = np.float32(0.0)
    for d in range(up.shape[0]):
        total += up[d] * half(high[d]) + down[d] * half(low[d])
    return total


@njit(**FAST)
def _pick(scores, budget, out):
    """The `budget` greatest scores, ascending by slot, the earlier of equal ones; -1 behind."""
    count = scores.shape[0]
    least = np.sort(scores)[count - budget]
    ties = budget
    for c in range(count):
        ties -= scores[c] > least
    n = 0
    for c in range(count):
        if scores[c] > least or (scores[c] == least and ties > 0):
            ties -= scores[c] == least
            out[n] = c
            n += 1
    out[n:] = -1


@kept
def select(q, kind, low, high, index, per_page, counts, budgets, out):
    """Chunks that one query for each head, `q` [H, D], reads: `budgets[n]` of the `counts[n]` of each KV head, its
    first and last in any case, into `out` [N, K].

    `low` and `high` hold fp16 bits, [pages * per_page, D]; for MEAN both are the mean.
    """
    heads, width = out.shape[0], q.shape[1]
    group = q.shape[0] // heads
    limit = np.float32(np.finfo(np.float32).max)
    up, down = np.empty(width, np.float32), np.empty(width, np.float32)
    for n in range(heads):
        up[:], down[:] = 0, 0
        for g in range(n * group, (n + 1) * group):
            for d in range(width):
                x = q[g, d]
                # For a mean the parts are one; a NaN goes into both.
                up[d] += x if kind == MEAN or not x < 0 else np.float32(0.0)
                down[d] += x if not x > 0 else np.float32(0.0)
        scores = np.empty(counts[n], np.float32)
        for c in range(counts[n]):
            row = index[n, c // per_page] * per_page + c % per_page
            score = _mean_score(up, high[row]) if kind == MEAN else _bound_score(up, down, low[row], high[row])
            # What is infinite or unknown is read, but after what is read in any case.
            scores[c] = limit if score != score else max(min(score, limit), -limit)
        if counts[n]:
            scores[0] = scores[counts[n] - 1] = np.inf
            _pick(scores, min(budgets[n], counts[n]), out[n])
        else:
            out[n] = -1
