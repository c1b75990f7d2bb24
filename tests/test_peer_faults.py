"""Faults that were reproduced in another library for KV-cache compression, each as the right value here."""

import copy
from typing import Any

import pytest
import torch
from reference import feed, feed_and_watch, kept, left_padded, masked_logits
from tiny import tiny_model, token_ids
from transformers import DynamicCache, StaticCache

from kvlab.attach import attach, cache_kwarg, make_plan
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction, Recency, Tokens, WindowAttention

EXACT = 1e-9
SCORERS = (Recency(), AttentionMass(), WindowAttention(window=8))
BY_SCORER = pytest.mark.parametrize("scorer", SCORERS, ids=lambda s: s.kind)
INT4 = Affine(bits=4)


def _half(scorer: Any, **more: Any) -> KVConfig:
    return KVConfig(scorer=scorer, budget=Fraction(0.5), recent_tokens=8, page_tokens=4, **more)


@torch.no_grad()
def _generate(model: Any, ids: torch.Tensor, cache: Any, **more: Any) -> list[int]:
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "eos_token_id": None} | more
    return model.generate(ids, do_sample=False, **settings, **{cache_kwarg(): cache})[0, ids.shape[1] :].tolist()


@BY_SCORER
def test_eviction_of_one_context_does_not_reach_another_one(scorer) -> None:
    """Evict in context A, then decode from an untouched cache of context B: not a key differs, nor a logit."""
    model, a, b = tiny_model("llama3"), token_ids(1, 60), token_ids(1, 60, seed=1)
    own, untouched = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for cache in (own, untouched):
        feed(model, cache, b, (50,))
    with attach(model, _half(scorer)) as kv:
        feed(model, kv.cache(), a, (50, 1, 1))
        during = feed(model, copy.deepcopy(untouched), b, (1,) * 10)
    after = feed(model, untouched, b, (1,) * 10)
    expected = feed(model, own, b, (1,) * 10)
    assert torch.equal(after, expected)
    assert (during - expected).abs().max() <= EXACT
    assert all(torch.equal(x.keys, y.keys) for x, y in zip(untouched.layers, own.layers, strict=True))


@pytest.mark.parametrize("prompt", [1, 100])
def test_repeated_eviction_keeps_the_sinks_and_the_latest(prompt) -> None:
    """Streaming, target 64, through many evictions while decoding: always 0 to 3 and the latest, without a gap."""
    model, ids = tiny_model("llama1"), token_ids(1, 300)
    config = KVConfig(scorer=Recency(), budget=Tokens(64), recent_tokens=16)
    with attach(model, config) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (prompt,))
        for seen in range(prompt + 1, prompt + 181):
            feed(model, cache, ids, (1,))
            for head in range(2):
                held = kept(cache.layers[0].rows[0], head)
                assert (
                    held == [*range(4), *range(seen - len(held) + 4, seen)] if seen > 4 else held == list(range(seen))
                )
                assert len(held) >= min(seen, 64)
                assert len(held) < 64 + config.page_tokens


def test_questions_on_one_quantized_context_are_not_mixed() -> None:
    """The second question after the first equals the second alone; the context is 200 tokens before and after."""
    model, context = tiny_model("llama3"), token_ids(1, 200)
    first, second = (torch.cat([context, token_ids(1, 11, seed=s)], dim=1) for s in (1, 2))
    with attach(model, KVConfig(key=INT4, value=INT4, recent_tokens=128)) as kv:
        cache, alone = kv.cache(), kv.cache()
        for each in (cache, alone):
            feed(model, each, context, (200,))
        held = cache.nbytes
        one = _generate(model, first, copy.deepcopy(cache))
        two = _generate(model, second, copy.deepcopy(cache))
        assert two == _generate(model, second, alone)
    assert one != two
    assert (cache.get_seq_length(), cache.nbytes) == (200, held)
    assert {head.window for layer in cache.occupancy() for head in layer} == {128}


@pytest.mark.parametrize("name", ["gemma3", "ministral"])
def test_sliding_layers_forget_the_first_answer_too(name) -> None:
    """Question 2 on a copy, after question 1 on another: as if it had been asked alone, sliding layers included."""
    model, context = tiny_model(name), token_ids(1, 100)
    first, second = (torch.cat([context, token_ids(1, 9, seed=s)], dim=1) for s in (1, 2))
    own = feed(model, DynamicCache(config=model.config), second, (100, 9))[:, 100:]
    with attach(model, KVConfig(recent_tokens=4, page_tokens=4)) as kv:
        cache = kv.cache()
        feed(model, cache, context, (100,))
        _generate(model, first, copy.deepcopy(cache))
        assert (feed(model, copy.deepcopy(cache), second, (9,)) - own).abs().max() <= EXACT


def test_a_window_counts_positions_and_not_what_is_left_in_the_cache() -> None:
    """Streaming, half of 200, beside sliding layers of 32: those still see their 31 latest tokens."""
    model, ids = tiny_model("ministral"), token_ids(1, 210)
    config = _half(Recency())
    with attach(model, config) as kv:
        cache = kv.cache()
        ours, before = feed_and_watch(model, cache, ids, (200, 1, 9))
    assert kept(cache.layers[1].rows[0], 0)[:5] == [0, 1, 2, 3, 109]  # ceil(210 / 2) = 105: four sinks and the latest
    expected = masked_logits(model, DynamicCache(config=model.config), ids, (200, 1, 9), before)
    assert (ours - expected).abs().max() <= EXACT


def test_layers_that_hold_different_numbers_of_tokens_take_a_question_of_several() -> None:
    """A layer that evicts whole pages keeps fewer tokens than one that evicts single ones."""
    model, ids = tiny_model("llama3"), token_ids(1, 107)
    channel = Affine(bits=4, axis="channel", group=16)
    config = KVConfig(scorer=AttentionMass(), budget=Tokens(51), recent_tokens=16, overrides=((1, channel, channel),))
    with attach(model, config) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (100,))
        assert [layer[0].kept for layer in cache.occupancy()] == [51, 36, 51]
        twin = copy.deepcopy(cache)
        question = feed(model, cache, ids, (7,))
        assert (question - feed(model, twin, ids, (1,) * 7)).abs().max() <= EXACT


def test_only_the_full_layer_of_gemma3_is_compressed() -> None:
    """By what the layer is, not by the name of the model class."""
    model, ids = tiny_model("gemma3"), token_ids(1, 210)
    with attach(model, _half(AttentionMass())) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (200,))
    assert [getattr(layer, "seen", None) for layer in cache.layers] == [None] * 5 + [200]
    assert {layer.keys.shape[2] for layer in cache.layers[:5]} == {31}
    assert {head.kept for head in cache.occupancy()[0]} == {100}


@BY_SCORER
def test_a_left_padded_row_generates_what_it_does_alone(scorer) -> None:
    """Padding takes no budget, and a 2-D mask counts slots that nothing moves."""
    model, prompts = tiny_model("llama3"), [token_ids(1, 90), token_ids(1, 37, seed=1)]
    ids, mask = left_padded(torch.cat([prompts[0], torch.nn.functional.pad(prompts[1], (53, 0))]), (0, 53))
    with attach(model, _half(scorer)) as kv:
        alone = [_generate(model, p, kv.cache(), max_new_tokens=16) for p in prompts]
        with torch.no_grad():
            cache = kv.cache()
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=16,
                eos_token_id=None,
                **{cache_kwarg(): cache},
            )
    assert out[:, 90:].tolist() == alone
    held = [max(kept(cache.layers[0].rows[b], 0)) for b in range(2)]
    assert held == [90 + 14, 37 + 14]  # positions of the row's own tokens


@pytest.mark.parametrize("route", ["forward", "generate"])
def test_a_question_after_eviction_stands_at_its_true_position(route) -> None:
    """Keys of the first layer depend on token and position only: after 100 of 200 are gone they must still agree."""
    model, ids = tiny_model("llama3"), token_ids(1, 207)
    own = DynamicCache(config=model.config)
    feed(model, own, ids, (207,))
    with attach(model, _half(AttentionMass())) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (200,))
        assert {head.kept for layer in cache.occupancy() for head in layer} == {100}
        if route == "forward":
            feed(model, cache, ids, (7,))
        else:
            _generate(model, ids, cache, max_new_tokens=1)
    keys, _ = cache.layers[0].rows[0].window()
    assert keys.shape[1] == 8
    assert torch.equal(keys[:, -7:], own.layers[0].keys[0, :, 200:])


def test_an_end_token_that_comes_first_ends_the_answer() -> None:
    model, ids = tiny_model("llama3"), token_ids(1, 60)
    with attach(model, _half(AttentionMass())) as kv:
        free = _generate(model, ids, kv.cache())
        assert len(free) == 6
        assert _generate(model, ids, kv.cache(), eos_token_id=free[0]) == free[:1]


@BY_SCORER
def test_chunked_prefill_and_used_caches_hold_half(scorer) -> None:
    """Four chunks of 50 keep 100 of 200, as one does; a used cache goes on, a reset one starts anew."""
    model, ids = tiny_model("llama1"), token_ids(1, 400)
    with attach(model, _half(scorer)) as kv:
        chunked, whole = kv.cache(), kv.cache()
        feed(model, chunked, ids, (50,) * 4)
        first = feed(model, whole, ids, (200,))
        for cache in (chunked, whole):
            assert {head.kept for head in cache.occupancy()[0]} == {100}
        feed(model, whole, ids, (200,))
        assert {head.kept for head in whole.occupancy()[0]} == {200}
        whole.reset()
        assert torch.equal(feed(model, whole, ids, (200,)), first)
        assert {head.kept for head in whole.occupancy()[0]} == {100}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_eviction_works_whatever_attention_the_model_ran_on(implementation) -> None:
    """Never a silent no-op: bytes shrink and logits move, the same as on any other implementation."""
    model, ids = tiny_model("llama3"), token_ids(1, 60)
    config = KVConfig(scorer=AttentionMass(), budget=Tokens(16), recent_tokens=4, page_tokens=4)
    with attach(model, config) as kv:
        expected = feed(model, kv.cache(), ids, (50, 1, 1))
    model.set_attn_implementation(implementation)
    own = feed(model, DynamicCache(config=model.config), ids, (50, 1, 1))
    with attach(model, config) as kv:
        cache = kv.cache()
        logits = feed(model, cache, ids, (50, 1, 1))
    assert torch.equal(logits, expected)
    assert (logits - own).abs().max() > 1e-3
    assert {head.kept for layer in cache.occupancy() for head in layer} == {18}
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(("fraction", "count"), [(0.2, 200), (0.1, 100), (0.7, 700)])
def test_ratios_are_not_truncated_floats(fraction, count) -> None:
    """1000 tokens at .2 and .1 keep 200 and 100, not 199 and 99; what is reported is what is held."""
    model = tiny_model("llama1", torch.float32)
    config = KVConfig(scorer=Recency(), budget=Fraction(fraction), recent_tokens=8)
    with attach(model, config) as kv:
        cache = kv.cache()
        feed(model, cache, token_ids(1, 1000), (1000,))
    assert [head.kept for head in cache.occupancy()[0]] == [count] * 2


@BY_SCORER
@pytest.mark.parametrize("name", ["phi3", "qwen2"])
def test_partial_rotary_and_derived_head_dims_work_with_every_scorer(name, scorer) -> None:
    """Phi3 rotates part of a head; Qwen2's config has no head_dim. Neither may matter to a cache."""
    model, ids, cuts = tiny_model(name), token_ids(1, 70), (50, *[1] * 9, 5)
    with attach(model, _half(scorer)) as kv:
        ours, before = feed_and_watch(model, kv.cache(), ids, cuts)
    expected = masked_logits(model, DynamicCache(config=model.config), ids, cuts, before)
    assert (ours - expected).abs().max() <= EXACT


def test_static_caches_are_not_touched() -> None:
    """They keep their size and their answers while a model is attached."""
    model, ids = tiny_model("phi3"), token_ids(1, 60)
    own = feed(model, StaticCache(model.config, max_cache_len=64), ids, (50, 1, 1))
    with attach(model, _half(AttentionMass())):
        cache = StaticCache(model.config, max_cache_len=64)
        logits = feed(model, cache, ids, (50, 1, 1))
    assert (logits - own).abs().max() <= EXACT
    assert cache.layers[0].keys.shape[2] == 64


def test_models_are_recognised_by_their_layers() -> None:
    """The text class of Gemma 3 and Qwen2 are served without being on any list."""
    assert make_plan(tiny_model("gemma3")).compressed == (5,)
    assert make_plan(tiny_model("qwen2")).mode == "packed"
