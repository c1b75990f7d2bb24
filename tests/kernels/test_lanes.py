"""Sixteen at once against one at a time."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from numba import njit

from kvlab.kernels import lanes_numba as lanes
from kvlab.kernels.formats import FP8_DTYPES
from kvlab.kernels.shared_numba import HAS_HALVES

SOME = np.random.default_rng(0).standard_normal(64).astype(np.float32)


@pytest.mark.skipif(not HAS_HALVES, reason="this CPU has no instruction for fp16")
@pytest.mark.parametrize("name", FP8_DTYPES)
def test_every_byte_of_an_fp8_format(name: str) -> None:
    read = getattr(lanes, name)

    @njit
    def run(x, out):
        for i in range(0, 256, 16):
            lanes.store(out, i, read(x, i))

    every, out = np.arange(256).astype(np.uint8), np.empty(256, np.float32)
    run(every, out)
    right = torch.from_numpy(every).view(FP8_DTYPES[name]).float()
    assert torch.equal(torch.from_numpy(out).isnan(), right.isnan())
    assert torch.equal(torch.from_numpy(out).nan_to_num(7.0), right.nan_to_num(7.0))


@pytest.mark.parametrize(("shift", "mask"), [(0, 255), (0, 15), (4, 15), (2, 3), (6, 3)])
def test_codes(shift: int, mask: int) -> None:
    @njit
    def run(x, out, shift, mask):
        lanes.store(out, 0, lanes.codes(x, 5, shift, mask))

    data, out = np.random.default_rng(1).integers(0, 256, 40, dtype=np.uint8), np.empty(16, np.float32)
    run(data, out, shift, mask)
    assert (out == data[5:21] >> shift & mask).all()


def test_sums_and_products() -> None:
    @njit
    def run(x, sums, product):
        a, b, c, d = lanes.load(x, 0), lanes.load(x, 16), lanes.load(x, 32), lanes.load(x, 48)
        lanes.store_sums(sums, 1, a, b, c, d)
        lanes.store(product, 0, lanes.fma(a, b, lanes.splat(np.float32(0.5))))

    sums, product = np.zeros(6, np.float32), np.empty(16, np.float32)
    run(SOME, sums, product)
    np.testing.assert_allclose(sums[1:5], SOME.reshape(4, 16).sum(1), rtol=1e-5)
    assert sums[0] == sums[5] == 0
    np.testing.assert_allclose(product, SOME[:16] * SOME[16:32] + 0.5, rtol=1e-6, atol=1e-6)


def test_blocks_of_nibbles() -> None:
    """Four tokens of 128 codes, the low and high halves of 64 bytes: the second half of the bytes adds to the first."""

    @njit
    def run(data, q, dots, weights, mixed):
        for part in (0, 32):
            found = lanes.nibbles(data, 7 + part, 70)
            lanes.block_dots(found, q, part, 64, dots, 1, part > 0)
            lanes.block_mix(found, weights, 2, mixed, part, 64)

    rng = np.random.default_rng(2)
    data, q = rng.integers(0, 256, 300, dtype=np.uint8), rng.standard_normal(128).astype(np.float32)
    dots, weights = np.full(6, np.nan, np.float32), rng.standard_normal(6).astype(np.float32)
    mixed = np.arange(128, dtype=np.float32)
    run(data, q, dots, weights, mixed)
    tokens = np.stack([data[7 + 70 * t :][:64] for t in range(4)])
    values = np.concatenate([tokens & 15, tokens >> 4], axis=1).astype(np.float32)
    np.testing.assert_allclose(dots[1:5], values @ q, rtol=1e-5, atol=1e-4)
    assert np.isnan(dots[[0, 5]]).all()
    np.testing.assert_allclose(mixed, np.arange(128) + weights[2:] @ values, rtol=1e-5, atol=1e-4)
