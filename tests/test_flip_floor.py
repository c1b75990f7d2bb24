"""The baseline against itself: really scored in other company the second time, and what that is worth."""

from typing import Any

import pytest
import torch
from asking import WORDS, item_of, sharpened
from tiny_folder import save_tiny

import kvlab.decoding
import kvlab.subject
from kvlab import models
from kvlab.answering import Answering
from kvlab.batching import Batcher
from kvlab.book import ScoreBook, StopFlag
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.confirm import Margin, Verdicts, judge_arms
from kvlab.evals.item import EvalSet
from kvlab.policies import Recency, Tokens
from kvlab.progress import Progress
from kvlab.runs import Run
from kvlab.stacked import StackedCache
from kvlab.subject import BASELINE, LocalSubject

SMALL: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 8, "page_tokens": 16}
INT4 = KVConfig(**SMALL, key=Affine(bits=4), value=Affine(bits=4))
CONTROL = KVConfig(**SMALL, scorer=Recency(), budget=Tokens(12))
ITEMS = EvalSet(
    "t", 1, tuple(item_of(n, WORDS[n : 60 + 9 * n], f" {n}? ", (WORDS[n],), max_new_tokens=4) for n in range(6))
)


@pytest.fixture(scope="module", params=["float64", "float32"])
def loaded(request, tmp_path_factory):
    found = models.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))), dtype=request.param, device="cpu")
    sharpened(found.model)
    return found


@pytest.fixture
def stacks(monkeypatch) -> list[list[str]]:
    """The configs of the rows of every stack that was asked."""
    seen = []

    class Noting(StackedCache):
        def __init__(self, caches, read_only=False):
            seen.append([cache.config.id for cache in caches])
            super().__init__(caches, read_only)

    for place in (kvlab.subject, kvlab.decoding):
        monkeypatch.setattr(place, "StackedCache", Noting)
    return seen


def _judged(tmp_path, scoring) -> Verdicts:
    book = ScoreBook(Run.create(tmp_path, "t", {"schema": "t"}), scoring, StopFlag(), Progress(1, quiet=True))
    return judge_arms(book, ITEMS, [INT4], CONTROL, Margin.planned(6))


@pytest.mark.parametrize("decoded", [False, True], ids=["forced", "decoded"])
def test_the_second_scoring_has_other_company(loaded, stacks, tmp_path, decoded) -> None:
    s = LocalSubject(loaded)
    again = _judged(tmp_path, Answering(s) if decoded else s).aa
    assert (again["n"], again["flips"], again["share"]) == (6, 0, 0.0)
    if decoded:
        assert again["dnll"] is None
    else:
        assert 0 <= again["dnll"] <= (1e-12 if loaded.dtype == "float64" else 1e-5)
    beside = [stack for stack in stacks if BASELINE.id in stack]
    first = [stack for stack in beside if set(stack) != {BASELINE.id}]
    alone = [stack for stack in beside if set(stack) == {BASELINE.id}]
    assert all({INT4.id, CONTROL.id} <= set(stack) for stack in first)
    assert max(map(len, alone)) == 6
    assert sum(stack.count(BASELINE.id) for stack in first) >= 6
    assert sum(map(len, alone)) >= 6
    assert s.counters.prefills == 6  # from the same prefills, as all configs are


def test_a_score_that_depends_on_its_company_shows(loaded, tmp_path, monkeypatch) -> None:
    """As where a kernel picks another way for another number of rows, but much larger."""
    s = LocalSubject(loaded)
    forward = s._forward

    def swayed(caches, ids, valid, keep, read_only=False):
        logits = forward(caches, ids, valid, keep, read_only).clone()
        if {cache.config.id for cache in caches} == {BASELINE.id}:
            logits += torch.linspace(0, 40, logits.shape[-1])
        return logits

    right = [row.score for row in s.score(ITEMS.items, [BASELINE])]
    monkeypatch.setattr(s, "_forward", swayed)
    swayed_scores = [row.score for row in s.score(ITEMS.items, [BASELINE])]
    expected = sum(a != b for a, b in zip(right, swayed_scores, strict=True))
    again = _judged(tmp_path, s).aa
    assert (again["flips"], again["share"]) == (expected, expected / 6)
    assert again["dnll"] > 1


def test_with_one_row_at_a_time_there_is_no_company(loaded, stacks, tmp_path) -> None:
    s = LocalSubject(loaded, max_rows=1)
    assert isinstance(s.batcher, Batcher)
    again = _judged(tmp_path, s).aa
    assert (again["flips"], again["dnll"]) == (0, 0.0)
    assert {len(stack) for stack in stacks} == {1}
