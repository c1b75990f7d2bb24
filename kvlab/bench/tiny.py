"""Tiny random models with fixed seeds, one for each way an architecture differs under a KV cache.

`tiny_model(name)` builds one of MODELS anew, so a caller may change what it gets. Weights are drawn wide enough for
attention to prefer some keys over others; a cache fault then moves logits by far more than rounding does.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97
WINDOW = 32
SEED = 20260117


def _sizes(layers: int, head_dim: int = 32, heads: int = 6, kv_heads: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more


def _llama(layers: int, head_dim: int = 32, heads: int = 6, kv_heads: int = 2) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_sizes(layers, head_dim, heads, kv_heads)))


def _qwen2() -> Any:
    sizes: dict[str, Any] = _sizes(2) | {"hidden_size": 192}  # Qwen2 takes head dim 32 from hidden size / heads
    del sizes["head_dim"]
    model: Any = Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        for layer in model.model.layers:
            # A few loud constant key channels, far above everything else.
            layer.self_attn.k_proj.bias[::16] = 100.0
    return model


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_sizes(2)))


def _mistral(window: int | None) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_sizes(2), sliding_window=window))


def _ministral() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return MinistralForCausalLM(MinistralConfig(**_sizes(3), sliding_window=WINDOW, layer_types=kinds))


def _phi3() -> PreTrainedModel:
    sizes: dict[str, Any] = _sizes(2) | {"hidden_size": 192}
    del sizes["head_dim"]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    return Phi3ForCausalLM(Phi3Config(**sizes, rope_parameters=rope))


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(**_sizes(4), sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0)
    config._attn_implementation = "eager"  # older versions of transformers start it on SDPA, which drops the cap
    return Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_sizes(6), sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=32)
    )


def _falcon() -> PreTrainedModel:
    config = FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return FalconForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    config = GptOssConfig(**_sizes(2), sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    model: Any = GptOssForCausalLM(config)
    model.set_experts_implementation("eager")  # the grouped matmul has no float64
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(1.0, 1.0)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama1": lambda: _llama(1),
    "llama3": lambda: _llama(3),
    "llama1_d80": lambda: _llama(1, head_dim=80),
    "llama3_d80": lambda: _llama(3, head_dim=80),
    "llama_9_3": lambda: _llama(2, head_dim=64, heads=9, kv_heads=3),  # the default model's heads
    "llama_4_2": lambda: _llama(2, head_dim=64, heads=4, kv_heads=2),
    "qwen2": _qwen2,  # loud key bias
    "qwen3": _qwen3,  # norms on queries and keys
    "mistral": lambda: _mistral(None),
    "mistral_sliding": lambda: _mistral(WINDOW),  # every layer slides: nothing to compress
    "ministral": _ministral,  # sliding and full layers mixed
    "phi3": _phi3,  # rotates three quarters of a head
    "gemma2": _gemma2,  # soft-capped logits, alternating layers
    "gemma3": _gemma3,  # five local layers, then a global one
    "gpt_oss": _gpt_oss,  # a learned sink logit per head
    "falcon": _falcon,  # attention of its own, not reached by AttentionInterface
}


def tiny_model(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A fresh copy of MODELS[name], in evaluation mode; the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return MODELS[name]().eval().to(dtype)


def token_ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids without padding, bos and eos."""
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
