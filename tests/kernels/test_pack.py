"""Codes to bytes and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.kernels.pack import BITS, pack, packed_width, unpack


@given(
    bits=st.sampled_from(BITS),
    tokens=st.sampled_from([1, 2, 3, 31, 33]),
    head_dim=st.sampled_from([8, 64, 80, 96, 256]),
    seed=st.integers(0, 2**16),
)
def test_unpack_inverts_pack(bits: int, tokens: int, head_dim: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (2, tokens, head_dim), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    before = codes.clone()
    packed = pack(codes, bits)
    assert packed.shape == (2, tokens, head_dim * bits // 8)
    assert torch.equal(unpack(packed, bits, head_dim), codes)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_survives_in_every_place(bits: int) -> None:
    # A spilling high nibble would show as a changed neighbour.
    for code in range(2**bits):
        codes = torch.zeros(8, 1, 8, dtype=torch.uint8)
        codes[torch.arange(8), 0, torch.arange(8)] = code
        assert torch.equal(unpack(pack(codes, bits), bits, 8), codes)


def test_split_planes_are_what_the_kernels_rely_on() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(1, 1, 16)
    # Byte j: channel j low, channel j + 8 high.
    assert pack(codes, 4)[0, 0].tolist() == [j | (j + 8) << 4 for j in range(8)]
    twos = (torch.arange(8, dtype=torch.uint8) % 4).view(1, 1, 8)
    assert pack(twos, 2)[0, 0].tolist() == [0 | 2 << 2 | 0 << 4 | 2 << 6, 1 | 3 << 2 | 1 << 4 | 3 << 6]
    threes = torch.tensor([[[0, 1, 2, 3, 4, 5, 6, 7]]], dtype=torch.uint8)
    low = [0 | 2 << 2 | 0 << 4 | 2 << 6, 1 | 3 << 2 | 1 << 4 | 3 << 6]
    assert pack(threes, 3)[0, 0].tolist() == [*low, 0b11110000]


def test_one_token_at_a_time_equals_all_at_once() -> None:
    codes = torch.randint(0, 16, (2, 5, 64), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    single = torch.cat([pack(codes[:, t : t + 1], 4) for t in range(5)], dim=1)
    assert torch.equal(single, pack(codes, 4))


@pytest.mark.parametrize(("head_dim", "bits", "multiple"), [(15, 4, 2), (15, 2, 4), (15, 3, 8), (81, 4, 2), (66, 2, 4)])
def test_a_head_that_fills_no_whole_bytes_is_refused(head_dim: int, bits: int, multiple: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of {multiple} for {bits}-bit codes, got {head_dim}"):
        packed_width(head_dim, bits)


def test_eight_bits_take_any_head() -> None:
    assert packed_width(15, 8) == 15


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="bits must be one of"):
        packed_width(64, 5)
