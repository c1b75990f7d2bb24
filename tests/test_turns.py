"""One cached prompt with several continuations, and conversations of several turns, with eviction on."""

import copy
from typing import Any

import pytest
import torch
from reference import feed
from tiny import tiny_model, token_ids
from transformers import DynamicCache

from kvlab.attach import attach, cache_kwarg
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction, WindowAttention

PAGES = KVConfig(sink_tokens=2, recent_tokens=4, page_tokens=4)
H2O = KVConfig(scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=4, page_tokens=4)
SNAPKV4 = KVConfig(
    key=Affine(bits=4),
    value=Affine(bits=4),
    scorer=WindowAttention(window=8),
    budget=Fraction(0.4),
    recent_tokens=8,
    page_tokens=8,
)
CONFIGS = pytest.mark.parametrize("config", [PAGES, H2O, SNAPKV4], ids=lambda c: c.label)
MODELS = pytest.mark.parametrize("name", ["llama3", "ministral"])


def _generate(model: Any, ids: torch.Tensor, cache: Any, tokens: int = 6) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # a random model answers with padding tokens, too
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            **{cache_kwarg(): cache},
        )
    return out[0, ids.shape[1] :].tolist()


def _greedy(model: Any, cache: Any, ids: torch.Tensor, tokens: int = 6) -> list[int]:
    """Greedy decoding by hand: `ids` in one call, then token by token."""
    answer = []
    for _ in range(tokens):
        start = cache.get_seq_length()
        logits = feed(model, cache, ids, (ids.shape[1] - start,))
        answer.append(int(logits[0, -1].argmax()))
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return answer


@MODELS
@CONFIGS
def test_questions_on_one_prefix_do_not_see_each_other(name, config) -> None:
    """A, B, A on copies of one prefix: A twice the same, the prefix untouched."""
    model, prefix = tiny_model(name), token_ids(1, 60)
    questions = {q: torch.cat([prefix, token_ids(1, 9, seed=seed)], dim=1) for q, seed in (("A", 1), ("B", 2))}
    with attach(model, config) as kv:
        cache = kv.cache()
        feed(model, cache, prefix, (60,))
        before = [x.clone() for i in cache.compressed for x in cache.layers[i].storages()]
        answers = [_generate(model, questions[q], copy.deepcopy(cache)) for q in "ABA"]
        alone = kv.cache()
        feed(model, alone, prefix, (60,))
        assert _generate(model, questions["B"], alone) == answers[1]
    assert answers[0] == answers[2] != answers[1]
    after = [x for i in cache.compressed for x in cache.layers[i].storages()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert cache.get_seq_length() == 60


@MODELS
@CONFIGS
def test_three_turns_equal_the_same_calls_on_a_fresh_cache(name, config) -> None:
    """The conversation so far goes in each time; generate feeds what the cache has not seen."""
    model, text = tiny_model(name), token_ids(1, 30)
    with attach(model, config) as kv:
        cache, replayed = kv.cache(), kv.cache()
        own = DynamicCache(config=model.config)
        for turn in range(3):
            answer = _generate(model, text, cache)
            assert answer == _greedy(model, replayed, text)
            if config == PAGES:
                assert answer == _generate(model, text, own)
            text = torch.cat([text, torch.tensor([answer]), token_ids(1, 12, seed=10 + turn)], dim=1)
            assert cache.get_seq_length() == text.shape[1] - 13  # all but the last answer token and the next turn


@MODELS
@CONFIGS
def test_only_the_new_tokens_with_a_mask_over_all_seen(name, config) -> None:
    """The mask counts tokens seen, not tokens kept."""
    model, text = tiny_model(name), token_ids(1, 50)
    with attach(model, config) as kv:
        whole, parts = kv.cache(), kv.cache()
        expected = feed(model, whole, text, (30, 1, 12))
        feed(model, parts, text, (30, 1))
        with torch.no_grad():
            out = model(
                text[:, 31:43],
                attention_mask=torch.ones(1, 43, dtype=torch.long),
                use_cache=True,
                **{cache_kwarg(): parts},
            )
    assert torch.equal(out.logits, expected[:, 31:])
