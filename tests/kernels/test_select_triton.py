"""Selection without a sort takes what the sort takes."""

import pytest
import torch

from kvlab.kernels.chunks import MOST_CHUNKS, select, select_mass

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def agrees(call, scores: torch.Tensor, counts: torch.Tensor, **fields) -> bool:
    expected = call(scores, counts, **fields, impl="torch")
    got = call(scores.to(DEVICE), counts.to(DEVICE), **fields, impl="triton").cpu()
    assert got.dtype == torch.int32
    return torch.equal(got, expected)


@pytest.mark.parametrize("n_chunks", [1, 5, 63, 257])
@pytest.mark.parametrize("rule", [{"k": 3}, {"k": 300}, {"fraction": 0.1}, {"fraction": 1.0}])
@pytest.mark.parametrize("forced", [(0, 0), (1, 2)])
def test_the_same_chunks_as_by_sorting(n_chunks: int, rule: dict, forced: tuple[int, int]) -> None:
    scores = torch.randint(-3, 3, (2, 3, n_chunks), generator=rng(n_chunks)).float()
    scores[0] = torch.randn(3, n_chunks, generator=rng(n_chunks + 1)) * torch.tensor([[1e-38], [1.0], [1e38]])
    scores[1, 0, 0], scores[1, 1, n_chunks // 2], scores[1, 2, 0] = torch.inf, torch.nan, -0.0
    counts = torch.randint(0, n_chunks + 1, (2, 3), generator=rng(n_chunks), dtype=torch.int32)
    counts[0, 0] = n_chunks
    assert agrees(select, scores, counts, **rule, forced_first=forced[0], forced_last=forced[1])


def test_zero_has_no_sign() -> None:
    scores, counts = torch.zeros(1, 8), torch.tensor([8]).int()
    scores[0, 0], scores[0, 4] = -0.0, -1.0
    got = select(scores.to(DEVICE), counts.to(DEVICE), k=2, forced_first=0, forced_last=0, impl="triton")
    assert got.tolist() == [[0, 1]]


@pytest.mark.parametrize("fraction", [0.1, 1 / 3, 0.7])
def test_shares_are_exact(fraction: float) -> None:
    # 0.1 of 30 is 3 and not 4.
    counts = torch.tensor([0, 1, 2, 9, 10, 11, 29, 30, 31, 60, 99, 100])
    scores = torch.rand(12, 100, generator=rng())
    assert agrees(select, scores, counts, fraction=fraction, forced_first=0, forced_last=1)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("forced", [(0, 0), (1, 2)])
def test_top_p_agrees(p: float, forced: tuple[int, int]) -> None:
    scores = torch.randn(2, 3, 63, generator=rng(1)) * torch.tensor([0.1, 2.0, 30.0]).view(1, 3, 1)
    scores[1, 0, 5], scores[1, 1] = torch.inf, 0.5  # one that takes all weight; equal weights
    counts = torch.tensor([[63, 40, 63], [63, 63, 0]]).int()
    width = 63 if p > 0.4 else 10
    fields = {"p": p, "width": width, "forced_first": forced[0], "forced_last": forced[1]}
    assert agrees(select_mass, scores, counts, **fields)


def test_scores_beyond_the_count_are_not_looked_at() -> None:
    scores = torch.rand(1, 40, generator=rng())
    counts = torch.tensor([25]).int()
    clean = select(scores.to(DEVICE), counts.to(DEVICE), k=8, impl="triton").cpu()
    scores[0, 25:] = torch.nan
    assert torch.equal(select(scores.to(DEVICE), counts.to(DEVICE), k=8, impl="triton").cpu(), clean)
    scores[0, 25:] = torch.inf
    assert torch.equal(select(scores.to(DEVICE), counts.to(DEVICE), k=8, impl="triton").cpu(), clean)


def test_more_chunks_than_a_program_holds_are_sorted() -> None:
    scores, counts = torch.zeros(1, MOST_CHUNKS + 1), torch.tensor([5]).int()
    assert select(scores, counts, k=4)[0].tolist() == [0, 1, 3, 4]
    with pytest.raises(ValueError, match="impl"):
        select(scores, counts, k=4, impl="triton")
    with pytest.raises(ValueError, match="impl"):
        select(scores[:, :9].double(), counts, k=4, impl="triton")
