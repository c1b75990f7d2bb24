"""Changes of the input that must not change attention, whatever the row stores and however it reads."""

import pytest
import torch
from rows import Sequence, make_row
from variants import ALL_SCORERS, SOME_CODECS, name_of

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.kernels.hadamard import hadamard
from kvlab.policies import Fraction, Scorer, TopK

PARTS = [90, 1, 1, 7, *[1] * 24]
SCALE = 0.2


def outputs(config: KVConfig, sequence: Sequence) -> torch.Tensor:
    """What every token of the sequence reads, forward by forward."""
    row = make_row(config, sequence.k.shape[0], sequence.k.shape[2])
    out = []
    for q, k, v in sequence.forwards(PARTS):
        served, mass = row.attend(q, k, v, SCALE)
        row.commit(k, v, mass)
        out.append(served)
    return torch.cat(out, dim=1)


def sequence(seed: int = 0) -> Sequence:
    return Sequence(sum(PARTS), heads=2, query_heads=6, head_dim=32, seed=seed)


def settings(key: Codec, value: Codec | None = None, **more: object) -> KVConfig:
    return KVConfig(key=key, value=value or key, sink_tokens=3, recent_tokens=8, page_tokens=16, **more)  # type: ignore[arg-type]


def moves_with_its_scale(codec: Codec) -> bool:
    """A static fp8 scale stays where it is while values double: what was subnormal then keeps one bit more."""
    return not (isinstance(codec, Fp8) and codec.scale == "static")


@pytest.mark.parametrize("codec", [c for c in SOME_CODECS if moves_with_its_scale(c)], ids=name_of)
def test_keys_twice_as_large_and_queries_half_as_large_change_nothing(codec: Codec) -> None:
    plain, scaled = sequence(), sequence()
    scaled.q, scaled.k = scaled.q / 2, scaled.k * 2
    assert torch.equal(outputs(settings(codec), plain), outputs(settings(codec), scaled))


@pytest.mark.parametrize("codec", [c for c in SOME_CODECS if moves_with_its_scale(c)], ids=name_of)
def test_values_twice_as_large_double_the_output(codec: Codec) -> None:
    plain, scaled = sequence(), sequence()
    scaled.v = scaled.v * 2
    assert torch.equal(2 * outputs(settings(Raw(), codec), plain), outputs(settings(Raw(), codec), scaled))


def test_a_rotation_of_queries_and_keys_leaves_every_logit() -> None:
    plain, turned = sequence(), sequence()
    turned.q, turned.k = hadamard(turned.q), hadamard(turned.k)
    torch.testing.assert_close(outputs(settings(Raw()), plain), outputs(settings(Raw()), turned), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_rotated_codec_stores_the_codes_of_rotated_keys(bits: int) -> None:
    plain, turned = sequence(), sequence()
    turned.q, turned.k = hadamard(turned.q), hadamard(turned.k)
    # No raw tokens beside the pages, which alone are rotated.
    rotated = KVConfig(key=Affine(bits=bits, group=0, hadamard=True), sink_tokens=0, recent_tokens=0)
    straight = KVConfig(key=Affine(bits=bits, group=0), sink_tokens=0, recent_tokens=0)
    torch.testing.assert_close(outputs(rotated, plain), outputs(straight, turned), rtol=0, atol=1e-12)


def test_one_vector_added_to_every_key_shifts_every_logit_alike() -> None:
    plain, shifted = sequence(), sequence()
    shifted.k = shifted.k + torch.linspace(-2, 2, 32, dtype=torch.float64)
    torch.testing.assert_close(outputs(settings(Raw()), plain), outputs(settings(Raw()), shifted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", [Raw(), Affine(bits=4, group=0)], ids=name_of)
@pytest.mark.parametrize("scorer", [s for s in ALL_SCORERS if s.kind != "last_selected"], ids=name_of)
def test_a_budget_of_everything_is_no_budget(scorer: Scorer, codec: Codec) -> None:
    kept = settings(codec, scorer=scorer, budget=Fraction(1.0))
    torch.testing.assert_close(outputs(kept, sequence()), outputs(settings(codec), sequence()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", SOME_CODECS, ids=name_of)
def test_reading_every_chunk_is_reading_everything(codec: Codec) -> None:
    reader = TopK(fraction=1.0, chunk=16, dense_layers=0)
    torch.testing.assert_close(
        outputs(settings(codec, reader=reader), sequence()), outputs(settings(codec), sequence()), rtol=0, atol=1e-12
    )
