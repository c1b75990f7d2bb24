"""GSM8K and CRUXEval as items, from local files; the split rule; every refusal."""

import json
import os
from pathlib import Path

import pytest

from kvlab.evals import execution
from kvlab.evals.columns import split_last_sentence
from kvlab.evals.grading import grade
from kvlab.evals.loaders import PUBLIC, at, find_spec, load, load_set, split_of

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
        assert (item.family, item.stop, item.form) == ("math", ("\nQuestion:",), "tokens")
        assert grade(item, item.answers[0]).score == 1.0
        assert grade(item, f"#### {index}").score == 0.0


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
    assert grade(item, f" {index + 1}\n").score == 1.0
    assert item.form == "greedy"


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
    with pytest.raises(
        ValueError, match=r"no file '.*missing\.jsonl'; pass a local file or a hub id such as openai/gsm8k"
    ):
        load_set("gsm8k", str(tmp_path / "missing.jsonl"), split="search", n=1)
    with pytest.raises(ValueError, match=r"gsm\.jsonl line 1 has no column 'id'.* It has question, answer"):
        load_set("cruxeval", gsm, split="search", n=1)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", \n')
    with pytest.raises(ValueError, match=r"broken\.jsonl line 1 is not valid JSON"):
        load_set("gsm8k", str(broken), split="search", n=1)


PLACES = {"gsm8k": (474, 651, 194), "humaneval": (51, 90, 23), "mbpp": (344, 483, 147), "cruxeval": (287, 390, 123)}


@needs_data
@pytest.mark.parametrize("name", PLACES)
def test_every_gold_answer_of_the_public_files_matches_itself(name: str) -> None:
    loaded = load(at(find_spec(name), str(DATA)))
    sizes = [loaded.size(split) for split in ("search", "confirm", "replicate")]
    assert tuple(sizes) == PLACES[name]
    items = [item for split in ("search", "confirm", "replicate") for item in loaded.items(split, 10**6)]
    assert len({item.id for item in items}) == len(items) == sum(sizes)
    for item in items:
        assert "<<" not in item.context + item.question + "".join(item.answers) or name != "gsm8k"
        if item.metric != "execute":
            assert all(grade(item, answer).score == 1.0 and grade(item, answer).extracted for answer in item.answers)


@needs_data
def test_strict_reading_of_gsm8k_takes_every_worked_answer_and_no_bare_number() -> None:
    for item in load(at(find_spec("gsm8k"), str(DATA))).items("confirm", 10**6):
        worked, bare = item.answers
        assert grade(item, worked).benchmark == 1.0
        assert grade(item, bare).benchmark == 0.0


@needs_data
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_canonical_solutions_are_found_whole_in_every_shape(name: str) -> None:
    """The program holds the solution unchanged, and the tests apart, so what runs is what the set says."""
    for item in load(at(find_spec(name), str(DATA))).items("confirm", 10**6):
        assert (item.form, item.metric) == ("tokens", "execute")
        assert item.check is not None
        gold, tests = item.answers[0].strip("\n"), item.check.tests.strip()
        for text in (item.answers[0], f"{gold}\n\n\nDone.\n"):
            program = execution.tested(item, text)
            assert program is not None
            assert gold in program.source
            assert program.tests == f"{tests}\n"
        if name == "humaneval":
            full = item.context + item.question + item.answers[0]
            fenced = execution.tested(item, f"Sure.\n```python\n{full}\n```\nIt is done.")
            assert fenced is not None
            assert fenced.source.count(gold) == 1
            assert full == item.check.before.rstrip("\n") + item.answers[0]


@needs_data
def test_running_text_is_cut_into_windows_that_share_nothing() -> None:
    loaded = load(at(find_spec("text"), str(DATA)))
    items = [item for split in ("search", "confirm", "replicate") for item in loaded.items(split, 10**6)]
    text = (DATA / "tinyshakespeare.txt").read_text(encoding="utf-8")
    places = sorted(text.index(item.context + item.question + item.answers[0]) for item in items)
    assert len(set(places)) == len(items) > 600
    lengths = {item.id: len(item.context + item.question + item.answers[0]) for item in items}
    assert sum(lengths.values()) <= len(text)
    assert {item.metric for item in items} == {"likelihood"}
    confirm = {item.cluster for item in loaded.items("confirm", 10**6)}
    assert not confirm & {item.cluster for item in loaded.items("search", 10**6)}


def test_a_set_is_found_by_name_file_folder_or_hub_id(tmp_path: Path, gsm: str) -> None:
    spec = find_spec("gsm8k")
    assert (spec.source.hub, spec.source.file) == ("openai/gsm8k", None)
    assert at(spec, gsm).source.file == Path(gsm)
    assert at(spec, "me/mine").source.hub == "me/mine"
    with pytest.raises(ValueError, match=r"no file 'gsm8k_test\.jsonl' in"):
        at(spec, str(tmp_path))
    (tmp_path / "gsm8k_test.jsonl").write_text(Path(gsm).read_text())
    assert at(spec, str(tmp_path)).source.file == tmp_path / "gsm8k_test.jsonl"
    with pytest.raises(ValueError, match=r"no file 'nowhere/mine\.toml'"):
        find_spec("nowhere/mine.toml")
    with pytest.raises(ValueError, match="has no rows of its own"):
        load(find_spec("text"))


def test_every_public_set_is_described() -> None:
    for name in PUBLIC:
        spec = find_spec(name)
        assert spec.name == name
        assert spec.source.offline
