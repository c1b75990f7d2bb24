"""Encode and append: the Triton path gives the bits of the torch path, which gives those of the codecs."""

import pytest
import torch

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.kernels.encode import append
from kvlab.kernels.formats import FP8_DTYPES, Format, restored_values
from kvlab.kernels.pack import packed_width

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("impl", ["torch", "triton"])
# What no launch may write to: a recognisable byte everywhere.
UNTOUCHED = 0xA5


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pool(
    fmt: Format, head_dim: int, page: int, pages: int, raw: torch.dtype = torch.float16
) -> dict[str, torch.Tensor]:
    """Streams of `pages` pages, every byte UNTOUCHED."""
    shapes: dict[str, tuple[int, int, torch.dtype]] = {"data": (page, head_dim, raw)}
    if fmt.kind != "raw":
        width = packed_width(head_dim, fmt.bits) if fmt.kind == "affine" else head_dim
        rows, groups = (1, head_dim) if fmt.axis == "channel" else (page, head_dim // (fmt.group or head_dim))
        shapes = {"codes": (page, width, torch.uint8), "exponent": (page, 1, torch.int8)}
        shapes |= dict.fromkeys(("scale", "zero"), (rows, groups, torch.float16))
    streams = {}
    for name in fmt.names:
        rows, width, dtype = shapes[name]
        size = pages * rows * width * dtype.itemsize
        streams[name] = torch.full((size,), UNTOUCHED, dtype=torch.uint8).view(dtype).view(pages, rows, width)
    return streams


def written(x, streams, fmt, index, start, lengths=None, impl="triton", minus=None) -> dict[str, torch.Tensor]:
    """The streams after an append on copies of them; on the CPU, whatever ran it."""
    place = DEVICE if impl == "triton" else "cpu"
    held = {name: s.clone().to(place) for name, s in streams.items()}
    table = [None if t is None else t.to(place) for t in (index, start, lengths)]
    minus = None if minus is None else minus.to(place)
    append(x.to(place), held, fmt, *table, minus=minus, impl=impl)
    return {name: s.cpu() for name, s in held.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


CASES = [
    # codec, head dim, tokens, dtype, whether something is taken off first
    (Affine(4, "token", 32), 64, 33, torch.float16, False),
    (Affine(4, "token", 0, "midrise", 0.88, hadamard=True), 64, 7, torch.float16, True),
    (Affine(4, "token", 32, hadamard=True), 256, 3, torch.bfloat16, False),
    (Affine(4, "token", 16), 80, 33, torch.float32, False),
    (Affine(4, "token", 32, hadamard=True), 96, 7, torch.float16, True),
    (Affine(3, "token", 16, "symmetric"), 80, 5, torch.float16, True),
    (Affine(3, "channel", 16, hadamard=True), 128, 32, torch.float16, False),
    (Affine(2, "channel", 16, "asymmetric", 0.7), 80, 32, torch.float16, False),
    (Affine(2, "token", 32, "asymmetric", 0.6), 128, 17, torch.float32, False),
    (Affine(8, "token", 0, "symmetric"), 96, 33, torch.float16, False),
    (Affine(8, "channel", 16, "midrise"), 64, 16, torch.bfloat16, True),
    (Affine(8, "token", 5), 15, 3, torch.float32, False),
    (Fp8("e4m3"), 64, 33, torch.float16, False),
    (Fp8("e4m3", exponents=(-1, 2, 0), hadamard=True), 80, 17, torch.float32, False),
    (Fp8("e5m2", exponents=(-1, 2, 0)), 96, 5, torch.bfloat16, True),
    (Fp8("e5m2", "dynamic"), 80, 33, torch.float16, False),
    (Fp8("e4m3", "dynamic", hadamard=True), 128, 1, torch.float32, True),
    (Raw(), 80, 33, torch.float16, False),
    (Raw(), 64, 5, torch.float32, True),
]


@pytest.mark.parametrize(
    ("codec", "head_dim", "tokens", "dtype", "less"), CASES, ids=lambda v: getattr(v, "label", None)
)
def test_both_paths_write_the_same_bits(
    codec: Codec, head_dim: int, tokens: int, dtype: torch.dtype, less: bool
) -> None:
    fmt, page, g = codec.stored_as(head_dim), 16, rng(hash((head_dim, tokens)) % 2**31)
    x = (torch.randn(2, 3, tokens, head_dim, generator=g) * 3).to(dtype)
    x[0, 0] *= 100  # one loud head
    minus = torch.randn(1, 3, tokens, head_dim, generator=g) if less else None
    index = torch.randperm(40, generator=g)[:36].view(2, 3, 6).int()
    unit = codec.block_tokens
    start = torch.randint(0, 2 * page // unit, (2, 3), generator=g).int() * unit
    lengths = torch.randint(0, tokens // unit + 1, (2, 3), generator=g).int() * unit
    lengths[1, 2] = tokens
    streams = pool(fmt, head_dim, page, 40)
    expected = written(x, streams, fmt, index, start, lengths, "torch", minus)
    assert not same(expected, streams)
    assert same(written(x, streams, fmt, index, start, lengths, "triton", minus), expected)
    assert same(
        written(x, streams, fmt, index, start, None, "triton", minus),
        written(x, streams, fmt, index, start, None, "torch", minus),
    )


@BOTH
@pytest.mark.parametrize(
    "codec", [Raw(), Affine(3, "token", 16), Affine(4, "channel", 16, hadamard=True), Fp8("e4m3", "dynamic")]
)
def test_every_token_lands_in_its_slot_and_nowhere_else(impl: str, codec: Codec) -> None:
    fmt, unit = codec.stored_as(64), codec.block_tokens
    x = torch.randn(2, 2, 48, 64, generator=rng())
    index = torch.tensor([[[7, 2, 9, 4, 11], [1, 0, 3, 12, 5]], [[6, 8, 10, 14, 15], [17, 16, 13, 18, 19]]]).int()
    start = torch.tensor([[0, unit], [2 * unit, 16]]).int()
    lengths = torch.tensor([[48 // unit * unit, 0], [unit, 32]]).int()
    streams = pool(fmt, 64, 16, 20, torch.float32)
    got = written(x, streams, fmt, index, start, lengths, impl)
    expected = {name: s.clone() for name, s in streams.items()}
    for b in range(2):
        for n in range(2):
            packed = codec.encode(x[b, n, None, : lengths[b, n]])
            for name, rows in packed.items():
                per_page = expected[name].shape[1]
                for i, row in enumerate(rows[0]):
                    at = int(start[b, n]) * per_page // 16 + i
                    expected[name][index[b, n, at // per_page], at % per_page] = row
    assert same(got, expected)


@BOTH
@pytest.mark.parametrize("repeats", [1, 64])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_beyond_the_format_saturate(impl: str, repeats: int, strided: bool, dtype: torch.dtype) -> None:
    x = torch.tensor([448.0, 460, 470, 900, -5000]).repeat(repeats).view(1, 1, 1, -1).to(dtype)
    if strided:
        x = x.repeat_interleave(3, dim=-1)[..., ::3]
    fmt, one = Fp8("e4m3").stored_as(x.shape[-1]), torch.zeros(1, 1).int()
    for part in [x] if repeats > 1 else [x, *x.split(1, dim=-1)]:
        got = written(part, pool(fmt, part.shape[-1], 16, 1), fmt, one[..., None], one, impl=impl)
        values = got["codes"][0, 0].view(torch.float8_e4m3fn).float()
        assert torch.equal(values, part[0, 0, 0].float().clamp(-448, 448))
    bits = written(x, pool(Fp8("e5m2").stored_as(5), x.shape[-1], 16, 1), Fp8("e5m2").stored_as(5), one[..., None], one)
    assert torch.equal(bits["codes"][0, 0], x[0, 0, 0].to(torch.float8_e5m2).view(torch.uint8))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_half_precision_number_rounds_as_torch_rounds_it(name: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(1, 1, 256, 256)
    fmt = Format("fp8", 8, fp8=name, exponents=(-9,))  # type: ignore[arg-type]
    index, one = torch.arange(16).view(1, 1, 16).int(), torch.zeros(1, 1).int()
    got = written(every, pool(fmt, 256, 16, 16), fmt, index, one)["codes"].view(-1)
    limit = torch.finfo(FP8_DTYPES[name]).max
    values = every.float().view(-1) * 512  # infinities of half precision among them, and subnormals of both formats
    expected = values.clamp(-limit, limit).to(FP8_DTYPES[name]).view(torch.uint8)
    broken = values.isnan()
    assert torch.equal(got[~broken], expected[~broken])
    assert bool(((got[broken] & 0x7F) == 0x7F).all())
    small = written(every, pool(fmt, 256, 16, 16), fmt._replace(exponents=(4,)), index, one)["codes"].view(-1)
    values = every.float().view(-1) / 16
    expected = values.clamp(-limit, limit).to(FP8_DTYPES[name]).view(torch.uint8)
    assert torch.equal(small[~broken], expected[~broken])


@BOTH
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_groups_without_range_come_back_exactly(impl: str, axis: str) -> None:
    codec = Affine(4, axis, 16)  # type: ignore[arg-type]
    fmt, one = codec.stored_as(64), torch.zeros(1, 1).int()
    x = torch.empty(1, 1, 16, 64)
    for group, value in enumerate([0.0, 100.0, -3.5]):
        x[..., group * 16 : group * 16 + 16] = value
    x[..., 48:] = torch.randn(16, 16, generator=rng())
    got = written(x, pool(fmt, 64, 16, 1), fmt, one[..., None], one, impl=impl)
    back = restored_values(got, fmt, 64, torch.float32)[0]
    assert torch.equal(back[:, :48], x[0, 0, :, :48])
    alone = Affine(4, axis, 16).encode(x[0, :, :, 48:])  # type: ignore[arg-type]
    assert torch.equal(back[:, 48:], codec.decode(alone, 16, torch.float32)[0])


@BOTH
@pytest.mark.parametrize("group", [16, 64])
def test_a_constant_that_rounds_up_has_no_negative_scale(impl: str, group: int) -> None:
    # 0.7 lies below its fp16 neighbour, 0.1 above: the stored zero passes the top of one group.
    fmt, one = Affine(8, "token", group).stored_as(64), torch.zeros(1, 1).int()
    x = torch.full((1, 1, 2, 64), 0.7)
    x[0, 0, 1] = 0.1
    got = written(x, pool(fmt, 64, 16, 1), fmt, one[..., None], one, impl=impl)
    assert bool((got["scale"][0, 0] == 0).all())
    assert bool((got["scale"][0, 1] > 0).all())
    assert torch.equal(got["zero"][0, 0], torch.tensor(0.7).half().expand(64 // group))
    back = restored_values(got, fmt, 64, torch.float32)[0, :2]
    torch.testing.assert_close(back, x[0, 0], rtol=2.0**-11, atol=0)


@BOTH
def test_a_head_of_zeros_has_no_scale(impl: str) -> None:
    fmt, one = Fp8("e4m3", "dynamic").stored_as(64), torch.zeros(1, 1).int()
    got = written(torch.zeros(1, 1, 3, 64), pool(fmt, 64, 16, 1), fmt, one[..., None], one, impl=impl)
    assert not got["codes"][0, :3].any()
    assert not got["exponent"][0, :3].any()


@BOTH
def test_a_dynamic_scale_is_the_smallest_that_fits(impl: str) -> None:
    fmt, one = Fp8("e4m3", "dynamic").stored_as(64), torch.zeros(1, 1).int()
    x = torch.zeros(1, 1, 4, 64)
    x[0, 0, :, 5] = -448 * torch.tensor([1.0, 2.0**-30, 1 + 2.0**-20, 2.0**100])
    got = written(x, pool(fmt, 64, 16, 1), fmt, one[..., None], one, impl=impl)
    assert got["exponent"][0, :4, 0].tolist() == [0, -30, 1, 100]


@BOTH
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 33])
def test_one_token_at_a_time_equals_all_at_once(impl: str, tokens: int) -> None:
    codec = Affine(4, "token", 16)
    fmt, index = codec.stored_as(80), torch.tensor([[[2, 0, 1]]]).int()
    x = torch.randn(1, 1, tokens, 80, generator=rng(tokens))
    streams = pool(fmt, 80, 16, 3)
    whole = written(x, streams, fmt, index, torch.zeros(1, 1).int(), impl=impl)
    for part in [slice(t, t + 1) for t in range(min(tokens, 5))] + [slice(5, tokens)] * (tokens > 5):
        streams = written(x[:, :, part], streams, fmt, index, torch.full((1, 1), part.start).int(), impl=impl)
    assert same(streams, whole)
    # Written again from token 3 on, nothing of the first time is left there.
    again = torch.randn(1, 1, 2, 80, generator=rng(99))
    streams = written(again, streams, fmt, index, torch.full((1, 1), 3).int(), impl=impl)
    packed = codec.encode(again[0])
    assert torch.equal(streams["codes"][2, 3:5], packed["codes"][0])


@pytest.mark.parametrize("mode", ["asymmetric", "symmetric", "midrise"])
def test_ties_round_to_even(mode: str) -> None:
    # Scale exactly 1: values halfway between codes.
    ends = {"asymmetric": (0.0, 15.0), "symmetric": (-7.0, 7.0), "midrise": (-7.5, 7.5)}[mode]
    x = torch.linspace(ends[0], ends[1], 31).repeat(2)[:32].view(1, 1, 1, 32)
    fmt, one = Affine(4, "token", 32, mode).stored_as(32), torch.zeros(1, 1).int()  # type: ignore[arg-type]
    got = written(x, pool(fmt, 32, 16, 1), fmt, one[..., None], one)
    assert got["scale"][0, 0, 0].item() == 1.0
    assert same(got, written(x, pool(fmt, 32, 16, 1), fmt, one[..., None], one, impl="torch"))


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("mode", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_nan_shows_in_its_group_and_only_there(group: int, mode: str, head_dim: int) -> None:
    fmt, one = Affine(4, "token", group, mode).stored_as(head_dim), torch.zeros(1, 1).int()  # type: ignore[arg-type]
    x = torch.randn(1, 1, 2, head_dim, generator=rng())
    x[0, 0, 1, 20] = torch.nan
    got = written(x, pool(fmt, head_dim, 16, 1), fmt, one[..., None], one)
    scales = got["scale"][0, :2].isnan()
    assert scales.nonzero().tolist() == [[1, 20 // group]]


def test_infinity_saturates() -> None:
    fmt, one = Affine(8, "token", 32).stored_as(32), torch.zeros(1, 1).int()
    x = torch.zeros(1, 1, 1, 32)
    x[..., 0], x[..., 1] = torch.inf, -torch.inf
    got = written(x, pool(fmt, 32, 16, 1), fmt, one[..., None], one)
    assert same(got, written(x, pool(fmt, 32, 16, 1), fmt, one[..., None], one, impl="torch"))
    assert bool(got["scale"][0, 0].isfinite().all())


def test_nothing_to_write_writes_nothing() -> None:
    fmt, one = Raw().stored_as(64), torch.zeros(1, 1).int()
    streams = pool(fmt, 64, 16, 1)
    assert same(written(torch.zeros(1, 1, 0, 64), streams, fmt, one[..., None], one), streams)
    assert same(written(torch.zeros(1, 1, 4, 64), streams, fmt, one[..., None], one, one), streams)


@pytest.mark.parametrize(
    ("codec", "head_dim", "tokens", "word"),
    [
        (Affine(4, "token", 32), 96, 4, "width 32 cannot hold heads of 96, which take 48"),
        (Affine(4, "channel", 32), 64, 32, "group 32 and pages of 16"),
        (Affine(4, "channel", 16), 64, 17, "whole pages of 16 tokens, got 17"),
        (Affine(4, "token", 24), 64, 4, "multiple of the group, got 64 and group 24"),
    ],
)
def test_what_does_not_fit_is_refused(codec: Codec, head_dim: int, tokens: int, word: str) -> None:
    fmt, one = codec.stored_as(head_dim), torch.zeros(1, 1).int()
    streams = {n: s for n, s in pool(Affine(4).stored_as(64), 64, 16, 2).items() if n in fmt.names}
    with pytest.raises(ValueError, match=word):
        append(torch.zeros(1, 1, tokens, head_dim), streams, fmt, one[..., None], one)
    with pytest.raises(ValueError, match="missing"):
        append(torch.zeros(1, 1, tokens, head_dim), {}, fmt, one[..., None], one)


def test_double_precision_has_no_triton_path() -> None:
    fmt, one = Raw().stored_as(64), torch.zeros(1, 1).int()
    streams = pool(fmt, 64, 16, 1, torch.float64)
    with pytest.raises(ValueError, match="impl"):
        append(torch.zeros(1, 1, 1, 64).double(), streams, fmt, one[..., None], one, impl="triton")
