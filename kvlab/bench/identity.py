"""Identity: a raw, unlimited cache equals the model's own, token for token and logit for logit.

On the default model through `generate`; on tiny random models of each architecture in float64, where rounding cannot
hide a fault. The cache's recent window is kept small, so that what is read comes from pages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvlab.attach import attach, cache_kwarg, make_plan
from kvlab.bench.tiny import tiny_model, token_ids
from kvlab.config import KVConfig
from kvlab.models import load

SCHEMA = "kvlab.bench.identity/1"
TOLERANCE = 1e-9
CONFIG = KVConfig(sink_tokens=2, recent_tokens=4, page_tokens=4)
_DEFINITION = "attention-by-definition"
_PROMPTS = (
    "The lighthouse keeper wrote down every ship that passed the point, with the hour and the weather, and at the end "
    "of each month he sent the list to the harbour office. This month the list began with",
    "Question: a box holds 12 pencils and a class needs 60. How many boxes are needed?\nAnswer:",
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "Once upon a time",
)


class Architecture(NamedTuple):
    """One row of the table: which tiny model, and what it is compared with."""

    name: str
    model: str
    reference: Literal["own", "definition"] = "own"
    note: str = ""


ARCHITECTURES = (
    Architecture("llama", "llama3"),
    Architecture("qwen2_large_key_bias", "qwen2"),
    Architecture("qwen3", "qwen3"),
    Architecture("mistral", "mistral"),
    Architecture(
        "mistral_sliding_layers",
        "ministral",
        note="sliding and full layers mixed; where every layer slides there is nothing to compress, and attach refuses",
    ),
    Architecture("phi3_partial_rotary", "phi3"),
    Architecture(
        "gemma2",
        "gemma2",
        "definition",
        "its own attention takes the softmax in float32 and gives NaN for padded rows in float64; compared with "
        "attention by its definition, all in float64",
    ),
    Architecture("gemma3", "gemma3"),
    Architecture("gpt_oss", "gpt_oss"),
    Architecture("falcon", "falcon", note="attention of its own: served decoded (dense mode)"),
)


def run(
    say: Callable[[str], None],
    model: str | None = "smollm2-135m",
    tokens: int = 64,
    rows: tuple[Architecture, ...] = ARCHITECTURES,
) -> dict[str, Any]:
    """The whole document. `model=None` leaves the default model out."""
    default = None if model is None else compare_tokens(model, tokens, say)
    architectures = []
    for architecture in rows:
        architectures.append(compare(architecture))
        say(f"{architecture.name}: {architectures[-1]['mode']}, {architectures[-1]['max_abs_logit_diff']:.1e}")
    exact = all(row["max_abs_logit_diff"] <= TOLERANCE for row in architectures)
    same = default is None or default["tokens_equal"] == default["tokens"]
    return {
        "schema": SCHEMA,
        "default_model": default,
        "architectures": architectures,
        "tolerance": TOLERANCE,
        "ok": exact and same,
    }


def compare(architecture: Architecture) -> dict[str, Any]:
    """Largest logit difference over a left-padded prompt, single steps, a second turn in one piece, and a last step."""
    model = tiny_model(architecture.model)
    plan = make_plan(model)
    ids, mask = token_ids(2, 64), torch.ones(2, 64, dtype=torch.long)
    mask[1, :13] = 0
    own = DynamicCache(config=model.config)
    if architecture.reference == "own":
        reference = forwards(model, ids, mask, own)
    else:
        with by_definition(model):
            reference = forwards(model, ids, mask, own)
    with attach(model, CONFIG, plan=plan) as kv:
        cache = kv.cache()
        logits = forwards(model, ids, mask, cache)
    row = {
        "name": architecture.name,
        "mode": plan.mode,
        "max_abs_logit_diff": float((logits - reference)[mask.bool()].abs().max()),
        "reference": architecture.reference,
        "layers_compressed": len(plan.compressed),
        "layers": len(plan.compressed) + len(plan.stock),
        "tokens_in_pages": cache.occupancy()[0][0].stored,
    }
    return row | ({"note": architecture.note} if architecture.note else {})


@torch.no_grad()
def forwards(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Logits [B, T, V] of `ids` fed as a prompt of 40, ten steps, a turn of 13, and a step."""
    positions, logits, start = (mask.cumsum(1) - 1).clamp_min(0), [], 0
    for count in (40, *[1] * 10, 13, 1):
        stop = start + count
        out = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            use_cache=True,
            **{cache_kwarg(): cache},
        )
        logits.append(out.logits)
        start = stop
    return torch.cat(logits, dim=1)


@contextmanager
def by_definition(model: PreTrainedModel) -> Iterator[None]:
    """The model with softmax attention written out, in the dtype of its inputs."""
    before = str(model.config._attn_implementation)
    AttentionInterface.register(_DEFINITION, _softmax_attention)
    AttentionMaskInterface.register(_DEFINITION, _full_mask)
    try:
        model.set_attn_implementation(_DEFINITION)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_DEFINITION, None)
        AttentionMaskInterface._global_mapping.pop(_DEFINITION, None)


def _full_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def _softmax_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, dim=1).mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    probs = torch.softmax(logits.masked_fill(~attention_mask, -torch.inf), dim=-1).nan_to_num(0.0)
    return (probs @ value.repeat_interleave(group, dim=1)).transpose(1, 2), None


def compare_tokens(name: str, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Greedy `generate`, alone and in a left-padded batch, under the model's own cache and under ours.

    `tokens` counts per row; `tokens_equal` is that of the row that agrees least.
    """
    loaded = load(name)
    model, tokenizer = loaded.model, loaded.tokenizer
    plan = make_plan(model)
    batches = []
    for prompts in (_PROMPTS[:1], _PROMPTS):
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
        say(f"{name}: {tokens} tokens for {len(prompts)} row(s), own cache")
        own = _greedy(model, inputs, tokens, {})
        say(f"{name}: {tokens} tokens for {len(prompts)} row(s), raw pages")
        with attach(model, CONFIG, plan=plan) as kv:
            cache = kv.cache()
            ours = _greedy(model, inputs, tokens, {cache_kwarg(): cache})
        batches.append(
            {
                "rows": len(prompts),
                "prompt_tokens": inputs["attention_mask"].sum(1).tolist(),
                "tokens_equal": (own == ours).sum(1).tolist(),
                "tokens_in_pages": [cache.occupancy(row)[0][0].stored for row in range(len(prompts))],
            }
        )
    return {
        "name": name,
        "mode": plan.mode,
        "tokens": tokens,
        "tokens_equal": min(count for batch in batches for count in batch["tokens_equal"]),
        "batches": batches,
    }


def _greedy(model: Any, inputs: Any, tokens: int, cache: dict[str, Any]) -> Tensor:
    """[B, tokens]; an end token does not stop it early."""
    out = model.generate(**inputs, **cache, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)
    return out[:, inputs["input_ids"].shape[1] :]
