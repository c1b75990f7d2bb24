"""What is decoded and what is forced, on a real model; and a confirmation that rests on decoded answers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tiny_folder import save_tiny

from kvlab import models
from kvlab.answering import Answering, notes, scoring
from kvlab.book import ScoreBook, StopFlag
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.confirm import Margin, judge_arms
from kvlab.evals.item import CodeCheck, EvalSet, Item
from kvlab.evals.sampling import Sampling
from kvlab.policies import Recency, Tokens
from kvlab.progress import Progress
from kvlab.runs import Run
from kvlab.subject import BASELINE, LocalSubject

INT4 = KVConfig(key=Affine(bits=4), value=Affine(bits=4), recent_tokens=8, page_tokens=16, sink_tokens=2)
TEXT = "the lamp stood by the river; nobody came in winter, and 417 boats lay on the sand."


def _item(index: int, split: str = "confirm", **more) -> Item:
    facts = {"context": TEXT, "question": f" Question {index}: ", "answers": ("417",), "max_new_tokens": 3}
    return Item(id=f"t/{split}/0/{index}", task="t", family="math", cluster=f"c{index}", **facts | more)


CODE = {
    "answers": ("def f():\n    return 1",),
    "metric": "execute",
    "forced": "tokens",
    "check": CodeCheck(before="", entry="f", tests="assert f() == 1"),
}
KINDS = {
    "plain": _item(0),
    "choice": _item(1, choices=("417", "boats")),
    "text": _item(2, metric="likelihood", forced="tokens"),
    "code": _item(3, **CODE),
    "search": _item(4, split="search"),
    "replicate": _item(5, split="replicate"),
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> LocalSubject:
    loaded = models.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))), dtype="float64", device="cpu")
    return LocalSubject(loaded)


@pytest.mark.parametrize("runs", [False, True])
def test_each_item_is_scored_in_the_form_that_can_judge_it(subject, runs) -> None:
    ran = []

    def runner(programs):
        ran.extend(programs)
        return [SimpleNamespace(verdict="wrong", detail="") for _ in programs]

    rows = list(Answering(subject, runner if runs else None).score(list(KINDS.values()), [BASELINE, INT4]))
    forms = {kind: {r.form for r in rows if r.item_id == item.id} for kind, item in KINDS.items()}
    assert forms == {
        "plain": {"generate"},
        "choice": {"choice"},
        "text": {"tokens"},
        "code": {"generate"} if runs else {"tokens"},
        "search": {"greedy"},
        "replicate": {"generate"},
    }
    assert sorted((r.config_id, r.item_id) for r in rows) == sorted(
        (c.id, i.id) for c in (BASELINE, INT4) for i in KINDS.values()
    )
    assert ran == []  # a random model writes no code


def test_contexts_are_prefilled_once_however_their_questions_are_scored(tmp_path) -> None:
    s = LocalSubject(models.load(str(save_tiny(tmp_path)), dtype="float64", device="cpu"))
    list(Answering(s).score(list(KINDS.values()), [BASELINE, INT4]))
    assert (s.counters.prefills, len(s.counters.contexts), len(s.counters.items)) == (1, 1, len(KINDS))


def test_no_score_is_blind_to_the_cache(tmp_path) -> None:
    """A cache of which next to nothing is left changes the likelihoods of every form, and the text of what is decoded.

    A metric that reads the prompt only, as a likelihood without a cache does, would call any compression lossless.
    """
    loaded = models.load(str(save_tiny(tmp_path)), dtype="float64", device="cpu")
    with torch.no_grad():
        for p in loaded.model.parameters():
            if p.ndim > 1:
                p.mul_(8)  # so that attention prefers some keys
    harsh = KVConfig(scorer=Recency(), budget=Tokens(4), recent_tokens=2, page_tokens=16, sink_tokens=1)
    s = LocalSubject(loaded)
    for kind, item in KINDS.items():
        full, bare = s.score([item], [BASELINE, harsh])
        assert bare.nll != pytest.approx(full.nll, rel=1e-3), kind
        assert bare.kl > 1e-3, kind
    long = dataclasses.replace(KINDS["plain"], max_new_tokens=24, stop=())
    full, bare = s.generate([long], [BASELINE, harsh])
    assert full.prediction != bare.prediction


def test_a_config_that_does_not_fit_is_refused_before_anything_is_decoded(subject) -> None:
    before = subject.counters.item_scores
    wrong = dataclasses.replace(INT4, key=Affine(bits=4, group=48))
    with pytest.raises(ValueError, match="group"):
        list(Answering(subject).score([KINDS["plain"]], [BASELINE, wrong]))
    assert subject.counters.item_scores == before


def test_what_gives_the_rows_is_what_was_allowed(subject, monkeypatch) -> None:
    opened = []

    class Box:
        def __enter__(self):
            opened.append(self)
            return self

        def __exit__(self, *_):
            opened.clear()

        def run(self, programs):
            return [SimpleNamespace(verdict="passed", detail="") for _ in programs]

    monkeypatch.setattr("kvlab.answering.Sandbox", Box)
    with scoring(subject, generate=False) as found:
        assert found is subject
    with scoring(subject, generate=True) as found:
        assert isinstance(found, Answering)
        assert not found.decodes(KINDS["code"])
    with scoring(subject, generate=True, allow_code_exec=True) as found:
        assert isinstance(found, Answering)
        assert found.decodes(KINDS["code"])
        assert len(opened) == 1
    assert opened == []


def test_readers_are_told_of_failed_extractions_and_of_code_that_did_not_run(subject) -> None:
    items = [KINDS["plain"], dataclasses.replace(KINDS["code"], id="writing/confirm/0/3", task="writing")]
    full, bare = (list(Answering(subject).score(items, [c])) for c in (BASELINE, INT4))
    failed = [sum(r.extracted is False for r in rows) for rows in (full, bare)]
    assert notes(items, [("uncompressed", full), ("int4", bare)], False) == [
        f"no answer could be read in: uncompressed {failed[0]} of 1; int4 {failed[1]} of 1",
        "writing: nothing was run; scored by the likelihood of the canonical solutions, token by token",
    ]
    forced = list(subject.score(items[:1], [BASELINE]))
    assert notes(items[:1], [("uncompressed", forced)], False) == []


def test_several_samples_are_judged_saved_and_told(subject, tmp_path) -> None:
    items = EvalSet("t", 1, tuple(_item(n) for n in range(3)))
    run = Run.create(tmp_path, "t", {"schema": "t"})
    drawn = Answering(subject, sampling=Sampling(temperature=1.5, samples=4, seed=3))
    book = ScoreBook(run, drawn, StopFlag(), Progress(1, quiet=True))
    verdicts = judge_arms(book, items, [INT4], INT4, Margin.planned(3))
    assert verdicts.aa["flips"] == 0  # the same luck the second time
    assert {(row.samples, row.right) for row in book.rows.values()} == {(4, 0)}
    assert len({row.prediction for row in book.rows.values()}) > 1
    again = ScoreBook(Run.open(run.path), drawn, StopFlag(), Progress(1, quiet=True))
    assert {(row.samples, row.right) for row in again.rows.values()} == {(4, 0)}
    rows = [
        dataclasses.replace(row, right=n) for n, row in enumerate(book.get("confirm", BASELINE, i) for i in items.items)
    ]
    # By hand: of 4 samples 0, 1 and 2 are right; all four hold a right one in two cases.
    assert notes(items.items, [("uncompressed", rows)], False)[1:] == [
        "pass@k over all items: uncompressed @1 0.250, @4 0.667"
    ]


def test_decoded_answers_are_judged_saved_and_read_back(subject, tmp_path) -> None:
    items = EvalSet("t", 1, tuple(_item(n) for n in range(6)))
    run = Run.create(tmp_path, "t", {"schema": "t"})
    book = ScoreBook(run, Answering(subject), StopFlag(), Progress(1, quiet=True))
    verdicts = judge_arms(book, items, [INT4], INT4, Margin.planned(6))
    assert verdicts.aa == {"n": 6, "flips": 0, "share": 0.0, "dnll": None}
    assert {row.form for row in book.rows.values()} == {"generate"}
    assert all(row.extracted is not None for row in book.rows.values())
    again = ScoreBook(Run.open(run.path), Answering(subject), StopFlag(), Progress(1, quiet=True))
    assert again.rows.keys() == book.rows.keys()
    for key, row in again.rows.items():
        assert row.nll != row.nll  # not a number, and not nothing
        same = dataclasses.replace(book.rows[key], nll=0.0)
        assert dataclasses.replace(row, nll=0.0) == same
