"""Encode and append compiled for CPUs against the torch path, bit for bit; and the fp16 and bf16 they round to."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab.codecs import Affine, Fp8, Raw
from kvlab.kernels.affine import Mode
from kvlab.kernels.encode import append, compiles
from kvlab.kernels.formats import Format

pytest.importorskip("numba")

from numba import njit

from kvlab.kernels import shared_numba

HEADS, PAGES, PAGE = 3, 4, 16
UNTOUCHED = 0xA5
MODES: tuple[Mode, ...] = ("asymmetric", "symmetric", "midrise")


def pool(fmt: Format, dim: int) -> dict[str, Tensor]:
    sizes = {"codes": (dim * fmt.bits // 8, torch.uint8)}
    sizes |= dict.fromkeys(("scale", "zero"), (dim // fmt.group, torch.float16))
    streams = {}
    for name in fmt.names:
        width, dtype = sizes[name]
        raw = torch.full((HEADS * PAGES * PAGE * width * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8)
        streams[name] = raw.view(dtype).view(HEADS * PAGES, PAGE, width)
    return streams


def both(x: Tensor, fmt: Format, start: Tensor, lengths: Tensor | None, seed: int = 0) -> None:
    """The two paths leave the same bytes, and touch the same ones."""
    index = torch.randperm(HEADS * PAGES, generator=torch.Generator().manual_seed(seed)).view(1, HEADS, PAGES)
    left = []
    for impl in ("torch", "numba"):
        streams = pool(fmt, x.shape[-1])
        append(x, streams, fmt, index, start, lengths, impl=impl)  # type: ignore[arg-type]
        left.append(streams)
    for name in fmt.names:
        a, b = (streams[name] for streams in left)
        if a.is_floating_point():
            # NaN may be any NaN, and a zero of either sign.
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name
            assert torch.equal(a.isnan(), b.isnan()), name
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize(("bits", "mode", "clip"), list(itertools.product((2, 3, 4, 8), MODES, (1.0, 0.88))))
def test_the_bits_of_the_torch_path(bits: int, mode: Mode, clip: float) -> None:
    g = torch.Generator().manual_seed(bits)
    for dim, group, size in itertools.product((64, 96), (0, 16, 32), (1.0, 1e-6, 1e5)):
        fmt = Affine(bits, "token", group, mode, clip).stored_as(dim)
        x = torch.randn(1, HEADS, 21, dim, generator=g) * size
        x[0, 0, 0], x[0, 1, 1] = 0.3, 0.0
        start = torch.tensor([[0, 15, 33]])
        both(x, fmt, start, torch.tensor([[21, 0, 5]]))
        both(x.bfloat16(), fmt, start, None)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), bits=st.sampled_from((2, 3, 4, 8)), mode=st.sampled_from(MODES), clip=st.sampled_from((1.0, 0.7))
)
def test_any_numbers(data, bits: int, mode: Mode, clip: float) -> None:
    """Ties, constants, signed zeros, subnormals, infinities and NaN."""
    special = st.sampled_from([0.0, -0.0, 0.5, 1.5, -2.5, 7.0, 0.1, 6e-8, 70000.0, float("inf"), -float("inf")])
    number = special | st.floats(width=32, allow_nan=True)
    values = data.draw(st.lists(number, min_size=32, max_size=32))
    x = torch.tensor(values, dtype=torch.float32).expand(1, HEADS, 2, 32).clone()
    both(x, Affine(bits, "token", 16, mode, clip).stored_as(32), torch.zeros(1, HEADS, dtype=torch.long), None)


def test_only_what_it_serves() -> None:
    assert compiles(Affine(4).stored_as(64))
    for codec in (Raw(), Fp8(), Affine(4, hadamard=True), Affine(4, "channel", 16)):
        fmt = codec.stored_as(64)
        assert not compiles(fmt)
    fmt = Affine(4, hadamard=True).stored_as(64)
    where = torch.zeros(1, HEADS, PAGES, dtype=torch.long), torch.zeros(1, HEADS, dtype=torch.long)
    with pytest.raises(ValueError, match="numba"):
        append(torch.zeros(1, HEADS, 1, 64), pool(fmt, 64), fmt, *where, impl="numba")
    fmt = Affine(4).stored_as(64)
    with pytest.raises(ValueError, match="numba"):
        append(torch.zeros(1, HEADS, 1, 64).double(), pool(fmt, 64), fmt, *where, impl="numba")


def _each(convert):
    @njit
    def run(x, out):
        for i in range(x.shape[0]):
            out[i] = convert(x[i])

    return run


@pytest.mark.parametrize("name", ["_half_bits_by_hand", "half_bits", "bf16_bits"])
def test_rounding_to_16_bits(name: str) -> None:
    """Every fp16, what lies on each side of it, every midpoint, and the like for bf16."""
    dtype = torch.bfloat16 if name == "bf16_bits" else torch.float16
    exact = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    middles = (exact[1:].double() + exact[:-1].double()).div(2).float()
    up, down = (exact.nextafter(torch.tensor(sign * torch.inf)) for sign in (1, -1))
    x = torch.cat([exact, middles, up, down])
    # Overflow to infinity is for callers to prevent, and bf16_bits does not claim it.
    x = x[x.abs() <= exact.max()]
    out = np.zeros(len(x), np.uint16)
    _each(getattr(shared_numba, name))(x.numpy(), out)
    assert torch.equal(torch.from_numpy(out), x.to(dtype).view(torch.uint16))
    nan = np.zeros(1, np.uint16)
    _each(getattr(shared_numba, name))(np.array([np.nan], np.float32), nan)
    assert torch.from_numpy(nan).view(dtype).isnan().all()
