"""Compaction moves the kept rows as they are, and nothing else."""

import pytest
import torch

from kvlab.kernels.compact import compact

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("impl", ["torch", "triton"])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def streams(pages: int, page: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Widths of all sorts; random bytes, so that every pattern occurs, NaN among them."""
    kinds = {"k.codes": (40, torch.uint8), "k.scale": (5, torch.float16), "v.data": (64, torch.bfloat16)}
    kinds |= {"v.exponent": (1, torch.int8), "position": (1, torch.int32), "mass": (1, torch.float32)}
    made = {}
    for name, (width, dtype) in kinds.items():
        size = (pages * page * width * dtype.itemsize,)
        data = torch.randint(0, 256, size, generator=rng(seed), dtype=torch.uint8)
        made[name] = data.view(dtype).view(pages, page, width)
    return made


def moved(held, index, kept, lengths, impl, target=None) -> dict[str, torch.Tensor]:
    place = DEVICE if impl == "triton" else "cpu"
    out = {name: s.clone().to(place) for name, s in held.items()}
    target = None if target is None else target.to(place)
    compact(out, index.to(place), kept.to(place), lengths.to(place), target=target, impl=impl)
    return {name: s.cpu() for name, s in out.items()}


def by_hand(held, index, kept, lengths, target=None) -> dict[str, torch.Tensor]:
    """One row at a time, from a copy."""
    out, page = {name: s.clone() for name, s in held.items()}, next(iter(held.values())).shape[1]
    target = index if target is None else target
    for b in range(index.shape[0]):
        for n in range(index.shape[1]):
            for i in range(int(lengths[b, n])):
                j = int(kept[b, n, i])
                for name, stream in held.items():
                    row = stream[index[b, n, j // page], j % page]
                    out[name][target[b, n, i // page], i % page] = row
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in b)


def some(counts: list[list[int]], share: float, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending kept slots of each head, padded with what must not be looked at, and how many there are."""
    kept = torch.full((len(counts), len(counts[0]), width), 10**6, dtype=torch.int32)
    lengths = torch.zeros(len(counts), len(counts[0]), dtype=torch.int32)
    for b, heads in enumerate(counts):
        for n, count in enumerate(heads):
            which = (torch.rand(count, generator=rng(seed + 10 * b + n)) < share).nonzero()[:, 0]
            kept[b, n, : len(which)], lengths[b, n] = which.int(), len(which)
    return kept, lengths


@BOTH
@pytest.mark.parametrize("share", [0.1, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("page", [16, 32])
def test_kept_rows_move_to_the_front(impl: str, share: float, page: int) -> None:
    counts = [[5 * page, 0, 4 * page + 3], [1, 2 * page - 1, 5 * page]]
    index = torch.randperm(40, generator=rng(3))[:30].view(2, 3, 5).int()
    kept, lengths = some(counts, share, 5 * page, seed=int(share * 100))
    held = streams(40, page)
    assert same(moved(held, index, kept, lengths, impl), by_hand(held, index, kept, lengths))


@BOTH
def test_a_long_head_moves_over_itself(impl: str) -> None:
    # More rows than a tile, most of them by one place: a row is source and destination at once.
    index = torch.randperm(40, generator=rng(4)).view(1, 1, 40).int()
    kept = torch.cat([torch.arange(0, 5), torch.arange(6, 640)]).view(1, 1, -1).int()
    lengths = torch.tensor([[639]]).int()
    held = {"position": streams(40, 16)["position"], "v.data": streams(40, 16)["v.data"]}
    assert same(moved(held, index, kept, lengths, impl), by_hand(held, index, kept, lengths))


@BOTH
def test_rows_may_go_to_other_pages(impl: str) -> None:
    pages = torch.randperm(40, generator=rng(5)).int()
    index, target = pages[:24].view(2, 2, 6), pages[24:40].view(2, 2, 4)
    kept, lengths = some([[96, 40], [0, 96]], 0.5, 64, seed=6)
    held = streams(40, 16)
    got = moved(held, index, kept, lengths, impl, target)
    assert same(got, by_hand(held, index, kept, lengths, target))
    assert same(
        {n: s[index.flatten().long()] for n, s in got.items()}, {n: s[index.flatten().long()] for n, s in held.items()}
    )


@BOTH
def test_lengths_may_be_long_and_kept_may_be_empty(impl: str) -> None:
    index, held = torch.arange(4).view(1, 2, 2), streams(4, 16)
    nothing = torch.zeros(1, 2, 0, dtype=torch.int64)
    assert same(moved(held, index, nothing, torch.zeros(1, 2).long(), impl), held)
    kept, lengths = torch.tensor([[[3, 31], [0, 0]]]), torch.tensor([[2, 1]])
    assert same(moved(held, index, kept, lengths, impl), by_hand(held, index, kept, lengths))


def test_rows_of_several_tokens_are_refused() -> None:
    held = {"k.codes": torch.zeros(2, 16, 8, dtype=torch.uint8), "k.scale": torch.zeros(2, 1, 16).half()}
    with pytest.raises(ValueError, match=r"\['k.scale'\] have fewer rows than the 16 tokens"):
        compact(held, torch.zeros(1, 1, 2).int(), torch.zeros(1, 1, 4).int(), torch.ones(1, 1).int())
