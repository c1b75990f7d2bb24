"""Sliding layers beside full ones: they stay transformers' own and are counted as they are; lengths are right."""

import pytest
import torch
from reference import feed
from tiny import WINDOW, tiny_model, token_ids
from transformers import DynamicCache

from kvlab.attach import attach, make_plan, shape_of
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Recency, Tokens

LENGTHS = (20, 32, 33, 100)
DECODED = 40
RAW = KVConfig(recent_tokens=4, page_tokens=4)
CONFIGS = {
    "raw": RAW,
    "fp8": KVConfig(key=Fp8(), value=Fp8(), recent_tokens=8),
    "int4": KVConfig(key=Affine(bits=4), value=Affine(bits=4), recent_tokens=8),
    "budget 16": KVConfig(scorer=Recency(), budget=Tokens(16), recent_tokens=4, page_tokens=4),
    "budget 48": KVConfig(scorer=AttentionMass(), budget=Tokens(48), recent_tokens=8),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("label", CONFIGS)
def test_global_layer_is_compressed_and_local_layers_are_left_alone(length, label) -> None:
    model, ids, config = tiny_model("gemma3"), token_ids(1, 160), CONFIGS[label]
    own = DynamicCache(config=model.config)
    expected = feed(model, own, ids, (length, *[1] * DECODED))
    with attach(model, config, plan=make_plan(model)) as kv:
        cache = kv.cache()
        logits = feed(model, cache, ids, (length, *[1] * DECODED))
    if label == "raw":
        assert (logits - expected).abs().max() <= 1e-9
    assert cache.compressed == [5]
    assert cache.get_seq_length() == length + DECODED
    # The global layer comes last, so what it forgets cannot reach the local ones: they must be the model's own.
    for ours, theirs in zip(cache.layers[:5], own.layers[:5], strict=True):
        assert ours.keys.shape[2] == WINDOW - 1
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    if config.budget.evicts:
        limit = config.budget.tokens + config.page_tokens  # steps settle page by page
        assert all(head.kept <= limit for head in cache.occupancy()[0])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("label", CONFIGS)
def test_bytes_sum_what_each_layer_holds(length, label) -> None:
    """Local layers hold window - 1 tokens, yet own what their slices were cut from until `fit`."""
    model, ids, config = tiny_model("gemma3"), token_ids(1, 160), CONFIGS[label]
    shape = shape_of(model)
    with attach(model, config, plan=make_plan(model)) as kv:
        cache = kv.cache()
        for decoded, cuts in ((0, (length,)), (DECODED, (1,) * DECODED)):
            feed(model, cache, ids, cuts)
            local = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers[:5])
            retained = sum(2 * layer.keys.untyped_storage().nbytes() for layer in cache.layers[:5])
            held = min(length + decoded, WINDOW - 1)
            assert local == 5 * 2 * 2 * 32 * 8 * held
            assert cache.nbytes == config.predicted_bytes(shape, length, decoded)
            assert cache.storage_bytes - cache.nbytes >= retained - local
            if length > held and not decoded:
                assert retained == local * length // held
            cache.fit()
            assert cache.storage_bytes == cache.nbytes
