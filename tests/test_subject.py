"""The local subject: its rows against slow computations with plain transformers, one item and one config at a time."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asking import ITEMS, WORDS, asked, by_hand, ids_of, item_of, sharpened
from tiny_folder import CHARACTERS, save_tiny
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvlab import models
from kvlab.attach import attach, cache_kwarg
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.decoding import Decoder, Written
from kvlab.evals.item import CodeCheck, Item
from kvlab.evals.subject import ItemScore, Subject
from kvlab.models import Loaded
from kvlab.policies import AttentionMass, Fraction, Recency, Tokens, WindowAttention
from kvlab.sandbox import Program
from kvlab.snapshot import Snapshot, SnapshotStore
from kvlab.stacked import StackedCache
from kvlab.subject import BASELINE, LocalSubject, snapshot_identity

SCORERS = (AttentionMass(), WindowAttention(window=16))
SMALL: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 8, "page_tokens": 16}
INT4 = KVConfig(**SMALL, key=Affine(bits=4), value=Affine(bits=2))
CONFIGS = [
    BASELINE,
    KVConfig(**SMALL, key=Fp8(), value=Fp8()),
    INT4,
    KVConfig(
        **SMALL, key=Affine(bits=3, axis="channel", group=16), value=Affine(bits=4, hadamard=True, mode="midrise")
    ),
    KVConfig(**SMALL, scorer=Recency(), budget=Tokens(20), raw_dtype="float16"),
    KVConfig(**SMALL, key=Affine(bits=8, group=0), scorer=SCORERS[0], budget=Fraction(0.4)),
    KVConfig(**SMALL, key=Fp8("e5m2"), value=Affine(bits=4), scorer=SCORERS[1], budget=Fraction(0.25)),
]
EXACT = 1e-12


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    found = models.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))), dtype="float64", device="cpu")
    sharpened(found.model)
    return found


@pytest.fixture(scope="module")
def sliding(loaded) -> Loaded:
    """A Gemma-3-like model under the same tokenizer: five local layers, then a global one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=len(CHARACTERS) + 2,
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=6,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=32,
                initializer_range=0.15,
                sliding_window=32,
                layer_types=["sliding_attention"] * 5 + ["full_attention"],
                query_pre_attn_scalar=32,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=None,
            )
        )
    return dataclasses.replace(loaded, model=model.eval().to(torch.float64), name="sliding")


def subject(loaded: Loaded, **more: Any) -> LocalSubject:
    return LocalSubject(loaded, scorers=SCORERS, **more)


@pytest.fixture(scope="module")
def rows(loaded) -> dict[tuple[str, str], ItemScore]:
    """All configs on all items in one go."""
    return _by_key(subject(loaded).score(ITEMS, CONFIGS))


def _by_key(found: Any) -> dict[tuple[str, str], ItemScore]:
    listed = list(found)
    keyed = {(r.config_id, r.item_id): r for r in listed}
    assert len(keyed) == len(listed)
    return keyed


# -- the slow way ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _logits(loaded: Loaded, item: Item, answer: str, config: KVConfig | None, moved: int = 0) -> Tensor:
    """Logits [A, V] at the answer's positions. None: one plain forward over everything, no cache of any kind.

    A config: a prefill of context (and the first `moved` tokens of the question) under it, then a forward on it.
    """
    context, question, gold = (ids_of(loaded, x) for x in (item.context, item.question, answer))
    if config is None:
        out = loaded.model(torch.tensor([context + question + gold]), use_cache=False).logits
    else:
        before, after = context + question[:moved], question[moved:] + gold
        with attach(loaded.model, config) as kv:
            cache = {cache_kwarg(): kv.cache()}
            loaded.model(torch.tensor([before]), use_cache=True, **cache)
            out = loaded.model(torch.tensor([after]), use_cache=True, **cache).logits
    return out[0, -len(gold) - 1 : -1]


def _expected(loaded: Loaded, item: Item, config: KVConfig | None, moved: int = 0) -> dict[str, Any]:
    """What a row must say, from the logits of every continuation on its own."""
    gold = torch.tensor(ids_of(loaded, item.answers[0]))
    logits = _logits(loaded, item, item.answers[0], config, moved)
    own = torch.log_softmax(logits, dim=-1)
    full = torch.log_softmax(_logits(loaded, item, item.answers[0], None), dim=-1)
    hits = logits.argmax(-1) == gold
    out = {
        "nll": float(torch.nn.functional.cross_entropy(logits, gold)),
        "exact": float(hits.all()),
        "token_accuracy": int(hits.sum()) / len(gold),
        "prediction": loaded.tokenizer.decode(logits.argmax(-1)),
        "kl": float(torch.nn.functional.kl_div(own, full, log_target=True, reduction="batchmean")),
        "top1": int((full.argmax(-1) == own.argmax(-1)).sum()) / len(gold),
    }
    if not item.choices:
        return out | {"score": out["exact"]}
    mean = {
        c: -float(
            torch.nn.functional.cross_entropy(_logits(loaded, item, c, config, moved), torch.tensor(ids_of(loaded, c)))
        )
        for c in item.choices
    }
    chosen = max(mean, key=lambda c: mean[c])
    return out | {"score": float(chosen == item.answers[0]), "prediction": chosen}


def _check(row: ItemScore, expected: dict[str, Any], *, baseline: bool = False) -> None:
    assert row.nll == pytest.approx(expected["nll"], rel=0, abs=1e-9)
    assert row.score == expected["score"]
    assert row.exact == expected["exact"]
    assert row.token_accuracy == pytest.approx(expected["token_accuracy"], abs=1e-6)
    assert row.prediction == expected["prediction"]
    if baseline:
        assert row.kl is None
        assert row.top1 is None
    else:
        assert row.kl == pytest.approx(expected["kl"], rel=0, abs=1e-9)
        assert row.top1 == pytest.approx(expected["top1"], abs=1e-6)


def test_rows_of_the_uncompressed_cache_equal_one_plain_forward(loaded, rows) -> None:
    for item in ITEMS:
        _check(rows[(BASELINE.id, item.id)], _expected(loaded, item, None), baseline=True)


@pytest.mark.parametrize("config", CONFIGS[1:], ids=lambda c: c.label)
def test_rows_of_a_config_equal_a_prefill_under_it_and_a_forward_on_that_cache(loaded, rows, config) -> None:
    for item in ITEMS:
        _check(rows[(config.id, item.id)], _expected(loaded, item, config))


def test_the_items_tell_configs_and_choices_apart(rows) -> None:
    """The comparison above is not one of equal numbers."""
    for item in (ITEMS[0], ITEMS[3], ITEMS[4]):
        nlls = [rows[(c.id, item.id)].nll for c in CONFIGS]
        assert min(abs(a - b) for n, a in enumerate(nlls) for b in nlls[:n]) > 1e-7
    assert len({rows[(c.id, ITEMS[4].id)].prediction for c in CONFIGS}) > 1
    assert rows[(INT4.id, ITEMS[1].id)].kl == 0  # a lone sink: nothing was compressed


def test_rows_say_what_they_are(loaded, rows) -> None:
    for (config_id, item_id), row in rows.items():
        item = next(i for i in ITEMS if i.id == item_id)
        config = next(c for c in CONFIGS if c.id == config_id)
        assert (row.task, row.family, row.cluster, row.split) == (item.task, "retrieval", item.cluster, "confirm")
        assert (row.mode, row.form) == ("forked", "choice" if item.choices else "greedy")
        assert row.context_tokens == len(item.context)  # one token per character
        assert row.answer_tokens == len(item.answers[0])
        assert row.measured_bytes == row.predicted_bytes > 0
        assert row.raw16_bytes == len(item.context) * 2 * 64 * 2 * 2  # layers, head dim, K and V, two bytes
        assert row.seconds > 0
        assert row.implementation == "torch"  # several queries at once
        if config == BASELINE:
            assert row.kl is None
            assert row.top1 is None
        else:
            assert row.kl is not None
            assert row.kl >= 0
            assert row.top1 is not None
            assert 0 <= row.top1 <= 1


def test_a_local_subject_is_a_subject(loaded) -> None:
    assert isinstance(subject(loaded), Subject)


# -- one prefill, any company ------------------------------------------------------------------------------------------


def test_prefills_equal_distinct_items_whatever_the_configs(loaded, rows) -> None:
    s = subject(loaded)
    assert list(s.score(ITEMS, CONFIGS))
    again = _by_key(s.score(ITEMS[::-1], CONFIGS[::-1]))
    for config in CONFIGS:
        assert len(list(s.score(ITEMS[:3], [config]))) == 3
    assert s.counters.prefills == len(s.counters.items) == len(ITEMS)
    assert s.counters.configs == {c.id for c in CONFIGS}
    assert s.counters.item_scores == 2 * len(ITEMS) * len(CONFIGS) + 3 * len(CONFIGS)
    _assert_alike(again, rows)


def _assert_alike(ours: dict[tuple[str, str], ItemScore], theirs: dict[tuple[str, str], ItemScore]) -> None:
    assert ours.keys() == theirs.keys()
    for key, a in ours.items():
        b = theirs[key]
        assert abs(a.nll - b.nll) <= EXACT, key
        for name in ("score", "exact", "token_accuracy", "prediction", "top1", "measured_bytes", "predicted_bytes"):
            assert getattr(a, name) == getattr(b, name), (key, name)
        assert (a.kl is None) == (b.kl is None)
        assert a.kl is None or abs(a.kl - b.kl) <= EXACT


@pytest.mark.parametrize("max_rows", [1, 3, 500])
def test_scores_do_not_depend_on_the_size_of_a_batch(loaded, rows, max_rows) -> None:
    _assert_alike(_by_key(subject(loaded, max_rows=max_rows).score(ITEMS, CONFIGS)), rows)


def test_scores_do_not_depend_on_company(loaded, rows) -> None:
    mixed = [ITEMS[i] for i in (4, 1, 0, 5, 3, 2)]
    _assert_alike(_by_key(subject(loaded).score(mixed, CONFIGS)), rows)
    alone: dict[tuple[str, str], ItemScore] = {}
    for config in CONFIGS[::-1]:
        s = subject(loaded)  # without the baseline beside it, which is then scored only for its distribution
        alone |= _by_key(s.score(ITEMS, [config]))
        assert s.counters.item_scores == len(ITEMS)
    _assert_alike(alone, rows)
    single = subject(loaded)
    _assert_alike(_by_key(r for i in ITEMS for c in CONFIGS for r in single.score([i], [c])), rows)


def test_rows_come_item_by_item_and_configs_in_order(loaded) -> None:
    order = CONFIGS[1:4][::-1]
    found = [(r.item_id, r.config_id) for r in subject(loaded, max_rows=9).score(ITEMS, order)]
    assert found == [(i.id, c.id) for i in ITEMS for c in order]


def test_a_read_only_pass_leaves_its_caches_as_they_were(loaded) -> None:
    s = subject(loaded)
    (snapshot,) = s._snapshots([s._tokens(ITEMS[0])], attach(loaded.model))
    with attach(loaded.model) as kv:
        caches = [snapshot.fork(c, kv) for c in CONFIGS]
        before = [[x.clone() for layer in c.layers for x in layer.storages()] for c in caches]  # type: ignore[union-attr]
        sizes = [(c.nbytes, c.get_seq_length(), c.layers[0].rows[0].n_window) for c in caches]  # type: ignore[union-attr]
        ids = torch.tensor([ids_of(loaded, "some more text")] * 2 * len(caches))
        logits = []
        for _ in range(2):
            stacked = StackedCache([*caches, *caches], read_only=True)
            positions = stacked.positions(torch.ones_like(ids, dtype=torch.bool))
            with torch.no_grad():
                out = loaded.model(ids, position_ids=positions, use_cache=True, **{cache_kwarg(): stacked})
            logits.append(out.logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0][: len(caches)], logits[0][len(caches) :])
    assert sizes == [(c.nbytes, c.get_seq_length(), c.layers[0].rows[0].n_window) for c in caches]  # type: ignore[union-attr]
    for cache, was in zip(caches, before, strict=True):
        now = [x for layer in cache.layers for x in layer.storages()]  # type: ignore[union-attr]
        assert all(torch.equal(x, y) for x, y in zip(now, was, strict=True))


# -- snapshots on disk -------------------------------------------------------------------------------------------------


def test_questions_of_one_context_share_its_prefill_and_its_compressed_caches(loaded, monkeypatch) -> None:
    pairs = [(" Who? ", "nobody"), (" How many? ", "417"), (" Where? ", "the sand"), (" Who? ", "boats")]
    items = [item_of(n, WORDS[: 90 + 30 * (n % 2)], question, (gold,)) for n, (question, gold) in enumerate(pairs)]
    forks = []
    fork = Snapshot.fork
    monkeypatch.setattr(Snapshot, "fork", lambda self, config, kv: forks.append(config) or fork(self, config, kv))
    s = subject(loaded)
    found = _by_key(s.score(items, [BASELINE, INT4]))
    assert (s.counters.prefills, len(s.counters.contexts), len(s.counters.items)) == (2, 2, 4)
    assert len(forks) == 2 * 2
    for item in items:
        _check(found[(BASELINE.id, item.id)], _expected(loaded, item, None), baseline=True)
        _check(found[(INT4.id, item.id)], _expected(loaded, item, INT4))
    # Another question later, and real decoding, take the same prefills.
    later = [item_of(9, WORDS[:90], " When? ", ("winter",)), asked(items[1], max_new_tokens=2)]
    (row,) = s.score(later[:1], [INT4])
    _check(row, _expected(loaded, later[0], INT4))
    list(s.generate(later, [INT4]))
    assert s.counters.prefills == 2


def test_a_context_on_disk_serves_a_question_it_was_not_made_for(loaded, tmp_path) -> None:
    first, second = (item_of(n, WORDS[:90], f" Question {n}? ", (gold,)) for n, gold in enumerate(("lamp", "sand")))
    list(subject(loaded, store=SnapshotStore("s", tmp_path)).score([first], [INT4]))
    for persisted in ([second], [first, second]):
        s = subject(loaded, store=SnapshotStore("s", tmp_path))
        for item, row in zip(persisted, s.score(persisted, [INT4]), strict=True):
            _check(row, _expected(loaded, item, INT4))
        assert s.counters.prefills == 0


def test_the_share_of_right_tokens_is_the_score_where_an_item_says_so(loaded) -> None:
    plain = item_of(0, WORDS[:90], "How many? ", ("?",))
    right = loaded.tokenizer.decode(_greedy(loaded, plain, 3))
    wrong = next(c for c in CHARACTERS if c != loaded.tokenizer.decode(_greedy(loaded, plain, 4))[3])
    item = dataclasses.replace(plain, answers=(right + wrong,), forced="tokens")
    row, other = subject(loaded).score([item], [BASELINE, INT4])
    assert (row.form, row.score, row.token_accuracy, row.exact) == ("tokens", 0.75, 0.75, 0.0)
    assert other.score == other.token_accuracy


def test_another_process_takes_the_prefills_from_disk(loaded, rows, tmp_path) -> None:
    def fresh() -> LocalSubject:
        return subject(loaded, store=SnapshotStore(snapshot_identity(loaded), tmp_path))

    list(fresh().score(ITEMS[:4], CONFIGS))
    second = fresh()
    found = _by_key(second.score(ITEMS[:4], CONFIGS))
    assert second.counters.prefills == 0
    _assert_alike(found, {k: v for k, v in rows.items() if k in found})

    broken = sorted(tmp_path.glob("*.safetensors"))[0]
    broken.write_bytes(broken.read_bytes()[:-7])
    third = fresh()
    found = _by_key(third.score(ITEMS[:4], CONFIGS))
    assert (third.counters.prefills, third.counters.corrupt_snapshots) == (1, 1)
    _assert_alike(found, {k: v for k, v in rows.items() if k in found})
    fourth = fresh()
    list(fourth.score(ITEMS[:4], CONFIGS))
    assert (fourth.counters.prefills, fourth.counters.corrupt_snapshots) == (0, 0)


def test_items_not_to_be_asked_again_stay_off_the_disk(loaded, tmp_path) -> None:
    s = subject(loaded, store=SnapshotStore(snapshot_identity(loaded), tmp_path))
    list(s.score(ITEMS[:2], CONFIGS[:2], persist=False))
    assert list(tmp_path.iterdir()) == []
    list(s.score(ITEMS[:2], CONFIGS[2:4], persist=False))
    assert s.counters.prefills == 2


def test_the_same_context_with_another_answer_is_compared_with_its_own_reference(loaded) -> None:
    """The full cache's distribution at the answer rides along, so it must not be another answer's."""
    other = dataclasses.replace(ITEMS[0], id="needle_text/confirm/0/77", answers=(" 9",))
    s = subject(loaded)
    found = _by_key([*s.score([ITEMS[0]], [INT4]), *s.score([other], [INT4])])
    assert s.counters.prefills == 1
    _check(found[(INT4.id, other.id)], _expected(loaded, other, INT4))
    _check(found[(INT4.id, ITEMS[0].id)], _expected(loaded, ITEMS[0], INT4))


# -- the question before compression -----------------------------------------------------------------------------------


def test_a_query_aware_subject_compresses_the_question_too(loaded) -> None:
    config = CONFIGS[6]
    s = subject(loaded, query_aware=True)
    found = _by_key(s.score(ITEMS, [BASELINE, config]))
    after = _by_key(subject(loaded).score(ITEMS, [BASELINE, config]))
    for item in ITEMS:
        moved = len(item.question) - 1
        row = found[(config.id, item.id)]
        _check(row, _expected(loaded, item, config, moved))
        assert row.context_tokens == len(item.context) + moved
        assert row.measured_bytes == row.predicted_bytes
        base = found[(BASELINE.id, item.id)]
        assert base.nll == pytest.approx(after[(BASELINE.id, item.id)].nll, abs=1e-9)  # order of text is the same
    assert abs(found[(config.id, ITEMS[0].id)].nll - after[(config.id, ITEMS[0].id)].nll) > 1e-6


# -- refused before anything is computed -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["score", "generate"])
def test_a_config_that_does_not_fit_is_refused_before_anything_is_computed(loaded, call) -> None:
    s = subject(loaded)
    wrong = KVConfig(key=Affine(bits=4, group=48))
    with pytest.raises(ValueError, match=r"layer 0.*64.*48"):
        list(s.score(ITEMS, [BASELINE, wrong]) if call == "score" else s.generate(ITEMS, [BASELINE, wrong]))
    assert s.counters.prefills == s.counters.item_scores == 0


def test_a_scorer_that_is_not_observed_is_refused(loaded) -> None:
    s = LocalSubject(loaded, scorers=(AttentionMass(),))
    with pytest.raises(ValueError, match="did not observe snapkv"):
        list(s.score(ITEMS[:1], [CONFIGS[6]]))


# -- generate ----------------------------------------------------------------------------------------------------------


def _greedy(loaded: Loaded, item: Item, tokens: int) -> list[int]:
    """transformers' own greedy continuation, end tokens included."""
    ids = torch.tensor([ids_of(loaded, item.context) + ids_of(loaded, item.question)])
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("max_rows", [48, 1])
def test_generated_text_equals_the_models_own(loaded, max_rows) -> None:
    """Six rows of different length in one left-padded batch, or one by one."""
    items = [asked(i) for i in ITEMS]
    found = list(subject(loaded, max_rows=max_rows).generate(items, [BASELINE]))
    assert [r.item_id for r in found] == [i.id for i in items]
    for item, row in zip(items, found, strict=True):
        tokens = _greedy(loaded, item, 24)
        assert row.prediction == loaded.tokenizer.decode(tokens)
        assert row.answer_tokens == len(tokens) == 24
        assert (row.mode, row.form, row.kl) == ("true", "generate", None)
        assert row.measured_bytes == row.predicted_bytes


@pytest.mark.parametrize("config", CONFIGS[1:], ids=lambda c: c.label)
def test_generation_on_a_compressed_cache_equals_decoding_by_hand(loaded, config) -> None:
    items = [asked(i, max_new_tokens=12) for i in ITEMS]
    found = list(subject(loaded).generate(items, [config]))
    for item, row in zip(items, found, strict=True):
        assert row.prediction == by_hand(loaded, item, config, 12)
        assert (
            row.measured_bytes
            == row.predicted_bytes
            == config.predicted_bytes(subject(loaded).shape, len(item.context))
        )


def _upto(text: str, stop: str) -> str:
    """Text before the first stop string behind its first visible character."""
    shown = next(n for n, c in enumerate(text) if not c.isspace())
    at = text.find(stop, shown)
    return text if at < 0 else text[:at]


def test_rows_of_real_decoding_name_what_attended(tmp_path) -> None:
    pytest.importorskip("numba")
    for dtype, implementation in (("float32", "numba"), ("float64", "torch")):
        narrow = models.load(str(save_tiny(tmp_path / dtype)), dtype=dtype, device="cpu")
        (row,) = subject(narrow).generate([asked(ITEMS[0], max_new_tokens=3)], [INT4])
        assert row.implementation == implementation


def test_generation_stops_at_stop_strings_and_limits_row_by_row(loaded) -> None:
    whole = [loaded.tokenizer.decode(_greedy(loaded, i, 24)) for i in ITEMS]
    # A stop string of one and of three characters, from the middle of each row's own text.
    items = [
        asked(ITEMS[0], stop=(whole[0][9],)),
        asked(ITEMS[2], stop=(whole[2][4:7], "never")),
        asked(ITEMS[3], max_new_tokens=1),
        asked(ITEMS[4], max_new_tokens=5),
        asked(ITEMS[5]),
    ]
    found = list(subject(loaded).generate(items, [BASELINE]))
    expected = [
        _upto(whole[0], whole[0][9]),
        _upto(whole[2], whole[2][4:7]),
        whole[3][0],
        whole[4][:5],
        whole[5],
    ]
    assert [row.prediction for row in found] == expected
    assert 0 < len(expected[0]) <= 9
    assert 0 < len(expected[1]) <= 4
    assert [r.answer_tokens for r in found[2:]] == [1, 5, 24]
    assert found[1].answer_tokens <= 7


def test_an_end_token_first_ends_that_row_alone(loaded) -> None:
    first = _greedy(loaded, ITEMS[0], 1)[0]
    ending = dataclasses.replace(loaded, model=copy.copy(loaded.model))
    ending.model.generation_config = copy.deepcopy(loaded.model.generation_config)
    ending.model.generation_config.eos_token_id = [1, first]
    found = list(subject(ending).generate([asked(ITEMS[0]), asked(ITEMS[1])], [BASELINE]))
    assert (found[0].prediction, found[0].answer_tokens) == ("", 0)
    other = [t for t in _greedy(ending, ITEMS[1], 24) if t not in (1, first)]
    assert found[1].prediction == loaded.tokenizer.decode(other)
    assert found[1].answer_tokens == len(other)


def test_generated_answers_are_graded_against_every_gold_answer(loaded) -> None:
    text = loaded.tokenizer.decode(_greedy(loaded, ITEMS[0], 24))
    right = asked(ITEMS[0], answers=("no", f"  {text} "))
    wrong = asked(ITEMS[0], answers=(text[:-1] + "@", "no"))
    assert [r.score for r in subject(loaded).generate([right], [BASELINE])] == [1.0]
    assert [r.score for r in subject(loaded).generate([wrong], [BASELINE])] == [0.0]


def _writes(monkeypatch, *texts: str) -> None:
    """A stub of the decoder: the same answers whatever is asked."""

    def write(self, jobs, fork):
        caches = fork(range(len(jobs)))
        yield from ((n, Written(text, 3, c, 0.0)) for n, (text, c) in enumerate(zip(texts, caches, strict=True)))

    monkeypatch.setattr(Decoder, "write", write)


def test_generated_numbers_are_compared_as_numbers_where_the_task_says_so(loaded, monkeypatch) -> None:
    """GSM8K's metric, on text that a stub of the decoder gives."""
    s = subject(loaded)
    item = asked(ITEMS[0], family="math", answers=("#### 18",), metric="number")
    for text, score, strict, found in (
        ("It is 9 + 9 = 18.00", 1.0, 0.0, True),
        ("It is 18.5", 0.0, 0.0, True),
        ("#### 18", 1.0, 1.0, True),
        ("I do not know", 0.0, 0.0, False),
    ):
        _writes(monkeypatch, text)
        (row,) = s.generate([item], [BASELINE])
        assert (row.score, row.benchmark, row.extracted, row.outcome) == (score, strict, found, None)
        assert row.exact == float(text == "#### 18")


def test_generated_code_runs_where_a_runner_is_given_and_nowhere_else(loaded, monkeypatch) -> None:
    s = subject(loaded)
    check = CodeCheck(before="", entry="f", tests="assert f() == 1")
    item = asked(ITEMS[0], answers=("def f():\n    return 1",), metric="execute", forced="tokens", check=check)
    with pytest.raises(ValueError, match="running it was not allowed"):
        list(s.generate([item], [BASELINE]))
    assert s.counters.prefills == 0
    ran: list[Program] = []

    def runner(programs):
        ran.extend(programs)
        return [SimpleNamespace(verdict="timeout", detail="") for _ in programs]

    _writes(monkeypatch, "def f():\n    return 1\n", "no")
    rows = list(s.generate([item, dataclasses.replace(item, id="needle_text/confirm/0/1")], [BASELINE], runner=runner))
    assert [(r.score, r.extracted, r.outcome) for r in rows] == [(0.0, True, "timeout"), (0.0, False, "no code")]
    assert ran == [Program(source="def f():\n    return 1\n", tests="assert f() == 1\n", entry="f")]


# -- models that cannot be stacked -------------------------------------------------------------------------------------


def test_a_model_with_sliding_layers_scores_and_generates(sliding) -> None:
    s = subject(sliding)
    assert s.plan.stock == (0, 1, 2, 3, 4)
    assert s.batcher.most == 1
    configs = [BASELINE, INT4, CONFIGS[5]]
    found = _by_key(s.score(ITEMS, configs))
    assert s.counters.prefills == len(ITEMS)
    for item in ITEMS:
        _check(found[(BASELINE.id, item.id)], _expected(sliding, item, None), baseline=True)
        for config in configs[1:]:
            row = found[(config.id, item.id)]
            _check(row, _expected(sliding, item, config))
            assert row.measured_bytes == row.predicted_bytes
    one = [asked(i, max_new_tokens=8) for i in (ITEMS[0], ITEMS[5])]
    for item, row in zip(one, s.generate(one, [BASELINE]), strict=True):
        assert row.prediction == sliding.tokenizer.decode(_greedy(sliding, item, 8), skip_special_tokens=False)


# -- timing ------------------------------------------------------------------------------------------------------------


def test_timing_covers_every_config_in_order(loaded) -> None:
    prompt = ids_of(loaded, WORDS[:60])
    found = subject(loaded).time([BASELINE, INT4], prompt, steps=2, repeats=2)
    assert [(t.prompt_tokens, t.steps) for t in found] == [(60, 2)] * 2
    for t in found:
        assert t.ttft_s > 0
        assert t.tokens_per_s == pytest.approx(1 / t.latency_s)
