"""Codec errors, against numbers made by hand."""

import dataclasses

import pytest
import torch

from kvlab import KVConfig, explore
from kvlab.codecs import Affine, Raw
from kvlab.explore.errors import errors_of
from kvlab.explore.tracing import Seen, span_of

INT4 = Affine(bits=4, group=32)


@pytest.fixture(scope="module")
def seen(subject):
    return explore.trace(subject, "the cat sat on the mat. " * 8)


def test_a_trace_holds_what_the_model_computes(subject, seen):
    ids = subject.tokenizer.encode(seen.text)
    out = subject.model(torch.tensor([ids]), output_attentions=False, use_cache=True).past_key_values
    assert list(seen.layers) == [0, 1, 2, 3]
    for i, layer in seen.layers.items():
        torch.testing.assert_close(layer.k, out.layers[i].keys[0])
        torch.testing.assert_close(layer.v, out.layers[i].values[0])
        probs = layer.attention()
        assert probs.shape == (2, len(ids), len(ids))
        torch.testing.assert_close(probs.sum(-1), torch.ones(2, len(ids)))
        assert float(probs.triu(1).abs().max()) == 0
    assert "".join(seen.tokens) == seen.text
    assert "".join(seen.tokens[seen.span("sat on")]) == "sat on"


def test_the_models_own_attention_is_what_a_trace_says(subject, seen):
    """The last layer's output, put through the rest of the model, gives the model's own logits' argmax."""
    layer = seen.layers[3]
    attention = subject.model.model.layers[3].self_attn
    got = {}
    hook = attention.o_proj.register_forward_hook(lambda _m, inputs, _o: got.update(x=inputs[0]))
    try:
        subject.model(torch.tensor([subject.tokenizer.encode(seen.text)]))
    finally:
        hook.remove()
    ours = layer.outputs(slice(None)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(ours, got["x"][0], atol=1e-5, rtol=1e-4)


def test_raw_loses_nothing_and_few_bits_lose_more(subject, seen):
    configs = {
        "raw": KVConfig(key=Raw(), value=Raw()),
        "int8": KVConfig(key=Affine(bits=8, group=32), value=Affine(bits=8, group=32)),
        "int4": KVConfig(key=INT4, value=INT4),
        "K alone": KVConfig(key=INT4),
    }
    picture = explore.codec_errors(subject, seen, configs)
    mean = picture.table.groupby("config", sort=False).mean()
    assert len(picture.table) == 4 * 4
    assert mean.loc["raw", ["k_error", "v_error", "output_error"]].max() == 0
    assert 0 < mean.loc["int8", "k_error"] < mean.loc["int4", "k_error"] / 8
    assert mean.loc["K alone", "v_error"] == mean.loc["K alone", "output_error_v"] == 0
    assert mean.loc["K alone", "output_error"] == pytest.approx(mean.loc["int4", "output_error_k"])
    # 4 bits, and two 16-bit numbers for 32 values
    assert mean.loc["int4", "k_bits"] == 4 + 32 / 32
    assert "int4: K" in picture.alt
    assert picture.png[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_error_is_that_of_the_codec_behind_the_sinks(subject, seen):
    rule, layer = KVConfig(key=INT4, value=INT4).at(0), seen.layers[0]
    keys, values = errors_of(rule, layer)
    assert torch.equal(keys[:, :4], layer.k[:, :4])
    part = slice(4, 4 + 16)
    torch.testing.assert_close(keys[:, part], INT4.decode(INT4.encode(layer.k[:, part]), 64, torch.float32))
    assert not torch.equal(values, layer.v)


def test_centring_finds_what_a_constant_hides(subject, seen):
    """A constant added to all keys before RoPE ruins 4 bits per token; taken out first it costs nothing."""
    centres = subject.centres([KVConfig(centring="mean")])["mean"]
    loud = centres[0]
    shift = dataclasses.replace(loud, mu=loud.mu + 20 * torch.eye(1, 64))
    more = dataclasses.replace(loud, mu=shift.mu - loud.mu).term(slice(0, len(seen.tokens)), None, torch.float32)
    shifted = dataclasses.replace(seen.layers[0], k=seen.layers[0].k + more)
    plain, centred = KVConfig(key=INT4).at(0), KVConfig(key=INT4, centring="mean").at(0)
    lost = (errors_of(plain, shifted)[0] - shifted.k).norm()
    kept = (errors_of(centred, shifted, shift)[0] - shifted.k).norm()
    own = (errors_of(centred, seen.layers[0], loud)[0] - seen.layers[0].k).norm()
    assert lost > 2 * kept
    assert float(kept) == pytest.approx(float(own), rel=1e-3)


def test_the_loudest_channel_is_found(seen):
    quiet = seen.layers[2]
    keys = quiet.k.clone()
    keys[0, :, 7] = 30.0
    marked = dataclasses.replace(seen, layers=seen.layers | {2: dataclasses.replace(quiet, k=keys)})
    assert explore.loudest(marked) == (2, 0)
    table = explore.channels(marked, 2, 0).table
    top = table.sort_values("peak").iloc[-1]
    assert (top["stream"], top["channel"], top["peak"]) == ("K", 7, 30.0)
    assert top["constancy"] > 1e6


def test_what_does_not_fit_is_refused(subject, seen):
    with pytest.raises(ValueError, match="layer 9"):
        explore.channels(seen, 9)
    with pytest.raises(ValueError, match="head must lie"):
        explore.channels(seen, 0, 1)
    with pytest.raises(ValueError, match="multiple of the group"):
        explore.codec_errors(subject, seen, {"odd": KVConfig(key=Affine(group=48))})
    with pytest.raises(ValueError, match="unknown measure"):
        explore.codec_errors(subject, seen, {"raw": KVConfig()}, measures=("speed",))
    with pytest.raises(ValueError, match="longer prompt"):
        errors_of(
            KVConfig().at(0), Seen(*(x[:, :9] for x in (seen.layers[0].q, seen.layers[0].k, seen.layers[0].v)), 0.1)
        )


def test_a_map_has_a_panel_for_each_config(subject, seen):
    errors = explore.codec_errors(subject, seen, {"int4": KVConfig(key=INT4), "raw": KVConfig()})
    picture = explore.error_map(errors.table, "k_error")
    assert len(picture.figure.axes) == 2 + 1  # and one colour bar
    assert list(picture.table.columns) == ["config", "layer", "head", "k_error"]


def test_a_part_is_found_by_its_tokens():
    tokens = ("<s>", "one ", "two", " three", " four")
    assert span_of("one two three four", tokens, "two three") == slice(2, 4)
    assert span_of("one two three four", tokens, "o th") == slice(2, 4)
    with pytest.raises(ValueError, match="does not contain"):
        span_of("one two", tokens, "five")
    with pytest.raises(ValueError, match="lies beyond"):
        span_of("one two three four five", tokens[:3], "five")
