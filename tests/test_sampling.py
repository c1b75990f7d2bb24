"""Drawn answers: the distribution they come from, the same luck whatever the batch, and pass@k over them."""

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asking import ITEMS, WORDS, asked, item_of, sharpened
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tiny_folder import save_tiny

from kvlab import models
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.decoding import Decoder, Written, draw
from kvlab.evals.item import CodeCheck
from kvlab.evals.sampling import GREEDY, Sampling
from kvlab.evals.summary import by_task
from kvlab.subject import BASELINE, LocalSubject

INT4 = KVConfig(key=Affine(bits=4), value=Affine(bits=4), recent_tokens=8, page_tokens=16, sink_tokens=2)
WARM = Sampling(temperature=0.8, samples=3, seed=5)
LOGITS = torch.tensor([math.log(p) for p in (0.1, 0.4, 0.2, 0.3)])  # likeliest first: 1, 3, 2, 0


@pytest.mark.parametrize(
    ("sampling", "luck", "token"),
    [
        (Sampling(temperature=1), 0.0, 1),
        (Sampling(temperature=1), 0.39, 1),
        (Sampling(temperature=1), 0.41, 3),
        (Sampling(temperature=1), 0.71, 2),
        (Sampling(temperature=1), 0.91, 0),
        (Sampling(temperature=1), 1 - 1e-16, 0),
        (Sampling(temperature=1, top_p=0.6), 0.999, 3),  # 0.4 + 0.3
        (Sampling(temperature=1, top_p=0.6), 0.57, 1),  # 0.57 of 0.7
        (Sampling(temperature=1, top_p=0.6), 0.58, 3),
        (Sampling(temperature=1, top_p=0.01), 0.999, 1),
        (Sampling(temperature=0.5), 0.53, 1),  # squares: 0.16 of 0.30
        (Sampling(temperature=0.5), 0.54, 3),
        (Sampling(temperature=1e-3), 0.999, 1),
    ],
)
def test_the_token_at_a_place_of_the_distribution(sampling, luck, token) -> None:
    assert draw(LOGITS, sampling, luck) == token


def test_frequencies_are_those_of_the_softmax() -> None:
    n = 2000
    found = Counter(draw(LOGITS, Sampling(temperature=2), (i + 0.5) / n) for i in range(n))
    roots = [math.sqrt(p) for p in (0.1, 0.4, 0.2, 0.3)]
    expected = [n * r / sum(roots) for r in roots]
    assert stats.chisquare([found[t] for t in range(4)], expected).pvalue > 0.99  # evenly spread luck


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=9), st.floats(0, 1, exclude_max=True), st.floats(0.01, 1))
def test_any_logits_give_a_token(logits, luck, top_p) -> None:
    assert 0 <= draw(torch.tensor(logits), Sampling(temperature=0.7, top_p=top_p), luck) < len(logits)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1}, "temperature must lie between 0"),
        ({"temperature": math.nan}, "temperature must lie"),
        ({"top_p": 0}, "top_p"),
        ({"samples": 0, "temperature": 1}, "samples must be at least 1"),
        ({"samples": 4}, "4 samples at temperature 0 are one answer"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**wrong)


# -- on a model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    found = models.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))), dtype="float64", device="cpu")
    sharpened(found.model)
    return found


ASKED = [asked(item, max_new_tokens=6) for item in ITEMS[:3]]


def _texts(loaded, monkeypatch, sampling, max_rows=None, configs=(BASELINE, INT4)) -> dict[tuple[str, str, int], str]:
    """Every sample's text, by config, item and sample."""
    out, write = {}, Decoder.write

    def noting(self, jobs, fork):
        for number, written in write(self, jobs, fork):
            question, config = fork.pair(number)
            out[(config.id, question.item.id, number % sampling.samples)] = written.text
            yield number, written

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "write", noting)
        rows = list(LocalSubject(loaded, max_rows=max_rows).generate(ASKED, configs, sampling=sampling))
    assert [(r.config_id, r.item_id) for r in rows] == [(c.id, i.id) for i in ASKED for c in configs]
    return out


def test_luck_belongs_to_item_and_sample_whatever_the_batch(loaded, monkeypatch) -> None:
    found = _texts(loaded, monkeypatch, WARM)
    assert len(found) == 2 * 3 * 3
    assert _texts(loaded, monkeypatch, WARM, max_rows=4) == found
    alone = _texts(loaded, monkeypatch, WARM, max_rows=1, configs=(INT4,))
    assert alone == {key: text for key, text in found.items() if key[0] == INT4.id}
    for item in ASKED:
        assert len({found[(BASELINE.id, item.id, n)] for n in range(3)}) > 1
    other = _texts(loaded, monkeypatch, Sampling(temperature=0.8, samples=3, seed=6))
    assert other != found


def test_items_have_luck_of_their_own(loaded) -> None:
    """Else all first samples would be lucky together."""
    same = [dataclasses.replace(ASKED[0], id=f"needle_text/confirm/0/{n}") for n in range(6)]
    warm = Sampling(temperature=1.5)
    assert len({r.prediction for r in LocalSubject(loaded).generate(same, [BASELINE], sampling=warm)}) > 2
    assert len({Sampling(seed=s).luck(i, n) for s in (1, 11) for i in ("a", "1|a") for n in (1, 11)}) == 8


def test_next_to_no_temperature_is_greedy(loaded, monkeypatch) -> None:
    cold = _texts(loaded, monkeypatch, Sampling(temperature=1e-4))
    assert cold == _texts(loaded, monkeypatch, GREEDY)


def test_a_first_token_is_drawn_as_often_as_the_model_says(loaded) -> None:
    item = asked(ITEMS[0], max_new_tokens=1)
    s = LocalSubject(loaded)
    ids = s.tokenizer.encode(item.context) + s.tokenizer.encode(item.question, add_special_tokens=False)
    with torch.no_grad():
        share = torch.softmax(loaded.model(torch.tensor([ids])).logits[0, -1] / 1.5, -1)
    texts = [
        row.prediction
        for seed in range(60)
        for row in s.generate([item], [BASELINE], sampling=Sampling(temperature=1.5, seed=seed))
    ]
    found = Counter(texts)
    for text, count in found.most_common(2):
        p = float(share[s.tokenizer.encode(text, add_special_tokens=False)[0]]) if text else 0.0
        assert stats.binomtest(count, 60, p).pvalue > 1e-3
    assert len(found) > 1
    assert s.counters.prefills == 1


def test_samples_are_graded_one_by_one_and_told_as_one_row(loaded, monkeypatch) -> None:
    check = CodeCheck(before="", entry="f", tests="assert f() == 1")
    more: dict[str, Any] = {"metric": "execute", "forced": "tokens", "check": check, "task": "writing", "stop": ()}
    items = [item_of(n, WORDS[:40], f" {n}? ", ("def f():\n    return 1",), **more) for n in range(2)]

    def write(self, jobs, fork):
        caches = fork(range(len(jobs)))
        for n, cache in enumerate(caches):
            yield n, Written(f"def f():\n    return {n}\n", 3 + n % 2, cache, 0.5)

    def runner(programs):  # of ten samples of each item, three and none pass
        passed = {f"def f():\n    return {n}\n" for n in (0, 4, 9)}
        return [SimpleNamespace(verdict="passed" if p.source in passed else "wrong", detail="") for p in programs]

    monkeypatch.setattr(Decoder, "write", write)
    s = LocalSubject(loaded)
    rows = list(s.generate(items, [BASELINE], runner=runner, sampling=Sampling(temperature=1, samples=10)))
    assert [(r.score, r.samples, r.right, r.outcome) for r in rows] == [(0.3, 10, 3, "wrong"), (0.0, 10, 0, "wrong")]
    assert rows[0].prediction == "def f():\n    return 0\n"
    assert s.counters.item_scores == 2
    entry = by_task(rows)["writing"]
    assert entry["pass_at_k"] == {"1": pytest.approx(0.15), "10": pytest.approx(0.5)}
    (single,) = s.generate(items[:1], [BASELINE], runner=runner, sampling=Sampling(temperature=1))
    assert (single.samples, single.right) == (None, None)
    assert "pass_at_k" not in by_task([single])["writing"]
