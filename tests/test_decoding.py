"""Many configs and items in one batch: each answer is what it is alone, no forward is wasted, memory may run out."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asking import ITEMS, WORDS, asked, by_hand, item_of, sharpened
from tiny_folder import save_tiny

import kvlab.subject
from kvlab import models
from kvlab.batching import Batcher, Cost
from kvlab.cache import cache_kwarg
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.decoding import Decoder
from kvlab.evals.item import Item
from kvlab.models import Loaded
from kvlab.policies import AttentionMass, Fraction, Recency, Tokens, TopK
from kvlab.stacked import StackedCache
from kvlab.subject import BASELINE, LocalSubject

SMALL: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 8, "page_tokens": 16}
FP8 = KVConfig(**SMALL, key=Fp8(), value=Fp8())
INT4 = KVConfig(**SMALL, key=Affine(bits=4), value=Affine(bits=4))
STREAMING = KVConfig(**SMALL, scorer=Recency(), budget=Tokens(20))
H2O = KVConfig(**SMALL, key=Affine(bits=8), value=Affine(bits=8), scorer=AttentionMass(), budget=Fraction(0.4))
SPARSE = KVConfig(**SMALL, reader=TopK(fraction=0.5, chunk=8))
CONFIGS = [BASELINE, FP8, INT4, STREAMING, H2O, SPARSE]
LENGTHS = (3, 12, 1, 7, 9, 5)
ASKED = [asked(item, max_new_tokens=n) for item, n in zip(ITEMS, LENGTHS, strict=True)]


@pytest.fixture(scope="module", params=["float64", "float32"])
def loaded(request, tmp_path_factory) -> Loaded:
    found = models.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))), dtype=request.param, device="cpu")
    sharpened(found.model)
    return found


@pytest.fixture(scope="module")
def alone(loaded) -> dict[tuple[str, str], str]:
    """Every answer by one-row forwards, a token at a time: what any batch must give."""
    return {(c.id, item.id): by_hand(loaded, item, c, item.max_new_tokens) for item in ASKED for c in CONFIGS}


def subject(loaded: Loaded, **more: Any) -> LocalSubject:
    return LocalSubject(loaded, scorers=[AttentionMass()], **more)


def _written(
    s: LocalSubject, items: list[Item] = ASKED, configs: list[KVConfig] = CONFIGS
) -> dict[tuple[str, str], str]:
    found = list(s.generate(items, configs))
    assert [(r.item_id, r.config_id) for r in found] == [(i.id, c.id) for i in items for c in configs]
    return {(r.config_id, r.item_id): r.prediction for r in found}


@pytest.mark.parametrize("max_rows", [500, 7, 1])
def test_every_config_writes_beside_all_others_what_it_writes_alone(loaded, alone, max_rows) -> None:
    assert _written(subject(loaded, max_rows=max_rows)) == alone


def test_another_company_changes_nothing(loaded, alone) -> None:
    items, configs = ASKED[::-1], [*CONFIGS[3:], *CONFIGS[:3]]
    assert _written(subject(loaded, max_rows=11), items, configs) == alone
    assert _written(subject(loaded), ASKED[3:4], [INT4]) == {(INT4.id, ASKED[3].id): alone[(INT4.id, ASKED[3].id)]}


def test_configs_differ_in_what_they_write(alone) -> None:
    """The comparison above is not one of equal texts."""
    texts = [[alone[(c.id, item.id)] for item in ASKED] for c in CONFIGS]
    assert sum(t != texts[0] for t in texts) >= 3


@pytest.fixture
def batches(loaded) -> Iterator[list[tuple[int, int]]]:
    """Rows and width of every forward over a stack of caches."""
    seen: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if isinstance(kwargs.get(cache_kwarg()), StackedCache):
            seen.append(tuple(kwargs["input_ids"].shape))

    hook = loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


@pytest.mark.parametrize("max_rows", [48, 8])
def test_no_row_is_carried_along_after_its_end(loaded, batches, max_rows) -> None:
    """Rows of all forwards are the tokens that were drawn, one by one; and places that came free were taken."""
    s = subject(loaded, max_rows=max_rows)
    batches.clear()
    drawn = [row.answer_tokens for row in s.generate(ASKED, CONFIGS)]
    forwards = [rows for rows, width in batches]
    assert sum(forwards) == sum(drawn) == len(CONFIGS) * sum(LENGTHS)
    assert max(forwards) <= max_rows
    # Written one batch after the other, each as long as its longest answer.
    batched = sum(max(drawn[n : n + max_rows]) for n in range(0, len(drawn), max_rows))
    assert len(forwards) <= batched + len(drawn) // (max_rows // 4)
    steps = [rows for rows, width in batches if width == 1]
    assert sum(steps[:6]) >= 6 * max_rows * 3 // 4 or max_rows == 48


def test_a_stop_string_frees_the_row_too(loaded, batches) -> None:
    s = subject(loaded)
    (whole,) = s.generate([asked(ITEMS[0], max_new_tokens=24)], [BASELINE])
    at = next(n for n, c in enumerate(whole.prediction) if n > 3 and c not in whole.prediction[:n] and c != " ")
    items = [asked(ITEMS[0], stop=(whole.prediction[at],)), asked(ITEMS[3])]
    batches.clear()
    first, _ = s.generate(items, [BASELINE])
    assert (first.prediction, first.answer_tokens) == (whole.prediction[:at], at + 1)
    assert [rows for rows, _ in batches] == [2] * (at + 1) + [1] * (24 - at - 1)


def test_rows_come_as_soon_as_those_before_them_are_there(loaded, batches) -> None:
    items = [asked(ITEMS[3], max_new_tokens=n) for n in (2, 9, 1)]
    items = [dataclasses.replace(i, id=f"{i.id}{n}") for n, i in enumerate(items)]
    rows = subject(loaded, max_rows=12).generate(items, [BASELINE, INT4])
    batches.clear()
    next(rows)
    assert len(batches) == 2
    assert len([next(rows) for _ in range(2)]) == 2
    assert len(batches) == 9


# -- memory ------------------------------------------------------------------------------------------------------------


def _run_out(monkeypatch, most: int, after: int = 0) -> list[int]:
    """Forwards of the decoder over more than `most` rows fail, when the caches have taken their tokens in."""
    forward, tried = Decoder._forward, []

    def failing(self, stack, ids, valid):
        tried.append(len(ids))
        out = forward(self, stack, ids, valid)
        if len(ids) > most and len(tried) > after:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    monkeypatch.setattr(Decoder, "_forward", failing)
    return tried


@pytest.mark.parametrize("after", [0, 3], ids=["at once", "in the middle"])
def test_where_memory_runs_out_answers_are_begun_again_half_as_many(loaded, alone, monkeypatch, after) -> None:
    tried = _run_out(monkeypatch, 9, after)
    s = subject(loaded, max_rows=36)
    assert _written(s) == alone
    assert tried[0] == 36
    assert max(tried[-6:]) <= s.batcher.most <= 9
    assert s.batcher.most > 4
    assert s.counters.prefills == len(ASKED)


def test_one_row_that_does_not_fit_is_an_error(loaded, monkeypatch) -> None:
    _run_out(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        list(subject(loaded, max_rows=4).generate(ASKED[:2], [BASELINE, INT4]))


def test_other_errors_are_raised(loaded, monkeypatch) -> None:
    def broken(self, stack, ids, valid):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Decoder, "_forward", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        list(subject(loaded).generate(ASKED[:2], [BASELINE]))


def _within(s: LocalSubject, room: int) -> LocalSubject:
    s.batcher = Batcher(s.model, s.batcher.most, room=lambda: room)
    return s


def test_fewer_answers_are_written_at_once_where_less_is_free(loaded, alone, batches) -> None:
    s = _within(subject(loaded), 10**12)
    s.batcher.cost = Cost(1, 1)
    held = BASELINE.predicted_bytes(s.shape, len(ASKED[0].context), len(ASKED[0].question) + LENGTHS[0])
    for room, rows in ((10**12, 6), (2 * (3 * held + 1000), 3), (0, 1)):
        s = _within(s, room)
        s.batcher.cost = Cost(1, 1)
        items = [dataclasses.replace(ASKED[0], id=f"needle_text/confirm/0/{n}") for n in range(6)]
        batches.clear()
        assert set(_written(s, items, [BASELINE]).values()) == {alone[(BASELINE.id, ASKED[0].id)]}
        assert max(n for n, _ in batches) == rows


def test_an_item_whose_configs_join_at_different_times_is_prefilled_once(loaded, alone) -> None:
    """Also where the store has dropped it meanwhile."""
    s = subject(loaded, max_rows=4)
    s.store.memory_bytes = 1
    assert _written(s) == alone
    assert s.counters.prefills == len(ASKED)


# -- the score pass ----------------------------------------------------------------------------------------------------


def _scores(s: LocalSubject, items: list[Item]) -> dict[tuple[str, str], Any]:
    return {(r.config_id, r.item_id): r for r in s.score(items, CONFIGS)}


def _apart(ours: dict[tuple[str, str], Any], theirs: dict[tuple[str, str], Any]) -> float:
    """Largest difference of nats; everything that is counted must be equal."""
    assert ours.keys() == theirs.keys()
    for key, a in ours.items():
        assert (a.score, a.exact, a.prediction) == (theirs[key].score, theirs[key].exact, theirs[key].prediction)
    return max(abs(a.nll - theirs[key].nll) for key, a in ours.items())


@pytest.mark.parametrize("failing", ["forward", "prefill"])
def test_scores_are_the_same_where_memory_runs_out(loaded, monkeypatch, failing) -> None:
    expected = _scores(subject(loaded), ITEMS)
    s, tried = subject(loaded), []
    place, name, at = (s, "_forward", 0) if failing == "forward" else (kvlab.subject, "take", 2)
    whole = getattr(place, name)

    def narrow(*args, **kwargs):
        tried.append(len(args[at]))
        out = whole(*args, **kwargs)
        if tried[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    monkeypatch.setattr(place, name, narrow)
    found = _scores(s, ITEMS)
    assert max(tried) > 3
    assert s.counters.prefills == len(ITEMS)
    assert _apart(found, expected) <= (1e-12 if s.model.dtype == torch.float64 else 1e-5)


def test_long_answers_go_fewer_at_a_time(loaded, batches) -> None:
    long = [item_of(n, WORDS[:60], "?", (WORDS[: 100 if n else 5],)) for n in range(4)]
    counts = {}
    for name, items in (("short", long[:1]), ("long", long[1:2])):
        s = _within(subject(loaded), 2 * 7 * 100 * 10**6)
        s.batcher.cost = Cost(0, 10**6)
        batches.clear()
        assert len(list(s.score(items, CONFIGS))) == len(CONFIGS)
        counts[name] = [n for n, width in batches if width >= len(items[0].answers[0])]
    assert counts == {"short": [6], "long": [6]}
    s = _within(subject(loaded), 2 * 2 * 110 * 10**6)
    s.batcher.cost = Cost(0, 10**6)
    batches.clear()
    found = _scores(s, long[1:2])
    assert [n for n, width in batches if width >= 100] == [2, 2, 2]
    assert _apart(found, _scores(subject(loaded), long[1:2])) <= (1e-12 if s.model.dtype == torch.float64 else 1e-5)


def test_configs_go_in_groups_where_their_caches_do_not_fit_together(loaded, batches) -> None:
    expected = _scores(subject(loaded), ITEMS[:2])
    s = subject(loaded)
    held = BASELINE.predicted_bytes(s.shape, len(ITEMS[0].context))
    s = _within(s, 2 * 2 * held)
    s.batcher.cost = Cost(0, 0)
    assert [len(g) for g in s._portions([s._tokens(ITEMS[0])], CONFIGS)[0]] != [len(CONFIGS)]
    found = list(s.score(ITEMS[:2], CONFIGS))
    assert s.counters.prefills == 2
    assert [r.item_id for r in found] == [i.id for i in ITEMS[:2] for _ in CONFIGS]
    assert _apart({(r.config_id, r.item_id): r for r in found}, expected) <= 1e-5


def test_a_store_with_little_room_changes_no_score(loaded) -> None:
    expected = _scores(subject(loaded), ITEMS)
    s = subject(loaded, max_rows=7)
    s.store._room = lambda device: 0
    found = _scores(s, ITEMS)
    assert _apart(found, expected) <= (1e-12 if s.model.dtype == torch.float64 else 1e-5)
    assert sum(x.nbytes for x in s.store._memory.values()) <= 2 * max(x.nbytes for x in s.store._memory.values())
