"""Figures beside the scores, with right values: failed extractions per arm, outcomes, perplexity over tokens."""

import math
from typing import Any

import pytest

from kvlab.evals.subject import ItemScore
from kvlab.evals.summary import by_task, extraction_note


def row(index: int, **more: Any) -> ItemScore:
    facts: dict[str, Any] = {
        "config_id": "0" * 12, "item_id": f"t/confirm/0/{index}", "task": "t", "family": "math", "cluster": str(index),
        "split": "confirm", "mode": "true", "form": "generate", "score": 0.0, "exact": 0.0, "token_accuracy": 0.0,
        "nll": math.nan, "kl": None, "top1": None, "prediction": "", "context_tokens": 9, "answer_tokens": 4,
        "measured_bytes": 1, "predicted_bytes": 1, "raw16_bytes": 1, "seconds": 0.0,
    }  # fmt: skip
    return ItemScore(**facts | more)


def test_failed_extractions_are_counted_and_told_apart_from_wrong_answers() -> None:
    rows = [
        row(0, score=1.0, extracted=True, benchmark=1.0, answer_tokens=10),
        row(1, score=1.0, extracted=True, benchmark=0.0, answer_tokens=20),
        row(2, score=0.0, extracted=True, benchmark=0.0),
        row(3, score=0.0, extracted=False, benchmark=0.0, answer_tokens=6),
    ]
    assert by_task(rows) == {
        "t": {
            "form": "generate", "n": 4, "score": 0.5, "mean_answer_tokens": 10.0, "extraction_failures": 1,
            "extraction_failure_rate": 0.25, "benchmark_score": 0.25,
        }
    }  # fmt: skip


def test_outcomes_of_code_are_counted() -> None:
    outcomes = ["passed", "wrong", "timeout", "wrong", "no code"]
    rows = [row(n, extracted=o != "no code", outcome=o, score=float(o == "passed")) for n, o in enumerate(outcomes)]
    entry = by_task(rows)["t"]
    assert entry["outcomes"] == {"no code": 1, "passed": 1, "timeout": 1, "wrong": 2}
    assert (entry["score"], entry["extraction_failure_rate"]) == (0.2, 0.2)
    assert "benchmark_score" not in entry


def test_perplexity_weighs_tokens_and_not_items() -> None:
    rows = [
        row(0, form="tokens", mode="forked", nll=1.0, answer_tokens=10, score=0.5),
        row(1, form="tokens", mode="forked", nll=3.0, answer_tokens=30, score=0.0),
    ]
    entry = by_task(rows)["t"]
    assert entry["nll"] == 2.5
    assert entry["perplexity"] == pytest.approx(math.exp(2.5))
    assert entry["score"] == 0.25
    assert "extraction_failures" not in entry
    hopeless = by_task([row(0, form="tokens", mode="forked", nll=1e5)])["t"]["perplexity"]
    assert math.isfinite(hopeless)


def test_tasks_keep_apart_and_forms_are_never_mixed() -> None:
    rows = [row(0, task="a", extracted=True), row(1, task="b", extracted=False), row(2, task="a", extracted=True)]
    found = by_task(rows)
    assert list(found) == ["a", "b"]
    assert [entry["n"] for entry in found.values()] == [2, 1]
    with pytest.raises(ValueError, match="forms generate, greedy"):
        by_task([row(0), row(1, form="greedy", nll=0.1)])


def test_every_arm_is_in_the_note_and_forced_rows_make_none() -> None:
    good = by_task([row(n, extracted=True) for n in range(4)])
    bad = by_task([row(n, extracted=n > 0) for n in range(4)])
    note = extraction_note([("uncompressed", good), ("int2", bad)])
    assert note == "no answer could be read in: uncompressed 0 of 4; int2 1 of 4"
    forced = by_task([row(0, form="greedy", mode="forked", nll=0.1)])
    assert extraction_note([("uncompressed", forced)]) is None
