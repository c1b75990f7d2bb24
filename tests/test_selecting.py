"""Sparse reading: rows against the slow reference, bounds that miss nothing, all chunks as dense, forks that stay."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import feed
from rows import Sequence, make_row
from slow_row import SlowRow
from tiny import tiny_model, token_ids
from variants import ALL_BUDGETS, ALL_SCORERS, SOME_CODECS, readers_of

from kvlab.attach import attach
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.kernels.chunks import Bounds, bound_scores
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import AttentionMass, Dense, LastSelected, Tokens, TopK
from kvlab.row import Row
from kvlab.selecting import choose
from kvlab.stacked import StackedCache
from kvlab.store import PageTable

SCORERS = [s for s in ALL_SCORERS if not (s.reads_keys or s.reads_values)]
HEADS, HEAD_DIM, SCALE = 2, 16, 0.3
INT4 = Affine(bits=4, group=16)
PER_HEAD = [b for b in ALL_BUDGETS if getattr(b, "scope", "head") == "head" and not getattr(b, "slope", 0)]


THIRD = TopK(fraction=0.3, dense_layers=0)


def sparse(reader: Any = THIRD, **more: Any) -> KVConfig:
    return KVConfig(**{"key": INT4, "value": INT4, "sink_tokens": 2, "recent_tokens": 4, "reader": reader} | more)


def run(row: Row, sequence: Sequence, parts: list[int]) -> list[torch.Tensor]:
    outs = []
    for q, k, v in sequence.forwards(parts):
        out, mass = row.attend(q, k, v, SCALE)
        row.commit(k, v, mass)
        outs.append(out)
    return outs


# -- the definition ----------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    key=st.sampled_from(SOME_CODECS),
    value=st.sampled_from(SOME_CODECS),
    scorer=st.sampled_from(SCORERS),
    budget=st.sampled_from(PER_HEAD),
    reader=st.integers(0, 10**6),
    parts=st.lists(st.sampled_from([1, 1, 2, 7, 19, 60]), min_size=1, max_size=5),
    steps=st.sampled_from([0, 20, 37]),
    group=st.sampled_from([1, 3]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_any_reader_reads_what_the_definition_reads(
    key: Any,
    value: Any,
    scorer: Any,
    budget: Any,
    reader: int,
    parts: list[int],
    steps: int,
    group: int,
    softcap: float | None,
    seed: int,
) -> None:
    readers = [r for r in readers_of(key, value) if r.kind == "top_k"]
    config = sparse(readers[reader % len(readers)], key=key, value=value, scorer=scorer, budget=budget)
    row, slow = make_row(config, HEADS, HEAD_DIM), SlowRow(config.at(0), HEADS)
    sequence = Sequence(70 + sum(parts) + steps, HEADS, HEADS * group, HEAD_DIM, seed)
    for q, k, v in sequence.forwards([70, *parts, *[1] * steps]):
        out, mass = row.attend(q, k, v, SCALE, softcap)
        row.commit(k, v, mass)
        torch.testing.assert_close(out, slow.forward(q, k, v, SCALE, softcap, None), rtol=0, atol=1e-9)
        assert row.positions().tolist() == [[t.position for t in head.pages] for head in slow.heads]


def test_a_flush_ends_a_selection_and_mass_goes_to_the_tokens_that_were_read() -> None:
    reader = TopK(fraction=0.3, chunk=4, dense_layers=0, select_every=10**6)
    config = sparse(reader, scorer=AttentionMass(), budget=Tokens(60))
    row, slow = make_row(config, HEADS, HEAD_DIM), SlowRow(config.at(0), HEADS)
    evicted = []
    for q, k, v in Sequence(130, HEADS, 6, HEAD_DIM, 9).forwards([80, *[1] * 50]):
        out, mass = row.attend(q, k, v, SCALE)
        row.commit(k, v, mass)
        torch.testing.assert_close(out, slow.forward(q, k, v, SCALE, None, None), rtol=0, atol=1e-9)
        evicted.append(row.positions().tolist())
        assert evicted[-1] == [[t.position for t in head.pages] for head in slow.heads]
    assert evicted[-1][0] != evicted[0][0]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("bound", ["minmax", "mean", "codec"])
def test_a_turn_in_one_call_reads_as_token_by_token(bound: Any, every: int) -> None:
    key = Affine(bits=4, axis="channel", group=16) if bound == "codec" else INT4
    config = sparse(TopK(fraction=0.3, bound=bound, dense_layers=0, select_every=every), key=key, recent_tokens=30)
    row, sequence = make_row(config, HEADS, HEAD_DIM), Sequence(230, HEADS, 6, HEAD_DIM, 5)
    run(row, sequence, [192])
    turn = [x[:, 192:204] for x in (sequence.q, sequence.k, sequence.v)]
    at_once, _ = row.copy().attend(*turn, SCALE)
    for t in range(12):  # fewer than a page: the pages stand meanwhile
        q, k, v = (x[:, t : t + 1] for x in turn)
        out, mass = row.attend(q, k, v, SCALE)
        torch.testing.assert_close(out, at_once[:, t : t + 1], rtol=0, atol=1e-12)
        row.commit(k, v, mass)
    everything = dataclasses.replace(row.config, reader=Dense())
    row.config = everything
    full, _ = row.attend(*(x[:, 11:] for x in turn), SCALE)
    assert float((full - at_once[:, 11:]).abs().max()) > 1e-3  # and it is not what a dense reader reads


def test_a_selection_serves_as_many_positions_as_it_says() -> None:
    config = sparse(TopK(fraction=0.2, dense_layers=0, select_every=4), recent_tokens=40)
    row, sequence = make_row(config, HEADS, HEAD_DIM), Sequence(330, HEADS, 6, HEAD_DIM, 5)
    run(row, sequence, [299])
    chosen = []
    for t in range(12):
        q, k, v = (x[:, 299 + t : 300 + t] for x in (sequence.q, sequence.k, sequence.v))
        choice = choose(row.config, row.table, q, row.seen, row._remembered)
        assert choice is not None
        chosen.append((row.seen // 4, choice.chunks.tolist()))
        row.commit(k, v, row.attend(q, k, v, SCALE)[1])
    by_block: dict[int, list[Any]] = {}
    for block, chunks in chosen:
        by_block.setdefault(block, []).append(chunks)
    assert [len(same) for same in by_block.values()] == [1, 4, 4, 3]
    assert all(chunks == same[0] for same in by_block.values() for chunks in same)
    assert len({str(same[0]) for same in by_block.values()}) > 1


# -- metamorphic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [TopK(fraction=1.0, dense_layers=0), TopK(count=10**6, chunk=4, dense_layers=0)])
def test_all_chunks_are_dense_token_for_token(reader: TopK) -> None:
    """And so they are where selection really gathers every chunk: through the lists of a choice."""
    for scorer, budget in ((AttentionMass(), Tokens(60)), (AttentionMass(), KVConfig().budget)):
        rows = [make_row(sparse(r, scorer=scorer, budget=budget), HEADS, HEAD_DIM) for r in (reader, Dense())]
        sequences = [Sequence(160, HEADS, 6, HEAD_DIM, 2) for _ in rows]
        for a, b in zip(*(run(r, s, [90, 9, *[1] * 61]) for r, s in zip(rows, sequences, strict=True)), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(rows[0].positions(), rows[1].positions())


def test_gathering_every_chunk_through_a_choice_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    # A reader that reads all takes the dense way; here it is made to go through its lists.
    sequence = Sequence(130, HEADS, 6, HEAD_DIM, 2)
    outs = {}
    for name, reader in (("dense", Dense()), ("lists", TopK(count=2, chunk=4, dense_layers=0))):
        row = make_row(sparse(reader, scorer=AttentionMass(), budget=Tokens(77)), HEADS, HEAD_DIM)
        if name == "lists":
            monkeypatch.setattr(TopK, "share", property(lambda _: {"k": 10**6}))
        outs[name] = run(row, sequence, [90, 5, *[1] * 35])
    for a, b in zip(outs["dense"], outs["lists"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_where_pages_lie_does_not_matter() -> None:
    config = sparse()
    row, sequence = make_row(config, HEADS, HEAD_DIM), Sequence(201, HEADS, 6, HEAD_DIM, 2)
    run(row, sequence, [200])
    new = [x[:, 200:] for x in (sequence.q, sequence.k, sequence.v)]
    before, _ = row.attend(*new, SCALE)
    pool, n = row.table.pool, row.table.pool.n_pages
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    for name, stream in pool.streams.items():
        moved = torch.empty_like(stream)
        moved[order] = stream
        pool.streams[name] = moved
    row.table.renumber({old: int(new_place) for old, new_place in enumerate(order)})
    pool.free = sorted(int(order[page]) for page in pool.free)
    after, _ = row.attend(*new, SCALE)
    assert torch.equal(after, before)


def test_the_order_of_pages_does_not_matter_to_a_dense_reader_nor_to_the_chunks_between_the_forced() -> None:
    config = sparse(TopK(count=5, dense_layers=0))
    row, sequence = make_row(config, HEADS, HEAD_DIM), Sequence(11 * 16 + 7, HEADS, 6, HEAD_DIM, 2)
    run(row, sequence, [11 * 16 + 6])
    assert row.table.counts == [11 * 16] * HEADS
    new = [x[:, -1:] for x in (sequence.q, sequence.k, sequence.v)]
    for reader in (config.reader, Dense()):
        row.config = dataclasses.replace(row.config, reader=reader)
        before, _ = row.attend(*new, SCALE)
        for pages in row.table.pages:
            pages[1:-1] = pages[-2:0:-1]
        row.table._index = None
        after, _ = row.attend(*new, SCALE)
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(
    key=st.sampled_from(SOME_CODECS),
    budget=st.sampled_from(PER_HEAD),
    chunk=st.sampled_from([16, 4]),
    loud=st.sampled_from([1.0, 200.0, 1e5]),
    parts=st.lists(st.sampled_from([1, 16, 40]), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_no_stored_key_lies_above_its_chunks_bound(
    key: Any, budget: Any, chunk: int, loud: float, parts: list[int], seed: int
) -> None:
    chunk = max(chunk, key.block_tokens)
    config = sparse(TopK(chunk=chunk, dense_layers=0), key=key, scorer=AttentionMass(), budget=budget)
    row = make_row(config, HEADS, HEAD_DIM, torch.float32)
    sequence = Sequence(40 + sum(parts) + 21, HEADS, 6, HEAD_DIM, seed, torch.float32)
    sequence.k[:, :, 3] *= loud
    run(row, sequence, [40, *parts, *[1] * 20])
    count = row.table.counts[0]
    if not count:
        return
    held = row.table.gather(["k.min", "k.max"])
    keys = config.key.decode(row.pages()[0], HEAD_DIM, torch.float32)[:, :count].double()
    q = sequence.q[:, -1:].double()
    true = torch.stack([(q.view(HEADS, 3, -1) @ part.mT).sum(1).amax(-1) for part in keys.split(chunk, dim=1)], dim=-1)
    bound = bound_scores(q, Bounds(held["k.min"], held["k.max"]))[:, 0]
    slack = 1e-12 * (q.view(HEADS, 3, -1).abs().sum(1).unsqueeze(1) * keys.abs().amax(1, keepdim=True)).sum(-1)
    assert bool((bound >= true - slack).all())
    for part, low, high in zip(
        keys.split(chunk, dim=1), held["k.min"].double().unbind(1), held["k.max"].double().unbind(1), strict=True
    ):
        assert bool((low <= part.amin(1)).all() and (high >= part.amax(1)).all())
        # And they say no more than they must: of these keys and no others.
        near = part.abs().amax(1) * 2.0**-10 + 2.0**-24
        assert bool(((part.amin(1) - low <= near) | low.isinf()).all())
        assert bool(((high - part.amax(1) <= near) | high.isinf()).all())


@settings(max_examples=15)
@given(seed=st.integers(0, 2**16), bound=st.sampled_from(["minmax", "mean"]))
def test_more_chunks_never_lose_one(seed: int, bound: Any) -> None:
    sequence = Sequence(201, HEADS, 6, HEAD_DIM, seed)
    row = make_row(sparse(TopK(bound=bound, dense_layers=0)), HEADS, HEAD_DIM)
    run(row, sequence, [200])
    before: list[set[int]] = [set()] * HEADS
    for count in range(2, 14):
        row.config = sparse(TopK(count=count, bound=bound, dense_layers=0)).at(0)
        choice = choose(row.config, row.table, sequence.q[:, 200:], 200, None)
        if choice is None:
            break
        now = [set(head) for head in choice.chunks[:, 0].tolist()]
        assert all(a < b and len(b) == count for a, b in zip(before, now, strict=True))
        assert all({0, 12} <= head for head in now)
        before = now
    else:
        pytest.fail("13 chunks are all there are")


def test_a_key_that_a_query_wants_is_read_wherever_it_lies() -> None:
    """A needle in a middle chunk; random keys of norm 4 around it."""
    sequence = Sequence(401, HEADS, HEADS, HEAD_DIM, 0)
    sequence.k[:, 203] = 8 * sequence.q[:, 400]
    sequence.v[:, 203] = 50.0
    rows = [make_row(sparse(r), HEADS, HEAD_DIM) for r in (TopK(count=3, dense_layers=0), Dense())]
    for row in rows:
        run(row, sequence, [400])
    new = [x[:, 400:] for x in (sequence.q, sequence.k, sequence.v)]
    a, b = (row.attend(*new, SCALE)[0] for row in rows)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-3)
    assert float(a.mean()) > 49


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_was_not_selected_for_longest_goes_first() -> None:
    """Chunk 3 of 6 is wanted by no query; when room is needed, it goes and nothing else does."""
    config = sparse(
        TopK(count=4, dense_layers=0),
        key=Affine(bits=8, axis="channel", group=16),
        scorer=LastSelected(),
        budget=Tokens(6 * 16 + 18),
        sink_tokens=2,
        recent_tokens=0,
    )
    row, sequence = make_row(config, HEADS, HEAD_DIM), Sequence(2 + 96 + 48, HEADS, 2, HEAD_DIM, 1)
    sequence.q[:], sequence.k[:] = 0.0, 0.0
    for wanted in (1, 2, 4):  # beside the first and the last, which are always read
        sequence.k[:, 2 + 16 * wanted : 18 + 16 * wanted, wanted] = 1.0
    for step in range(48):
        sequence.q[:, 98 + step, 1 + step % 2] = 1.0
        sequence.q[:, 98 + step, 4] = 0.5
    run(row, sequence, [98])
    assert row.positions()[0, ::16].tolist() == [2, 18, 34, 50, 66, 82]
    for q, k, v in list(sequence.forwards([98, *[1] * 47]))[1:]:
        _, mass = row.attend(q, k, v, SCALE)
        row.commit(k, v, mass)
    left = row.positions()[0, ::16].tolist()
    assert 50 not in left
    assert {2, 18, 34, 66} <= set(left)


def test_last_selected_needs_a_reader_that_selects() -> None:
    from kvlab.attach import shape_of

    shape = shape_of(tiny_model("llama3"))
    dense = KVConfig(scorer=LastSelected(), budget=Tokens(40))
    with pytest.raises(
        ValueError, match=r"'last_selected' ranks chunks .* 'dense' reader selects none: use reader TopK"
    ):
        dense.check(shape)
    dataclasses.replace(dense, reader=TopK()).check(shape)


# -- on a model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama3", torch.float64)


SPARSE = sparse(TopK(fraction=0.3, chunk=4, dense_layers=0, select_every=2), page_tokens=8)
LRU = sparse(TopK(count=4, chunk=4, dense_layers=0), page_tokens=8, scorer=LastSelected(), budget=Tokens(60))


@pytest.mark.parametrize("config", [SPARSE, LRU], ids=lambda c: c.label)
def test_a_read_only_pass_leaves_the_cache_as_it_is_and_says_what_decoding_says(llama: Any, config: KVConfig) -> None:
    config = dataclasses.replace(config, recent_tokens=20)
    ids = token_ids(1, 108)
    with attach(llama, config) as kv, torch.no_grad():
        cache = kv.cache()
        feed(llama, cache, ids, (97,))
        feed(llama, cache, ids, (1,) * 3)
        before = [copy.deepcopy((row._remembered, row.table.gather())) for x in cache.layers for row in x.rows]
        stacked = StackedCache([cache, cache], read_only=True)
        turn = ids[:, 100:104].expand(2, -1)
        valid = torch.ones_like(turn, dtype=torch.bool)
        from kvlab.attach import cache_kwarg

        forced = llama(
            input_ids=turn, position_ids=stacked.positions(valid), use_cache=True, **{cache_kwarg(): stacked}
        ).logits
        after = [(row._remembered, row.table.gather()) for x in cache.layers for row in x.rows]
        for (a, held), (b, still) in zip(before, after, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.block == b.block and torch.equal(a.chunks, b.chunks))
            assert all(torch.equal(x, still[name]) for name, x in held.items())
        stepwise = feed(llama, cache, ids, (1,) * 4)
    for row in forced:
        torch.testing.assert_close(row, stepwise[0], rtol=0, atol=1e-9)


def test_the_first_compressed_layers_read_everything_and_hold_no_summaries(llama: Any) -> None:
    config = sparse(TopK(fraction=0.3, dense_layers=1))
    with attach(llama, config) as kv:
        layers = kv.cache().layers
    assert isinstance(layers[0].config.reader, Dense)
    assert isinstance(layers[1].config.reader, TopK)
    gemma = tiny_model("gemma3")
    with attach(gemma, config) as kv:
        cache = kv.cache()
        # Sliding layers come before it, but it is the first that is compressed.
        assert [isinstance(cache.layers[i].config.reader, Dense) for i in cache.compressed] == [True] + [False] * (
            len(cache.compressed) - 1
        )


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: sparse(TopK(chunk=32), page_tokens=16), r"got chunk 32 and page_tokens 16: set page_tokens"),
        (lambda: sparse(TopK(chunk=6), page_tokens=16), "got chunk 6 and page_tokens 16"),
        (lambda: sparse(TopK(chunk=8), key=Affine(axis="channel", group=16)), "got chunk 8 and group 16: set chunk=16"),
        (lambda: sparse(TopK(bound="codec"), key=Fp8()), "'codec' takes .* per-channel keys, got key fp8_e4m3"),
        (lambda: sparse(TopK(bound="codec")), r"got key int4 g16: use Affine\(axis='channel', group=16\)"),
        (lambda: TopK(fraction=0.0), r"\(0, 1\], got 0.0"),
        (lambda: TopK(fraction=1.5), r"\(0, 1\], got 1.5"),
        (lambda: TopK(fraction=float("nan")), r"\(0, 1\], got nan"),
        (lambda: TopK(count=-1), "count must be at least 0"),
        (lambda: TopK(select_every=0), "select_every must be at least 1"),
    ],
)
def test_readers_that_mean_nothing_are_refused(make: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()


# -- bytes read --------------------------------------------------------------------------------------------------------


CHANNEL = Affine(bits=4, axis="channel", group=16)
READ = [
    sparse(),
    sparse(TopK(count=3, chunk=4, dense_layers=0), key=Fp8(), value=Affine(bits=2, group=16)),
    sparse(TopK(fraction=0.3, bound="mean", dense_layers=0, select_every=3)),
    sparse(TopK(fraction=0.3, bound="codec", dense_layers=0), key=CHANNEL),
    sparse(TopK(fraction=0.5, dense_layers=0), scorer=LastSelected(), budget=Tokens(100)),
    sparse(TopK(fraction=1.0, dense_layers=0)),
    sparse(Dense(), scorer=AttentionMass(), budget=Tokens(100)),
]


@pytest.mark.parametrize("config", READ, ids=lambda c: c.label)
def test_bytes_read_are_those_that_are_gathered(config: KVConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, steps = 246, 3  # from a multiple of three on, and no page is flushed meanwhile
    row, sequence = make_row(config, HEADS, HEAD_DIM), Sequence(prefill + steps, HEADS, 6, HEAD_DIM, 3)
    first, *rest = sequence.forwards([prefill, *[1] * steps])
    row.commit(first[1], first[2], row.attend(*first, SCALE)[1])
    shape = ModelShape((LayerShape(HEADS, HEAD_DIM, HEAD_DIM),), torch.float64)
    gathered: list[int] = []
    for name in ("gather", "take"):
        real = getattr(PageTable, name)

        def counted(self: Any, *args: Any, real: Any = real) -> Any:
            out = real(self, *args)
            gathered.append(sum(x.numel() * x.element_size() for x in out.values()))
            return out

        monkeypatch.setattr(PageTable, name, counted)
    predicted = 0
    for t, (q, k, v) in enumerate(rest):
        predicted += config.read_bytes(shape, prefill, t)
        raw = [*(row.sinks or ()), *row.window()]
        raw += [row.window_mass()] if row.config.tracks_mass else []
        gathered += [x.numel() * x.element_size() for x in raw]
        _, mass = row.attend(q, k, v, SCALE, impl="torch")
        row.commit(k, v, mass)
    assert 0 <= predicted - sum(gathered) < steps * HEADS  # summaries shared out to steps are rounded up
    if isinstance(config.reader, TopK) and config.reader.fraction < 1 and not config.budget.evicts:
        everything = dataclasses.replace(config, reader=Dense()).read_bytes(shape, prefill)
        assert config.read_bytes(shape, prefill) < everything
        assert config.read_bytes(shape, prefill) < config.predicted_bytes(shape, prefill)


def test_what_a_quarter_of_the_chunks_costs_to_read() -> None:
    """4096 tokens, head dim 64, int4 of 40 bytes a token and side: 252 of its 1024 chunks, 128 bytes of bounds each."""
    config = KVConfig(key=Affine(bits=4), value=Affine(bits=4), reader=TopK(dense_layers=0), raw_dtype="float16")
    shape = ModelShape((LayerShape(3, 64, 64),), torch.float32)
    stored = 4096 - 4 - 64
    assert stored % 16 == 12
    chunks = 252
    per_head = chunks * 16 * 2 * 64 * 2 // 16 + 63 * 16 * (40 + 40) + (4 + 64) * 2 * 64 * 2
    assert config.read_bytes(shape, 4096) == 3 * per_head
    assert dataclasses.replace(config, reader=Dense()).read_bytes(shape, 4096) == 3 * (stored * 80 + 68 * 256)
    assert config.predicted_bytes(shape, 4096) == 3 * (252 * (16 * 80 + 256) + 68 * 256)
