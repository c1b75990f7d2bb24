"""Codecs in the kernels' terms, and which implementation runs."""

import pytest
import torch

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.kernels import dispatch
from kvlab.kernels.dispatch import choose
from kvlab.kernels.formats import Format, restored_values

CODECS = [
    Raw(),
    Fp8(),
    Fp8("e5m2", exponents=(1, -2, 0)),
    Fp8(scale="dynamic", hadamard=True),
    Affine(4, group=0, hadamard=True),
    Affine(3, group=8, mode="symmetric"),
    Affine(2, "channel", 16, "midrise"),
    Affine(8, "channel", 16, clip=0.9),
]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.label)
def test_a_format_reads_what_its_codec_reads(codec: Codec) -> None:
    x = torch.randn(3, 32, 24, dtype=torch.float64)
    fmt = codec.stored_as(24)
    packed = codec.encode(x)
    assert set(fmt.names) == set(packed) == set(codec.streams(24, 16, torch.float32))
    read = restored_values(packed, fmt, 24, torch.float64)
    torch.testing.assert_close(read, codec.decode(packed, 24, torch.float64), rtol=1e-12, atol=1e-12)


def test_a_format_without_groups_says_so() -> None:
    with pytest.raises(ValueError, match="only an affine format has groups, got kind='fp8'"):
        _ = Format("fp8").groups


def test_exponents_must_fit_the_heads() -> None:
    with pytest.raises(ValueError, match="1 or one per KV head"):
        restored_values(
            {"codes": torch.zeros(3, 1, 8, dtype=torch.uint8)}, Format("fp8", exponents=(0, 1)), 8, torch.float32
        )


def test_auto_takes_triton_on_a_gpu_only() -> None:
    available = ("triton", "torch", "reference")
    assert choose("auto", available) == "torch"
    assert choose("auto", available, torch.device("cuda")) == "triton"
    assert choose("auto", ("torch", "reference"), torch.device("cuda")) == "torch"


def test_what_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    available = ("triton", "numba", "torch")
    with pytest.raises(ValueError, match="got 'reference'"):
        choose("reference", available)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose("triton", available)
    with pytest.raises(ValueError, match="numba kernels run on CPU tensors"):
        choose("numba", available, torch.device("cuda"))
    with pytest.raises(ValueError, match="CUDA or ROCm"):
        choose("triton", available, torch.device("mps"))
    monkeypatch.setattr(dispatch, "installed", lambda name: False)
    with pytest.raises(ValueError, match=r"pip install 'kvlab\[gpu\]'"):
        choose("triton", available)
    assert choose("auto", available, torch.device("cuda")) == "torch"
