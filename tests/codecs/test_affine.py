"""Affine integers: the error of one step, groups without range, loud channels, known noise levels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import ALL_CODECS, PAGE, name_of

from kvlab.codecs import Affine
from kvlab.kernels.hadamard import hadamard

AFFINE = [codec for codec in ALL_CODECS if isinstance(codec, Affine)]


def widened(rows: torch.Tensor, codec: Affine, head_dim: int) -> torch.Tensor:
    """Scales or zeros as one number for each element."""
    if codec.axis == "channel":
        return rows.double().repeat_interleave(codec.group, dim=1)
    return rows.double().repeat_interleave(codec.group or head_dim, dim=2)


@pytest.mark.parametrize("codec", AFFINE, ids=name_of)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**20), loudness=st.floats(-8, 8), offset=st.floats(-50, 50))
def test_every_element_comes_back_within_half_a_stored_step(
    codec: Affine, seed: int, loudness: float, offset: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2 * PAGE, 64, generator=rng) * 2.0**loudness + offset
    packed = codec.encode(x)
    got, x = codec.decode(packed, 64, torch.float64), x.double()
    if codec.hadamard:  # the step holds where the codes are
        got, x = hadamard(got), hadamard(x)
    step, top = widened(packed["scale"], codec, 64), 2**codec.bits - 1
    bound = step / 2
    bound = bound + 2.0**-11 * top * step + 2.0**-24 * top  # the scale itself is rounded to fp16
    if codec.mode == "asymmetric":
        bound = bound + 2.0**-11 * widened(packed["zero"], codec, 64).abs()  # and so is the zero
    bound = bound + 1e-5 * x.abs().amax()  # float32 rotation
    assert bool(((got - x).abs() <= bound).all())


@given(bits=st.sampled_from([8, 4, 3, 2]), seed=st.integers(0, 2**16))
def test_codes_of_the_decoded_value_are_the_same_codes(bits: int, seed: int) -> None:
    # Encoding what was decoded must not drift.
    codec = Affine(bits=bits, group=16)
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(seed))
    once = codec.decode(codec.encode(x), 64, torch.float64)
    twice = codec.decode(codec.encode(once), 64, torch.float64)
    torch.testing.assert_close(twice, once, rtol=2.0**-9, atol=2.0**-9)


@pytest.mark.parametrize("head_dim", [15, 64, 80])
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("mode", ["asymmetric", "symmetric"])
def test_odd_lengths_are_stored_whole_or_refused_before_the_first_token(head_dim: int, group: int, mode: str) -> None:
    codec = Affine(bits=4, group=group, mode=mode)  # type: ignore[arg-type]
    if head_dim % group:
        with pytest.raises(ValueError, match=rf"head dim must be a multiple of .*got {head_dim}"):
            codec.check(head_dim, 2, PAGE)
        return
    codec.check(head_dim, 2, PAGE)
    x = torch.randn(2, 33, head_dim, generator=torch.Generator().manual_seed(group))
    whole = codec.decode(codec.encode(x), head_dim, torch.float32)
    for tokens in (1, 2, 3, 31, 33):
        packed = codec.encode(x[:, :tokens])
        assert packed["codes"].shape == (2, tokens, head_dim // 2)
        assert torch.equal(codec.decode(packed, head_dim, torch.float32), whole[:, :tokens])
    assert bool((whole.sign() == x.sign())[x.abs() > 0.5].all())  # no sign is lost in a nibble


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_groups_without_range_come_back_exactly(axis: str, bits: int) -> None:
    codec = Affine(bits=bits, axis=axis, group=PAGE)  # type: ignore[arg-type]
    x = torch.randn(1, PAGE, 64, generator=torch.Generator().manual_seed(3))
    neighbour = codec.decode(codec.encode(x), 64, torch.float32)
    for place, value in enumerate((0.0, 100.0, -3.5)):
        at = slice(place * 16, place * 16 + 16) if axis == "token" else slice(place, place + 1)
        x[:, :, at] = value
        neighbour[:, :, at] = value
    packed = codec.encode(x)
    assert torch.equal(codec.decode(packed, 64, torch.float32), neighbour)
    q = torch.ones(1, 1, 64, dtype=torch.float64)
    assert bool(torch.isfinite(codec.scores(q, packed)).all())


@pytest.mark.parametrize("mode", ["symmetric", "midrise"])
def test_zero_groups_are_zero_without_a_zero_point(mode: str) -> None:
    x = torch.zeros(1, 2, 64)
    assert torch.equal(Affine(bits=4, mode=mode).decode(Affine(bits=4, mode=mode).encode(x), 64, torch.float32), x)  # type: ignore[arg-type]


def rms_of_quiet_channels(codec: Affine) -> float:
    x = torch.randn(8, 512, 64, generator=torch.Generator().manual_seed(11))
    x[:, :, 17] += 100
    error = (codec.decode(codec.encode(x), 64, torch.float32) - x).square()
    error[:, :, 17] = 0
    return float((error.sum() / (error.numel() * 63 / 64)).sqrt())


def test_one_loud_channel_drowns_token_groups_but_not_channel_groups() -> None:
    # One step of a token group is about (100 + 4) / 15, and every quiet channel is rounded to it.
    assert rms_of_quiet_channels(Affine(bits=4, group=0)) == pytest.approx(2.3, rel=0.03)
    assert rms_of_quiet_channels(Affine(bits=4, axis="channel", group=256)) == pytest.approx(0.11, rel=0.03)
    # A smaller group costs more bits and has a smaller step.
    assert rms_of_quiet_channels(Affine(bits=4, axis="channel", group=32)) == pytest.approx(0.078, rel=0.03)
    # A rotation spreads the loud channel over all others: no cure.
    assert rms_of_quiet_channels(Affine(bits=4, group=0, hadamard=True)) > 0.5


@pytest.mark.parametrize(
    ("codec", "nmse"),
    [
        (Affine(bits=4, group=128), 0.00997),
        (Affine(bits=4, group=128, clip=0.92), 0.00915),
        (Affine(bits=4, group=128, mode="midrise", clip=0.88), 0.0104),
        (Affine(bits=4, group=64, mode="midrise", clip=0.92), 0.0093),
        (Affine(bits=4, group=128, mode="symmetric", clip=0.88), 0.0118),
        (Affine(bits=2, group=128), 0.251),
        (Affine(bits=2, group=128, clip=0.60), 0.119),
        (Affine(bits=2, group=32, clip=0.72), 0.102),
        (Affine(bits=2, group=128, mode="midrise", clip=0.52), 0.122),
        (Affine(bits=3, group=128), 0.0459),
        (Affine(bits=3, group=128, clip=0.80), 0.0346),
        (Affine(bits=8, group=128), 3.5e-5),
    ],
    ids=lambda x: x.label if isinstance(x, Affine) else None,
)
def test_noise_on_gaussian_data(codec: Affine, nmse: float) -> None:
    x = torch.randn(4, 4096, 128, generator=torch.Generator().manual_seed(5))
    for data in (x, hadamard(x)):
        error = codec.decode(codec.encode(data), 128, torch.float32) - data
        assert float(error.square().mean() / data.square().mean()) == pytest.approx(nmse, rel=0.03)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Affine(bits=4, group=128), 4.25),
        (Affine(bits=4, group=128, mode="midrise"), 4.125),
        (Affine(bits=4, group=64, mode="midrise"), 4.25),
        (Affine(bits=2, group=32), 3.0),
        (Affine(bits=3, group=128, mode="symmetric"), 3.125),
        (Affine(bits=8, group=128), 8.25),
        (Affine(bits=2, axis="channel", group=64), 2.5),
    ],
    ids=lambda x: x.label if isinstance(x, Affine) else None,
)
def test_effective_bits_count_scales_and_zeros(codec: Affine, bits: float) -> None:
    page = codec.group if codec.axis == "channel" else PAGE
    assert codec.effective_bits(128, page, torch.bfloat16) == bits


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"clip": 0.0}, "clip must lie in"),
        ({"clip": float("nan")}, "clip must lie in"),
        ({"group": -1}, "group must be positive"),
        ({"group": 0, "axis": "channel"}, "group must be positive"),
    ],
)
def test_impossible_settings_are_refused(fields: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Affine(**fields)


def test_checks_name_the_rule() -> None:
    with pytest.raises(ValueError, match="multiple of the group, got 80 and group 32"):
        Affine(bits=4, group=32).check(80, 2, 16)
    with pytest.raises(ValueError, match="one page, got group 32 and page_tokens 16"):
        Affine(bits=4, axis="channel", group=32).check(64, 2, 16)
