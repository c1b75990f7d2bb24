"""The inline PTX of the tile kernels, run by a small interpreter of the instructions it uses.

Triton's interpreter takes another path, so without a GPU nothing else looks at these lines.
"""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kvlab.kernels.pack import pack
from kvlab.kernels.tiles_triton import fp8_bits, registers, unpacking

MASK = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """Four bytes of b:a by nibbles of the selector; the sign-spreading modes are not used."""
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    picks = [selector >> 4 * i & 0xF for i in range(4)]
    assert max(picks) < 8
    return int.from_bytes(bytes(source[p] for p in picks), "little")


def halves(x: int) -> np.ndarray:
    return np.array([x & 0xFFFF, x >> 16], dtype=np.uint16).view(np.float16)


def whole(x: np.ndarray) -> int:
    low, high = x.astype(np.float16).view(np.uint16)
    return int(low) | int(high) << 16


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Bit i of the result is bit (a_i, b_i, c_i) of the table."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


OPERATIONS = {
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "add.f16x2": lambda a, b: whole(halves(a) + halves(b)),
    # The products here are exact in float32, so rounding once more is what a fused one does.
    "fma.rn.f16x2": lambda a, b, c: whole(
        halves(a).astype(np.float32) * halves(b).astype(np.float32) + halves(c).astype(np.float32)
    ),
}


def run(ptx: str, word: int, outputs: int) -> np.ndarray:
    """Values of $0.. as float16 after the block; the last operand $outputs is the word."""
    held: dict[str, int] = {f"${outputs}": word}
    for line in re.split(r"[\n;]+", ptx.strip("{}")):
        parts = re.match(r"\s*(\S+)\s+(.*)", line)
        if parts is None or parts[1] == ".reg":
            continue
        pair = re.match(r"\{(\$\d+), (\$\d+)\}, (\w+)$", parts[2])
        if pair is not None:
            held[pair[1]], held[pair[2]] = held[pair[3]] & 0xFFFF, held[pair[3]] >> 16
            continue
        target, *operands = parts[2].split(", ")
        values = [held[o] if o in held else int(o, 0) for o in operands]
        held[target] = OPERATIONS[parts[1]](*values) & MASK
    return np.array([held[f"${i}"] for i in range(outputs)], dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("less", [0, 1, 2])
def test_every_code_in_every_place(bits: int, less: int) -> None:
    less = {0: 0, 1: 2 ** (bits - 1) - 1, 2: 2 ** (bits - 1)}[less]
    planes = 8 // bits
    ptx = str(unpacking(bits, less))
    for start in range(2**bits):
        codes = (torch.arange(4 * planes) * 7 + start) % 2**bits
        word = int.from_bytes(bytes(pack(codes.to(torch.uint8)[None], bits)[0].tolist()), "little")
        np.testing.assert_array_equal(run(ptx, word, 4 * planes), codes.numpy() - less)


@pytest.mark.parametrize(("e5m2", "dtype"), [(False, torch.float8_e4m3fn), (True, torch.float8_e5m2)])
def test_every_finite_fp8(e5m2: bool, dtype: torch.dtype) -> None:
    ptx, short = str(fp8_bits(e5m2)), 1.0 if e5m2 else 256.0
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    for first in range(256):
        codes = [first, (first + 1) % 256, (first + 128) % 256, 255 - first]
        got = run(ptx, int.from_bytes(bytes(codes), "little"), 4).astype(np.float32) * short
        finite = torch.isfinite(values[codes])
        np.testing.assert_array_equal(got[finite.numpy()], values[codes][finite].numpy())


def test_results_have_registers_of_their_own() -> None:
    # Without the & a result may share a register with the word that is still to be read.
    assert str(registers(4)) == "=&h,=&h,=&h,=&h,r"
