"""Single compiled steps on pages against the torch definitions."""

import pytest
import torch
from torch import Tensor

from kvlab.kernels import chunks
from kvlab.kernels.pages_step import fold_mass, select_chunks

pytest.importorskip("numba")

HEADS, GROUP, DIM, PER_PAGE, COUNTS = 3, 2, 24, 2, [11, 1, 0]


def scattered(seed: int) -> tuple[torch.Generator, Tensor]:
    """Pages of 6 for each head, in no order."""
    rng = torch.Generator().manual_seed(seed)
    return rng, torch.randperm(30, generator=rng)[: HEADS * 6].view(HEADS, 6)


@pytest.mark.parametrize("bound", ["mean", "minmax"])
@pytest.mark.parametrize("share", [{"k": 4}, {"k": 50}, {"fraction": 0.3}, {"fraction": 1.0}])
@pytest.mark.parametrize("strange", [None, "nan", "inf", "-inf", "equal"])
def test_chunks_are_those_that_torch_selects(bound: str, share: dict, strange: str | None) -> None:
    rng, index = scattered(5)
    a, b = torch.randn(2, 30, PER_PAGE, DIM, generator=rng).half()
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    if strange == "equal":
        low[:], high[:] = low[0, 0].clone(), high[0, 0].clone()
    elif strange is not None:
        low[index[0, 2], 1, 3] = high[index[0, 2], 1, 3] = float(strange)
    q = torch.randn(HEADS * GROUP, 1, DIM, generator=rng)
    counts = torch.tensor(COUNTS)
    held = [x[index].flatten(1, 2) for x in (low, high)]
    if bound == "mean":
        scores = chunks.mean_scores(q, held[1], counts)
    else:
        scores = chunks.bound_scores(q, chunks.Bounds(*held), counts)
    want = chunks.select(scores, counts.unsqueeze(1), **share, forced_first=1, forced_last=1)[:, 0]
    budgets = [chunks.width_of(n, **share, forced_first=1, forced_last=1) if n else 0 for n in COUNTS]
    width = chunks.width_of(12, **share, forced_first=1, forced_last=1)
    summaries = [high] if bound == "mean" else [low, high]
    got = select_chunks(q[:, 0], summaries, index, COUNTS, budgets, width)
    assert torch.equal(got, want)


@pytest.mark.parametrize("carry", [1.0, 0.5, 0.0])
def test_mass_is_added_to_stored_tokens_alone(carry: float) -> None:
    rng, index = scattered(7)
    mass = torch.rand(30, 4, 1, generator=rng)
    counts, seen = [22, 3, 0], torch.rand(HEADS, 40, generator=rng)
    want = mass.clone()
    for n, count in enumerate(counts):
        for t in range(count):
            at = int(index[n, t // 4]), t % 4, 0
            want[at] = want[at] * carry + seen[n, t]
    fold_mass(mass, index, counts, carry, seen)
    torch.testing.assert_close(mass, want)
