"""What every codec in CODECS must do, whatever it is."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import ALL_CODECS, PAGE, fits, name_of

from kvlab.codecs import CODECS, Codec

every_codec = pytest.mark.parametrize("codec", ALL_CODECS, ids=name_of)
HEADS = 2


def sample(tokens: int, head_dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(HEADS, tokens, head_dim, generator=torch.Generator().manual_seed(seed))
    x[:, :, 3] *= 6  # one channel louder than the rest
    return x.to(dtype)


def tokens_for(codec: Codec) -> list[int]:
    return [16, 48] if codec.block_tokens == PAGE else [1, 2, 3, 31, 33]


def test_the_registry_names_classes_by_their_kind() -> None:
    assert {kind: cls.kind for kind, cls in CODECS.items()} == {kind: kind for kind in CODECS}


@every_codec
def test_streams_say_exactly_what_encode_returns(codec: Codec) -> None:
    for head_dim in (64, 80):
        if not fits(codec, head_dim):
            continue
        x = sample(3 * PAGE, head_dim)
        packed = codec.encode(x)
        streams = codec.streams(head_dim, PAGE, torch.float32)
        assert packed.keys() == streams.keys()
        for name, stream in streams.items():
            assert packed[name].shape == (HEADS, 3 * stream.rows, stream.width)
            assert packed[name].dtype == stream.dtype
        held = sum(rows.numel() * rows.element_size() for rows in packed.values())
        assert held == HEADS * 3 * sum(s.page_bytes for s in streams.values())
        assert codec.effective_bits(head_dim, PAGE, torch.float32) == held * 8 / x.numel()


@every_codec
def test_encoding_is_a_function_of_the_values_alone(codec: Codec) -> None:
    x = sample(2 * PAGE, 80 if fits(codec, 80) else 64)
    before = x.clone()
    first, again = codec.encode(x), codec.encode(x)
    strided = codec.encode(x.repeat_interleave(2, dim=1)[:, ::2])
    transposed = codec.encode(x.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(x, before)
    for other in (again, strided, transposed):
        assert all(torch.equal(first[name], other[name]) for name in first)


@every_codec
def test_a_prefix_encodes_to_a_prefix(codec: Codec) -> None:
    # Appending block by block must store what a bulk append stores.
    head_dim, block = 64, codec.block_tokens
    x = sample(4 * block + (0 if block > 1 else 1), head_dim)
    whole = codec.encode(x)
    for blocks in (1, 2, 3):
        part = codec.encode(x[:, : blocks * block])
        for name, rows in part.items():
            assert torch.equal(rows, whole[name][:, : rows.shape[1]])
    singles = [codec.encode(x[:, t : t + block]) for t in range(0, x.shape[1], block)]
    for name, rows in whole.items():
        assert torch.equal(torch.cat([s[name] for s in singles], dim=1), rows)


@every_codec
@pytest.mark.parametrize("head_dim", [64, 80])
def test_products_equal_those_of_the_decoded_rows(codec: Codec, head_dim: int) -> None:
    if not fits(codec, head_dim):
        pytest.skip(f"{codec.label} does not store head dim {head_dim}")
    for tokens in tokens_for(codec):
        packed = codec.encode(sample(tokens, head_dim, seed=tokens))
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
            rng = torch.Generator().manual_seed(tokens + 1)
            q = torch.randn(HEADS, 6, head_dim, dtype=dtype, generator=rng)
            p = torch.rand(HEADS, 6, tokens, dtype=dtype, generator=rng)
            x = codec.decode(packed, head_dim, dtype)
            assert x.dtype == dtype
            assert x.shape == (HEADS, tokens, head_dim)
            for got, expected in ((codec.scores(q, packed), q @ x.mT), (codec.mix(p, packed, head_dim), p @ x)):
                assert got.dtype == dtype
                scale = max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale)


@every_codec
def test_decoding_to_a_narrow_dtype_rounds_once(codec: Codec) -> None:
    packed = codec.encode(sample(2 * PAGE, 64))
    for dtype in (torch.bfloat16, torch.float16):
        expected = codec.decode(packed, 64, torch.float32).to(dtype)
        assert torch.equal(codec.decode(packed, 64, dtype), expected)


@every_codec
def test_a_narrow_input_is_widened_before_anything_is_computed(codec: Codec) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = sample(2 * PAGE, 64, dtype=dtype)
        narrow, wide = codec.encode(x), codec.encode(x.float())
        for name, rows in narrow.items():
            assert torch.equal(rows.float(), wide[name].float()), name


@every_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nothing_finite_turns_into_nan_or_infinity(codec: Codec, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    rows = torch.zeros(HEADS, 2 * PAGE, 64, dtype=dtype)
    rows[:, 1] = 100
    rows[:, 2] = -3.5
    rows[:, 3, ::2] = 60000
    rows[:, 4] = torch.finfo(dtype).tiny
    rows[:, 5, :3] = -1e-7
    rows[:, 6] = 300 if dtype in (torch.float16, torch.bfloat16) else 1e30
    rows[:, 7, 0] = -min(top, 3e38) / (64 if "hadamard" in {f.name for f in dataclasses.fields(codec)} else 1)  # type: ignore[arg-type]
    packed = codec.encode(rows)
    x = codec.decode(packed, 64, torch.promote_types(dtype, torch.float32))
    assert bool(torch.isfinite(x).all())
    assert all(bool(torch.isfinite(r).all()) for r in packed.values() if r.is_floating_point())


@every_codec
def test_head_dim_fifteen_is_stored_right_or_refused_clearly(codec: Codec) -> None:
    if fits(codec, 15):
        x = sample(PAGE, 15)
        assert codec.decode(codec.encode(x), 15, torch.float32).shape == x.shape
        return
    with pytest.raises(ValueError, match=r"head dim must be a multiple of .* got 15"):
        codec.check(15, HEADS, PAGE)


@every_codec
@settings(max_examples=3)
@given(seed=st.integers(0, 2**20), loudness=st.floats(-6, 6))
def test_error_stays_below_the_signal(codec: Codec, seed: int, loudness: float) -> None:
    # A bound that any codec worth its bytes meets on plain data. The widest is three levels for 64 elements.
    x = torch.randn(HEADS, 2 * PAGE, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**loudness
    error = codec.decode(codec.encode(x), 64, torch.float64) - x
    assert float(error.pow(2).mean()) < 0.6 * float(x.double().pow(2).mean())
