"""What `pages_numba` takes: one row's pages as arrays, no copy made. Needs no numba until something is done."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def fold_mass(
    mass: Float[Tensor, "pages P 1"], index: Int[Tensor, "N M"], counts: list[int], carry: float, seen: Tensor
) -> None:
    """`mass` times `carry` plus what was `seen` [N, T] of each stored token, in place; all float32 on the CPU."""
    from kvlab.kernels.pages_numba import fold

    fold(mass.view(-1).numpy(), index.numpy(), np.array(counts), mass.shape[1], carry, seen.numpy())


def select_chunks(
    q: Float[Tensor, "H D"],
    summaries: list[Float[Tensor, "pages C D"]],
    index: Int[Tensor, "N M"],
    counts: list[int],
    budgets: list[int],
    width: int,
) -> Int[Tensor, "N K"]:
    """As `chunks.select` on `chunks.mean_scores` of one summary, or on `chunks.bound_scores` of two (least, greatest).

    Head n holds `counts[n]` chunks and reads `budgets[n]` of them, its first and last in any case.
    """
    from kvlab.kernels.pages_numba import MEAN, MINMAX, select

    low, high = (x.view(-1, x.shape[2]).view(torch.uint16).numpy() for x in (summaries[0], summaries[-1]))
    out = torch.empty(len(counts), width, dtype=torch.int32)
    kind = MEAN if len(summaries) == 1 else MINMAX
    per_page = summaries[0].shape[1]
    wide = q.float().contiguous().numpy()
    select(wide, kind, low, high, index.numpy(), per_page, np.array(counts), np.array(budgets), out.numpy())
    return out
