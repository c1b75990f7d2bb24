"""Budgets that heads share: who gets the pages, live caches and forks alike, bytes known beforehand, depth."""

import copy
import dataclasses
from fractions import Fraction as Ratio
from typing import Any

import pytest
import torch
from reference import feed
from rows import Sequence, make_row
from tiny import tiny_model, token_ids

from kvlab.attach import attach, make_plan, shape_of
from kvlab.cache import KVCache, cache_kwarg
from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.evicting import allot
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import (
    AttentionMass,
    ExpectedAttention,
    Fraction,
    KeyDiff,
    KeyNorm,
    Recency,
    Threshold,
    Tokens,
    WindowAttention,
)
from kvlab.settling import settle
from kvlab.snapshot import take
from kvlab.stacked import StackedCache

INT4, CHANNEL = Affine(bits=4, group=16), Affine(bits=4, axis="channel", group=16)
SHAPE = ModelShape((LayerShape(3, 64, 64),) * 4, torch.float16)
NONE = -torch.inf


# -- who gets the pages ------------------------------------------------------------------------------------------------


def test_pages_go_where_they_are_worth_most_after_a_floor_for_each() -> None:
    worth = torch.tensor([[9.0, 8.0, 7.0, 1.0], [6.0, 5.0, 0.5, 0.4], [0.3, 0.2, NONE, NONE]])
    assert allot(worth, 5, 3, 0).flatten().tolist() == [3, 2, 0]
    assert allot(worth, 5, 3, 1).flatten().tolist() == [3, 1, 1]
    assert allot(worth, 8, 3, 2).flatten().tolist() == [4, 2, 2]
    assert allot(worth, 10, 3, 3).flatten().tolist() == [4, 4, 2]  # who has no more pages cannot take its floor
    assert allot(worth, 0, 3, 0).flatten().tolist() == [0, 0, 0]


def test_each_group_shares_among_its_own_heads() -> None:
    worth = torch.tensor([[9.0, 8.0], [1.0, 0.0], [3.0, 2.0], [2.5, 2.4]])
    assert allot(worth, 2, 2, 0).flatten().tolist() == [2, 0, 1, 1]
    assert allot(worth, 4, 4, 0).flatten().tolist() == [2, 0, 1, 1]


def test_equal_pages_are_dealt_in_turn() -> None:
    assert allot(torch.ones(3, 4), 7, 3, 0).flatten().tolist() == [3, 2, 2]


@pytest.mark.parametrize("key", [Raw(), CHANNEL], ids=lambda c: c.label)
@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
def test_loud_heads_get_more_and_quiet_ones_their_floor(key: Any, floor: float) -> None:
    budget = Tokens(70, scope="layer", floor=floor)
    row = make_row(KVConfig(key=key, scorer=KeyNorm(), budget=budget, sink_tokens=2, recent_tokens=4), 3, 16)
    sequence = Sequence(166, 3, 3, 16, 0)
    sequence.k *= torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64).view(3, 1, 1)  # short keys stay
    row.commit(sequence.k, sequence.v)
    # 64 tokens beside sinks and recent ones, 4 pages a head: 12 pages of the 30 that leave.
    assert row.table.counts == {0.0: [160, 32, 0], 0.5: [128, 32, 32], 1.0: [64, 64, 64]}[floor]


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("budget", [Tokens, Fraction, Threshold])
def test_no_head_is_left_without_a_token(scope: Any, budget: Any) -> None:
    number = {Tokens: 1, Fraction: 0.01, Threshold: 0.99}[budget]
    config = KVConfig(
        scorer=KeyNorm(), budget=budget(number, scope=scope, floor=0.0), sink_tokens=0, recent_tokens=0, page_tokens=4
    )
    row, sequence = make_row(config, 3, 16), Sequence(60, 3, 3, 16, 1)
    sequence.k[0] *= 0.01
    for q, k, v in sequence.forwards([33, 1, 1, 1, 1, 9, 4, *[1] * 9]):
        assert bool(torch.isfinite(row.attend(q, k, v, 0.3)[0]).all())
        row.commit(k, v)
        if scope == "model":
            settle([row])
        assert min(o.kept for o in row.occupancy) >= 1


def test_one_layer_alone_settles_too() -> None:
    config = KVConfig(scorer=Recency(), budget=Tokens(20, scope="model"), sink_tokens=0, recent_tokens=4)
    shape = ModelShape((LayerShape(2, 16, 16),), torch.float32)
    row, sequence = make_row(config, 2, 16, torch.float32), Sequence(100, 2, 2, 16, 1, torch.float32)
    row.commit(sequence.k, sequence.v)
    assert row.n_window == 100
    settle([row])
    assert (row.n_window, sum(row.table.counts)) == (4, 32)
    assert row.nbytes == config.predicted_bytes(shape, 100)
    # The prompt's room is let go at once, without `fit`.
    assert sum(x.untyped_storage().nbytes() for x in row.storages()) == 2 * 2 * 4 * 16 * 4


# -- live caches, forks and stacks -------------------------------------------------------------------------------------

BUDGETS = [
    Tokens(60, scope="layer"),
    Fraction(0.5, scope="model", floor=0.5),
    Threshold(0.5, scope="model"),
    Fraction(0.4, scope="layer", slope=0.5),
    Tokens(50, slope=0.3),
]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: b.label)
@pytest.mark.parametrize(
    ("key", "scorer", "raw"),
    [
        (INT4, AttentionMass(value_norm=True), "auto"),
        (CHANNEL, WindowAttention(8, 3), "float16"),
        (INT4, KeyDiff(), "float16"),
        (Fp8(), Recency(), "bfloat16"),
        (INT4, ExpectedAttention(), "auto"),
    ],
    ids=["h2o", "snapkv", "keydiff", "window", "expected"],
)
def test_caches_forks_and_stacks_agree_and_hold_the_predicted(budget: Any, key: Any, scorer: Any, raw: str) -> None:
    model, ids = tiny_model("llama_9_3", torch.float32), token_ids(1, 150)
    config = KVConfig(key=key, value=INT4, scorer=scorer, budget=budget, sink_tokens=2, recent_tokens=8, raw_dtype=raw)
    shape = shape_of(model)
    config.check(shape)
    with attach(model, config) as kv:
        live = kv.cache()
        feed(model, live, ids, [100])
        fork = take(model, kv, [ids[0, :100].tolist()], [scorer])[0].fork(config, kv)
        assert live.nbytes == fork.nbytes == config.predicted_bytes(shape, 100)
        alone = copy.deepcopy(live)
        after = [feed(model, cache, ids, [1] * 30 + [20]) for cache in (live, fork)]
        torch.testing.assert_close(*after, rtol=0, atol=1e-4)
        stack = StackedCache([alone])
        for start, stop in [(i, i + 1) for i in range(100, 130)] + [(130, 150)]:
            valid = torch.ones(1, stop - start, dtype=torch.bool)
            positions = stack.positions(valid)
            with torch.no_grad():
                model(input_ids=ids[:, start:stop], position_ids=positions, use_cache=True, **{cache_kwarg(): stack})
        expected = held(live)
        assert held(fork) == expected
        assert held(alone) == expected
        live.fit()
        assert live.storage_bytes == live.nbytes == fork.nbytes


def held(cache: KVCache, row: int = 0) -> list[Any]:
    """Positions in every head of every layer."""
    rows = [layer.rows[row] for layer in cache.layers]  # type: ignore[union-attr]
    return [[kept[:count].tolist() for kept, count in zip(x.positions(), x.table.counts, strict=True)] for x in rows]


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_rows_of_a_batch_share_with_nobody_else(scope: Any) -> None:
    model, ids = tiny_model("llama_9_3", torch.float32), token_ids(2, 90)
    config = KVConfig(scorer=KeyNorm(), budget=Fraction(0.4, scope=scope), sink_tokens=2, recent_tokens=4)
    with attach(model, config) as kv:
        both, alone = kv.cache(), kv.cache()
        feed(model, both, ids, [70] + [1] * 20)
        feed(model, alone, ids[1:], [70] + [1] * 20)
    assert held(both, 1) == held(alone)


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("budget", [Tokens(10**6), Fraction(1.0), Threshold(0.0)], ids=lambda b: b.label)
def test_a_budget_for_all_is_the_dense_cache_token_for_token(scope: Any, budget: Any) -> None:
    model, ids = tiny_model("llama_9_3", torch.float32), token_ids(1, 90)
    wide = dataclasses.replace(budget, scope=scope)
    config = KVConfig(scorer=AttentionMass(), budget=wide, sink_tokens=2, recent_tokens=8)
    with attach(model, config) as kv:
        kept = feed(model, kv.cache(), ids, [50] + [1] * 40)
        full = feed(model, kv.cache(KVConfig(sink_tokens=2, recent_tokens=8)), ids, [50] + [1] * 40)
    torch.testing.assert_close(kept, full, rtol=0, atol=2e-5)
    assert torch.equal(kept.argmax(-1), full.argmax(-1))


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_second_turn_is_the_same_in_one_call_or_token_by_token(scope: Any) -> None:
    config = KVConfig(key=INT4, scorer=AttentionMass(), budget=Tokens(38, scope=scope), sink_tokens=2, recent_tokens=4)
    model, ids = tiny_model("llama_9_3", torch.float32), token_ids(1, 109)
    with attach(model, config) as kv:
        cache = kv.cache()
        feed(model, cache, ids, [102])
        assert cache.occupancy()[0][0].window == 4  # seven more flush nothing
        assert {head.stored for layer in cache.occupancy() for head in layer} != {96}
        twin = copy.deepcopy(cache)
        torch.testing.assert_close(feed(model, cache, ids, [7]), feed(model, twin, ids, [1] * 7), rtol=0, atol=2e-5)


# -- depth -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [Tokens(200, slope=0.5), Fraction(0.5, slope=0.5), Threshold(0.5, slope=0.5)])
def test_a_slope_gives_the_first_layers_more_and_the_mean_the_same(budget: Any) -> None:
    config = KVConfig(budget=budget, sink_tokens=4, recent_tokens=12)
    layers = list(config.layers(range(5)).values())
    assert [layer.share for layer in layers] == [Ratio(3, 2), Ratio(5, 4), 1, Ratio(3, 4), Ratio(1, 2)]
    stored = [layer.occupancy(416).stored for layer in layers]
    even = {"tokens": 184, "fraction": 192, "threshold": 200}[budget.kind]
    assert stored == [even * 3 // 2, even * 5 // 4, even, even * 3 // 4, even // 2]
    assert sum(stored) == 5 * even


def test_one_layer_alone_has_the_even_budget() -> None:
    assert KVConfig(budget=Tokens(200, slope=0.5)).layers([7])[7].share == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Tokens(9, floor=1.5), r"floor is a share .* \[0, 1\], got 1.5"),
        (lambda: Tokens(9, floor=float("nan")), "floor is a share"),
        (lambda: Tokens(9, slope=1.0), r"slope must lie in \[0, 1\), got 1.0"),
        (lambda: Tokens(9, slope=-0.1), "slope must lie in"),
        (lambda: Tokens(9, slope=0.5, scope="model"), "slope 0.5 .*scope 'model'"),
        (lambda: Fraction(0.8, slope=0.5), "more than everything: at most 0.25"),
        (lambda: Threshold(0.1, slope=0.5), "at most 0.1111"),
        (lambda: Threshold(0.0, slope=0.1), "at most 0 "),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize(
    ("config", "shape", "word"),
    [
        (KVConfig(key=Fp8(exponents=(0, 1, 2)), budget=Tokens(99, scope="model")), SHAPE, "each head of one layer"),
        (KVConfig(budget=Tokens(99, scope="model"), overrides=((1, INT4, INT4),)), SHAPE, "settings .* in layer 1"),
        (
            KVConfig(budget=Tokens(99, scope="model")),
            ModelShape((LayerShape(3, 64, 64), LayerShape(1, 64, 64)), torch.float16),
            "same heads .* in layer 1",
        ),
    ],
    ids=["per head", "override", "shape"],
)
def test_layers_that_differ_cannot_share_one_budget(config: KVConfig, shape: ModelShape, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        config.check(shape)
    dataclasses.replace(config, budget=Tokens(99, scope="layer")).check(shape)


def test_a_cache_whose_layers_differ_is_refused_too() -> None:
    model = tiny_model("llama_9_3", torch.float32)
    config = KVConfig(budget=Tokens(99, scope="model"), overrides=((1, INT4, INT4),))
    with attach(model, plan=make_plan(model)) as kv, pytest.raises(ValueError, match="the same settings"):
        kv.cache(config)


def test_configs_survive_text() -> None:
    for budget in BUDGETS:
        config = KVConfig(scorer=WindowAttention(value_norm=True), budget=budget)
        assert KVConfig.from_toml(config.to_toml()) == KVConfig.from_json(config.to_json()) == config
