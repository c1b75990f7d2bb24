"""FP8: saturation on every path, scales applied once, known rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs import Fp8, Raw
from kvlab.codecs.base import to_raw
from kvlab.codecs.fp8 import calibrated_exponents

LOUD = [448.0, 460.0, 470.0, 900.0, -5000.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("repeats", [1, 64])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "single"])
def test_values_beyond_the_format_saturate(dtype: torch.dtype, repeats: int, layout: str) -> None:
    codec = Fp8("e4m3")
    x = torch.tensor(LOUD, dtype=dtype).repeat(repeats).view(1, 1, -1)
    expected = torch.tensor([448.0, 448, 448, 448, -448]).repeat(repeats).view(1, 1, -1)
    if layout == "strided":
        x = x.repeat_interleave(3, dim=-1)[..., ::3]
    if layout == "single":
        packed = [codec.encode(x[..., i : i + 1]) for i in range(x.shape[-1])]
        got = torch.cat([codec.decode(p, 1, torch.float32) for p in packed], dim=-1)
    else:
        got = codec.decode(codec.encode(x), x.shape[-1], torch.float32)
    assert torch.equal(got, expected)
    # The rule: clipped is what lies above 448, whether or not rounding would have brought it back.
    if dtype is not torch.bfloat16:
        assert codec.clipped(x) == 4 * repeats


def test_products_see_saturated_values() -> None:
    codec = Fp8("e4m3")
    packed = codec.encode(torch.tensor(LOUD).view(1, 1, 5))
    assert codec.scores(torch.ones(1, 1, 5), packed).item() == 4 * 448 - 448
    assert codec.mix(torch.ones(1, 1, 1), packed, 5)[0, 0].tolist() == [448, 448, 448, 448, -448]


def test_e5m2_saturates_at_its_own_limit() -> None:
    codec = Fp8("e5m2")
    x = torch.tensor([57344.0, 60000.0, -1e30, float("inf")]).view(1, 1, 4)
    assert codec.decode(codec.encode(x), 4, torch.float32)[0, 0].tolist() == [57344, 57344, -57344, 57344]
    assert codec.clipped(x) == 3


@pytest.mark.parametrize(
    ("format", "half_ulp", "subnormal"), [("e4m3", 2.0**-4, 2.0**-10), ("e5m2", 2.0**-3, 2.0**-17)]
)
@given(exponent=st.integers(-10, 10), seed=st.integers(0, 2**16))
def test_relative_error_is_half_a_unit_in_the_last_place(
    format: str, half_ulp: float, subnormal: float, exponent: int, seed: int
) -> None:
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed)).double() * 2.0**exponent
    for codec in (Fp8(format, "static", (exponent,)), Fp8(format, "dynamic")):  # type: ignore[arg-type]
        error = (codec.decode(codec.encode(x), 64, torch.float64) - x).abs()
        assert bool((error <= half_ulp * x.abs() + subnormal * 2.0**exponent).all())


@pytest.mark.parametrize(
    ("codec", "nmse"), [(Fp8("e4m3"), 7.0e-4), (Fp8("e5m2"), 2.8e-3), (Fp8("e4m3", "dynamic"), 7.0e-4)]
)
@pytest.mark.parametrize("loudness", [1.0, 8.0])
def test_noise_on_gaussian_data_does_not_depend_on_the_scale(codec: Fp8, nmse: float, loudness: float) -> None:
    x = torch.randn(4, 2048, 128, generator=torch.Generator().manual_seed(5)) * loudness
    error = codec.decode(codec.encode(x), 128, torch.float32) - x
    assert float(error.square().mean() / x.square().mean()) == pytest.approx(nmse, rel=0.04)


@pytest.mark.parametrize("exponents", [(-2,), (0,), (2,), (-2, 2), (1, 0)])
@pytest.mark.parametrize("rotate", [False, True])
def test_a_scale_is_applied_exactly_once(exponents: tuple[int, ...], rotate: bool) -> None:
    # Multiplying by a power of two commutes with rounding, so every product must scale with it and nothing else.
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    plain = Fp8("e4m3", "static", (0,), rotate)
    codec = Fp8("e4m3", "static", exponents, rotate)
    factor = torch.tensor(exponents).float().exp2().view(-1, 1, 1)
    one, two = plain.encode(x), codec.encode(x * factor)
    assert torch.equal(one["codes"], two["codes"])
    assert torch.equal(codec.decode(two, 64, torch.float32), plain.decode(one, 64, torch.float32) * factor)
    q, p = torch.randn(2, 3, 64), torch.rand(2, 3, 5)
    torch.testing.assert_close(codec.scores(q, two), plain.scores(q, one) * factor)
    torch.testing.assert_close(codec.mix(p, two, 64), plain.mix(p, one, 64) * factor)


def test_a_dynamic_scale_belongs_to_its_token() -> None:
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))
    x = x * torch.tensor([1e-20, 1e-3, 1, 30, 1e4, 0]).view(1, 6, 1)
    codec = Fp8("e4m3", "dynamic")
    got = codec.decode(codec.encode(x), 64, torch.float64)
    assert bool(((got - x).abs() <= 2.0**-4 * x.abs() + 2.0**-17 * x.abs().amax(-1, keepdim=True)).all())
    assert torch.equal(got[:, 5], torch.zeros(1, 64, dtype=torch.float64))


def test_a_tiny_dynamic_scale_survives_a_half_precision_reader() -> None:
    # 2**-26 is no fp16 number, but 300 * 2**-26 is.
    codec = Fp8("e4m3", "dynamic")
    x = torch.full((1, 1, 4), 300 * 2.0**-26)
    assert codec.decode(codec.encode(x), 4, torch.float16)[0, 0, 0].item() == pytest.approx(300 * 2.0**-26, rel=0.07)


def test_raw_storage_ignores_scales_and_saturates() -> None:
    x = torch.tensor([[[1.0, 70000.0, -1e20]]])
    assert torch.equal(Raw().decode(Raw().encode(x), 3, torch.float32), x)
    assert to_raw(x, torch.float16)[0, 0].tolist() == [1.0, 65504.0, -65504.0]
    assert to_raw(x, torch.float32) is x


def test_calibration_picks_the_smallest_scale_that_fits() -> None:
    x = torch.zeros(3, 2, 4)
    x[0, 0, 0], x[1, 1, 1] = 896.0, -449.0
    exponents = calibrated_exponents(x)
    assert exponents[:2] == (1, 1)
    assert Fp8("e4m3", exponents=exponents).clipped(x) == 0
    assert calibrated_exponents(torch.full((1, 1, 1), 448.0)) == (0,)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"exponents": ()}, "at least one"),
        ({"exponents": (200,)}, r"\[-120, 120\]"),
        ({"scale": "dynamic", "exponents": (1,)}, "belong to scale='static'"),
    ],
)
def test_impossible_settings_are_refused(fields: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Fp8(**fields)


def test_exponents_must_match_the_heads() -> None:
    with pytest.raises(ValueError, match=r"1 or one per KV head \(3\), got 2"):
        Fp8(exponents=(0, 1)).check(64, 3, 16)
