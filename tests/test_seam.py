"""Packed attention inside real models, against transformers' own cache, in float64.

Raw pages equal it; quantized pages equal quantize-then-dequantize in it; evicted tokens equal masked ones in it.
"""

import copy

import pytest
import torch
from reference import feed, feed_and_watch, left_padded, masked_logits, round_trip_cache
from tiny import tiny_model, token_ids
from transformers import DynamicCache

from kvlab.attach import attach, cache_kwarg, make_plan
from kvlab.bench.identity import ARCHITECTURES, compare
from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction, Recency, Threshold, Tokens, WindowAttention

EXACT = 1e-9  # float64; norms round to float32, so what survives them is either nothing or far more
PAGES = KVConfig(sink_tokens=2, recent_tokens=4, page_tokens=4)
INT4, INT8 = Affine(bits=4), Affine(bits=8)
CHANNEL = Affine(bits=4, axis="channel", group=8)
SNAPKV = WindowAttention(window=8, pool=3)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_raw_pages_equal_the_models_own_cache(architecture) -> None:
    """Left-padded prompt, steps, a second turn in one piece; on every architecture."""
    row = compare(architecture)
    assert row["mode"] == ("dense" if architecture.model == "falcon" else "packed")
    assert row["tokens_in_pages"] > 40
    assert row["max_abs_logit_diff"] <= EXACT


@pytest.mark.parametrize("name", ["llama3", "ministral"])
@pytest.mark.parametrize("cuts", [(1,) * 9, (7, 30, 2, 1, 1, 9), (1, 49)], ids=str)
@pytest.mark.parametrize(
    "config", [PAGES, KVConfig(sink_tokens=0, recent_tokens=0, page_tokens=1), KVConfig()], ids=str
)
def test_any_cut_of_a_prompt_gives_the_same_logits(name, cuts, config) -> None:
    model, ids = tiny_model(name), token_ids(1, 60)
    own = feed(model, DynamicCache(config=model.config), ids, cuts)
    with attach(model, config) as kv:
        ours = feed(model, kv.cache(), ids, cuts)
    assert (ours - own).abs().max() <= EXACT


GENERATE = {
    "greedy": {"max_new_tokens": 20},
    "chunked prefill": {"max_new_tokens": 8, "prefill_chunk_size": 7},
    "beams": {"max_new_tokens": 12, "num_beams": 3},
    "beams, all returned": {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 3},
    "samples": {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 4},
}


@pytest.mark.parametrize("name", ["llama3", "ministral"])
@pytest.mark.parametrize("how", GENERATE)
@pytest.mark.parametrize("pads", [(0,), (0, 11, 24)], ids=str)
def test_generate_gives_the_models_own_tokens(name, how, pads) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(token_ids(len(pads), 40), pads)

    def generate(**cache):
        torch.manual_seed(1)
        settings = {"do_sample": False} | GENERATE[how] | {"eos_token_id": None}
        with torch.no_grad():
            return model.generate(ids, attention_mask=mask, **settings, **cache)

    own = generate()
    with attach(model, PAGES) as kv:
        cache = kv.cache()
        ours = generate(**{cache_kwarg(): cache})
    assert cache.occupancy()[0][0].stored > 0
    assert ours.tolist() == own.tolist()


QUANTIZED = {
    "int8": KVConfig(key=INT8, value=INT8, recent_tokens=4, page_tokens=4),
    "int4 stepwise": KVConfig(key=INT4, value=INT4, sink_tokens=0, recent_tokens=0, page_tokens=1),
    "channel keys": KVConfig(key=CHANNEL, value=INT4, sink_tokens=1, recent_tokens=5, page_tokens=8),
    "rotated": KVConfig(
        key=Affine(bits=4, hadamard=True), value=Affine(bits=3, mode="midrise", hadamard=True), recent_tokens=4
    ),
    "fp8": KVConfig(key=Fp8("e4m3"), value=Fp8("e5m2", scale="dynamic"), recent_tokens=6, page_tokens=8),
    "per layer": KVConfig(key=INT8, value=INT4, overrides=((1, CHANNEL, Raw()),), recent_tokens=4, page_tokens=8),
}


@pytest.mark.parametrize(
    ("name", "label"),
    [(name, label) for name in ("llama3", "ministral") for label in QUANTIZED] + [("gemma2", "channel keys")],
)
def test_quantized_pages_equal_quantize_and_dequantize(name, label) -> None:
    """Teacher forced; a row with padding; prompt, steps, a turn in one piece."""
    config, pads, cuts = QUANTIZED[label], (0, 9), (30, *[1] * 11, 12, 1, 1)
    if name != "llama3" and config.overrides:
        layer = make_plan(tiny_model(name)).compressed[0]
        config = KVConfig(key=INT8, value=INT4, overrides=((layer, CHANNEL, Raw()),), recent_tokens=4, page_tokens=8)
    model = tiny_model(name)
    ids, mask = left_padded(token_ids(2, 60), pads)
    expected = masked_logits(model, round_trip_cache(model, config, pads), ids, cuts, [{}] * len(cuts), mask)
    exact = masked_logits(model, DynamicCache(config=model.config), ids, cuts, [{}] * len(cuts), mask)
    with attach(model, config) as kv:
        ours = feed(model, kv.cache(), ids, cuts, mask)
    real = mask[:, : sum(cuts)].bool()
    assert (ours - expected)[real].abs().max() <= EXACT
    assert (ours - exact)[real].abs().max() > 1e-4  # the codec did something


EVICTING = {
    "streaming": KVConfig(scorer=Recency(), budget=Tokens(16), recent_tokens=4, page_tokens=4),
    "h2o half": KVConfig(scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=4, page_tokens=4),
    "h2o forgetting": KVConfig(scorer=AttentionMass(decay=0.8), budget=Tokens(14), sink_tokens=0, recent_tokens=2),
    "snapkv": KVConfig(scorer=SNAPKV, budget=Tokens(20), recent_tokens=4, page_tokens=4),
    "threshold": KVConfig(scorer=AttentionMass(), budget=Threshold(0.5), recent_tokens=4, page_tokens=4),
    "snapkv int4": KVConfig(key=INT4, value=INT4, scorer=SNAPKV, budget=Fraction(0.4), recent_tokens=4, page_tokens=4),
}


@pytest.mark.parametrize(
    ("name", "label"),
    [(name, label) for name in ("llama3", "ministral") for label in EVICTING]
    + [("phi3", "snapkv"), ("qwen2", "h2o half"), ("gemma2", "snapkv int4")],
)
def test_evicted_tokens_equal_masked_ones(name, label) -> None:
    """Eviction after the prompt, in the middle of steps, after a turn; with and without padding, head by head."""
    config, pads, cuts = EVICTING[label], (0, 9), (30, *[1] * 18, 8, 1, 1, 1)
    model = tiny_model(name)
    ids, mask = left_padded(token_ids(2, 60), pads)
    with attach(model, config) as kv:
        cache = kv.cache()
        ours, before = feed_and_watch(model, cache, ids, cuts, mask)
    expected = masked_logits(model, round_trip_cache(model, config, pads), ids, cuts, before, mask)
    exact = masked_logits(model, DynamicCache(config=model.config), ids, cuts, [{}] * len(cuts), mask)
    real = mask[:, : sum(cuts)].bool()
    assert (ours - expected)[real].abs().max() <= EXACT
    assert (ours - exact)[real].abs().max() > 1e-3  # something was evicted
    assert cache.get_seq_length() == sum(cuts)


def test_heads_and_layers_may_hold_different_tokens() -> None:
    """What the test above relies on: h2o really keeps different sets, and different numbers of old and new ones."""
    model, ids = tiny_model("llama3"), token_ids(1, 60)
    with attach(model, EVICTING["h2o half"]) as kv:
        _, before = feed_and_watch(model, kv.cache(), ids, (40, *[1] * 10))
    sets = {tuple(slots) for layer in before[-1].values() for slots in layer[0]}
    assert len(sets) == 6  # three layers of two heads


@pytest.mark.parametrize("name", ["llama3", "gpt_oss"])
@pytest.mark.parametrize("label", ["h2o half", "snapkv int4"])
def test_a_turn_in_one_call_equals_the_same_turn_token_by_token(name, label) -> None:
    """After eviction; the turn is shorter than a page of overflow, so that eviction stays as it is meanwhile."""
    base = EVICTING[label]
    config = KVConfig(
        key=base.key, value=base.value, scorer=base.scorer, budget=Tokens(30), recent_tokens=8, page_tokens=8
    )
    model, ids = tiny_model(name), token_ids(1, 107)
    with attach(model, config) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (100,))
        twin = copy.deepcopy(cache)
        assert [h.kept for layer in cache.occupancy() for h in layer] == [30] * 2 * len(cache.compressed)
        at_once = feed(model, cache, ids, (7,))
        one_by_one = feed(model, twin, ids, (1,) * 7)
    assert (at_once - one_by_one).abs().max() <= EXACT
    assert cache.get_seq_length() == twin.get_seq_length() == 107


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama3", "gemma2", "gpt_oss", "qwen2"])
@pytest.mark.parametrize("label", ["streaming", "snapkv int4"])
def test_half_precision_models_stay_finite_beside_a_row_of_one_token(dtype, name, label) -> None:
    """Rows of 1 and 50 tokens; a padded query sees no key at all and must give zeros, not NaN."""
    model = tiny_model(name, dtype)
    ids, mask = left_padded(token_ids(2, 60), (0, 49))
    own = feed(model, DynamicCache(config=model.config), ids, (50, 1, 1, 4), mask)
    with attach(model, EVICTING[label]) as kv:
        ours = feed(model, kv.cache(), ids, (50, 1, 1, 4), mask)
        raw = feed(model, kv.cache(PAGES), ids, (50, 1, 1, 4), mask)
    assert ours.isfinite().all()
    assert raw.isfinite().all()
    # Not the largest: where a router chooses between experts, rounding may turn a token over to another one.
    differences = (raw - own)[mask[:, :56].bool()].abs().float().amax(-1)
    assert differences.quantile(0.8) <= (0.02 if dtype is torch.float16 else 0.1)


def test_no_grad_is_not_needed_and_the_graph_is_not_kept() -> None:
    model, ids = tiny_model("llama3"), token_ids(1, 30)
    own = feed(model, DynamicCache(config=model.config), ids, (20, 1))
    with attach(model, EVICTING["h2o half"]) as kv:
        feed(model, kv.cache(), ids, (20,))
        cache = kv.cache(PAGES)
        logits = [model(ids[:, a:b], use_cache=True, **{cache_kwarg(): cache}).logits for a, b in ((0, 20), (20, 21))]
        mass = kv.cache()
        model(ids[:, :20], use_cache=True, **{cache_kwarg(): mass})
    assert (torch.cat(logits, dim=1) - own).abs().max() <= EXACT
    assert not any(x.requires_grad for c in (cache, mass) for i in c.compressed for x in c.layers[i].storages())
    copy.deepcopy(cache)


def test_inference_mode() -> None:
    model, ids = tiny_model("llama3"), token_ids(1, 30)
    own = feed(model, DynamicCache(config=model.config), ids, (20, 1, 5))
    with torch.inference_mode(), attach(model, PAGES) as kv:
        ours = feed(model, kv.cache(), ids, (20, 1, 5))
    assert (ours - own).abs().max() <= EXACT
