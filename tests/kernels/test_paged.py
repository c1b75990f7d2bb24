"""Decode attention from pages: the reference against plain attention, the Triton kernels against the reference.

Without a GPU the kernels run in Triton's interpreter, in float32 and float16. Slots, pages and window places without a
token hold NaN or the largest code.
"""

import os

import pytest
import torch
from paged_case import Case

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.kernels.attend import attend_reference, attention_mass
from kvlab.kernels.dispatch import interpreted
from kvlab.kernels.formats import RAW, Format, restored_values
from kvlab.kernels.paged import (
    Centring,
    Chosen,
    Decoded,
    Fresh,
    LaunchOptions,
    Pages,
    decode,
    decode_reference,
    resolved,
)

pytest.importorskip("triton")
DEVICE = "cpu" if interpreted() else "cuda"
SINGLE = LaunchOptions(32, 4, 2, 3, torch.float32)
# A GPU's exp2 and its float32 on tensor cores are good to a few units in the last place.
TIGHT = 1e-5 if DEVICE == "cpu" else 5e-5
HALF = LaunchOptions(32, 4, 2, 2, torch.float16)
UNEVEN = [[37, 0], [1, 32]]


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)  # shown where a test fails
    torch.manual_seed(seed)


def close(got: Decoded, want: Decoded, relative: float) -> None:
    """Errors against the largest entry, and nothing that is not a number."""
    for mine, right in ((got.out, want.out), (got.lse.exp(), want.lse.exp()), (got.mass, want.mass)):
        if right is None:
            assert mine is None
            continue
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(
            mine.double(), right.double(), rtol=relative, atol=relative * float(right.abs().max())
        )


def both(case: Case, options: LaunchOptions = SINGLE, **asked) -> tuple[Decoded, Decoded]:
    """Triton's answer and the float64 one."""
    want = decode_reference(*case.arguments(torch.float64), **asked)
    return decode(*case.arguments(), options=options, impl="triton", **asked), want


def chunks(rows: list[list[list[int]]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


# --- the reference ---


def test_the_reference_is_plain_attention() -> None:
    case = Case(Raw(), Raw(), [[20, 20, 20]], [4], group=3, dim=32)
    q, pages, _, _, raw, scale = case.arguments(torch.float64)
    sinks = torch.randn(9)
    got = decode_reference(*case.arguments(torch.float64), softcap=3.0, sink_logits=sinks, mass=True)
    ids = pages.index[0].long()
    k, v = (
        torch.cat([s["data"][ids].flatten(1, 2)[:, :20].double(), x[0]], 1)
        for s, x in ((pages.k, raw.k), (pages.v, raw.v))
    )
    want = attend_reference(q[0].unsqueeze(1), k, v, scale, softcap=3.0, sink_logits=sinks)
    torch.testing.assert_close(got.out[0], want[:, 0], rtol=1e-12, atol=1e-12)
    logits = 3 * torch.tanh((q.view(3, 3, 32) @ k.mT * scale) / 3)
    probs = torch.cat([logits, sinks.view(3, 3, 1).double()], -1).softmax(-1)[..., :-1]
    mass = attention_mass(probs, torch.ones(1))
    assert got.mass is not None
    torch.testing.assert_close(got.mass[0, :, :20], mass[:, :20], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.mass[0, :, -4:], mass[:, 20:], rtol=1e-12, atol=1e-12)


def test_the_reference_reads_chosen_chunks_only() -> None:
    case = Case(Raw(), Raw(), [[20]], [1], group=1, dim=16)
    whole = decode_reference(
        *case.arguments(torch.float64), chosen=Chosen(torch.tensor([[[0, 1]]], dtype=torch.int32), 16)
    )
    torch.testing.assert_close(whole.out, decode_reference(*case.arguments(torch.float64)).out)
    some = decode_reference(
        *case.arguments(torch.float64), chosen=Chosen(torch.tensor([[[2, -1]]], dtype=torch.int32), 8), mass=True
    )
    assert some.mass is not None
    assert set(some.mass[0, 0].nonzero().flatten().tolist()) == {16, 17, 18, 19, 32}


# --- the kernels ---

FORMATS: list[tuple[Codec, Codec]] = [
    (Raw(), Fp8()),
    (Fp8("e4m3", exponents=(2, -1)), Fp8("e5m2", exponents=(-1,))),
    (Fp8("e5m2", "dynamic", hadamard=True), Fp8("e4m3", "dynamic")),
    (Affine(8, group=0, mode="symmetric"), Affine(4, group=32)),
    (Affine(4, group=16), Affine(8, "channel", 16)),
    (Affine(4, group=0, mode="midrise", hadamard=True), Affine(4, group=0, mode="symmetric", hadamard=True)),
    (Affine(3, group=32), Affine(3, group=16, mode="midrise")),
    (Affine(4, "channel", 16), Affine(2, group=32)),
    (Affine(2, "channel", 16, "midrise", hadamard=True), Affine(3, "channel", 16)),
    (Affine(2, group=16), Affine(2, "channel", 16, "symmetric")),
]


@pytest.mark.parametrize(("key", "value"), FORMATS, ids=lambda codec: codec.label)
def test_every_format_in_float32(key: Codec, value: Codec) -> None:
    got, want = both(Case(key, value, UNEVEN, [3, 1], group=4, dim=64, device=DEVICE))
    close(got, want, TIGHT)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (Fp8("e5m2"), Fp8("e4m3", "dynamic")),
        (Affine(8, group=32), Affine(8, group=0)),
        (Affine(4, group=0, mode="midrise", hadamard=True), Affine(4, group=32)),
        (Affine(2, "channel", 16), Affine(3, group=32)),
    ],
    ids=lambda codec: codec.label,
)
def test_quantized_streams_in_float16(key: Codec, value: Codec) -> None:
    got, want = both(Case(key, value, UNEVEN, [3, 1], dim=64, dtype=torch.float16, device=DEVICE), HALF)
    close(got, want, 2e-3)


@pytest.mark.parametrize(
    ("dim", "high", "group", "count", "page", "key", "value"),
    [
        (80, 80, 1, 63, 16, Affine(4, group=16), Affine(4, group=0, hadamard=True)),
        (96, 64, 3, 33, 16, Affine(3, group=32, hadamard=True), Affine(2, group=8)),
        (128, 128, 7, 257, 64, Affine(4, "channel", 64), Affine(4, group=32)),
        (256, 256, 4, 17, 32, Affine(4, group=128, mode="midrise", hadamard=True), Affine(8, group=0, hadamard=True)),
        (64, 128, 8, 40, 32, Raw(), Fp8()),
        (48, 24, 2, 20, 16, Affine(8, group=48), Affine(4, group=8)),
    ],
)  # fmt: skip
def test_awkward_shapes(dim: int, high: int, group: int, count: int, page: int, key: Codec, value: Codec) -> None:
    case = Case(key, value, [[count, 5]], [2], group=group, dim=dim, high=high, page=page, device=DEVICE)
    got, want = both(case, SINGLE._replace(tile=64, splits=2))
    close(got, want, TIGHT)


@pytest.mark.parametrize("splits", [1, 4, 9])
@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_and_splits_change_nothing(tile: int, splits: int) -> None:
    case = Case(Raw(), Raw(), [[70, 1]], [1], group=2, dim=32, device=DEVICE)
    close(*both(case, LaunchOptions(tile, 4, 2, splits)), TIGHT)


def test_mass_is_each_keys_share() -> None:
    case = Case(Affine(8, group=0), Raw(), [[70, 0], [1, 33]], [34, 1], group=3, dim=32, device=DEVICE)
    # A key in the second tile of the window that outweighs those before it: each tile's share has its own reference.
    case.raw.k[0, :, 33] = case.q[0].view(2, 3, 32).sum(1)
    got, want = both(case, SINGLE._replace(splits=2), mass=True)
    close(got, want, 1e-3)
    assert got.mass is not None
    torch.testing.assert_close(got.mass.sum(-1), torch.ones(2, 2, device=DEVICE), rtol=1e-3, atol=1e-3)


def test_chosen_chunks() -> None:
    """Chunks of half a page, of one and of two; some heads choose nothing, some what they do not hold."""
    case = Case(Affine(4, "channel", 16), Affine(4, group=16), [[70, 0], [1, 33]], [2, 1], dim=64, device=DEVICE)
    rows = [[[0, 3, 8], [0, 1, -1]], [[0, -1, -1], [4, -1, 1]]]
    for tokens in (8, 16, 32):
        chosen = Chosen(chunks(rows), tokens)
        close(
            *both(case, SINGLE._replace(tile=16 if tokens == 8 else 32), chosen=chosen, mass=tokens == 16),
            1e-3 if tokens == 16 else TIGHT,
        )


@pytest.mark.parametrize("positions", [True, False])
def test_softcap_sinks_and_centring_together(positions: bool) -> None:
    case = Case(Affine(4, group=32, hadamard=True), Raw(), UNEVEN, [3, 1], dim=32, positions=positions, device=DEVICE)
    centring = Centring(torch.randn(2, 8, 32, device=DEVICE), torch.randn(600, 32, device=DEVICE))
    sinks = torch.randn(8, device=DEVICE)
    close(*both(case, softcap=4.0, sink_logits=sinks, centring=centring), TIGHT)


def test_no_key_gives_zeros_and_one_key_its_value() -> None:
    case = Case(Affine(4, group=32), Affine(4, group=32), [[0, 0], [0, 1]], [0, 0], dim=32, device=DEVICE)
    case.raw = Fresh(case.raw.k.new_zeros(2, 2, 0, 32), case.raw.v.new_zeros(2, 2, 0, 32), case.raw.counts)
    got, want = both(case, mass=True)
    close(got, want, 1e-4)
    assert (got.out[0] == 0).all()
    assert (got.out[1, :4] == 0).all()
    assert torch.isneginf(got.lse[0]).all()
    with_sink, want = both(case, sink_logits=torch.zeros(8, device=DEVICE))
    close(with_sink, want, TIGHT)


def test_query_heads_read_their_own_kv_head() -> None:
    case = Case(Raw(), Raw(), [[20, 20, 20]], [1], group=3, dim=64, device=DEVICE)
    case.pages.v["data"].fill_(torch.nan)
    for head in range(3):
        case.pages.v["data"][case.pages.index[0, head].long()] = head + 1.0
        case.raw.v[0, head] = head + 1.0
    got = decode(*case.arguments(), options=SINGLE, impl="triton")
    want = torch.tensor([1.0, 2.0, 3.0], device=DEVICE).repeat_interleave(3)
    torch.testing.assert_close(got.out[0], want.unsqueeze(1).expand(9, 64), rtol=1e-6, atol=1e-6)


def test_scales_are_applied_once_and_each_to_its_own_stream() -> None:
    def run(key: tuple[int, ...], value: tuple[int, ...]) -> Decoded:
        case.key, case.value = Format("fp8", 8, exponents=key), Format("fp8", 8, exponents=value)
        got, want = both(case)
        close(got, want, TIGHT)
        return got

    case = Case(Fp8(), Fp8(), [[40, 40]], [0], group=2, dim=32, device=DEVICE)
    plain, louder = run((0,), (0,)), run((0,), (1, -2))
    torch.testing.assert_close(louder.out[:, :2], 2 * plain.out[:, :2])
    torch.testing.assert_close(louder.out[:, 2:], plain.out[:, 2:] / 4)
    assert not torch.allclose(run((1,), (0,)).out, plain.out)


def test_large_and_small_queries_fit_half_precision() -> None:
    """Queries whose products would overflow or vanish in float16 are scaled by a power of two on the way in."""
    for size in (1e6, 1e-6):
        case = Case(Affine(4, group=32), Affine(4, group=32), [[20, 20]], [1], dim=32, device=DEVICE)
        case.q = case.q * size
        q, *rest, _ = case.arguments()
        want = decode_reference(q.double(), *rest, 0.2 / size)
        close(decode(q, *rest, 0.2 / size, options=HALF, impl="triton"), want, 2e-3)


def test_bits_of_every_fp8_code() -> None:
    """All finite codes of both formats as values, read one at a time: their weight is exactly 1."""
    for fmt, name in ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
        codes = torch.arange(256, dtype=torch.uint8)
        codes[~torch.isfinite(codes.view(fmt).float())] = 0
        pages = Pages(
            {"data": torch.zeros(1, 16, 16)}, {"codes": codes.view(1, 1, 256).repeat(1, 16, 1)},
            torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32), 16,
        )  # fmt: skip
        raw = Fresh(torch.zeros(1, 1, 0, 16), torch.zeros(1, 1, 0, 256), torch.zeros(1, dtype=torch.int32))
        pages = pages._replace(**{n: {s: x.to(DEVICE) for s, x in getattr(pages, n).items()} for n in ("k", "v")})
        pages = pages._replace(index=pages.index.to(DEVICE), counts=pages.counts.to(DEVICE))
        raw = Fresh(*(x.to(DEVICE) for x in raw))
        value = Format("fp8", 8, fp8=name, exponents=(0,))
        got = decode(torch.zeros(1, 1, 16, device=DEVICE), pages, RAW, value, raw, 1.0, options=HALF, impl="triton")
        assert torch.equal(got.out[0, 0].cpu(), codes.view(fmt).float()), name


# --- what is refused ---


def test_what_does_not_fit_is_named() -> None:
    case = Case(Raw(), Raw(), [[4, 4]], [1], group=2, dim=16)
    q, pages, key, value, raw, scale = case.arguments()
    with pytest.raises(ValueError, match="5 query and 2 KV heads"):
        decode(q.new_zeros(1, 5, 16), pages, key, value, raw, scale)
    with pytest.raises(ValueError, match=r"pages\.k lacks \['codes'"):
        decode(q, pages, Format("fp8", 8), value, raw, scale)
    with pytest.raises(ValueError, match="divide a page or be whole pages, got 12 and 16"):
        decode(q, pages, key, value, raw, scale, chosen=Chosen(torch.zeros(1, 2, 1, dtype=torch.int32), 12))
    with pytest.raises(ValueError, match="got 'torch'"):
        decode(q, pages, key, value, raw, scale, impl="torch")
    assert resolved(q) == "reference"


def test_odd_bytes_are_refused_by_triton() -> None:
    case = Case(Raw(), Affine(4, group=0), [[4]], [1], group=1, dim=16, high=12, device=DEVICE)
    with pytest.raises(ValueError, match="whole words of 4 bytes for triton, got 6"):
        decode(*case.arguments(), impl="triton")


def test_reference_reads_what_formats_read() -> None:
    case = Case(Affine(4, group=16), Raw(), [[16]], [1], group=1, dim=16)
    held = {n: x[case.pages.index[0, 0].long()][:1].flatten(0, 1)[None] for n, x in case.pages.k.items()}
    k = restored_values(held, case.key, 16, torch.float64)
    logits = case.q[0].double() @ torch.cat([k[0], case.raw.k[0, 0].double()]).mT / 4
    want = decode_reference(*case.arguments(torch.float64)).lse
    torch.testing.assert_close(want[0], logits.logsumexp(-1))
