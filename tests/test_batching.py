"""Rows beside each other: padded batches give each row what it gets alone, and so do stacks of different configs."""

import copy
from typing import Any

import pytest
import torch
from reference import feed, left_padded
from tiny import tiny_model, token_ids
from transformers import DynamicCache

from kvlab.attach import attach, cache_kwarg
from kvlab.cache import KVCache, SeamError
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction, Recency, Threshold, Tokens, WindowAttention
from kvlab.stacked import StackedCache

LENGTHS = (200, 1, 3, 10, 20, 50, 77, 120)
PAGES = KVConfig(sink_tokens=2, recent_tokens=4, page_tokens=4)
STREAMING = KVConfig(scorer=Recency(), budget=Tokens(24), recent_tokens=8, page_tokens=4)
SNAPKV = KVConfig(scorer=WindowAttention(window=8), budget=Fraction(0.5), recent_tokens=8, page_tokens=4)
H2O4 = KVConfig(
    key=Affine(bits=4),
    value=Affine(bits=4),
    scorer=AttentionMass(),
    budget=Fraction(0.5),
    recent_tokens=8,
    page_tokens=4,
)


def _prompts(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [token_ids(1, length, seed=i) for i, length in enumerate(lengths)]


def _pad(prompts: list[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(p.shape[1] for p in prompts)
    rows = [torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=pad) for p in prompts]
    _, mask = left_padded(torch.cat(rows), [longest - p.shape[1] for p in prompts])
    return torch.cat(rows), mask


@torch.no_grad()
def _answers(model: Any, prompts: list[torch.Tensor], cache: KVCache, pad: int = 0) -> list[list[int]]:
    ids, mask = _pad(prompts, pad)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=None, **{cache_kwarg(): cache}
    )
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (PAGES, torch.float32),
        (STREAMING, torch.float32),
        (SNAPKV, torch.float32),
        (H2O4, torch.float64),  # in float32 the order of sums moves codes by a step
    ],
    ids=lambda x: x.label if isinstance(x, KVConfig) else str(x),
)
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_greedy_answers_do_not_depend_on_the_batch(name, config, dtype) -> None:
    """A row of 1 token beside one of 200; batches of 1, 3 and 8; the padding token is whatever."""
    model, prompts = tiny_model(name, dtype), _prompts(LENGTHS)
    with attach(model, config) as kv:
        alone = [_answers(model, [p], kv.cache())[0] for p in prompts]
        assert _answers(model, prompts, kv.cache()) == alone
        assert _answers(model, prompts[:3], kv.cache(), pad=2) == alone[:3]


@pytest.mark.parametrize("config", [PAGES, STREAMING, H2O4], ids=lambda c: c.label)
def test_logits_of_a_padded_row_are_those_of_the_row_alone(config) -> None:
    model, prompts = tiny_model("llama3"), _prompts((60, 1, 9, 33))
    ids, mask = _pad(prompts)
    more = token_ids(4, 12, seed=9)
    ids, mask = torch.cat([ids, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)
    with attach(model, config) as kv:
        together = feed(model, kv.cache(), ids, (60, *[1] * 7, 5), mask)
        for b, prompt in enumerate(prompts):
            alone = feed(model, kv.cache(), torch.cat([prompt, more[b : b + 1]], dim=1), (prompt.shape[1], *[1] * 7, 5))
            assert (together[b, 60 - prompt.shape[1] :] - alone[0]).abs().max() <= 1e-9


# -- stacks ------------------------------------------------------------------------------------------------------------

STACK = (
    (KVConfig(), 40),
    (PAGES, 7),
    (STREAMING, 55),
    (H2O4, 31),
    (KVConfig(key=Affine(bits=4, axis="channel", group=8), value=Fp8(), recent_tokens=4, page_tokens=8), 1),
    (KVConfig(scorer=AttentionMass(), budget=Threshold(0.5), recent_tokens=0, sink_tokens=0, page_tokens=8), 48),
)


def _prefilled(model: Any, kv: Any) -> list[KVCache]:
    caches = [kv.cache(config) for config, _ in STACK]
    for cache, prompt in zip(caches, _prompts(tuple(n for _, n in STACK)), strict=True):
        feed(model, cache, prompt, (prompt.shape[1],))
    return caches


@torch.no_grad()
def _stacked_step(model: Any, stack: StackedCache, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    stack.expect(valid)
    return model(ids, position_ids=stack.positions(valid), use_cache=True, **{cache_kwarg(): stack}).logits


@pytest.mark.parametrize("name", ["llama3", "qwen3", "phi3"])
def test_a_stack_gives_each_row_what_it_gets_alone(name) -> None:
    """Different configs and lengths; a turn of different lengths padded on the left, then steps."""
    model = tiny_model(name)
    turns = [token_ids(1, n, seed=50 + n) for n in (9, 1, 4, 9, 6, 2)]
    ids, mask = _pad(turns)
    steps = token_ids(len(STACK), 20, seed=70)
    with attach(model) as kv:
        caches, single = _prefilled(model, kv), _prefilled(model, kv)
        stack = StackedCache(caches)
        logits = [_stacked_step(model, stack, ids, mask.bool())]
        for i in range(20):
            logits.append(_stacked_step(model, stack, steps[:, i : i + 1], torch.ones(len(STACK), 1, dtype=torch.bool)))
        together = torch.cat(logits, dim=1)
        for b, (cache, turn) in enumerate(zip(single, turns, strict=True)):
            rest = torch.cat([torch.zeros(1, cache.get_seq_length(), dtype=torch.long), turn, steps[b : b + 1]], dim=1)
            alone = feed(model, cache, rest, (turn.shape[1], *[1] * 20))
            assert (together[b, 9 - turn.shape[1] :] - alone[0]).abs().max() <= 1e-12
            assert caches[b].occupancy() == cache.occupancy()
            assert caches[b].get_seq_length() == cache.get_seq_length()
            assert caches[b].nbytes == cache.nbytes
            later = torch.cat([rest, token_ids(1, 3, seed=90)], dim=1)
            assert (feed(model, caches[b], later, (1, 2)) - feed(model, cache, later, (1, 2))).abs().max() <= 1e-12


def test_a_read_only_stack_changes_nothing() -> None:
    """One cache under several continuations, as a score pass over several answers needs it."""
    model, prefix, turns = tiny_model("llama3"), token_ids(1, 50), token_ids(3, 6, seed=5)
    valid = torch.ones(3, 6, dtype=torch.bool)
    with attach(model, H2O4) as kv:
        cache = kv.cache()
        feed(model, cache, prefix, (50,))
        before = [x.clone() for i in cache.compressed for x in cache.layers[i].storages()]
        copies = [copy.deepcopy(cache) for _ in range(3)]
        together = _stacked_step(model, StackedCache([cache] * 3, read_only=True), turns, valid)
        for b, twin in enumerate(copies):
            alone = feed(model, twin, torch.cat([prefix, turns[b : b + 1]], dim=1), (6,))
            assert (together[b] - alone[0]).abs().max() <= 1e-12
    assert cache.get_seq_length() == 50
    after = [x for i in cache.compressed for x in cache.layers[i].storages()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_stacks_refuse_what_they_cannot_serve() -> None:
    model, mixed = tiny_model("llama3"), tiny_model("gemma3")
    with attach(mixed) as kv, pytest.raises(ValueError, match=r"layers \[0, 1, 2, 3, 4\] keep their own"):
        StackedCache([kv.cache()])
    step = {"use_cache": True, "input_ids": token_ids(2, 1)}
    with attach(model) as kv, torch.no_grad():
        caches = [kv.cache(), kv.cache()]
        for cache, tokens in zip(caches, (5, 9), strict=True):
            feed(model, cache, token_ids(1, tokens), (tokens,))
        with pytest.raises(SeamError, match="pass `position_ids`"):
            model(**step, **{cache_kwarg(): StackedCache(caches)})
        mask = torch.ones(2, 10, dtype=torch.long)
        with pytest.raises(SeamError, match="takes no attention mask"):
            model(**step, attention_mask=mask, **{cache_kwarg(): StackedCache(caches)})


def test_a_stack_of_raw_rows_is_the_models_own_batch() -> None:
    model, prompts = tiny_model("llama3"), _prompts((30, 30))
    ids = torch.cat([torch.cat(prompts), token_ids(2, 5, seed=8)], dim=1)
    own = feed(model, DynamicCache(config=model.config), ids, (30, 5))
    with attach(model, PAGES) as kv:
        caches = [kv.cache(), kv.cache()]
        for cache, prompt in zip(caches, prompts, strict=True):
            feed(model, cache, prompt, (30,))
        logits = _stacked_step(model, StackedCache(caches), ids[:, 30:], torch.ones(2, 5, dtype=torch.bool))
    assert (logits - own[:, 30:]).abs().max() <= 1e-9
