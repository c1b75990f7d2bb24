"""GSM8K and CRUXEval as items, from local files; the split rule; every refusal."""

import json
import os
from pathlib import Path

import pytest

from kvlab.evals import metrics
from kvlab.evals.loaders import load_set, split_last_sentence, split_of

DATA = Path(os.environ.get("KVLAB_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data folder {DATA}; set KVLAB_DATA")


@pytest.fixture
def gsm(tmp_path: Path) -> str:
    rows = [
        {
            "question": f"Ada has {index} jars. She buys 2.5 more.  How many jars does she have?",
            "answer": f"She has {index} + 2.5 = <<{index}+2.5={index + 2.5}>>{index + 2.5} jars.\n#### {index + 2.5}",
        }
        for index in range(60)
    ]
    path = tmp_path / "gsm.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def test_gsm8k_item(gsm: str) -> None:
    items = load_set("gsm8k", gsm, split="search", n=5).items
    for item in items:
        index = int(item.id.rsplit("/", 1)[1])
        assert item.id == f"gsm8k/search/0/{index}"
        assert item.context.endswith(f"\nQuestion: Ada has {index} jars. She buys 2.5 more.")
        assert item.question == " How many jars does she have?\nAnswer:"
        assert item.answers == (
            f" She has {index} + 2.5 = {index + 2.5} jars.\n#### {index + 2.5}", f" {index + 2.5}",
        )  # fmt: skip
        assert (item.family, item.stop) == ("math", ("\nQuestion:",))
        assert metrics.grade(item, item.answers[0]) == 1.0
        assert metrics.grade(item, f"#### {index}") == 0.0


def test_splits_are_disjoint_complete_and_stable(gsm: str) -> None:
    rows = {}
    questions = [json.loads(line)["question"] for line in Path(gsm).read_text().splitlines()]
    for split in ("search", "confirm", "replicate"):
        n = sum(split_of("gsm8k", question) == split for question in questions)
        rows[split] = {item.cluster for item in load_set("gsm8k", gsm, split=split, n=n).items}
        with pytest.raises(ValueError, match=rf"has {n} rows in split '{split}', {n + 1} were asked for"):
            load_set("gsm8k", gsm, split=split, n=n + 1)
    assert sum(map(len, rows.values())) == 60
    assert len(set().union(*rows.values())) == 60
    assert [split_of("t", str(index)) for index in range(6)] == [
        "confirm", "confirm", "search", "search", "confirm", "replicate",
    ]  # fmt: skip


def test_shares_of_the_splits() -> None:
    many = [split_of("t", str(index)) for index in range(4000)]
    assert many.count("search") / 4000 == pytest.approx(0.35, abs=0.03)
    assert many.count("confirm") / 4000 == pytest.approx(0.50, abs=0.03)


def test_order_depends_on_the_seed_and_shorter_is_a_prefix(gsm: str) -> None:
    long = load_set("gsm8k", gsm, split="confirm", n=12).items
    assert load_set("gsm8k", gsm, split="confirm", n=4).items == long[:4]
    other = load_set("gsm8k", gsm, split="confirm", n=12, seed=1).items
    assert [item.cluster for item in other] != [item.cluster for item in long]


def test_repeated_rows_are_taken_once(gsm: str, tmp_path: Path) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text(Path(gsm).read_text() * 2)
    assert load_set("gsm8k", str(twice), split="search", n=5) == load_set("gsm8k", gsm, split="search", n=5)


def test_cruxeval_item(tmp_path: Path) -> None:
    code = "def f(a):\n    return a + {}\n"
    rows = [{"id": f"s{i}", "code": code.format(i), "input": "1", "output": str(i + 1)} for i in range(30)]
    path = tmp_path / "crux.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (item,) = load_set("cruxeval", str(path), split="search", n=1).items
    index = int(item.id.rsplit("/", 1)[1])
    assert item.context.endswith(f"\ndef f(a):\n    return a + {index}")
    assert item.question == "\nassert f(1) =="
    assert item.answers == (f" {index + 1}",)
    assert metrics.grade(item, f" {index + 1}\n") == 1.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two?", ("One.", "Two?")),
        ("Only one?", ("", "Only one?")),
        ("It costs $2.50. How much is it?", ("It costs $2.50.", "How much is it?")),
        ('He said "no." Then why?', ('He said "no."', "Then why?")),
        ("A. B. C", ("A. B.", "C")),
        ("", ("", "")),
    ],
)
def test_split_last_sentence(text: str, parts: tuple[str, str]) -> None:
    assert split_last_sentence(text) == parts


def test_refusals(gsm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown public set 'gsm8'; did you mean 'gsm8k'"):
        load_set("gsm8", gsm, split="search", n=1)
    with pytest.raises(ValueError, match="unknown split"):
        load_set("gsm8k", gsm, split="test", n=1)
    with pytest.raises(ValueError, match="n=0"):
        load_set("gsm8k", gsm, split="search", n=0)
    with pytest.raises(ValueError, match=r"no file '.*missing\.jsonl'; pass a \.jsonl file or a hub id"):
        load_set("gsm8k", str(tmp_path / "missing.jsonl"), split="search", n=1)
    with pytest.raises(ValueError, match=r"row 0 of .* lacks id, code, input, output"):
        load_set("cruxeval", gsm, split="search", n=1)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", \n')
    with pytest.raises(ValueError, match="cannot read"):
        load_set("gsm8k", str(broken), split="search", n=1)


@needs_data
def test_the_real_files() -> None:
    math = load_set("gsm8k", str(DATA / "gsm8k_test.jsonl"), split="confirm", n=400)
    code = load_set("cruxeval", str(DATA / "cruxeval.jsonl"), split="confirm", n=300)
    for item in (*math.items, *code.items):
        assert metrics.grade(item, item.answers[0]) == 1.0
        assert "<<" not in item.context + item.question + "".join(item.answers)
    assert all(item.question.endswith("\nAnswer:") for item in math.items)
