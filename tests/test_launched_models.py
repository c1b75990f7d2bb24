"""Public faults of other caches on tiny models whose steps are Triton launches (in its interpreter where no GPU is)."""

from typing import Any

import pytest
import torch
from tiny import tiny_model, token_ids

from kvlab.attach import attach, cache_kwarg
from kvlab.cache import KVCache
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction, Recency, Tokens

INT8 = Affine(bits=8, group=0, mode="symmetric")


@torch.no_grad()
def feed(model: Any, cache: KVCache, ids: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Logits of every token, forward by forward."""
    split = ids.split([*parts, ids.shape[1] - sum(parts)], dim=1)
    out = [model(input_ids=part, use_cache=True, **{cache_kwarg(): cache}).logits[0] for part in split if part.numel()]
    return torch.cat(out)


def both(name: str, config: KVConfig, ids: torch.Tensor, parts: list[int]) -> dict[str, tuple[torch.Tensor, KVCache]]:
    """Logits and cache by launches and by torch."""
    model, found = tiny_model(name, torch.float32), {}
    with attach(model, config) as kv:
        for impl in ("triton", "torch"):
            cache = kv.cache(impl=impl)  # type: ignore[arg-type]
            found[impl] = (feed(model, cache, ids, parts), cache)
            assert cache.implementation == impl
    return found


def agree(found: dict[str, tuple[torch.Tensor, KVCache]], within: float = 4e-3) -> None:
    (ours, launched), (theirs, plain) = found["triton"], found["torch"]
    spread = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=within * spread)
    assert launched.occupancy() == plain.occupancy()
    assert launched.nbytes == plain.nbytes


@pytest.mark.parametrize(("length", "fraction", "kept"), [(2, 0.1, 1), (3, 0.5, 2), (10, 0.1, 1), (100, 0.1, 10)])
def test_a_share_that_rounds_to_nothing_keeps_one(length: int, fraction: float, kept: int) -> None:
    config = KVConfig(key=INT8, value=INT8, budget=Fraction(fraction), sink_tokens=0, recent_tokens=0)
    found = both("llama1", config, token_ids(1, length + 2), [length, 1])
    agree(found)
    # Two steps later the first two wait in the window; what the prompt left is as it was.
    assert [o.stored for o in found["triton"][1].occupancy()[0]] == [kept] * 2


def test_a_turn_after_eviction_is_the_same_in_one_call_or_in_launches() -> None:
    # Room for the turn, so that it evicts nothing on its way.
    config = KVConfig(key=Affine(4), scorer=Recency(), budget=Fraction(0.3), sink_tokens=2, recent_tokens=12)
    model, ids = tiny_model("llama1", torch.float32), token_ids(1, 107)
    with attach(model, config) as kv:
        at_once = feed(model, kv.cache(impl="torch"), ids, [100])
        one_by_one = feed(model, kv.cache(impl="triton"), ids, [100, *[1] * 6])
    torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=4e-3 * float(at_once.abs().max()))


def test_three_key_heads_are_stored_and_each_query_group_votes() -> None:
    config = KVConfig(key=INT8, value=INT8, scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=8)
    found = both("llama_9_3", config, token_ids(1, 66), [64, 1])
    agree(found)
    row = found["triton"][1].layers[0].rows[0]  # type: ignore[union-attr]
    assert len(row.table.pages) == 3
    assert row.positions().tolist() == found["torch"][1].layers[0].rows[0].positions().tolist()  # type: ignore[union-attr]
    assert row._mass is not None


@pytest.mark.parametrize("codec", [Fp8(), Affine(4)], ids=lambda c: c.label)
@pytest.mark.parametrize("prompt", [20, 33, 100])
def test_only_the_full_layer_of_a_sliding_model_is_launched(prompt: int, codec: Any) -> None:
    config = KVConfig(key=codec, value=codec, budget=Tokens(16), sink_tokens=2, recent_tokens=4)
    found = both("gemma3", config, token_ids(1, prompt + 2), [prompt, 1])
    agree(found)
    cache = found["triton"][1]
    assert cache.get_seq_length() == prompt + 2
    assert cache.compressed == [5]


def test_a_loud_key_bias_needs_its_centre_also_in_launches() -> None:
    lost = {}
    for name, centring in (("plain", "none"), ("centred", "bias")):
        config = KVConfig(
            key=Affine(4, group=0),
            sink_tokens=0,
            recent_tokens=0,
            page_tokens=16,
            centring=centring,  # type: ignore[arg-type]
        )
        found = both("qwen2", config, token_ids(1, 66), [64, 1])
        agree(found, 2e-2)  # logits of several hundred, from queries in fp16
        want = tiny_model("qwen2", torch.float32)(input_ids=token_ids(1, 66)).logits[0, -2:].log_softmax(-1)
        got = found["triton"][0][-2:].log_softmax(-1)
        lost[name] = float((want.exp() * (want - got)).sum(-1).mean())
    assert lost["centred"] < lost["plain"] / 3
