"""Rows: attention over what is really stored, exact counts and bytes, memory that is never read by mistake."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import Sequence, make_row
from variants import ALL_BUDGETS, ALL_CODECS, ALL_SCORERS, SOME_CODECS, name_of

import kvlab.kernels.prompt
from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.kernels.attend import attend_reference
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import AttentionMass, Budget, Fraction, KeyNorm, Scorer, Threshold, Tokens, Unlimited
from kvlab.row import Row
from kvlab.settling import settle

SCALE = 0.2


def feed(row: Row, sequence: Sequence, parts: list[int]) -> None:
    for q, k, v in sequence.forwards(parts):
        row.commit(k, v, row.attend(q, k, v, SCALE)[1])
        if row.config.scope == "model":
            settle([row])


def check_attend(row: Row, q: Any, k: Any, v: Any, **more: Any) -> None:
    """The row's attention of new tokens equals the definition's over everything it holds, decoded."""
    expected, group = [], q.shape[0] // k.shape[0]
    for n, part in enumerate(row.split(k.shape[0])):  # heads may hold different counts
        k_n, v_n, mine = k[n : n + 1], v[n : n + 1], slice(n * group, (n + 1) * group)
        held = part.dense(k.dtype, k.shape[-1], v.shape[-1]) if row.seen else (k_n[:, :0], v_n[:, :0])
        n_held, n_new = held[0].shape[1], k.shape[1]
        mask = torch.ones(n_new, n_held + n_new, dtype=torch.bool).tril(n_held)
        keys, values = (torch.cat([x, new], 1) for x, new in zip(held, (k_n, v_n), strict=True))
        own = {name: x[mine] if name == "sink_logits" and x is not None else x for name, x in more.items()}
        expected.append(attend_reference(q[mine], keys, values, SCALE, mask, **own))
    out, _ = row.attend(q, k, v, SCALE, **more)
    tolerance = 1e-10 if k.dtype == torch.float64 else 2e-5
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out, torch.cat(expected), rtol=0, atol=tolerance)


def check_sizes(row: Row, config: KVConfig, shape: LayerShape, dtype: torch.dtype, prefill: int, decoded: int) -> None:
    """Counts and bytes are the predicted ones, and after `fit` nothing more is owned."""
    rule, model = config.at(0), ModelShape((shape,), dtype)
    held = rule.occupancy(prefill, decoded, shape.kv_heads)
    assert {(o.sinks, o.window) for o in row.occupancy} == {(held.sinks, held.window)}
    counts = [o.stored for o in row.occupancy]
    assert sum(counts) == held.stored if rule.ragged else set(counts) == {held.stored}
    assert row.nbytes == rule.nbytes(shape, config.raw(dtype), held) == config.predicted_bytes(model, prefill, decoded)
    pool = row.table.pool
    assert row.nbytes <= sum(x.untyped_storage().nbytes() for x in [*pool.storages(), *row.storages()])
    pool.fit([row.table])
    row.fit()
    owned = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in [*pool.storages(), *row.storages()]}
    assert sum(owned.values()) == row.nbytes


@pytest.mark.parametrize("codec", ALL_CODECS, ids=name_of)
def test_every_codec_is_attended_and_counted_exactly(codec: Codec) -> None:
    # K and V apart: the codec under test on one side, a different one on the other.
    for key, value in ((codec, Fp8("e5m2")), (Affine(bits=8, group=16), codec)):
        config = KVConfig(key=key, value=value, sink_tokens=3, recent_tokens=5)
        row, sequence = make_row(config, 2, 64), Sequence(60, 2, 6, 64, 3)
        parts = [29, 7, *[1] * 20]
        feed(row, sequence, parts)
        rest = slice(sum(parts), 60)
        check_attend(row, sequence.q[:, rest], sequence.k[:, rest], sequence.v[:, rest])
        held = row.occupancy[0]
        assert held.kept == row.seen == 56
        assert held.stored >= 32


# Every scorer with one budget of each scope, and every budget with a scorer that tracks and one that reads keys.
SETTINGS = list(
    dict.fromkeys(
        [(s, b) for s in ALL_SCORERS for b in (Fraction(0.5), Fraction(0.5, scope="layer"), Threshold(0.4))]
        + [(s, b) for s in (AttentionMass(), KeyNorm()) for b in ALL_BUDGETS if b.evicts]
        + [(AttentionMass(), Unlimited())]
    )
)


@pytest.mark.parametrize(("scorer", "budget"), SETTINGS, ids=name_of)
def test_every_scorer_and_budget_is_attended_and_counted_exactly(scorer: Scorer, budget: Budget) -> None:
    for codec in (SOME_CODECS[2], SOME_CODECS[4]):  # groups along a token, groups along a channel
        config = KVConfig(key=codec, value=codec, scorer=scorer, budget=budget, sink_tokens=2, recent_tokens=4)
        row, sequence = make_row(config, 2, 16), Sequence(70, 2, 2, 16, 3)
        feed(row, sequence, [40, *[1] * 26])
        check_sizes(row, config, LayerShape(2, 16, 16), torch.float64, 40, 26)
        check_attend(row, *(x[:, 66:] for x in (sequence.q, sequence.k, sequence.v)))
        for kept, count in zip(row.positions(), row.table.counts, strict=True):
            assert bool((kept[:count].diff() > 0).all())


@settings(max_examples=60)
@given(
    key=st.sampled_from(SOME_CODECS),
    value=st.sampled_from(SOME_CODECS),
    scorer=st.sampled_from(ALL_SCORERS),
    budget=st.sampled_from(ALL_BUDGETS),
    sink_tokens=st.integers(0, 5),
    recent_tokens=st.integers(0, 40),
    page_tokens=st.sampled_from([16, 16, 1, 5]),
    prefill=st.integers(0, 70),
    decoded=st.integers(0, 40),
    raw=st.sampled_from(["auto", "float16", "bfloat16"]),
    seed=st.integers(0, 2**16),
)
def test_any_sequence_has_the_predicted_size(
    key: Codec,
    value: Codec,
    scorer: Scorer,
    budget: Budget,
    sink_tokens: int,
    recent_tokens: int,
    page_tokens: int,
    prefill: int,
    decoded: int,
    raw: str,
    seed: int,
) -> None:
    if max(key.block_tokens, value.block_tokens) > 1:
        page_tokens = 16
    config = KVConfig(
        key=key,
        value=value,
        scorer=scorer,
        budget=budget,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        page_tokens=page_tokens,
        raw_dtype=raw,
    )
    row, sequence = make_row(config, 2, 16, torch.float32), Sequence(prefill + decoded, 2, 4, 16, seed, torch.float32)
    feed(row, sequence, [prefill] * bool(prefill) + [1] * decoded)
    check_sizes(row, config, LayerShape(2, 16, 16), torch.float32, prefill, decoded)
    assert all(bool(torch.isfinite(x).all()) for x in row.storages())


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("n_new", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_soft_cap_and_sink_logits_act_on_every_path(
    group: int, softcap: float | None, sinks: bool, n_new: int, dtype: torch.dtype
) -> None:
    config = KVConfig(key=Affine(bits=4, group=16), value=Fp8(), sink_tokens=2, recent_tokens=4)
    sequence = Sequence(50, 2, 2 * group, 32, 1, dtype)
    more = {"softcap": softcap, "sink_logits": sequence.sink_logits() if sinks else None}
    row = make_row(config, 2, 32, dtype)
    first = [x[:, :n_new] for x in (sequence.q, sequence.k, sequence.v)]
    check_attend(row, *first, **more)  # an empty row: the prompt's own path
    feed(row, sequence, [44])
    check_attend(row, *(x[:, 44 : 44 + n_new] for x in (sequence.q, sequence.k, sequence.v)), **more)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (6, 2), (4, 1), (7, 7)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_each_query_head_reads_its_own_pages(heads: int, kv_heads: int, head_dim: int) -> None:
    config = KVConfig(key=Affine(bits=4, group=16), value=Affine(bits=4, group=16), sink_tokens=1, recent_tokens=2)
    sequence = Sequence(21, kv_heads, heads, head_dim, 0)
    sequence.v[:] = torch.arange(1, kv_heads + 1).view(-1, 1, 1)
    row = make_row(config, kv_heads, head_dim)
    feed(row, sequence, [20])
    out, _ = row.attend(*(x[:, 20:] for x in (sequence.q, sequence.k, sequence.v)), SCALE)
    expected = torch.tensor([float(h // (heads // kv_heads) + 1) for h in range(heads)], dtype=torch.float64)
    torch.testing.assert_close(out, expected.view(-1, 1, 1).expand_as(out), rtol=0, atol=1e-9)


def test_query_heads_that_kv_heads_do_not_divide_are_refused() -> None:
    row, sequence = make_row(KVConfig(recent_tokens=2), 2, 16), Sequence(9, 2, 5, 16, 0)
    row.commit(sequence.k, sequence.v)
    with pytest.raises(ValueError, match="got 5 query and 2 KV heads"):
        row.attend(sequence.q, sequence.k, sequence.v, SCALE)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_queries_are_served_in_blocks_without_a_difference(softcap: float | None, monkeypatch: Any) -> None:
    config = KVConfig(key=Affine(bits=4, group=16), scorer=AttentionMass(0.9), budget=Tokens(30), recent_tokens=8)
    sequence, results = Sequence(70, 2, 6, 16, 3), []
    for logits_at_once in (2**26, 500):
        monkeypatch.setattr(kvlab.kernels.prompt, "LOGITS_AT_ONCE", logits_at_once)
        row = make_row(config, 2, 16)
        for q, k, v in sequence.forwards([37, 32, 1]):
            out, mass = row.attend(q, k, v, SCALE, softcap)
            row.commit(k, v, mass)
            results.append((out, mass))
    for (out, mass), (blocked, blocked_mass) in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(blocked, out, rtol=0, atol=1e-12)
        torch.testing.assert_close(blocked_mass, mass, rtol=0, atol=1e-6)


def test_a_second_turn_after_eviction_is_the_same_in_one_call_or_token_by_token() -> None:
    config = KVConfig(
        key=Affine(bits=4, group=16), scorer=AttentionMass(), budget=Tokens(30), sink_tokens=2, recent_tokens=8
    )
    row, sequence = make_row(config, 2, 16), Sequence(107, 2, 6, 16, 12)
    feed(row, sequence, [100])
    assert row.occupancy[0].kept == 30
    assert not torch.equal(row.positions(), torch.arange(72, 92).expand(2, -1))  # scattered, not the last ones
    turn = [x[:, 100:] for x in (sequence.q, sequence.k, sequence.v)]
    at_once, _ = row.copy().attend(*turn, SCALE)
    for t in range(7):  # fewer than a page: nothing more is evicted meanwhile
        q, k, v = (x[:, t : t + 1] for x in turn)
        out, mass = row.attend(q, k, v, SCALE)
        torch.testing.assert_close(out, at_once[:, t : t + 1], rtol=0, atol=1e-12)
        row.commit(k, v, mass)


def poison(row: Row) -> None:
    """NaN, or bytes that are NaN in fp8, into all memory that holds no token."""
    for name, stream in row.table.pool.streams.items():
        bad = float("nan") if stream.is_floating_point() else 0x7F
        stream[row.table.pool.free] = bad
        per_page = row.table.pool.layout[name].rows
        for pages, count in zip(row.table.pages, row.table.counts, strict=True):
            used = -(-count * per_page // row.table.pool.page_tokens)
            for i, page in enumerate(pages):
                stream[page, max(0, used - i * per_page) :] = bad
    for buffer in row._window or ():
        buffer[:, row.n_window :] = float("nan")
    if row._mass is not None:
        row._mass[:, row.n_window :] = float("nan")


@pytest.mark.parametrize("codec", SOME_CODECS, ids=name_of)
@pytest.mark.parametrize("budget", [Unlimited(), Tokens(30)], ids=lambda b: b.label or "all")
def test_memory_that_holds_no_token_is_never_read(codec: Codec, budget: Budget) -> None:
    config = KVConfig(key=codec, value=codec, scorer=AttentionMass(), budget=budget, sink_tokens=2, recent_tokens=5)
    clean, dirty = make_row(config, 2, 16), make_row(config, 2, 16)
    sequence = Sequence(90, 2, 6, 16, 8)
    for part, (q, k, v) in enumerate(sequence.forwards([40, 9, *[1] * 41])):
        outs = []
        for row in (clean, dirty):
            out, mass = row.attend(q, k, v, SCALE)
            row.commit(k, v, mass)
            outs.append(out)
        assert torch.equal(*outs), part
        poison(dirty)
    assert torch.equal(clean.positions(), dirty.positions())


def test_heads_of_different_length_are_masked_each_by_its_own() -> None:
    config = KVConfig(sink_tokens=0, recent_tokens=0)
    row, sequence = make_row(config, 2, 16), Sequence(41, 2, 6, 16, 4)
    k, v = sequence.k[:, :40], sequence.v[:, :40]
    row.table.append({"k.data": k, "v.data": v}, [40, 3])
    row.seen = 40
    q, k1, v1 = (x[:, 40:] for x in (sequence.q, sequence.k, sequence.v))
    out, _ = row.attend(q, k1, v1, SCALE)
    for n, count in enumerate((40, 3)):
        mine = slice(3 * n, 3 * n + 3)
        keys, values = (torch.cat([x[n : n + 1, :count], y[n : n + 1]], 1) for x, y in ((k, k1), (v, v1)))
        torch.testing.assert_close(out[mine], attend_reference(q[mine], keys, values, SCALE), rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 15, 17, 500])
def test_one_kept_key_is_enough(length: int) -> None:
    config = KVConfig(
        key=Affine(bits=4, group=16),
        value=Affine(bits=4, group=16),
        scorer=AttentionMass(),
        budget=Tokens(1),
        sink_tokens=0,
        recent_tokens=0,
        page_tokens=1,
    )
    row, sequence = make_row(config, 2, 16), Sequence(length + 3, 2, 6, 16, 2)
    feed(row, sequence, [length, 1, 1])
    assert {o.kept for o in row.occupancy} == {1}
    check_attend(row, *(x[:, -1:] for x in (sequence.q, sequence.k, sequence.v)))


def test_a_forward_of_no_tokens_changes_nothing() -> None:
    row, sequence = make_row(KVConfig(), 2, 16), Sequence(5, 2, 2, 16, 0)
    feed(row, sequence, [5])
    before = row.nbytes
    row.commit(sequence.k[:, :0], sequence.v[:, :0])
    assert (row.nbytes, row.seen) == (before, 5)


@pytest.mark.parametrize("k_exponent", [-2, 0, 2])
@pytest.mark.parametrize("v_exponent", [-1, 0, 1])
def test_scales_of_keys_and_values_are_applied_once_each(k_exponent: int, v_exponent: int) -> None:
    def attended(k: int, v: int) -> torch.Tensor:
        config = KVConfig(key=Fp8(exponents=(k,)), value=Fp8(exponents=(v,)), sink_tokens=0, recent_tokens=0)
        row, sequence = make_row(config, 2, 16), Sequence(33, 2, 6, 16, 4)
        feed(row, sequence, [32])
        new = [x[:, 32:] for x in (sequence.q, sequence.k, sequence.v)]
        check_attend(row, *new)
        # Reading the same codes under another scale must change the output.
        return row.attend(*new, SCALE)[0]

    here = attended(k_exponent, v_exponent)
    # Powers of two commute with rounding, but for subnormals.
    torch.testing.assert_close(here, attended(0, 0), rtol=0, atol=2e-2)


def test_altered_scales_alter_the_output() -> None:
    row, sequence = (
        make_row(KVConfig(key=Fp8(), value=Fp8(), sink_tokens=0, recent_tokens=0), 2, 16),
        Sequence(33, 2, 6, 16, 4),
    )
    feed(row, sequence, [32])
    new = [x[:, 32:] for x in (sequence.q, sequence.k, sequence.v)]
    outs = []
    for k, v in ((0, 0), (0, 1), (1, 0), (2, 1), (1, 2)):
        other = KVConfig(key=Fp8(exponents=(k,)), value=Fp8(exponents=(v,)), sink_tokens=0, recent_tokens=0)
        row.config = other.at(0)
        check_attend(row, *new)
        outs.append(row.attend(*new, SCALE)[0])
    for a, b in itertools.combinations(outs, 2):
        assert float((a - b).abs().max()) > 1e-2


@pytest.mark.parametrize("codec", [c for c in SOME_CODECS if c.block_tokens == 1], ids=name_of)
def test_stepwise_and_bulk_store_the_same_bytes(codec: Codec) -> None:
    config = KVConfig(key=codec, value=codec, sink_tokens=1, recent_tokens=4, page_tokens=1)
    sequence = Sequence(33, 2, 2, 64, 6, torch.float32)
    rows = []
    for parts in ([33], [1] * 33, [7, 1, 20, 1, 1, 3]):
        rows.append(make_row(config, 2, 64, torch.float32))
        feed(rows[-1], sequence, parts)
    for row in rows[1:]:
        assert row.nbytes == rows[0].nbytes
        for name, stored in rows[0].table.gather().items():
            assert torch.equal(row.table.gather()[name], stored)
        for a, b in zip(row.window(), rows[0].window(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("parts", [[33], [1] * 33, [20, 13]], ids=len)
def test_what_four_bits_really_cost(parts: list[int]) -> None:
    codec = Affine(bits=4, group=32)
    config = KVConfig(key=codec, value=codec, sink_tokens=0, recent_tokens=0, page_tokens=1)
    sequence = Sequence(33, 2, 2, 64, 6, torch.float32)
    layers = [make_row(config, 2, 64, torch.float32, layer) for layer in range(2)]
    for row in layers:
        feed(row, sequence, parts)
    assert sum(row.nbytes for row in layers) == 10_560  # of 33,792 in fp16: 3.2 times, not 4
    residual = KVConfig(key=codec, value=codec, sink_tokens=0, recent_tokens=16, page_tokens=1, raw_dtype="float16")
    row = make_row(residual, 2, 64, torch.float32)
    feed(row, sequence, parts)
    assert row.nbytes == 2 * 2 * (17 * 40 + 16 * 128)


def test_what_is_kept_does_not_hold_on_to_the_prompt() -> None:
    # 4096 tokens of 2 heads and dim 64 in fp16 are 1,048,576 bytes of K; the last 32 are 8,192.
    config = KVConfig(budget=Tokens(32), sink_tokens=0, recent_tokens=16, page_tokens=16)
    row, sequence = make_row(config, 2, 64, torch.float16), Sequence(4096, 2, 2, 64, 0, torch.float16)
    row.commit(sequence.k, sequence.v)
    assert row.nbytes == 2 * 8192 + 2 * 16 * 4  # K, V and a position for each encoded token
    owned = [*row.table.pool.storages(), *row.storages()]
    distinct = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in owned}
    assert sum(distinct.values()) == row.nbytes
    prompt = {x.untyped_storage().data_ptr() for x in (sequence.k, sequence.v)}
    assert not prompt & set(distinct)


def test_a_copy_shares_nothing_and_goes_its_own_way() -> None:
    config = KVConfig(
        key=Affine(bits=4, group=16), scorer=AttentionMass(), budget=Fraction(0.5), sink_tokens=2, recent_tokens=5
    )
    row, sequence = make_row(config, 2, 16), Sequence(80, 2, 6, 16, 9)
    feed(row, sequence, [50])
    before = {name: x.clone() for name, x in row.table.gather().items()}
    twin = row.copy()
    assert twin.nbytes == row.nbytes
    assert not {x.data_ptr() for x in twin.storages()} & {x.data_ptr() for x in row.storages()}
    assert not {p for h in twin.table.pages for p in h} & {p for h in row.table.pages for p in h}
    rest = Sequence(30, 2, 6, 16, 10)
    feed(twin, rest, [1] * 30)
    assert all(torch.equal(x, before[name]) for name, x in row.table.gather().items())
    # The original, taken the same way, ends where its copy did.
    feed(row, rest, [1] * 30)
    assert torch.equal(row.positions(), twin.positions())
    for a, b in zip(row.dense(torch.float64, 16, 16), twin.dense(torch.float64, 16, 16), strict=True):
        assert torch.equal(a, b)
    row.release()
    twin.release()
    assert row.table.pool.used_pages == 0


def test_mass_must_be_given_where_it_is_tracked() -> None:
    row, sequence = make_row(KVConfig(scorer=AttentionMass(), budget=Tokens(5)), 2, 16), Sequence(5, 2, 2, 16, 0)
    with pytest.raises(ValueError, match="tracks attention mass"):
        row.commit(sequence.k, sequence.v)


def test_raw_tokens_saturate_in_a_narrower_raw_dtype() -> None:
    row, sequence = (
        make_row(KVConfig(raw_dtype="float16", sink_tokens=1, recent_tokens=1), 2, 16),
        Sequence(20, 2, 2, 16, 0),
    )
    sequence.k[:, ::3] = 1e6
    sequence.v[:, ::4] = -1e6
    feed(row, sequence, [20])
    dense = row.dense(torch.float64, 16, 16)
    assert all(bool(torch.isfinite(x).all()) for x in dense)
    assert (float(dense[0].max()), float(dense[1].min())) == (65504.0, -65504.0)
    assert isinstance(row.config.key, Raw)
