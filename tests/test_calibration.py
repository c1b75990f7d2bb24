"""Calibrated centres: the same for the same weights, kept beside them, checked when they are read."""

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folder import save_tiny

from kvlab import calibration, models
from kvlab.attach import attach, cache_kwarg
from kvlab.calibration import TEXT, calibrated, facts
from kvlab.centring import CentringError, find_rotaries, mean_centres
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.evals.bundled import bundled
from kvlab.evals.item import Item
from kvlab.evals.tasks import TASKS
from kvlab.models import Loaded
from kvlab.subject import BASELINE, LocalSubject


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def opened(folder: Path, root: Path) -> Loaded:
    return models.load(str(folder), dtype="float32", device="cpu", cache_dir=root)


def mus(centres: Any) -> list[torch.Tensor]:
    return [c.mu for c in centres]


def test_a_mean_is_measured_once_and_then_read(folder, tmp_path, monkeypatch) -> None:
    loaded = opened(folder, tmp_path)
    first = calibrated(loaded, ["mean", "none"])
    assert list(first) == ["mean"]
    ids = loaded.tokenizer.encode(bundled(TEXT).read_text(encoding="utf-8"))[:768]
    assert len(ids) == 768
    expected = mean_centres(loaded.model, ids, find_rotaries(loaded.model))
    assert all(torch.equal(a, b) for a, b in zip(mus(first["mean"]), mus(expected), strict=True))
    (path,) = (tmp_path / "centres").iterdir()
    monkeypatch.setattr(calibration, "mean_centres", None)  # a second measurement would fail
    again = calibrated(opened(folder, tmp_path), ["mean"])
    assert all(torch.equal(a, b) for a, b in zip(mus(again["mean"]), mus(first["mean"]), strict=True))
    assert [p.name for p in (tmp_path / "centres").iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["cut", "flipped", "renamed"])
def test_a_file_that_does_not_verify_is_made_again(folder, tmp_path, monkeypatch, damage) -> None:
    loaded = opened(folder, tmp_path)
    first = mus(calibrated(loaded, ["mean"])["mean"])
    (path,) = (tmp_path / "centres").iterdir()
    sound = path.read_bytes()
    if damage == "cut":
        path.write_bytes(sound[:-8])
    elif damage == "flipped":
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    else:
        # Another model's centres under this one's name.
        path.write_bytes(sound.replace(path.stem.encode(), hashlib.sha256(b"x").hexdigest().encode()))
    again = mus(calibrated(loaded, ["mean"])["mean"])
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    monkeypatch.setattr(calibration, "mean_centres", None)  # what lies there now verifies
    again = mus(calibrated(loaded, ["mean"])["mean"])
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_other_weights_have_other_centres(folder, tmp_path) -> None:
    other = opened(save_tiny(tmp_path / "other", seed=1), tmp_path)
    ours, theirs = (mus(calibrated(x, ["mean"])["mean"]) for x in (opened(folder, tmp_path), other))
    assert len(list((tmp_path / "centres").iterdir())) == 2
    assert not torch.equal(ours[0], theirs[0])


def test_nothing_is_written_where_nothing_may_be_kept(folder, tmp_path) -> None:
    loaded = dataclasses.replace(opened(folder, tmp_path), cache_root=None)
    assert len(calibrated(loaded, ["mean"])["mean"]) == 2
    assert not (tmp_path / "centres").exists()


def test_no_centring_asks_nothing_of_the_model() -> None:
    assert calibrated(None, ["none"]) == {}  # type: ignore[arg-type]


def test_facts_name_the_text(folder, tmp_path) -> None:
    told = facts(opened(folder, tmp_path))
    assert told["tokens"] == 768
    assert told["left_out"] == 4
    assert told["text_sha256"] == hashlib.sha256(bundled(told["text"]).read_bytes()).hexdigest()
    json.dumps(told)


def test_the_text_is_in_no_task() -> None:
    text = bundled(TEXT).read_text(encoding="utf-8")
    assert not any(c.isdigit() for c in text)
    lines = [sentence.strip() for sentence in text.split(".") if len(sentence) > 20]
    assert len(lines) > 40
    for task in TASKS.values():
        made = task.make(random.Random(1), task.length)
        for draft in made if isinstance(made, list) else [made]:
            assert not any(line in draft.context + draft.question for line in lines), task.name


def item(index: int) -> Item:
    context = "The lamp stood by the river and nobody came in winter; the boats lay on the sand. " * 2
    return Item(
        id=f"needle_text/confirm/0/{index}",
        task="needle_text",
        family="retrieval",
        context=context[index:],
        question="What stood by the river?",
        answers=(" the lamp",),
        cluster=f"c{index}",
    )


def test_a_subject_calibrates_what_its_configs_need(folder, tmp_path) -> None:
    loaded = opened(folder, tmp_path)
    with torch.no_grad():
        for p in loaded.model.parameters():
            if p.ndim > 1:
                p.mul_(8)
    subject, items = LocalSubject(loaded), [item(0), item(3)]
    plain = KVConfig(key=Affine(bits=4, group=32), sink_tokens=0, recent_tokens=0)
    list(subject.score(items, [BASELINE, plain]))
    assert not (tmp_path / "centres").exists()
    raw = KVConfig(centring="mean", sink_tokens=0, recent_tokens=0)
    centred = KVConfig(key=plain.key, centring="mean", sink_tokens=0, recent_tokens=0)
    rows = list(subject.score(items, [BASELINE, raw, centred]))
    assert len(list((tmp_path / "centres").iterdir())) == 1
    for full, same, _ in (rows[:3], rows[3:]):
        assert same.nll == pytest.approx(full.nll, abs=1e-4)
        assert same.kl is not None
        assert same.kl < 1e-5
    # The score pass on a fork is what a live cache gives.
    with attach(loaded.model, centred, centres=subject.centres([centred])) as kv, torch.no_grad():
        ids = torch.tensor([loaded.tokenizer.encode(items[0].context)])
        question = loaded.tokenizer.encode(items[0].question, add_special_tokens=False)
        answer = loaded.tokenizer.encode(items[0].answers[0], add_special_tokens=False)
        cache = kv.cache()
        loaded.model(ids, use_cache=True, **{cache_kwarg(): cache})
        logits = loaded.model(torch.tensor([question + answer]), use_cache=True, **{cache_kwarg(): cache}).logits[0]
    logp = logits[len(question) - 1 : -1].log_softmax(-1)
    nll = -float(logp.gather(1, torch.tensor(answer).unsqueeze(1)).mean())
    assert rows[2].nll == pytest.approx(nll, abs=1e-4)
    (generated,) = subject.generate([items[0]], [centred])
    assert generated.measured_bytes == rows[2].measured_bytes
    assert subject.time([centred], ids[0].tolist(), 2, repeats=1)[0].steps == 2


def test_a_subject_refuses_what_its_model_cannot_do_before_anything_is_computed(folder, tmp_path) -> None:
    subject = LocalSubject(opened(folder, tmp_path))
    with pytest.raises(CentringError, match="no k_proj bias"):
        list(subject.score([item(0)], [KVConfig(centring="bias")]))
    assert subject.counters.prefills == 0
