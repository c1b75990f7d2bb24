"""Snapshots: a fork holds what a prefill under its config holds, byte for byte; and the store, healthy and damaged."""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import feed
from tiny import tiny_model, token_ids
from torch import Tensor
from variants import ALL_BUDGETS, ALL_CODECS, ALL_SCORERS, fits, readers_of

from kvlab.attach import attach, make_plan
from kvlab.cache import KVCache, KVLayer
from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.policies import AttentionMass, Dense, Fraction, KeyDiff, Recency, Tokens, WindowAttention
from kvlab.snapshot import Snapshot, SnapshotStore, _together, take

PROMPT = 93  # sinks, a window, whole pages and a part of one
DECODED = 20
SIZES: dict[str, Any] = {"sink_tokens": 3, "recent_tokens": 8, "page_tokens": 16}
HEAD_DIM = 32
CODECS = [c for c in ALL_CODECS if fits(c, HEAD_DIM)]
PAIRS = list(zip(CODECS, [*CODECS[7:], *CODECS[:7]], strict=True))
RULES = list(itertools.product(ALL_SCORERS, ALL_BUDGETS))


def _rich(n: int) -> KVConfig:
    """Config n of a series that holds every codec, and every scorer with every budget."""
    (key, value), (scorer, budget) = PAIRS[n % len(PAIRS)], RULES[n % len(RULES)]
    readers = readers_of(key, value)
    reader = readers[n // 2 % len(readers)] if n % 2 else Dense()
    return KVConfig(key=key, value=value, scorer=scorer, budget=budget, reader=reader, **SIZES)


SERIES = [_rich(n) for n in range(max(len(PAIRS), len(RULES)))]
APART = [
    KVConfig(**SIZES, overrides=((1, Affine(bits=2, group=16), Fp8()),), scorer=AttentionMass(), budget=Fraction(0.4)),
    KVConfig(**SIZES, key=Fp8(exponents=(-2, 1)), value=Fp8(exponents=(0, 3))),
    KVConfig(**SIZES, key=Fp8(exponents=(-2, 1)), scorer=WindowAttention(window=5), budget=Tokens(30)),
    KVConfig(**SIZES, key=Affine(bits=4, group=16), value=Raw(), raw_dtype="float16"),
    KVConfig(sink_tokens=0, recent_tokens=0, page_tokens=16, scorer=AttentionMass(), budget=Tokens(1)),
    KVConfig(recent_tokens=200),  # everything stays in the raw window
]


def _state(cache: KVCache) -> list[tuple[str, Any]]:
    """Everything a cache holds that decides what it will read or evict, by name."""
    out: list[tuple[str, Any]] = []
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, KVLayer):
            out += [(f"{i}.keys", layer.keys), (f"{i}.values", layer.values)]
            out.append((f"{i}.cumulative_length", layer.cumulative_length))
            continue
        (row,) = layer.rows
        out += [(f"{i}.seen", (layer.seen, row.seen)), (f"{i}.counts", row.table.counts)]
        out += [(f"{i}.{name}", x) for name, x in row.table.gather().items()] if row.table.length else []
        out += [(f"{i}.sink", x) for x in row.sinks or ()]
        out += [(f"{i}.window", x) for x in row.window()]
        if row._mass is not None:
            out.append((f"{i}.mass", row._mass[:, : row.n_window]))
    return out


def _copied(state: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, x.clone() if isinstance(x, Tensor) else x) for name, x in state]


def _assert_same(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> None:
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, x), (_, y) in zip(ours, theirs, strict=True):
        if isinstance(x, Tensor):
            assert x.dtype == y.dtype, name
            assert x.shape == y.shape, name
            assert torch.equal(x, y), name
        else:
            assert x == y, name


def _scorers(configs: list[KVConfig]) -> list[Any]:
    return [c.scorer for c in configs]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama3", torch.float32)


# -- a fork is a prefill -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(6))
def test_fork_equals_a_prefill_under_that_config(llama, part) -> None:
    ids = token_ids(1, PROMPT)
    configs = [*SERIES[part::6], *APART[part::6]]
    assert configs
    with attach(llama) as kv:
        (snapshot,) = take(llama, kv, [ids[0].tolist()], _scorers(configs))
        for config in configs:
            forked, real = snapshot.fork(config, kv), kv.cache(config)
            feed(llama, real, ids, (PROMPT,))
            _assert_same(_state(forked), _state(real))
            assert forked.nbytes == real.nbytes


def test_forks_share_scores_where_the_same_tokens_leave_and_nowhere_else(llama, monkeypatch) -> None:
    ids, asked = token_ids(1, PROMPT), []
    score = KeyDiff.score
    monkeypatch.setattr(
        KeyDiff, "score", lambda self, given: asked.append(given.positions.shape[1]) or score(self, given)
    )
    small: dict[str, Any] = {**SIZES, "scorer": KeyDiff()}
    alike = [KVConfig(**small, budget=Tokens(n), key=key) for n, key in ((40, Raw()), (60, Affine(bits=4, group=16)))]
    others = [
        dataclasses.replace(alike[0], recent_tokens=24),
        dataclasses.replace(alike[0], sink_tokens=1),
        KVConfig(**small, budget=Tokens(48, scope="model")),
    ]
    with attach(llama) as kv:
        (snapshot,) = take(llama, kv, [ids[0].tolist()])
        before = snapshot.nbytes
        forks = [snapshot.fork(config, kv) for config in [*alike, *others]]
        # The layers are scored as one row: sinks and window say what leaves it.
        assert asked == [PROMPT - 3 - 8, PROMPT - 3 - 24, PROMPT - 1 - 8, (PROMPT - 3 - 8) // 16 * 16]
        assert snapshot.nbytes > before
        for config, fork in zip([*alike, *others], forks, strict=True):
            real = kv.cache(config)
            feed(llama, real, ids, (PROMPT,))
            _assert_same(_state(fork), _state(real))


def test_prompts_go_together_up_to_a_number_of_tokens() -> None:
    lengths = [5, 300, 200, 200, 100, 60, 700, 3]
    assert list(_together(lengths, 512)) == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 4),
        slice(4, 6),
        slice(6, 7),
        slice(7, 8),
    ]
    assert list(_together(lengths, 1)) == [slice(n, n + 1) for n in range(8)]
    assert list(_together(lengths, 8 * 700)) == [slice(0, 8)]


def test_the_series_holds_every_codec_and_every_pair_of_scorer_and_budget() -> None:
    assert {c.key for c in SERIES} == {c.value for c in SERIES} == set(CODECS)
    assert {(c.scorer, c.budget) for c in SERIES} == set(RULES)


@pytest.mark.parametrize("config", [SERIES[5], SERIES[17], SERIES[29], *APART], ids=lambda c: c.label)
def test_fork_decodes_as_the_real_cache_does(llama, config) -> None:
    ids = token_ids(1, PROMPT + DECODED)
    with attach(llama) as kv:
        (snapshot,) = take(llama, kv, [ids[0, :PROMPT].tolist()], [config.scorer])
        forked, real = snapshot.fork(config, kv), kv.cache(config)
        feed(llama, real, ids, (PROMPT,))
        ours = feed(llama, forked, ids, (1,) * DECODED)
        theirs = feed(llama, real, ids, (1,) * DECODED)
    assert torch.equal(ours, theirs)
    _assert_same(_state(forked), _state(real))


@pytest.mark.parametrize("name", ["ministral", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [20, 32, 33, 90])
def test_fork_of_a_model_with_sliding_layers(name, length) -> None:
    """Lengths below, at and above the sliding window of 32."""
    model, ids = tiny_model(name), token_ids(1, length + DECODED)
    config = KVConfig(**SIZES, key=Fp8(), value=Affine(bits=4), scorer=AttentionMass(), budget=Fraction(0.6))
    with attach(model, plan=make_plan(model)) as kv:
        (snapshot,) = take(model, kv, [ids[0, :length].tolist()], [config.scorer])
        forked, real = snapshot.fork(config, kv), kv.cache(config)
        feed(model, real, ids, (length,))
        real.fit()  # what transformers' slices retain is not what they hold
        _assert_same(_state(forked), _state(real))
        assert forked.nbytes == real.nbytes
        ours, theirs = (feed(model, cache, ids, (1,) * DECODED) for cache in (forked, real))
    assert torch.equal(ours, theirs)
    _assert_same(_state(forked), _state(real))


# -- several prompts at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma3"])
def test_prompts_of_different_length_at_once_equal_one_by_one(name) -> None:
    model = tiny_model(name)
    lengths = (1, 200, 17, 40)
    prompts = [token_ids(1, n, seed=n)[0].tolist() for n in lengths]
    scorers = [AttentionMass(), WindowAttention(window=16), AttentionMass(decay=0.9), Recency()]
    with attach(model, plan=make_plan(model)) as kv:
        together = take(model, kv, prompts, scorers)
        alone = [take(model, kv, [p], scorers)[0] for p in prompts]
    for length, ours, theirs in zip(lengths, together, alone, strict=True):
        assert ours.tokens == theirs.tokens == length
        a, b = ours.tensors(), theirs.tensors()
        assert a.keys() == b.keys()
        for key, x in a.items():
            assert x.shape == b[key].shape, key
            assert x.isfinite().all(), key
            assert (x - b[key]).abs().max() <= 1e-12 * max(1.0, float(b[key].abs().max())), key


def test_only_stateful_scorers_are_observed_and_each_once(llama) -> None:
    with attach(llama) as kv:
        (s,) = take(llama, kv, [[5, 6, 7]], [AttentionMass(), Recency(), AttentionMass(), WindowAttention()])
    assert list(s.masses) == [AttentionMass(), WindowAttention()]
    assert all(sorted(by_layer) == [0, 1, 2] for by_layer in s.masses.values())
    # Each of 3 queries gives every KV head a mass of one: 2 heads in 3 layers.
    total = sum(float(x.sum()) for x in s.masses[AttentionMass()].values())
    assert total == pytest.approx(3 * 2 * 3, rel=1e-5)


@pytest.mark.parametrize("prompts", [[], [[]], [[1, 2], []]])
def test_an_empty_prompt_is_refused(llama, prompts) -> None:
    with attach(llama) as kv, pytest.raises(ValueError, match="at least one token"):
        take(llama, kv, prompts)


# -- nothing is shared -------------------------------------------------------------------------------------------------


def _places(tensors: list[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if x.numel()}


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
@pytest.mark.parametrize("config", [KVConfig(), SERIES[9], APART[5]], ids=lambda c: c.label)
def test_decoding_a_fork_leaves_snapshot_and_other_forks_alone(name, config) -> None:
    model, ids = tiny_model(name), token_ids(1, 60 + DECODED)
    with attach(model, plan=make_plan(model)) as kv:
        (snapshot,) = take(model, kv, [ids[0, :60].tolist()], [config.scorer])
        before = {n: x.clone() for n, x in snapshot.tensors().items()}
        first, second = snapshot.fork(config, kv), snapshot.fork(config, kv)
        of_second = _copied(_state(second))
        owned = [
            [*(layer.storages() if isinstance(layer, KVLayer) else (layer.keys, layer.values))]
            for cache in (first, second)
            for layer in cache.layers
        ]
        n = len(first.layers)
        mine, other = (_places([x for part in half for x in part]) for half in (owned[:n], owned[n:]))
        assert mine
        assert not mine & other
        assert not mine & _places(list(snapshot.tensors().values()))
        for x in [x for part in owned[:n] for x in part]:
            if x.is_floating_point():
                x.fill_(7.0)  # whatever the fork writes into its own memory
        feed(model, first, ids, (1,) * DECODED)
    _assert_same(_state(second), of_second)
    assert all(torch.equal(x, before[n]) for n, x in snapshot.tensors().items())


def test_a_scorer_that_was_not_observed_is_refused_by_name(llama) -> None:
    config = KVConfig(scorer=AttentionMass(decay=0.5), budget=Fraction(0.5))
    with attach(llama) as kv:
        (snapshot,) = take(llama, kv, [list(range(3, 90))], [AttentionMass()])
        with pytest.raises(ValueError, match="did not observe") as caught:
            snapshot.fork(config, kv)
    assert AttentionMass(decay=0.5).label in str(caught.value)
    assert AttentionMass().label in str(caught.value)
    # A scorer of positions needs no observation, nor does a config that keeps everything.
    with attach(llama) as kv:
        for harmless in (
            KVConfig(scorer=Recency(), budget=Fraction(0.5)),
            KVConfig(scorer=AttentionMass(decay=0.5)),
        ):
            assert snapshot.fork(harmless, kv).get_seq_length() == 87


# -- the store ---------------------------------------------------------------------------------------------------------


def _small(seed: int, dtype: torch.dtype = torch.float64) -> Snapshot:
    """Two layers of different width, two scorers, references of two questions."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    masses = {s: {0: draw(2, 9), 1: draw(2, 9)} for s in (AttentionMass(), WindowAttention(window=4))}
    return Snapshot(
        9, [draw(2, 9, 4), draw(2, 9, 6)], [draw(2, 9, 4), draw(2, 9, 2)], masses, {"a": draw(3, 11), "b": draw(1, 11)}
    )


SCORERS = (WindowAttention(window=4), AttentionMass(), Recency())
SIZE = _small(0).nbytes


def _assert_equal(a: Snapshot, b: Snapshot) -> None:
    assert a.tokens == b.tokens
    assert a.masses.keys() == b.masses.keys()
    x, y = a.tensors(), b.tensors()
    assert x.keys() == y.keys()
    for name in x:
        assert x[name].dtype == y[name].dtype
        assert torch.equal(x[name], y[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_snapshot_comes_back_from_disk_as_it_was(tmp_path, dtype) -> None:
    SnapshotStore("id", tmp_path).put("a" * 64, _small(1, dtype))
    again = SnapshotStore("id", tmp_path)
    found = again.get("a" * 64, SCORERS)
    assert found is not None
    _assert_equal(found, _small(1, dtype))
    assert again.get("a" * 64, SCORERS) is found  # from memory now
    assert again.corrupt == 0


def test_a_forked_cache_is_the_same_after_a_round_trip(llama, tmp_path) -> None:
    config = KVConfig(**SIZES, key=Affine(bits=4), value=Fp8(), scorer=AttentionMass(), budget=Fraction(0.4))
    with attach(llama) as kv:
        (made,) = take(llama, kv, [list(range(3, 90))], [config.scorer])
        SnapshotStore("id", tmp_path).put("b" * 64, made)
        read = SnapshotStore("id", tmp_path).get("b" * 64, [config.scorer])
        assert read is not None
        _assert_same(_state(read.fork(config, kv)), _state(made.fork(config, kv)))


def test_memory_drops_the_least_recently_used() -> None:
    store = SnapshotStore("id", memory_bytes=2 * SIZE)
    store.put("a", _small(1))
    store.put("b", _small(2))
    assert store.get("a") is not None  # now b is the older one
    store.put("c", _small(3))
    assert store.get("b") is None
    assert store.get("a") is not None
    assert store.get("c") is not None


def test_memory_keeps_the_newest_even_when_it_is_too_large() -> None:
    store = SnapshotStore("id", memory_bytes=1)
    store.put("a", _small(1))
    store.put("b", _small(2))
    assert store.get("a") is None
    assert store.get("b") is not None


def test_memory_shrinks_with_what_is_free() -> None:
    """Half of what would be free without the snapshots: nothing is free when three are there."""
    free = 6 * SIZE
    store = SnapshotStore("id", room=lambda device: free)
    for n, key in enumerate("abc"):
        store.put(key, _small(n))
        free -= SIZE
    assert [store.get(key) is not None for key in "abc"] == [True] * 3  # half of 4 + 3
    free = 0
    store.put("d", _small(4))
    assert [store.get(key) is not None for key in "abcd"] == [False, False, True, True]  # half of 0 + 4


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_disk_drops_the_least_recently_used_with_its_stamp(tmp_path) -> None:
    store = SnapshotStore("id", tmp_path)
    for n, key in enumerate("abc"):
        store.put(key, _small(n))
        os.utime(tmp_path / f"{key}.safetensors", (1000 + n, 1000 + n))
    size = (tmp_path / "a.safetensors").stat().st_size
    assert SnapshotStore("id", tmp_path).get("a", SCORERS) is not None  # touched: b is the oldest now
    SnapshotStore("id", tmp_path, disk_bytes=3 * size).put("d", _small(9))
    assert _names(tmp_path) == sorted(f"{k}.{e}" for k in "acd" for e in ("safetensors", "sha256"))
    SnapshotStore("id", tmp_path, disk_bytes=1).put("e", _small(10))
    assert _names(tmp_path) == ["e.safetensors", "e.sha256"]


def test_memory_only_snapshots_leave_no_file(tmp_path) -> None:
    store = SnapshotStore("id", tmp_path)
    store.put("a", _small(1), on_disk=False)
    assert _names(tmp_path) == []
    assert store.get("a") is not None
    assert SnapshotStore("id", tmp_path).get("a") is None


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "bit flip": lambda d: _flip(d / "a.safetensors"),
    "flip in the header": lambda d: (d / "a.safetensors").write_bytes(
        bytes([1]) + (d / "a.safetensors").read_bytes()[1:]
    ),
    "truncated": lambda d: os.truncate(d / "a.safetensors", 100),
    "empty": lambda d: os.truncate(d / "a.safetensors", 0),
    "no stamp": lambda d: (d / "a.sha256").unlink(),
    "other stamp": lambda d: (d / "a.sha256").write_text("0" * 64),
    "another prompt's": lambda d: [os.replace(d / f"b.{e}", d / f"a.{e}") for e in ("safetensors", "sha256")],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_dropped_counted_and_made_again(tmp_path, how) -> None:
    first = SnapshotStore("id", tmp_path)
    first.put("a", _small(1))
    first.put("b", _small(2))
    DAMAGE[how](tmp_path)
    store = SnapshotStore("id", tmp_path)
    assert store.get("a", SCORERS) is None
    assert store.corrupt == 1
    assert not [n for n in _names(tmp_path) if n.startswith("a.")]
    assert store.get("a", SCORERS) is None
    assert store.corrupt == 1  # a file that is not there is no damage
    store.put("a", _small(1))
    again = SnapshotStore("id", tmp_path).get("a", SCORERS)
    assert again is not None
    _assert_equal(again, _small(1))


def test_a_missing_file_is_no_damage(tmp_path) -> None:
    store = SnapshotStore("id", tmp_path / "new")
    assert store.get("c" * 64) is None
    assert store.corrupt == 0


def test_the_key_changes_with_all_that_decides_the_content() -> None:
    store, other = SnapshotStore("weights|float32|cpu"), SnapshotStore("weights|float64|cpu")
    two = (AttentionMass(), WindowAttention())
    keys = [
        store.key([1, 2, 3], two),
        store.key([1, 2, 4], two),
        store.key([12, 3], two),
        store.key([1, 2, 3]),
        store.key([1, 2, 3], two[:1]),
        store.key([1, 2, 3], (AttentionMass(decay=0.9), WindowAttention())),
        other.key([1, 2, 3], two),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(k) == 64 for k in keys)
    # Order, and scorers that need no observation, do not matter.
    assert store.key((1, 2, 3), two[::-1]) == keys[0]
    assert store.key([1, 2, 3], (*two, Recency())) == keys[0]


def test_a_folder_given_later_holds_what_was_in_memory_before(tmp_path) -> None:
    store = SnapshotStore("id")
    store.put("a", _small(1))
    store.put("b", _small(2), on_disk=False)
    store.keep_in(tmp_path / "later")
    store.put("c", _small(3))
    for n, key in enumerate("abc", start=1):
        found = SnapshotStore("id", tmp_path / "later").get(key, SCORERS)
        assert found is not None
        _assert_equal(found, _small(n))
    store.discard()
    assert not (tmp_path / "later").exists()
    store.put("d", _small(4))  # and from now on in memory only
    assert store.get("d") is not None
    assert list(tmp_path.iterdir()) == []
