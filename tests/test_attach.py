"""Attaching: what a model's plan is, that attaching leaves no trace, and what is refused with a reason."""

import contextlib
import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import feed, left_padded
from tiny import tiny_model, token_ids
from transformers import (
    AttentionInterface,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import AttentionMaskInterface

from kvlab.attach import UnsupportedModelError, attach, cache_kwarg, make_plan, shape_of
from kvlab.cache import Handle, SeamError
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.layer import LayerShape
from kvlab.policies import AttentionMass, Fraction, Tokens, TopK
from kvlab.seam import attention

EXACT = 1e-9
PAGES = KVConfig(sink_tokens=2, recent_tokens=4, page_tokens=4)
HALF = KVConfig(scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=4, page_tokens=4)


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "compressed", "stock"),
    [
        ("llama3", (0, 1, 2), ()),
        ("ministral", (1,), (0, 2)),
        ("gemma2", (1, 3), (0, 2)),
        ("gemma3", (5,), (0, 1, 2, 3, 4)),
        ("gpt_oss", (1,), (0,)),
    ],
)
def test_full_attention_layers_are_packed_in_every_dtype(name, compressed, stock, dtype) -> None:
    plan = make_plan(tiny_model(name, dtype))
    assert (plan.mode, plan.compressed, plan.stock) == ("packed", compressed, stock)
    assert plan.stackable == (not stock)


def _bloom() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3))


def _deepseek() -> Any:
    config = DeepseekV3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        initializer_range=0.15,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(_bloom, "does not go through AttentionInterface"), (_deepseek, "packed: ")],
)
def test_models_that_cannot_be_packed_are_served_decoded_and_say_why(build, reason) -> None:
    """Bloom has attention of its own; DeepSeek caches latents and expands them after the cache.

    For the latter the reason depends on what transformers passes along: K was changed, or the update was lost.
    """
    torch.manual_seed(0)
    model = build().eval()
    plan = make_plan(model)
    assert plan.mode == "dense"
    assert reason in plan.reason
    ids, mask = left_padded(token_ids(2, 40), (0, 9))
    cuts, real = (24, 1, 1, 6, 1), mask[:, :33].bool()
    own = feed(model, DynamicCache(config=model.config), ids, cuts, mask)
    with attach(model, PAGES, plan=plan) as kv:
        raw = feed(model, kv.cache(), ids, cuts, mask)
        cache = kv.cache(
            KVConfig(key=Affine(bits=4, group=16), value=Affine(bits=4, group=16), recent_tokens=4, page_tokens=4)
        )
        coarse = feed(model, cache, ids, cuts, mask)
    assert (raw - own)[real].abs().max() <= 1e-5
    assert 1e-3 < (coarse - own)[real].abs().max() < own.abs().max()
    assert cache.nbytes < 0.9 * sum(layer.shape.kv_heads * 2 * 33 * 4 * layer.shape.key_dim for layer in cache.layers)
    with pytest.raises(UnsupportedModelError, match="no eviction in dense mode"):
        attach(model, HALF, plan=plan)
    with pytest.raises(UnsupportedModelError, match="no sparse reading in dense mode"):
        attach(model, KVConfig(reader=TopK()), plan=plan)
    with attach(model, plan=plan) as kv, pytest.raises(SeamError, match="dense mode reads every token"):
        feed(model, kv.cache(KVConfig(reader=TopK(dense_layers=0))), ids[:1], (24,))


class _OwnCache(LlamaForCausalLM):
    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def _small_llama(kind: type = LlamaForCausalLM, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(LlamaConfig(vocab_size=97, **sizes, **more))


class _IgnoresTheCache(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(kwargs["input_ids"], use_cache=False)


def _t5() -> Any:
    return T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


def _mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: tiny_model("mistral_sliding"), "no layer keeps a full-attention cache"),
        (_t5, "encoder-decoder"),
        (_mamba, "no layer keeps a full-attention cache"),
        (lambda: _small_llama(_OwnCache), "cache class of its own"),
        (lambda: _small_llama(_IgnoresTheCache), "does not use the cache it is given"),
    ],
    ids=["all layers slide", "encoder-decoder", "state space", "own cache class", "ignores its cache"],
)
def test_models_without_a_cache_to_compress_are_refused(build, reason) -> None:
    torch.manual_seed(0)
    model = build().eval()
    plan = make_plan(model)
    assert plan.mode == "refuse"
    assert reason in plan.reason
    with pytest.raises(UnsupportedModelError, match=reason):
        attach(model)
    assert not model.config._attn_implementation.startswith("kvlab")


def test_configs_that_do_not_fit_are_refused_before_any_text() -> None:
    model = tiny_model("gemma3")
    with pytest.raises(ValueError, match=r"override for layer 0: the layers that can be compressed are \[5\]"):
        attach(model, KVConfig(overrides=((0, Affine(), Affine()),)))
    with pytest.raises(ValueError, match="head dim must be a multiple of the group, got 32 and group 64"):
        attach(model, KVConfig(key=Affine(group=64)))
    assert model.config._attn_implementation == "sdpa"


def test_shape_counts_heads_dims_and_windows() -> None:
    assert shape_of(tiny_model("llama_9_3")).layers == (LayerShape(3, 64, 64),) * 2
    assert shape_of(tiny_model("gemma3")).layers == (LayerShape(2, 32, 32, 32),) * 5 + (LayerShape(2, 32, 32),)


# -- no trace --------------------------------------------------------------------------------------------------------


def _trace(model: Any) -> tuple[Any, ...]:
    """Everything attaching could leave behind."""
    names = sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    return model.config._attn_implementation, names, hooks, attributes, type(model).forward


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt], ids=["none", "error", "Ctrl-C"])
def test_attach_leaves_no_trace(error) -> None:
    model, ids = tiny_model("llama3"), token_ids(1, 30)
    own = feed(model, DynamicCache(config=model.config), ids, (20, 1))
    before = _trace(model)
    with contextlib.suppress(*[error] if error else []), attach(model, HALF) as kv:
        feed(model, kv.cache(), ids, (20, 1))
        if error:
            raise error
    assert _trace(model) == before
    assert torch.equal(feed(model, DynamicCache(config=model.config), ids, (20, 1)), own)
    with pytest.raises(RuntimeError, match="detached"):
        kv.cache()


def test_a_failed_attach_leaves_no_trace(monkeypatch) -> None:
    model = tiny_model("llama3")
    plan, before = make_plan(model), _trace(model)

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "set_attn_implementation", fail)
        with pytest.raises(KeyboardInterrupt):
            attach(model, plan=plan)
    assert _trace(model) == before


def test_attention_that_differs_below_the_top_is_put_back() -> None:
    """A model of models may run its parts on different attention."""
    model = _gemma3_with_vision()
    model.config.text_config._attn_implementation_internal = "sdpa"
    model.config.vision_config._attn_implementation_internal = "eager"
    with attach(model):
        assert model.config.text_config._attn_implementation.startswith("kvlab")
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"


def test_nested_attachments_of_one_model() -> None:
    model, ids = tiny_model("llama3"), token_ids(1, 40)
    before = _trace(model)
    with attach(model, HALF) as outer:
        alone = feed(model, outer.cache(), ids, (30, 1))
        with attach(model, PAGES) as inner:
            nested, other = outer.cache(), inner.cache()
            assert torch.equal(feed(model, nested, ids, (30, 1)), alone)
            feed(model, other, ids, (30, 1))
        assert torch.equal(feed(model, outer.cache(), ids, (30, 1)), alone)
        feed(model, nested, ids, (1,))
        outer.detach()
        outer.detach()
    assert _trace(model) == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_attachments_come_off_in_any_order(order) -> None:
    """As generators do that the garbage collector closes: whatever is left keeps working, and nothing stays behind."""
    model, ids = tiny_model("llama3"), token_ids(1, 30)
    before, own = _trace(model), feed(model, DynamicCache(config=model.config), ids, (20, 1))
    attachments = [attach(model) for _ in range(3)]
    for n, which in enumerate(order, start=1):
        attachments[which].detach()
        for rest in order[n:]:
            assert (feed(model, attachments[rest].cache(), ids, (20, 1)) - own).abs().max() <= EXACT
    assert _trace(model) == before


def test_an_attachment_nobody_holds_any_more_keeps_its_name() -> None:
    """Its address may be taken by the next one, whose end must not take the name away."""
    model, other = tiny_model("llama3"), tiny_model("llama3")
    attach(model)
    for _ in range(50):
        attach(other).detach()
    assert make_plan(model).mode == "packed"
    model._kvlab_attached[0].detach()
    assert "_kvlab_attached" not in model.__dict__


def test_two_models_attached_at_once_do_not_need_each_other() -> None:
    first, second, ids = tiny_model("llama3"), tiny_model("qwen3"), token_ids(1, 30)
    own = feed(second, DynamicCache(config=second.config), ids, (20, 1))
    a, b = attach(first), attach(second, PAGES)
    a.detach()
    assert (feed(second, b.cache(), ids, (20, 1)) - own).abs().max() <= EXACT
    b.detach()
    assert second.config._attn_implementation == "sdpa"


# -- other caches while attached ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "ministral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "make",
    [lambda config: DynamicCache(config=config), lambda config: StaticCache(config, max_cache_len=64)],
    ids=["dynamic", "static"],
)
def test_transformers_own_caches_stay_right_while_attached(name, make) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(token_ids(2, 50), (0, 11))
    own = feed(model, make(model.config), ids, (30, 1, 9, 1), mask)
    alone = feed(model, make(model.config), ids[:1], (30, 1, 9, 1))
    with torch.no_grad():
        uncached = model(ids, attention_mask=mask, use_cache=False).logits
    with attach(model, HALF):
        padded = feed(model, make(model.config), ids, (30, 1, 9, 1), mask)
        single = feed(model, make(model.config), ids[:1], (30, 1, 9, 1))
        with torch.no_grad():
            nothing = model(ids, attention_mask=mask, use_cache=False).logits
    assert (padded - own)[mask[:, :41].bool()].abs().max() <= EXACT
    assert (single - alone).abs().max() <= EXACT
    assert (nothing - uncached)[mask.bool()].abs().max() <= EXACT


def test_attention_that_reads_both_ways_stays_so() -> None:
    """As in a vision tower below the same model."""
    q = torch.randn(1, 2, 5, 8)
    out, _ = attention(SimpleNamespace(is_causal=False), q, q, q, None)  # type: ignore[arg-type]
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q).transpose(1, 2))
    causal, _ = attention(SimpleNamespace(), q, q, q, None)  # type: ignore[arg-type]
    assert (causal - F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)).abs().max() <= 1e-6


def _gemma3_with_vision() -> Any:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 97, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16}
    config = Gemma3Config(
        text_config=text | {"layer_types": kinds, "initializer_range": 0.15, "pad_token_id": 0},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=96,
        boi_token_index=95,
        eoi_token_index=94,
    )
    return Gemma3ForConditionalGeneration(config).eval().double()


# -- refusals in attention ---------------------------------------------------------------------------------------------


def _forward(model: Any, cache: Any, ids: torch.Tensor, **more: Any) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=True, **more, **{cache_kwarg(): cache})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, r"passes \['position_bias'\]"),
        ({"indices": torch.zeros(1)}, r"passes \['indices'\]"),
        ({"output_attentions": True}, r"passes \['output_attentions'\]"),
        ({"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()}, r"2-D padding mask .* \(1, 1, 8, 8\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_that_would_have_to_be_ignored_are_refused(more, reason) -> None:
    model = tiny_model("llama1")
    with attach(model) as kv, pytest.raises(SeamError, match=reason):
        _forward(model, kv.cache(), token_ids(1, 8), **more)


def test_dropout_is_refused() -> None:
    model = _small_llama(attention_dropout=0.1).train()
    with attach(model.eval()) as kv:
        model.train()
        with pytest.raises(SeamError, match="dropout"):
            _forward(model, kv.cache(), token_ids(1, 8))


def test_a_mask_must_keep_its_past() -> None:
    model, ids = tiny_model("llama3"), token_ids(2, 30)
    _, mask = left_padded(ids, (0, 5))
    with attach(model, PAGES) as kv:
        cache = kv.cache()
        feed(model, cache, ids, (20,), mask)
        changed = mask.clone()
        changed[1, 3] = 1
        with pytest.raises(SeamError, match="row 1 of the cache has taken 15 tokens, but the mask now counts 16"):
            feed(model, cache, ids, (1,), changed)


def _handle(kv: Any) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer of the cache with an update that is not attended yet."""
    cache, q = kv.cache(), torch.randn(1, 6, 5, 32, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 5, 32, dtype=torch.float64) for _ in range(2))
    return cache, q, *cache.update(k, v, 0)


def test_keys_or_values_changed_after_the_update_are_noticed() -> None:
    model = tiny_model("llama1")
    module = model.model.layers[0].self_attn
    with attach(model, PAGES) as kv:
        for spoil in (lambda k, v: (k, v.clone()), lambda k, v: (k, v.mul_(2)), lambda k, v: (k.neg_(), v)):
            _, q, k, v = _handle(kv)
            handle = Handle.of(k, {})
            k, v = spoil(k, v)
            with pytest.raises(SeamError, match="changes K or V"):
                attention(module, q, k, v, None, kvlab_handle=handle)


def test_an_update_is_attended_once() -> None:
    model = tiny_model("llama1")
    module = model.model.layers[0].self_attn
    with attach(model, PAGES) as kv:
        cache, q, k, v = _handle(kv)
        attention(module, q, k, v, None)
        with pytest.raises(SeamError, match="two attention calls"):
            attention(module, q, k, v, None)
        _, _, k, v = _handle(kv)
        with pytest.raises(SeamError, match="slides a window"):
            attention(module, q, k, v, None, sliding_window=8)
        cache, _, k, v = _handle(kv)
        with pytest.raises(SeamError, match="never attended"):
            cache.update(k, v, 0)
        _, _, k, v = _handle(kv)
        with pytest.raises(SeamError, match="reads later tokens"):
            attention(module, q, k, v, None, is_causal=False)


def test_new_keys_and_values_are_freed_without_the_garbage_collector() -> None:
    """A handle rides on the key tensor; if it held the key in turn, each forward's K and V would stay."""
    model, alive = tiny_model("llama3"), []
    with attach(model, PAGES) as kv:
        cache = kv.cache()
        update = cache.layers[0].update

        def watched(*args: Any, **kwargs: Any) -> Any:
            k, v = update(*args, **kwargs)
            alive.append(weakref.ref(k))
            return k, v

        cache.layers[0].update = watched
        gc.collect()
        gc.disable()
        try:
            feed(model, cache, token_ids(1, 30), (20, 1))
        finally:
            gc.enable()
    assert [x() for x in alive] == [None, None]


def test_assisted_decoding_is_refused_because_it_takes_tokens_back() -> None:
    model = tiny_model("llama3")
    ids = token_ids(1, 5).repeat(1, 6)  # so that there is something to look up
    with attach(model, PAGES) as kv, pytest.raises(ValueError, match=r"can be cropped|cannot give back"):
        model.generate(ids, max_new_tokens=9, prompt_lookup_num_tokens=3, **{cache_kwarg(): kv.cache()})


def test_two_caches_of_one_model_at_once() -> None:
    """Steps in turns, on different texts and configs."""
    model, ids, other = tiny_model("llama3"), token_ids(1, 40), token_ids(1, 40, seed=1)
    small = KVConfig(scorer=AttentionMass(), budget=Tokens(12), recent_tokens=4, page_tokens=4)
    with attach(model, HALF) as kv:
        alone = feed(model, kv.cache(), ids, (20, 1, 1)), feed(model, kv.cache(small), other, (9, 1, 1))
        a, b = kv.cache(), kv.cache(small)
        turns = [
            feed(model, c, x, (n,))
            for n_a, n_b in ((20, 9), (1, 1), (1, 1))
            for c, x, n in ((a, ids, n_a), (b, other, n_b))
        ]
    assert torch.equal(torch.cat(turns[0::2], dim=1), alone[0])
    assert torch.equal(torch.cat(turns[1::2], dim=1), alone[1])


def test_cache_kwarg_is_what_this_transformers_takes() -> None:
    model, cache = tiny_model("llama1"), DynamicCache()
    _forward(model, cache, token_ids(1, 3))
    assert cache.get_seq_length() == 3
