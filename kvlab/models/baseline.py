"""Check that an uncompressed model gives right numbers, before anything is compared with it.

This file refuses to know how the model was loaded or what will be compared.
"""

import math
from typing import Any

import torch

from kvlab.models.loading import Loaded

SANITY_TEXT = (
    "The old lighthouse stood at the end of a narrow spit of land, and for most of the year nobody went there except "
    "the man who kept the lamp. Every evening he climbed the stairs, cleaned the glass, and lit the flame before the "
    "sun had gone down. In the winter the wind blew so hard that he could not hear his own footsteps. He had a small "
    "radio, a shelf of books, and a dog that slept beside the stove. Once a month a boat brought flour, oil, coffee "
    "and letters from his sister, who lived in the city and could not understand why he stayed. He never found a good "
    "answer to that question. When the weather was clear he could see the ships passing far out at sea, and he liked "
    "to think that somebody on board was looking back at the light and knew exactly where they were."
)


class BrokenBaseline(RuntimeError):  # noqa: N818 - a finding about the model, not a fault of the call
    """The uncompressed model itself gives wrong numbers, so no comparison against it would mean anything."""


def perplexity(loaded: Loaded, text: str = SANITY_TEXT) -> float:
    """exp of the mean nats per token of `text`, NaN where a logit is not finite."""
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids.to(loaded.device)
    with torch.inference_mode():
        logits = loaded.model(ids, use_cache=False).logits[0, :-1].float()
    if not bool(torch.isfinite(logits).all()):
        return math.nan
    return math.exp(min(700.0, float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))))


def sanity(loaded: Loaded, *, ceiling: float | None = 200.0) -> dict[str, Any]:
    """Check the uncompressed model before it serves as a baseline; call it before every sweep.

    A fault in loading (key weights permuted for the wrong head count, say) gives poor text and no error, and its loss
    would be blamed on the cache. The perplexity of a fixed paragraph must lie in the range recorded for the alias, or
    below `ceiling` where none is recorded (None: no limit). Special tokens must be single tokens, and an alias of a
    chat model must have its template. Raises BrokenBaseline with the numbers; returns them otherwise.
    """
    value = perplexity(loaded)
    low, high = loaded.alias.perplexity if loaded.alias else (1.0, ceiling)
    if math.isnan(value):
        raise BrokenBaseline(f"{loaded.name} ({loaded.dtype}) gives logits that are not finite on plain text")
    if value < low or (high is not None and value > high):
        raise BrokenBaseline(
            f"{loaded.name} ({loaded.dtype}) has perplexity {value:.2f} on the fixed paragraph; {low:.2f} to "
            f"{high:.2f} is right. The weights were loaded wrongly: delete the cached folder and load it again"
        )
    split = {}
    for token in loaded.tokenizer.all_special_tokens:
        ids = loaded.tokenizer(token, add_special_tokens=False).input_ids
        if len(ids) != 1:
            split[token] = ids
    if split:
        raise BrokenBaseline(f"{loaded.name}: special tokens are split into pieces: {split}; the tokenizer is damaged")
    template = bool(loaded.tokenizer.chat_template)
    if loaded.alias and not template:
        raise BrokenBaseline(f"{loaded.name}: the chat template is missing; delete the cached folder and load it again")
    return {
        "perplexity": value,
        "perplexity_range": [low, high],
        "recorded": loaded.alias is not None,
        "chat_template": template,
        "special_tokens": len(loaded.tokenizer.all_special_tokens),
    }
