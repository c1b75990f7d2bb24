"""The rotation: fast path, definition and its two identities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.kernels.hadamard import block_of, hadamard, matrix


@given(head_dim=st.sampled_from([1, 2, 15, 32, 64, 80, 96, 128, 256]), seed=st.integers(0, 2**16))
def test_fast_equals_matrix_and_is_its_own_inverse(head_dim: int, seed: int) -> None:
    x = torch.randn(2, 3, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotated = hadamard(x)
    torch.testing.assert_close(rotated, hadamard(x, impl="reference"), rtol=0, atol=1e-12)
    torch.testing.assert_close(hadamard(rotated), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


@given(head_dim=st.sampled_from([64, 80, 96]), seed=st.integers(0, 2**16))
def test_products_of_queries_and_keys_do_not_change(head_dim: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, 5, head_dim, dtype=torch.float64, generator=rng) for _ in range(2))
    torch.testing.assert_close(hadamard(q) @ hadamard(k).mT, q @ k.mT, rtol=0, atol=1e-11)


def test_blocks_are_the_largest_power_of_two() -> None:
    assert [block_of(d) for d in (64, 80, 96, 256, 15)] == [64, 16, 32, 256, 1]


def test_matrix_of_size_four() -> None:
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64) / 2
    assert torch.equal(matrix(4), expected)


def test_one_loud_channel_is_spread_evenly() -> None:
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, 5] = 8.0
    assert torch.equal(hadamard(x).abs(), torch.ones(1, 64, dtype=torch.float64))


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(Exception, match="impl"):
        hadamard(torch.zeros(1, 4), impl="cuda")  # type: ignore[arg-type]
