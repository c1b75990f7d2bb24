"""Bytes: what a config is predicted to hold, what its cache holds, and what the storages behind it take.

Composed configs on tiny models, after the prompt and after 40 decoded tokens. The three figures must be equal once
preallocation is given back; that slack is reported apart.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from kvlab.attach import Plan, attach, cache_kwarg, make_plan, shape_of
from kvlab.bench.tiny import tiny_model, token_ids
from kvlab.cache import KVCache
from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.layer import ModelShape
from kvlab.policies import (
    AttentionMass,
    ExpectedAttention,
    Fraction,
    KeyDiff,
    KeyNorm,
    LastSelected,
    Recency,
    Threshold,
    Tokens,
    TopK,
    WindowAttention,
)

SCHEMA = "kvlab.bench.bytes/1"
PROMPTS = (1, 33, 257)
DECODED = 40

_INT4 = Affine(bits=4)
_INT8 = Affine(bits=8)
_INT2 = Affine(bits=2, group=16)
_CHANNEL16 = Affine(bits=4, axis="channel", group=16)
_CHANNEL32 = Affine(bits=2, axis="channel", group=32)

CONFIGS: tuple[KVConfig, ...] = (
    KVConfig(),
    KVConfig(raw_dtype="float16"),
    KVConfig(raw_dtype="bfloat16", sink_tokens=0, recent_tokens=0, page_tokens=1),
    KVConfig(raw_dtype="float16", recent_tokens=7, page_tokens=8),
    KVConfig(key=Fp8(), value=Fp8(), raw_dtype="float16"),
    KVConfig(key=Fp8("e5m2", scale="dynamic", hadamard=True), value=Fp8("e4m3", scale="dynamic"), recent_tokens=16),
    KVConfig(key=_INT8, value=_INT8, raw_dtype="float16"),
    KVConfig(key=Affine(bits=8, group=0, mode="symmetric"), value=_INT8, sink_tokens=0, recent_tokens=0),
    KVConfig(key=_INT4, value=_INT4, raw_dtype="float16"),
    KVConfig(key=_INT4, value=_INT4, sink_tokens=0, recent_tokens=0, page_tokens=1),
    KVConfig(key=_CHANNEL16, value=_INT4, raw_dtype="float16", recent_tokens=32),
    KVConfig(key=_CHANNEL32, value=_INT2, raw_dtype="float16", recent_tokens=32, page_tokens=32),
    KVConfig(key=Affine(bits=3, group=64), value=Affine(bits=3, mode="midrise", clip=0.9), page_tokens=64),
    KVConfig(key=_INT8, value=Affine(bits=4, hadamard=True), raw_dtype="bfloat16"),
    KVConfig(value=_INT4, raw_dtype="float16", recent_tokens=8),
    KVConfig(key=_INT4, value=_INT4, overrides=((0, Raw(), Raw()),), raw_dtype="float16"),
    KVConfig(key=_INT8, value=_INT4, overrides=((1, _INT2, _INT2), (0, Fp8(), _INT8)), recent_tokens=20),
    KVConfig(scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=16, raw_dtype="float16"),
    KVConfig(key=Fp8(), value=Fp8(), scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=16),
    KVConfig(key=_INT4, value=_INT4, scorer=AttentionMass(decay=0.9), budget=Fraction(0.25), recent_tokens=8),
    KVConfig(key=_INT8, value=_INT8, scorer=WindowAttention(window=16), budget=Tokens(96), recent_tokens=16),
    KVConfig(scorer=Recency(), budget=Tokens(48), recent_tokens=32, raw_dtype="float16"),
    KVConfig(key=_CHANNEL16, value=_INT4, scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=16),
    KVConfig(key=_INT8, value=_INT4, scorer=AttentionMass(), budget=Threshold(0.25), recent_tokens=16),
    KVConfig(key=Fp8(), value=_INT4, scorer=Recency(), budget=Threshold(0.5), recent_tokens=0, sink_tokens=0),
    KVConfig(
        key=_INT8,
        value=_INT4,
        scorer=WindowAttention(),
        budget=Fraction(0.3),
        overrides=((1, _CHANNEL16, _CHANNEL16),),
        recent_tokens=24,
        raw_dtype="float16",
    ),
    KVConfig(key=_INT4, value=_INT4, reader=TopK(dense_layers=1), raw_dtype="float16"),
    KVConfig(key=_CHANNEL16, value=_INT4, reader=TopK(0.5, bound="codec", dense_layers=0), recent_tokens=16),
    KVConfig(key=_INT8, reader=TopK(count=3, chunk=4, bound="mean", dense_layers=0, select_every=4), recent_tokens=8),
    KVConfig(
        key=_INT8,
        value=_INT4,
        reader=TopK(count=3, dense_layers=0),
        scorer=LastSelected(),
        budget=Tokens(96),
        recent_tokens=16,
    ),
    KVConfig(key=_INT8, value=_INT4, scorer=KeyNorm(), budget=Fraction(0.4, scope="layer"), recent_tokens=16),
    KVConfig(key=_CHANNEL16, value=_INT4, scorer=KeyDiff(), budget=Tokens(96, scope="model"), recent_tokens=16),
    KVConfig(
        key=_INT4,
        value=_INT4,
        scorer=AttentionMass(value_norm=True),
        budget=Threshold(0.5, scope="model", floor=0.5),
        recent_tokens=8,
        raw_dtype="float16",
    ),
    KVConfig(key=_INT8, scorer=WindowAttention(), budget=Fraction(0.4, slope=0.5), recent_tokens=16),
    KVConfig(key=_INT4, value=_INT4, scorer=ExpectedAttention(), budget=Fraction(0.3), recent_tokens=16),
    KVConfig(scorer=Recency(), budget=Threshold(0.9, scope="layer"), recent_tokens=0, sink_tokens=0, page_tokens=4),
)
# Sliding layers beside the compressed one: they keep their window, and count.
SLIDING_CONFIGS = (CONFIGS[0], CONFIGS[8], CONFIGS[17], CONFIGS[20])


def run(
    say: Callable[[str], None],
    configs: Iterable[KVConfig] = CONFIGS,
    sliding: Iterable[KVConfig] = SLIDING_CONFIGS,
    prompts: Iterable[int] = PROMPTS,
) -> dict[str, Any]:
    """The whole document."""
    rows: list[dict[str, Any]] = []
    for name, chosen in (("llama_9_3", configs), ("gemma3", sliding)):
        model = tiny_model(name, torch.float32)
        shape, plan = shape_of(model), make_plan(model)
        for config in chosen:
            for prompt in prompts:
                rows += [{"model": name} | row for row in _measure(model, shape, plan, config, prompt)]
            say(f"{name}: {config.label}")
    checks = [group_of_32(), half_budget()]
    ok = all(r["predicted_bytes"] == r["measured_bytes"] == r["storage_bytes"] for r in rows)
    return {"schema": SCHEMA, "rows": rows, "checks": checks, "ok": ok and all(c["ok"] for c in checks)}


def _measure(
    model: PreTrainedModel, shape: ModelShape, plan: Plan, config: KVConfig, prompt: int
) -> Iterator[dict[str, Any]]:
    """One row after the prompt and one after the decoded tokens."""
    ids = token_ids(1, prompt + DECODED)
    with attach(model, config, plan=plan) as kv:
        cache = kv.cache()
        _feed(model, cache, ids[:, :prompt], prompt)
        yield _row(cache, config, shape, prompt, 0)
        _feed(model, cache, ids[:, prompt:], 1)
        yield _row(cache, config, shape, prompt, DECODED)


@torch.no_grad()
def _feed(model: PreTrainedModel, cache: KVCache, ids: torch.Tensor, at_once: int) -> None:
    for part in ids.split(at_once, dim=1):
        model(input_ids=part, use_cache=True, **{cache_kwarg(): cache})


def _row(cache: KVCache, config: KVConfig, shape: ModelShape, prompt: int, decoded: int) -> dict[str, Any]:
    measured, grown = cache.nbytes, cache.storage_bytes
    cache.fit()
    return {
        "config": config.label,
        "config_id": config.id,
        "prompt": prompt,
        "decoded": decoded,
        "tokens": prompt + decoded,
        "predicted_bytes": config.predicted_bytes(shape, prompt, decoded),
        "measured_bytes": measured,
        "storage_bytes": cache.storage_bytes,
        "slack_bytes": grown - measured,
        "raw16_bytes": shape.raw_bytes(prompt + decoded),
    }


def group_of_32() -> dict[str, Any]:
    """Codes of 4 bits in groups of 32 with fp16 scale and zero on head dim 64: 32 + 8 bytes per token and head."""
    model = tiny_model("llama_4_2", torch.float32)
    config = KVConfig(key=_INT4, value=_INT4, sink_tokens=0, recent_tokens=0, page_tokens=1)
    tokens, held = 33, {}
    with attach(model, config) as kv:
        for name, at_once in (("prompt", tokens), ("stepwise", 1)):
            cache = kv.cache()
            _feed(model, cache, token_ids(1, tokens), at_once)
            held[name] = cache.nbytes
    shape = shape_of(model)
    streams = tokens * sum(s.kv_heads for s in shape.layers) * 2
    per_token = {name: nbytes / streams for name, nbytes in held.items()}
    return {
        "name": "int4 g32 on head dim 64, bytes per token and head for each of K and V",
        "expected": 40,
        "measured": per_token["prompt"],
        "measured_stepwise": per_token["stepwise"],
        "nbytes": held["prompt"],
        "raw16_bytes": shape.raw_bytes(tokens),
        "ok": set(per_token.values()) == {40.0},
    }


def half_budget() -> dict[str, Any]:
    """A budget of one half per head holds at most half the bytes, plus what it says: position, mass, a part page."""
    model = tiny_model("llama_9_3", torch.float32)
    config = KVConfig(scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=32, raw_dtype="float16")
    tokens = 1024
    with attach(model, config) as kv:
        cache = kv.cache()
        _feed(model, cache, token_ids(1, tokens), tokens)
    shape = shape_of(model)
    heads = [(head, s) for layer, s in zip(cache.occupancy(), shape.layers, strict=True) for head in layer]
    overhead = sum(
        head.stored * (4 + 4) + head.window * 4 + (config.page_tokens - 1) * (2 * (s.key_dim + s.value_dim) + 8)
        for head, s in heads
    )
    raw = shape.raw_bytes(tokens)
    return {
        "name": "half of the tokens per head (h2o), bytes against half of raw and the stated overhead",
        "expected": raw // 2 + overhead,
        "measured": cache.nbytes,
        "overhead_bytes": overhead,
        "raw16_bytes": raw,
        "ratio": cache.nbytes / raw,
        "kept_per_head": sorted({head.kept for head, _ in heads}),
        "ok": cache.nbytes <= raw // 2 + overhead,
    }
