"""Centres on real architectures: rotary embeddings found by facts, identity to the dense model, and what is refused."""

import copy
import re
from typing import Any

import pytest
import torch
from reference import feed, left_padded
from tiny import tiny_model, token_ids
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvlab.attach import UnsupportedModelError, attach, cache_kwarg, make_plan
from kvlab.cache import SeamError
from kvlab.centring import Centres, CentringError, bias_centres, find_rotaries, mean_centres
from kvlab.codecs import Affine, Raw
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction
from kvlab.snapshot import take

MODELS = ["llama3", "qwen2", "qwen3", "phi3", "gemma3", "gpt_oss"]
ENCODED: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 4, "page_tokens": 16, "centring": "mean"}


def means(model: Any) -> dict[str, Centres]:
    return {"mean": mean_centres(model, token_ids(1, 90, seed=5)[0].tolist(), find_rotaries(model))}


def small(kind: str, **more: Any) -> Any:
    """A tiny model of another family or with other RoPE than those of `tiny_model`."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "phi3": (Phi3Config, Phi3ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "cohere": (CohereConfig, CohereForCausalLM),
        "cohere2": (Cohere2Config, Cohere2ForCausalLM),
    }[kind]
    torch.manual_seed(4)
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return model_class(config_class(**sizes | more)).eval().double()


# -- the rotary embedding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pairs", "slowest"),
    [
        ("llama3", [16] * 3, 1e4 ** (-15 / 16)),
        ("phi3", [12] * 2, 1e4 ** (-11 / 12)),
        ("gemma3", [None] * 5 + [16], 1e6 ** (-15 / 16)),  # of its two embeddings the one of full layers
        ("gpt_oss", [None, 16], None),
    ],
)
def test_embeddings_are_found(name: str, pairs: list[int | None], slowest: float | None) -> None:
    rotaries = find_rotaries(tiny_model(name))
    assert [r and r.pairs for r in rotaries] == pairs
    found = [r for r in rotaries if r is not None]
    assert not any(r.interleaved for r in found)
    assert len({id(r) for r in found}) == 1  # one table of angles for all layers that turn alike
    if slowest is not None:
        assert float(found[0].inv_freq[-1]) == pytest.approx(slowest, rel=1e-5)


def test_interleaved_pairs_are_found() -> None:
    rotaries = find_rotaries(small("cohere"))
    assert [(r.pairs, r.interleaved) for r in rotaries if r is not None] == [(8, True)] * 2


def test_a_layer_that_does_not_turn_has_no_pairs() -> None:
    model = small("cohere2", sliding_window=32, layer_types=["sliding_attention", "full_attention"])
    assert [r and r.pairs for r in find_rotaries(model)] == [None, 0]
    identical(model, means(model), "mean")


SCALED = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_embeddings_are_found(kind: str) -> None:
    model = small("llama", rope_parameters=SCALED[kind])
    assert [r and r.pairs for r in find_rotaries(model)] == [8, 8]
    identical(model, means(model), "mean")


def test_embeddings_that_change_with_the_length_are_refused_and_left_as_they_were() -> None:
    dynamic = small("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 128}  # fmt: skip
    for model in (dynamic, small("phi3", rope_parameters=long, original_max_position_embeddings=128)):
        ids = token_ids(1, 20)
        before = model(ids).logits
        with pytest.raises(CentringError, match=r"layer 0: no known rotation takes .* changes with the length"):
            find_rotaries(model)
        assert torch.equal(model(ids).logits, before)
        model(token_ids(1, 600))  # and after a prompt that has already changed them
        with pytest.raises(CentringError, match=r"layer 0: no known rotation"):
            find_rotaries(model)


# -- identity ----------------------------------------------------------------------------------------------------------


def identical(model: Any, centres: dict[str, Centres], centring: Any) -> None:
    """Raw keys that are centred read back as the model's own cache: a batch with padding, chunks, turns, steps."""
    ids, mask = left_padded(token_ids(2, 90), [0, 13])
    cuts = (30, 25, 1, 1, 20, 1)
    config = KVConfig(sink_tokens=0, recent_tokens=0, centring=centring)
    with attach(model, config, centres=centres) as kv:
        own: Any = DynamicCache(config=model.config)
        expected = feed(model, own, ids, cuts, mask)
        cache: Any = kv.cache()
        got = feed(model, cache, ids, cuts, mask)
        plain = feed(model, kv.cache(KVConfig(sink_tokens=0, recent_tokens=0)), ids, cuts, mask)
        stored = [cache.layers[i].rows[0].pages()[0]["data"] for i in cache.compressed]
        norms = [c.mu.norm() for c in centres[centring] if c is not None]
    real = mask[:, : sum(cuts)].bool()
    # Keys come back to the last bit or two of float64; the norms of a model compute in float32 and may flip one there.
    assert float((got - expected)[real].abs().max()) <= 1e-5
    assert float((got - plain)[real].abs().max()) <= 1e-5
    for i, x, norm in zip(cache.compressed, stored, norms, strict=True):
        whole = own.layers[i].keys[0, :, : x.shape[1]]
        assert float(norm) > 0.3
        assert float((whole - x).norm(dim=-1).square().sum(0).mean()) == pytest.approx(float(norm) ** 2, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_raw_centred_keys_are_the_dense_model(name: str) -> None:
    model = tiny_model(name)
    identical(model, means(model), "mean")


def test_raw_keys_centred_by_their_bias_are_the_dense_model() -> None:
    model = tiny_model("qwen2")
    identical(model, {"bias": bias_centres(model, find_rotaries(model))}, "bias")


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_generate_goes_on_where_a_centred_cache_is(name: str) -> None:
    model: Any = tiny_model(name)
    ids = token_ids(1, 60)

    def greedy(cache: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=None, **{cache_kwarg(): cache})

    with attach(model, KVConfig(sink_tokens=0, recent_tokens=0, centring="mean"), centres=means(model)) as kv:
        cache, own = kv.cache(), DynamicCache(config=model.config)
        ours, theirs = greedy(cache, ids), greedy(own, ids)
        assert torch.equal(ours, theirs)
        more = torch.cat([ours, token_ids(1, 9, seed=2)], dim=1)
        assert torch.equal(greedy(cache, more), greedy(own, more))


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
@pytest.mark.parametrize("key", [Affine(bits=4, group=16), Affine(bits=2, axis="channel", group=16)], ids=str)
def test_a_fork_is_a_prefill(name: str, key: Any) -> None:
    model, ids = tiny_model(name), token_ids(1, 95)
    config = KVConfig(key=key, scorer=AttentionMass(), budget=Fraction(0.6), **ENCODED)
    with attach(model, config, centres=means(model)) as kv:
        (snapshot,) = take(model, kv, [ids[0, :75].tolist()], [config.scorer])
        fork: Any = snapshot.fork(config, kv)
        live: Any = kv.cache()
        feed(model, live, ids, (75,))
        for i in live.compressed:
            ours, theirs = (c.layers[i].rows[0].table.gather() for c in (fork, live))
            assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
        assert torch.equal(feed(model, fork, ids, (1,) * 20), feed(model, live, ids, (1,) * 20))


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_heads_that_share_a_budget_keep_their_own_centres(scope: Any) -> None:
    """Ragged heads, of one layer and of all: what is held reads back as the dense cache's keys, where raw."""
    model, ids = tiny_model("llama3"), token_ids(1, 95)
    budget = Fraction(0.5, scope=scope)
    config = KVConfig(key=Raw(), scorer=AttentionMass(), budget=budget, **ENCODED)
    with attach(model, config, centres=means(model)) as kv:
        own: Any = DynamicCache(config=model.config)
        live: Any = kv.cache()
        feed(model, live, ids, (75, 1, 1, 1))
        (snapshot,) = take(model, kv, [ids[0, :75].tolist()], [config.scorer])
        fork: Any = snapshot.fork(config, kv)
        feed(model, fork, ids, (1, 1, 1))
        feed(model, own, ids, (78,))
    counts = [row.table.counts for layer in live.layers for row in layer.rows]
    assert len({n for heads in counts for n in heads}) > 1
    for i in live.compressed:
        row = live.layers[i].rows[0]
        assert torch.equal(row.positions(), fork.layers[i].rows[0].positions())
        keys, at = row.encoded_keys(32, torch.float64), row.positions()
        for head, count in enumerate(row.table.counts):
            # The first layer's keys do not depend on what was evicted; those of later layers nearly not.
            whole = own.layers[i].keys[0, head][at[head, :count]]
            before = at[head, :count] < 75
            torch.testing.assert_close(keys[head, :count][before], whole[before], rtol=0, atol=1e-5)


def test_centred_rows_do_not_depend_on_what_they_share_a_batch_with() -> None:
    model, prompts = tiny_model("llama3"), [token_ids(1, n, seed=n) for n in (41, 60, 23)]
    config = KVConfig(key=Affine(bits=4, group=16), **ENCODED)
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    ids, mask = left_padded(ids, [width - p.shape[1] for p in prompts])
    with attach(model, config, centres=means(model)) as kv:
        together = feed(model, kv.cache(), ids, (50, 10), mask)[:, -1]
        for b, p in enumerate(prompts):
            cuts = (p.shape[1] - 10, 10)
            torch.testing.assert_close(feed(model, kv.cache(), p, cuts)[0, -1], together[b], rtol=0, atol=1e-5)


# -- centres -----------------------------------------------------------------------------------------------------------


def test_the_bias_centre_is_the_bias_times_what_the_model_scales_keys_by() -> None:
    model: Any = tiny_model("gpt_oss")
    scaling = model.model.rotary_emb.attention_scaling
    assert scaling > 1.3
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_()
    first, second = bias_centres(model, find_rotaries(model))
    assert first is None
    assert second is not None
    bias = model.model.layers[1].self_attn.k_proj.bias.view(2, 32)
    torch.testing.assert_close(second.mu, (scaling * bias).float(), rtol=1e-5, atol=1e-5)
    identical(model, {"bias": (first, second)}, "bias")


def test_the_mean_centre_is_the_mean_of_keys_before_they_are_turned() -> None:
    model: Any = tiny_model("llama1")
    ids = token_ids(1, 80)
    seen = []
    hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _m, _i, out: seen.append(out))
    (centre,) = mean_centres(model, ids[0].tolist(), find_rotaries(model))
    hook.remove()
    before = seen[-1][0].view(80, 2, 32)[4:].mean(0)
    assert centre is not None
    torch.testing.assert_close(centre.mu.double(), before, rtol=1e-4, atol=1e-4)
    (again,) = mean_centres(model, ids[0].tolist(), find_rotaries(model))
    assert again is not None
    assert torch.equal(again.mu, centre.mu)


def test_a_bias_that_is_missing_or_followed_by_a_norm_is_refused() -> None:
    for model, why in (
        (tiny_model("llama3"), "layer 0 has no k_proj bias .* use centring 'mean'"),
        (tiny_model("phi3"), "layer 0 has no k_proj bias"),  # one projection for q, k and v
        (small("qwen3", attention_bias=True, head_dim=16), "layer 0: what leaves k_proj is not what is rotated"),
    ):
        if "Qwen3" in type(model).__name__:
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.self_attn.k_proj.bias.normal_()
        rotaries = find_rotaries(model)
        with pytest.raises(CentringError, match=why):
            bias_centres(model, rotaries)
        with pytest.raises(CentringError, match=why):
            attach(model, KVConfig(centring="bias"))
        assert model.config._attn_implementation == "sdpa"


def test_a_mean_of_a_few_tokens_is_refused() -> None:
    model = tiny_model("llama1")
    with pytest.raises(CentringError, match="at least 64 calibration tokens, got 63"):
        mean_centres(model, [5] * 63, find_rotaries(model))


# -- at attach time, and at the seam -----------------------------------------------------------------------------------


def test_a_mean_must_be_given() -> None:
    model = tiny_model("llama1")
    with pytest.raises(ValueError, match="centring 'mean' needs centres measured beforehand"):
        attach(model, KVConfig(centring="mean"))
    assert model.config._attn_implementation == "sdpa"
    with attach(model) as kv, pytest.raises(ValueError, match="centring 'mean' needs centres"):
        kv.cache(KVConfig(centring="mean"))


def test_a_bias_is_read_off_the_model_when_it_is_needed() -> None:
    model = tiny_model("qwen2")
    with attach(model) as kv:
        cache: Any = kv.cache(KVConfig(key=Raw(), centring="bias"))
        assert [layer.centre is not None for layer in cache.layers] == [True, True]
        assert kv.centres("bias") is kv.centres("bias")
        twin: Any = copy.deepcopy(cache)
        assert twin.layers[0].centre is cache.layers[0].centre  # a copy of a cache copies nothing of the model
        assert kv.centres("none") is None


def test_dense_mode_takes_no_centre() -> None:
    with pytest.raises(UnsupportedModelError, match="keys are centred in packed mode only"):
        attach(tiny_model("falcon"), KVConfig(centring="mean"))


def test_positions_that_are_not_a_count_of_real_tokens_are_refused() -> None:
    model, ids = tiny_model("llama3"), token_ids(2, 12)
    ids, mask = left_padded(ids, [0, 3])
    with attach(model, KVConfig(centring="mean"), centres=means(model)) as kv, torch.no_grad():
        with pytest.raises(SeamError, match="row 1 takes its tokens 0 to 8, but position_ids say 3 to 11"):
            model(input_ids=ids, attention_mask=mask, use_cache=True, **{cache_kwarg(): kv.cache()})
        shifted = torch.arange(100, 112).unsqueeze(0)
        with pytest.raises(SeamError, match="row 0 takes its tokens 0 to 11, but position_ids say 100 to 111"):
            model(input_ids=ids[:1], position_ids=shifted, use_cache=True, **{cache_kwarg(): kv.cache()})


# -- advice ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3", "at 4 bit per token use centring='mean'"),
        ("phi3", "at 4 bit per token use centring='mean'"),
        ("qwen2", "k_proj biases reach .* times the spread of a key channel .* use centring='bias'"),
        ("qwen3", "keys are normed in a small model: keep them at 8 bit"),
        ("gemma3", "keys are normed"),
        ("gpt_oss", "at 4 bit per token"),  # it has biases, and they are quiet
        ("falcon", "^$"),  # dense mode: keys are not centred there
    ],
)
def test_a_plan_says_how_to_store_keys(name: str, said: str) -> None:
    assert re.search(said, make_plan(tiny_model(name)).advice)


# -- FMT-08: a loud key channel ----------------------------------------------------------------------------------------

LOUD = {
    "token": KVConfig(key=Affine(bits=4, group=32)),
    "rotated": KVConfig(key=Affine(bits=4, group=32, hadamard=True)),
    "bias": KVConfig(key=Affine(bits=4, group=32), centring="bias"),
    "mean": KVConfig(key=Affine(bits=4, group=32), centring="mean"),
    "channel": KVConfig(key=Affine(bits=4, axis="channel", group=16)),
}


@torch.no_grad()
def losses(loud: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """KL, and NLL lost on the model's own choices, against the uncompressed cache: a context stored whole at 4 bit.

    Of each head's key bias the dims in `loud` are 100, the others 0; keys spread by about 2.
    """
    model, ids = tiny_model("qwen2"), token_ids(4, 170)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.zero_().view(2, 32)[:, loud] = 100.0
    kl, nll = {}, {}
    with attach(model, centres=means(model)) as kv:
        own = feed(model, DynamicCache(config=model.config), ids, (160, 10)).log_softmax(-1)[:, 160:]
        gold = own.argmax(-1, keepdim=True)
        for name, kind in LOUD.items():
            config = KVConfig(key=kind.key, centring=kind.centring, sink_tokens=0, recent_tokens=0)
            got = feed(model, kv.cache(config), ids, (160, 10)).log_softmax(-1)[:, 160:]
            kl[name] = float((own.exp() * (own - got)).sum(-1).mean())
            nll[name] = float((own.gather(2, gold) - got.gather(2, gold)).mean())
    return kl, nll


def test_a_loud_key_bias_collapses_per_token_keys_and_no_others() -> None:
    kl, nll = losses([15, 31])  # the slowest pair: a constant for channels, too
    assert kl["token"] > 2.5
    assert nll["token"] > 3.5
    assert kl["rotated"] > 1.5  # a rotation spreads a constant over the group, it does not remove it
    for name in ("bias", "mean", "channel"):
        assert kl[name] < 0.3
        assert nll[name] < 0.45


def test_a_loud_pair_that_turns_fast_collapses_per_channel_keys_too() -> None:
    kl, nll = losses([0, 16])  # one radian a token: within a page the channel swings from -100 to 100
    for name, least in (("token", 2.5), ("channel", 1.5)):
        assert kl[name] > least
        assert nll[name] > least
    for name in ("bias", "mean"):
        assert kl[name] < 0.5
        assert nll[name] < 0.7
