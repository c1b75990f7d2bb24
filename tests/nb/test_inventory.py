"""Bytes by stream, counted on tensors, add up to what the cache says it holds; tokens kept are where they are."""

import pytest
import torch
from showing import Page, filled
from tiny import tiny_model, token_ids
from variants import ALL_CODECS, SOME_CODECS, fits

from kvlab import inventory
from kvlab.attach import attach, make_plan, shape_of
from kvlab.cache import cache_kwarg
from kvlab.codecs import Affine, Raw
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, ExpectedAttention, Fraction, Recency, Threshold, Tokens, TopK, Unlimited

MODEL, SHALLOW = (tiny_model(name, torch.float32) for name in ("llama3", "llama1"))
SHAPE = {"heads": 2, "dim": 32, "layers": 3}
BUDGETS = [
    (Recency(), Unlimited()),
    (AttentionMass(), Fraction(0.5)),
    (Recency(), Tokens(24)),
    (AttentionMass(), Tokens(40, scope="layer", floor=0.2)),
    (AttentionMass(), Fraction(0.4, scope="model")),
    (ExpectedAttention(), Threshold(0.4)),
]
WINDOWS = [(0, 0), (4, 16), (4, 64)]


def held(config, *, rows=1, prompt=90, steps=2, model=MODEL):
    with attach(model, config) as kv, torch.no_grad():
        cache = kv.cache()
        model(token_ids(rows, prompt), **{cache_kwarg(): cache})
        for _ in range(steps):
            model(token_ids(rows, 1), **{cache_kwarg(): cache})
    return cache


def distinct(cache):
    """Bytes of all storages behind a cache, found without the cache's own count."""
    tensors = []
    for layer in cache.layers:
        for row in getattr(layer, "rows", []):
            tensors += [*(row.sinks or ()), *(row._window or ()), row._mass, row._queries]
        if getattr(layer, "pool", None) is not None:
            tensors += list(layer.pool.streams.values())
        tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
    found = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None and x.numel()
    }
    return sum(found.values())


def check(cache):
    d = cache.describe()
    assert sum(d["streams"].values()) == cache.nbytes == d["nbytes"]
    assert sum(sum(layer["bytes"].values()) for layer in d["per_layer"]) == cache.nbytes
    assert all(count > 0 for count in d["streams"].values())
    assert d["nbytes"] + d["preallocated_bytes"] == distinct(cache)
    for layer, bins in zip(d["kept"]["layers"], d["kept"]["bins"], strict=True):
        row = cache.layers[layer].rows[0]
        # tokens of each place, of how many heads still have them
        wide = [sum(p * len(bins) // row.seen == i for p in range(row.seen)) for i in range(len(bins))]
        heads = len(row.table.pages)
        found = sum(share * tokens for share, tokens in zip(bins, wide, strict=True)) * heads
        assert found == pytest.approx(sum(o.kept for o in row.occupancy), abs=0.05)
    assert Page(cache._repr_mimebundle_()["text/html"]).faults == []
    return d


@pytest.mark.parametrize("codec", [c for c in ALL_CODECS if fits(c, SHAPE["dim"])], ids=repr)
def test_streams_add_up_for_every_codec(codec):
    for scorer, budget in BUDGETS[:2]:
        d = check(held(KVConfig(key=codec, value=codec, scorer=scorer, budget=budget, recent_tokens=16), model=SHALLOW))
        assert d["form"] == "packed"
        assert ("positions" in d["streams"]) == budget.evicts


@pytest.mark.parametrize(("scorer", "budget"), BUDGETS, ids=str)
@pytest.mark.parametrize(("sinks", "window"), WINDOWS)
def test_streams_add_up_for_every_eviction_and_window(scorer, budget, sinks, window):
    for codec in SOME_CODECS:
        if (codec.per_head and getattr(budget, "scope", "") == "model") or not fits(codec, SHAPE["dim"]):
            continue
        config = KVConfig(key=codec, value=codec, scorer=scorer, budget=budget, sink_tokens=sinks, recent_tokens=window)
        d = check(held(config, rows=2))
        assert window == 0 or "raw window" in d["streams"]
        assert ("raw sinks" in d["streams"]) == (sinks > 0)


def test_sparse_readers_sliding_layers_and_mixes_add_up():
    sparse = check(held(KVConfig(key=Affine(bits=4), value=Affine(bits=4), reader=TopK(), recent_tokens=16)))
    # 92 tokens, 4 sinks, 18 recent: five pages begun. The third layer alone reads sparsely, and keeps the smallest and
    # the largest key of each page in fp16.
    assert sparse["streams"]["chunk summaries"] == 5 * 2 * 32 * 2 * SHAPE["heads"]
    sliding = check(filled(KVConfig(key=Affine(bits=8), value=Raw()), "gemma3", rows=2))
    assert sliding["streams"]["other layers"] > 0
    assert sliding["compressed_layers"] < sliding["layers"]
    mixed = check(held(KVConfig(key=Affine(bits=8), value=Affine(bits=8), overrides=((1, Affine(bits=2), Raw()),))))
    first, second, third = (layer["bytes"] for layer in mixed["per_layer"])
    assert first == third
    assert second["K"] * 4 == first["K"]


def test_the_figures_of_one_cache_by_hand():
    config = KVConfig(key=Affine(bits=4), value=Affine(bits=8), sink_tokens=4, recent_tokens=16, raw_dtype="bfloat16")
    d = check(held(config, prompt=100, steps=0))
    heads = SHAPE["heads"] * SHAPE["layers"]
    # 100 tokens: 4 sinks, 16 recent, 80 in five pages
    assert d["streams"] == {
        "K": 80 * 16 * heads,
        "V": 80 * 32 * heads,
        "scales": 80 * 2 * 4 * heads,
        "raw sinks": 4 * 64 * 2 * heads,
        "raw window": 16 * 64 * 2 * heads,
    }
    assert d["raw16_bytes"] == 100 * 64 * 2 * heads
    assert d["effective_bits"] == pytest.approx(16 * d["nbytes"] / d["raw16_bytes"])
    assert d["effective_bits"] == pytest.approx(config.effective_bits(shape_of(MODEL), 100))
    assert d["sessions"][0] == {"budget_bytes": 6 * 10**9, "sessions": 6 * 10**9 // d["nbytes"]}
    assert d["kept"]["share"] == 1


def test_a_page_that_is_not_full_is_slack():
    # every head keeps 24 of its tokens: a page and a half
    d = check(held(KVConfig(budget=Tokens(24), sink_tokens=0, recent_tokens=0), prompt=64, steps=0))
    empty_slots = 8 * SHAPE["heads"] * SHAPE["layers"]
    assert d["streams"]["page slack"] == empty_slots * (2 * 32 * 4 + 4)
    assert d["streams"]["positions"] == 24 * 4 * SHAPE["heads"] * SHAPE["layers"]


def test_kept_tokens_are_where_they_are():
    cache = held(KVConfig(budget=Tokens(16), sink_tokens=4, recent_tokens=16), prompt=96, steps=0)
    d = check(cache)
    row = cache.layers[0].rows[0]
    # recency: four sinks, and the last of the rest
    kept = {*range(4), *range(96 - row.occupancy[0].kept + 4, 96)}
    expected = [round(sum(p in kept for p in range(2 * i, 2 * i + 2)) / 2, 4) for i in range(48)]
    assert d["kept"]["bins"][0] == expected
    assert d["kept"]["share"] == pytest.approx(len(kept) / 96, abs=1e-6)
    assert 0 < d["kept"]["share"] < 1


def test_fewer_tokens_than_places():
    d = check(held(KVConfig(), prompt=5, steps=0))
    assert d["kept"]["bins"] == [[1.0] * 5] * SHAPE["layers"]


def test_budgets_are_the_callers():
    cache = held(KVConfig())
    (only,) = cache.describe([10 * cache.nbytes + 5])["sessions"]
    assert only["sessions"] == 10
    two = held(KVConfig(), rows=2)
    assert two.describe([two.nbytes])["sessions"][0]["sessions"] == 2


def test_a_dense_cache_says_so():
    config = KVConfig(key=Affine(bits=8), value=Affine(bits=8), recent_tokens=16)
    plan = make_plan(MODEL)._replace(mode="dense")
    with attach(MODEL, config, plan=plan) as kv, torch.no_grad():
        cache = kv.cache()
        MODEL(token_ids(1, 90), **{cache_kwarg(): cache})
    assert check(cache)["form"] == "dense"
    assert "decoded for each forward" in cache._repr_mimebundle_()["text/plain"]


def test_names_of_streams_are_known_to_the_picture():
    from kvlab.show.cache import _COLOUR

    assert set(inventory.STREAMS) == set(_COLOUR)
