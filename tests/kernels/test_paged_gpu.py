"""Decode kernels on a GPU: bfloat16 models, default launches, and capture in a CUDA graph."""

import pytest
import torch
from paged_case import Case

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.kernels.paged import LaunchOptions, decode, decode_reference, resolved

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

FORMATS: list[tuple[Codec, Codec]] = [
    (Raw(), Raw()),
    (Fp8(), Fp8("e5m2", exponents=(1,))),
    (Fp8(scale="dynamic"), Fp8(scale="dynamic", hadamard=True)),
    (Affine(8, group=0, mode="symmetric"), Affine(4, group=32)),
    (Affine(4, group=0, mode="midrise", hadamard=True), Affine(4, group=0, mode="midrise", hadamard=True)),
    (Affine(4, "channel", 32), Affine(4, group=32)),
    (Affine(3, group=32), Affine(3, group=32)),
    (Affine(2, "channel", 32), Affine(2, group=32)),
]


def near(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    assert torch.isfinite(got).all()
    assert (got.double() - want).abs().max() <= relative * want.abs().max()


def case_for(key: Codec, value: Codec, *, dim: int = 128, group: int = 4) -> Case:
    return Case(
        key, value, [[2000, 1, 700], [0, 3000, 64]], [40, 1], group=group, dim=dim, page=32,
        raw=torch.bfloat16, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize(("key", "value"), FORMATS, ids=lambda codec: codec.label)
@pytest.mark.parametrize("dim", [64, 128])
def test_bfloat16_models(key: Codec, value: Codec, dim: int) -> None:
    case = case_for(key, value, dim=dim)
    assert resolved(case.q) == "triton"
    got = decode(*case.arguments(), mass=True)
    want = decode_reference(*case.arguments(torch.float64), mass=True)
    assert got.mass is not None
    assert want.mass is not None
    # The output itself is rounded to bfloat16, and so are raw probabilities and values.
    near(got.out, want.out, 1e-2)
    near(got.mass, want.mass, 1e-2)


@pytest.mark.parametrize(
    "options",
    [LaunchOptions(32, 1, 3), LaunchOptions(64, 2, 5, 1), LaunchOptions(128, 4, 7, 7), LaunchOptions(128, 8, 2, 30)],
)
def test_launches_agree(options: LaunchOptions) -> None:
    case = case_for(Affine(4, group=32), Affine(2, group=32), group=7)
    want = decode_reference(*case.arguments(torch.float64))
    near(decode(*case.arguments(), options=options).out, want.out, 1e-2)


def test_a_graph_follows_lengths_and_pages() -> None:
    """What was captured reads the counts and page ids that lie in the tensors when it is replayed."""
    case = case_for(Fp8(exponents=(1, 0, -1)), Affine(4, group=32))
    arguments = case.arguments()
    decode(*arguments)  # compiles, and places what is kept on the device
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(*arguments).out
    case.pages.counts.copy_(torch.tensor([[100, 1, 0], [0, 2999, 5]], device="cuda"))
    case.pages.index[1, 1, :2] = case.pages.index[1, 1, :2].flip(0)
    case.raw.counts.copy_(torch.tensor([1, 1], device="cuda"))
    graph.replay()
    near(out, decode_reference(*case.arguments(torch.float64)).out, 1e-2)
