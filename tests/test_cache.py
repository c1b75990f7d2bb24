"""The cache object: transformers' protocol, copies, batches, interrupted forwards, and what memory it really holds."""

import copy
import io
from typing import Any

import pytest
import torch
from reference import feed, kept
from tiny import tiny_model, token_ids
from transformers import DynamicCache, LlamaConfig

from kvlab.attach import attach, cache_kwarg, shape_of
from kvlab.cache import KVCache, KVLayer, SeamError
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction, Recency, Tokens, WindowAttention

EXACT = 1e-9
PAGES = KVConfig(sink_tokens=2, recent_tokens=4, page_tokens=4)
RICH = KVConfig(
    key=Affine(bits=4),
    value=Fp8("e5m2", scale="dynamic"),
    scorer=AttentionMass(),
    budget=Fraction(0.5),
    recent_tokens=4,
    page_tokens=4,
)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama3")


def _state(cache: KVCache) -> list[torch.Tensor]:
    """Copies, as bits, of all that decides what a cache reads; room not yet used may hold NaN, which equals nothing."""
    return [x.clone().view(torch.uint8) for i in cache.compressed for x in cache.layers[i].storages()]


# -- protocol ----------------------------------------------------------------------------------------------------------


def test_lengths_count_tokens_seen_and_not_tokens_kept(llama) -> None:
    with attach(llama, RICH) as kv:
        cache = kv.cache()
        assert cache.get_seq_length() == 0
        assert cache.nbytes == cache.storage_bytes == 0
        feed(llama, cache, token_ids(1, 50), (40, 1, 1))
    assert [cache.get_seq_length(i) for i in range(3)] == [42] * 3
    assert cache.get_mask_sizes(5, 0) == (47, 0)
    assert cache.get_max_length() == -1
    assert {head.kept for layer in cache.occupancy() for head in layer} == {22}  # 20 and two steps since
    assert not cache.is_croppable
    assert not cache.is_compileable
    assert "42 tokens seen" in repr(cache)


def test_tokens_are_not_given_back(llama) -> None:
    with attach(llama, PAGES) as kv:
        cache = kv.cache()
        feed(llama, cache, token_ids(1, 20), (20,))
    cache.crop(0)
    with pytest.raises(ValueError, match=r"cannot give back 3 tokens.*copy\.deepcopy"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="offloading"):
        cache.layers[0].offload()


def test_reset_makes_the_cache_as_good_as_new(llama) -> None:
    ids = token_ids(1, 40)
    with attach(llama, RICH) as kv:
        fresh = feed(llama, kv.cache(), ids, (30, 1))
        cache = kv.cache()
        feed(llama, cache, token_ids(1, 40, seed=1), (25, 1, 1))
        cache.reset()
        assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
        assert torch.equal(feed(llama, cache, ids, (30, 1)), fresh)
    pages = sum(len(head) for i in range(3) for head in cache.layers[i].rows[0].table.pages)
    assert sum(pool.used_pages for pool in {id(layer.pool): layer.pool for layer in cache.layers}.values()) == pages


def test_another_number_of_rows_is_refused(llama) -> None:
    with attach(llama, PAGES) as kv:
        cache = kv.cache()
        feed(llama, cache, token_ids(2, 20), (10,))
        with pytest.raises(ValueError, match="this cache holds 2 rows, got K for 3"):
            feed(llama, cache, token_ids(3, 20), (1,))


@pytest.mark.parametrize("config", [PAGES, RICH], ids=["raw", "rich"])
def test_rows_are_selected_reordered_and_repeated(llama, config) -> None:
    """Each row goes on as if nothing had happened; what is dropped gives its pages back."""
    ids = token_ids(3, 40)
    with attach(llama, config) as kv:
        full = kv.cache()
        feed(llama, full, ids, (25,))
        expected = feed(llama, copy.deepcopy(full), ids, (1,) * 6)
        for change, rows in (
            (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
            (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        ):
            cache = copy.deepcopy(full)
            used = cache.layers[0].pool.used_pages
            change(cache)
            assert cache.layers[0].pool.used_pages == used * len(rows) // 3
            logits = feed(llama, cache, ids[rows], (1,) * 6)
            # The number of rows may change the order of sums in the linear layers; no more than that.
            assert (logits - expected[rows]).abs().max() <= 1e-6


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_deep_copy_shares_no_storage_and_goes_its_own_way(name) -> None:
    model, ids = tiny_model(name), token_ids(1, 80)
    with attach(model, RICH) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (60, 1))
        before, twin = _state(cache), copy.deepcopy(cache)
        pointers = [
            {x.untyped_storage().data_ptr() for layer in c.layers for x in _tensors(layer) if x.numel()}
            for c in (cache, twin)
        ]
        assert not pointers[0] & pointers[1]
        other = feed(model, twin, token_ids(1, 80, seed=1), (9, 1, 1))
        assert all(torch.equal(a, b) for a, b in zip(_state(cache), before, strict=True))
        mine = feed(model, cache, ids, (9, 1, 1))
    assert twin.config == cache.config
    assert (mine - other).abs().max() > 1e-3


def _tensors(layer: Any) -> list[torch.Tensor]:
    return layer.storages() if isinstance(layer, KVLayer) else [layer.keys, layer.values]


# -- interrupted forwards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["between layers", "in attention"])
def test_a_cache_whose_forward_was_interrupted_is_refused(where, monkeypatch) -> None:
    """Half of the layers hold the tokens then: going on would give plausible nonsense."""
    model, ids = tiny_model("llama3"), token_ids(1, 40)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with attach(model, PAGES) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (20,))
        with monkeypatch.context() as patch:
            if where == "between layers":
                patch.setattr(model.model.layers[1], "forward", stop)
            else:
                patch.setattr(type(cache.layers[2].rows[0]), "commit", stop)
            with pytest.raises(KeyboardInterrupt):
                feed(model, cache, ids, (1,))
        with pytest.raises(SeamError, match="interrupted"):
            feed(model, cache, ids, (1,))
        feed(model, kv.cache(), ids, (20, 1))


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_reported_bytes_are_those_of_distinct_storages_and_memory_falls() -> None:
    """4096 tokens in, the last 32 stay: 8,192 bytes of K for two heads, where a slice would retain 1,048,576."""
    config = KVConfig(scorer=Recency(), budget=Tokens(32), sink_tokens=0, recent_tokens=32)
    cache = KVCache(config, LlamaConfig(num_hidden_layers=1))
    (layer,) = cache.layers
    k, v = torch.randn(2, 1, 2, 4096, 64).half()
    layer.lazy_initialization(k, v)
    layer.rows[0].commit(k[0], v[0])
    cache.fit()
    (keys, values), pages = layer.rows[0].window(), layer.pool
    assert keys.untyped_storage().nbytes() == values.untyped_storage().nbytes() == 8192
    assert (
        cache.nbytes == cache.storage_bytes == sum(x.untyped_storage().nbytes() for x in layer.storages()) == 2 * 8192
    )
    assert pages is not None
    assert pages.n_pages == 0
    assert not {x.data_ptr() for x in layer.storages()} & {
        k.untyped_storage().data_ptr(),
        v.untyped_storage().data_ptr(),
    }
    assert torch.equal(keys, k[0, :, -32:])
    saved = io.BytesIO()
    torch.save(layer.storages(), saved)
    assert 2 * 8192 < saved.tell() < 2 * 8192 + 4096


def test_what_was_evicted_leaves_no_bytes_behind(llama) -> None:
    """Pages that eviction empties are free for others, and `fit` gives them back."""
    with attach(llama, KVConfig(scorer=AttentionMass(), budget=Fraction(1.0), recent_tokens=4, page_tokens=4)) as kv:
        everything = kv.cache()
        feed(llama, everything, token_ids(1, 200), (200,))
        config = KVConfig(scorer=AttentionMass(), budget=Tokens(40), recent_tokens=4, page_tokens=4)
        cache = kv.cache(config)
        feed(llama, cache, token_ids(1, 200), (50,) * 4)
    assert (
        cache.nbytes
        == config.predicted_bytes(shape_of(llama), 0)
        + sum(
            config.at(i).nbytes(shape_of(llama).layers[i], torch.float64, head)  # as one head of two holds, for both
            for i, layer in enumerate(cache.occupancy())
            for head in layer[:1]
        )
    )
    assert cache.nbytes < everything.nbytes / 4
    slack = cache.storage_bytes - cache.nbytes
    cache.fit()
    assert slack > 0
    assert cache.storage_bytes == cache.nbytes


def test_grouped_query_heads_store_and_vote_per_kv_head() -> None:
    """9 query heads on 3 KV heads, half of 64 tokens: three kept sets, half the bytes, and the mean of three votes."""
    model, ids = tiny_model("llama_9_3"), token_ids(1, 64)
    config = KVConfig(scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=16)
    with attach(model, config) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (64,))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    for i, probs in enumerate(attentions):
        mass = probs[0].unflatten(0, (3, 3)).mean(1).sum(1)  # over the group, then over queries
        row = cache.layers[i].rows[0]
        assert row.table.pool.layout["k.data"].width == 64
        assert [head.stored for head in row.occupancy] == [12] * 3
        for head in range(3):
            best = (mass[head, 4:48].topk(12).indices + 4).sort().values.tolist()
            assert kept(row, head) == [0, 1, 2, 3, *best, *range(48, 64)]
    raw = shape_of(model).raw_bytes(64, itemsize=8)
    overhead = 2 * 3 * (12 * 8 + 16 * 4 + 4 * (2 * 64 * 8 + 8))  # position and mass; window mass; part page
    assert raw / 2 < cache.nbytes <= raw / 2 + overhead


@pytest.mark.parametrize("scorer", [Recency(), AttentionMass(), WindowAttention(window=8)], ids=lambda s: s.kind)
@pytest.mark.parametrize("length", [1, 2, 3, 8, 10, 100])
def test_short_prompts_keep_something_and_sinks_and_window_always(scorer, length) -> None:
    model, ids = tiny_model("llama1"), token_ids(1, 110)
    own = feed(model, DynamicCache(config=model.config), ids, (length, 1))
    with attach(model) as kv:
        bare = KVConfig(scorer=scorer, budget=Fraction(0.1), sink_tokens=0, recent_tokens=0)
        cache = kv.cache(bare)
        feed(model, cache, ids, (length,))
        assert [head.kept for head in cache.occupancy()[0]] == [-(-length // 10)] * 2
        roomy = KVConfig(scorer=scorer, budget=Tokens(50))
        cache = kv.cache(roomy)
        logits = feed(model, cache, ids, (length,))
        (head, _) = cache.occupancy()[0]
        assert (head.sinks, head.window) == (min(4, length), min(64, max(0, length - 4)))
        logits = torch.cat([logits, feed(model, cache, ids, (1,))], dim=1)
    if length <= 50:  # nothing was evicted, and nothing changed
        assert head.kept == length
        assert (logits - own).abs().max() <= EXACT


def test_cache_is_passed_by_the_name_this_version_takes(llama) -> None:
    with attach(llama, PAGES) as kv, torch.no_grad():
        out = llama(token_ids(1, 8), use_cache=True, **{cache_kwarg(): kv.cache()})
    assert isinstance(getattr(out, cache_kwarg()), KVCache)
