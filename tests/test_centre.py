"""Centred keys against the row by its definition; what is stored, what is read, what never changes."""

from functools import partial
from typing import Any

import pytest
import torch
from rows import Sequence, make_centre, make_row, term_of
from slow_row import SlowRow

from kvlab.centre import Centre, joined
from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.kernels.rope import Rotary
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import AttentionMass, Fraction, Recency, Tokens, TopK
from kvlab.row import Row

HEADS, DIM = 2, 16
CODECS: list[Codec] = [
    Raw(),
    Fp8("e5m2", scale="dynamic", hadamard=True),
    Affine(bits=4, group=16),
    Affine(bits=3, group=0, mode="midrise", hadamard=True),
    Affine(bits=2, axis="channel", group=16),
]


def compare(config: KVConfig, parts: list[int], seed: int = 1, group: int = 3) -> Row:
    """Feed a row and its definition the same forwards; after each one everything agrees. Returns the row."""
    sequence = Sequence(sum(parts), HEADS, HEADS * group, DIM, seed)
    row = make_row(config, HEADS, DIM)
    assert row.centre is not None
    slow = SlowRow(config.at(0), HEADS, partial(term_of, row.centre))
    for q, k, v in sequence.forwards(parts):
        out, mass = row.attend(q, k, v, 0.1)
        row.commit(k, v, mass)
        torch.testing.assert_close(out, slow.forward(q, k, v, 0.1, None, None), rtol=0, atol=1e-9)
        assert row.positions().tolist() == [[t.position for t in head.pages] for head in slow.heads]
        dense = row.dense(torch.float64, DIM, DIM)[0]
        held = torch.stack([torch.stack([t.k for t in head.all()]) for head in slow.heads])
        torch.testing.assert_close(dense, held, rtol=0, atol=1e-9)
    return row


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.label)
def test_every_layout_is_what_the_definition_says(codec: Codec) -> None:
    config = KVConfig(key=codec, value=Affine(bits=4, group=16), centring="mean", sink_tokens=3, recent_tokens=5)
    compare(config, [37, 6, *[1] * 20, 9])


@pytest.mark.parametrize("scorer", [Recency(), AttentionMass(0.9)], ids=lambda s: s.label)
@pytest.mark.parametrize("budget", [Tokens(24), Fraction(0.5), Tokens(5)], ids=lambda b: b.label)
@pytest.mark.parametrize("codec", [CODECS[2], CODECS[4]], ids=lambda c: c.label)
def test_under_eviction_every_token_keeps_the_term_of_its_own_position(scorer: Any, budget: Any, codec: Codec) -> None:
    config = KVConfig(key=codec, scorer=scorer, budget=budget, centring="mean", sink_tokens=2, recent_tokens=4)
    row = compare(config, [50, 8, *[1] * 36])
    assert row.table.length < 94 - 6


@pytest.mark.parametrize("bound", ["minmax", "mean", "codec"])
@pytest.mark.parametrize("budget", [None, Tokens(70)], ids=["all", "some"])
def test_a_sparse_reader_sees_whole_keys(bound: Any, budget: Any) -> None:
    key = Affine(bits=4, axis="channel", group=16) if bound == "codec" else Affine(bits=4, group=16)
    reader = TopK(fraction=0.34, chunk=16, bound=bound, dense_layers=0)
    more = {} if budget is None else {"budget": budget, "scorer": AttentionMass()}
    config = KVConfig(key=key, reader=reader, centring="mean", sink_tokens=2, recent_tokens=4, **more)
    compare(config, [99, 6, *[1] * 20])


def test_raw_keys_lose_nothing_by_being_centred() -> None:
    plain = KVConfig(sink_tokens=0, recent_tokens=0)
    centred = KVConfig(centring="mean", sink_tokens=0, recent_tokens=0)
    rows, sequence = [make_row(c, HEADS, DIM) for c in (plain, centred)], Sequence(60, HEADS, 4, DIM, 3)
    for q, k, v in sequence.forwards([40, 7, 1, 1, 11]):
        outs = [row.attend(q, k, v, 0.1)[0] for row in rows]
        torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-12)
        for row in rows:
            row.commit(k, v)
    # Nothing of the constant is left in what is stored: else this would prove nothing.
    packed = rows[1].pages()[0]["data"]
    torch.testing.assert_close(packed, sequence.k - rows[1].centre.term(slice(0, 60), 60, torch.float64))  # type: ignore[union-attr]


def loud_keys(tokens: int, centre: Centre) -> Sequence:
    """Keys of spread 1 around the centre, turned to their positions."""
    sequence = Sequence(tokens, HEADS, HEADS * 2, DIM, 11)
    sequence.k += centre.term(slice(0, tokens), tokens, torch.float64)
    return sequence


def test_a_loud_constant_costs_a_centred_key_nothing() -> None:
    centre = make_centre(HEADS, DIM)
    centre = Centre(25 * centre.mu, centre.rotary)
    sequence, errors = loud_keys(96, centre), {}
    for centring in ("none", "mean"):
        config = KVConfig(key=Affine(bits=4, group=16), centring=centring, sink_tokens=0, recent_tokens=0)  # type: ignore[arg-type]
        row = make_row(config, HEADS, DIM)
        row.centre = None if centring == "none" else centre
        row.commit(sequence.k, sequence.v)
        error = row.dense(torch.float64, DIM, DIM)[0] - sequence.k
        errors[centring] = float(error.square().mean().sqrt())
    # Keys have spread 1: without a centre the step of a group is set by the constant, and their signal is gone.
    assert errors["none"] > 1.0
    assert errors["mean"] < 0.12


def test_one_loud_channel_costs_the_others_their_signal_unless_it_is_centred() -> None:
    keys = torch.randn(HEADS, 512, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    keys[..., 7] += 100.0
    mu = torch.zeros(HEADS, 64)
    mu[:, 7] = 100.0
    centre = Centre(mu, Rotary(torch.empty(0), 64))
    ways = {
        "token": KVConfig(key=Affine(bits=4, group=0)),
        "channel": KVConfig(key=Affine(bits=4, axis="channel", group=16)),
        "centred": KVConfig(key=Affine(bits=4, group=0), centring="mean"),
    }
    rms = {}
    for name, way in ways.items():
        config = KVConfig(key=way.key, centring=way.centring, sink_tokens=0, recent_tokens=0)
        row = make_row(config, HEADS, 64)
        row.centre = centre if name == "centred" else None
        row.commit(keys, keys)
        error = (row.dense(torch.float64, 64, 64)[0] - keys)[..., [d for d in range(64) if d != 7]]
        rms[name] = float(error.square().mean().sqrt())
    assert 1.7 < rms["token"] < 2.6
    assert 0.05 < rms["channel"] < 0.12
    assert 0.05 < rms["centred"] < 0.12


def test_a_centre_costs_no_bytes() -> None:
    plain = KVConfig(key=Affine(bits=4, group=16))
    centred = KVConfig(key=Affine(bits=4, group=16), centring="mean")
    shape = ModelShape((LayerShape(HEADS, DIM, DIM),), torch.float64)
    assert centred.predicted_bytes(shape, 200, 9) == plain.predicted_bytes(shape, 200, 9)
    row = compare(centred, [90, 1, 1])
    assert row.nbytes == centred.predicted_bytes(shape, 90, 2)
    assert row.centre is not None
    assert row.centre.nbytes == HEADS * DIM * 4


def test_copies_and_parts_keep_their_centre() -> None:
    row = compare(KVConfig(key=Affine(bits=4, group=16), centring="mean", recent_tokens=3), [40])
    sequence = Sequence(2, HEADS, 4, DIM, 9)
    ((q, k, v),) = sequence.forwards([2])
    expected = row.attend(q, k, v, 0.1)[0]
    assert torch.equal(row.copy().attend(q, k, v, 0.1)[0], expected)
    parts = row.split(2)
    out = torch.cat([p.attend(q[2 * n : 2 * n + 2], k[n : n + 1], v[n : n + 1], 0.1)[0] for n, p in enumerate(parts)])
    torch.testing.assert_close(out, expected)


def test_layers_are_joined_only_where_they_turn_alike() -> None:
    first, second = make_centre(2, 8), make_centre(2, 8)
    assert joined([None, None]) is None
    both = joined([first, Centre(second.mu, first.rotary)])
    assert both is not None
    assert both.mu.shape == (4, 8)
    assert both.rotary is first.rotary
    with pytest.raises(ValueError, match="one rotary embedding"):
        joined([first, second])
    with pytest.raises(ValueError, match="all are centred"):
        joined([first, None])


def test_half_precision_keys_are_centred_in_float32() -> None:
    centre = Centre(torch.full((1, 8), 100.0), Rotary(torch.tensor([1.0, 0.1, 0.01, 0.001]), 8))
    keys = (torch.randn(1, 5, 8) + centre.term(slice(0, 5), 5, torch.float32)).to(torch.float16)
    rest = centre.take_out(keys, slice(0, 5))
    assert rest.dtype == torch.float32
    assert torch.equal(centre.put_back(rest, slice(0, 5)).half(), keys)


@pytest.mark.parametrize(("centring", "centre"), [("mean", False), ("none", True)])
def test_a_row_refuses_a_centre_that_its_config_does_not_name(centring: Any, centre: bool) -> None:
    row = make_row(KVConfig(), HEADS, DIM)
    config = KVConfig(centring=centring).at(0)
    with pytest.raises(ValueError, match=f"centring '{centring}' takes"):
        Row(config, row.table.pool, HEADS, torch.float64, make_centre(HEADS, DIM) if centre else None)
