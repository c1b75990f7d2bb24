"""Who stays: rows against a slow, obvious reference, over prompts, chunks and single steps."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import Sequence, make_row, term_of
from slow_row import SlowRow
from variants import ALL_BUDGETS, ALL_SCORERS, SOME_CODECS, readers_of

from kvlab.codecs import Affine, Raw
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Fraction, Recency, Threshold, Tokens, WindowAttention
from kvlab.settling import settle


def compare(config: KVConfig, parts: list[int], group: int, softcap: float | None, sinks: bool, seed: int) -> None:
    """Feed both rows the same forwards; after each one everything must agree."""
    heads, head_dim = 2, 16
    sequence = Sequence(sum(parts), heads, heads * group, head_dim, seed)
    sink_logits = sequence.sink_logits() if sinks else None
    row = make_row(config, heads, head_dim)
    slow = SlowRow(config.at(0), heads, row.centre and partial(term_of, row.centre))
    for q, k, v in sequence.forwards(parts):
        out, mass = row.attend(q, k, v, 0.3, softcap, sink_logits)
        row.commit(k, v, mass)
        expected = slow.forward(q, k, v, 0.3, softcap, sink_logits)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
        if config.at(0).scope == "model":
            settle([row])
            slow.flush(slow.heads)
        kept = zip(row.positions().tolist(), row.table.counts, strict=True)
        assert [at[:count] for at, count in kept] == [[t.position for t in head.pages] for head in slow.heads]
        for part, head in zip(row.split(heads), slow.heads, strict=True):
            for x, kind in zip(part.dense(torch.float64, head_dim, head_dim), "kv", strict=True):
                held = torch.stack([getattr(t, kind) for t in head.all()])
                torch.testing.assert_close(x[0], held, rtol=0, atol=1e-9)
    for head in slow.heads:
        assert [t.position for t in head.sinks] == list(range(min(config.sink_tokens, sum(parts))))
        recent = [t.position for t in head.window]
        assert recent == list(range(sum(parts) - len(recent), sum(parts)))
        assert len(recent) >= min(config.recent_tokens, sum(parts) - len(head.sinks))


@settings(max_examples=60)
@given(
    key=st.sampled_from(SOME_CODECS),
    value=st.sampled_from(SOME_CODECS),
    scorer=st.sampled_from(ALL_SCORERS),
    budget=st.sampled_from(ALL_BUDGETS),
    reader=st.integers(0, 1000),
    centring=st.sampled_from(["none", "mean"]),
    sink_tokens=st.sampled_from([0, 1, 4]),
    recent_tokens=st.sampled_from([0, 3, 8]),
    parts=st.lists(st.sampled_from([1, 1, 1, 2, 7, 19, 40]), min_size=1, max_size=6),
    steps=st.sampled_from([0, 0, 20, 37]),
    group=st.sampled_from([1, 3]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_setting_keeps_what_the_definition_keeps(
    key: Any,
    value: Any,
    scorer: Any,
    budget: Any,
    reader: int,
    centring: Any,
    sink_tokens: int,
    recent_tokens: int,
    parts: list[int],
    steps: int,
    group: int,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    readers = readers_of(key, value)
    config = KVConfig(
        key=key,
        value=value,
        scorer=scorer,
        budget=budget,
        reader=readers[reader % len(readers)],
        centring=centring,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
    )
    compare(config, parts + [1] * steps, group, softcap, sinks, seed)


@pytest.mark.parametrize(
    "scorer",
    [Recency(), AttentionMass(), AttentionMass(0.8), WindowAttention(8, 5), WindowAttention(64, 1)],
    ids=lambda s: s.label,
)
@pytest.mark.parametrize("budget", [Tokens(24), Fraction(0.3), Threshold(0.5)], ids=lambda b: b.label)
@pytest.mark.parametrize("key", [Raw(), Affine(bits=2, axis="channel", group=16)], ids=lambda c: c.label)
def test_prompt_then_decode_keeps_what_the_definition_keeps(scorer: Any, budget: Any, key: Any) -> None:
    config = KVConfig(key=key, scorer=scorer, budget=budget, sink_tokens=2, recent_tokens=6)
    compare(config, [60, 9] + [1] * 34, 3, None, False, 7)


@pytest.mark.parametrize("scorer", [AttentionMass(), WindowAttention(8, 3)], ids=lambda s: s.label)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pages_of_a_channel_codec_are_weighed_by_their_mean(scorer: Any, seed: int) -> None:
    codec = Affine(bits=4, axis="channel", group=16)
    config = KVConfig(key=codec, value=Raw(), scorer=scorer, budget=Tokens(70), sink_tokens=1, recent_tokens=4)
    compare(config, [70, 50, *[1] * 20, 33], 1, None, False, seed)


def positions_after(config: KVConfig, parts: list[int], loud: dict[int, float] | None = None) -> list[list[int]]:
    """Positions kept by each head when every query looks at `loud` tokens."""
    heads, head_dim = 3, 16
    sequence = Sequence(sum(parts), heads, heads * 3, head_dim, 5)
    sequence.q += 1.0  # so that every query leans towards the ones vector
    for position, loudness in (loud or {}).items():
        sequence.k[:, position] = loudness
    row = make_row(config, heads, head_dim)
    for q, k, v in sequence.forwards(parts):
        row.commit(k, v, row.attend(q, k, v, 0.25)[1])
    return [
        [*range(row.n_sinks), *kept, *range(row.seen - row.n_window, row.seen)] for kept in row.positions().tolist()
    ]


def test_half_of_a_9_by_3_model_stores_three_key_heads_and_half_the_bytes() -> None:
    config = KVConfig(scorer=AttentionMass(), budget=Fraction(0.5), sink_tokens=4, recent_tokens=8, page_tokens=4)
    full = KVConfig(sink_tokens=4, recent_tokens=8, page_tokens=4)
    sequence = Sequence(64, 3, 9, 64, 0, torch.float32)
    rows = [make_row(c, 3, 64, torch.float32) for c in (config, full)]
    for row in rows:
        for q, k, v in sequence.forwards([64]):
            row.commit(k, v, row.attend(q, k, v, 0.125)[1])
    kept, whole = rows
    assert kept.positions().shape == (3, 20)  # 32 of 64, less 4 sinks and 8 recent
    assert {o.kept for o in kept.occupancy} == {32}
    assert whole.nbytes == 64 * 3 * 2 * 64 * 4
    assert kept.nbytes == whole.nbytes // 2 + 3 * 20 * 8 + 3 * 8 * 4  # position and mass of each, mass of the recent
    # Three votes make one choice: the hand computation is the mean over the group.
    q, k, _ = next(sequence.forwards([64]))
    logits = (q.view(3, 3, 64, 64) @ k.unsqueeze(1).mT) * 0.125
    probs = logits.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    mass = probs.mean(1).sum(1)[:, 4:56]
    by_hand = [sorted((m.argsort()[-20:] + 4).tolist()) for m in mass]
    assert kept.positions().tolist() == by_hand


@pytest.mark.parametrize("length", [1, 2, 3, 8, 10, 100])
@pytest.mark.parametrize("fraction", [1 - 0.5, 1 - 0.9])
def test_a_share_of_a_short_prompt_is_never_nothing(length: int, fraction: float) -> None:
    config = KVConfig(budget=Fraction(fraction), sink_tokens=0, recent_tokens=0, page_tokens=1)
    kept = positions_after(config, [length])
    expected = {0.5: [1, 1, 2, 4, 5, 50], 1 - 0.9: [1, 1, 1, 1, 1, 10]}[fraction][[1, 2, 3, 8, 10, 100].index(length)]
    assert kept == [list(range(length - expected, length))] * 3


@pytest.mark.parametrize("budget", [Tokens(1), Tokens(50), Fraction(0.05)], ids=lambda b: b.label)
def test_sinks_and_recent_tokens_stay_whatever_the_budget(budget: Any) -> None:
    kept = positions_after(KVConfig(budget=budget, sink_tokens=4, recent_tokens=20), [100])
    for head in kept:
        assert head[:4] == [0, 1, 2, 3]
        assert head[-20:] == list(range(80, 100))


def test_a_budget_above_the_prompt_evicts_nothing() -> None:
    config = KVConfig(scorer=AttentionMass(), budget=Tokens(1000), sink_tokens=4, recent_tokens=8)
    assert positions_after(config, [40, 7, 1]) == [list(range(48))] * 3


def test_heavy_hitters_survive_and_windows_forget() -> None:
    loud = {11: 3.0, 23: 3.0}
    base = {"budget": Tokens(16), "sink_tokens": 2, "recent_tokens": 8}
    heavy = positions_after(KVConfig(scorer=AttentionMass(), **base), [60], loud)
    snap = positions_after(KVConfig(scorer=WindowAttention(8, 1), **base), [60], loud)
    window = positions_after(KVConfig(scorer=Recency(), **base), [60], loud)
    for heads in (heavy, snap):
        assert all({11, 23} <= set(head) for head in heads)
    assert window == [[0, 1, *range(46, 60)]] * 3
