"""The memo: what it hands out is what was scored, under the same circumstances, on the same text; and nothing else."""

import dataclasses
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import standin
import torch
from standin import StandIn, harmed, items
from tiny_folder import save_tiny

import kvlab.memo
from kvlab import models
from kvlab.book import ScoreBook, StopFlag
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.evals.tasks import build
from kvlab.layer import LayerShape, ModelShape
from kvlab.memo import APART, Memo, code_version, key
from kvlab.progress import Progress
from kvlab.runs import Run
from kvlab.subject import BASELINE, LocalSubject

SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
FACTS = {"weights_sha256": "0" * 64, "dtype": "float32"}
ITEMS = items("search", 3, ("math",)).items
CONFIGS = [BASELINE, KVConfig(key=Fp8()), KVConfig(key=Affine(bits=2))]
PACKAGE = Path(kvlab.memo.__file__).parent


def _book(root: Path, subject: Any, memo: Memo | None) -> ScoreBook:
    return ScoreBook(
        Run.create(root / "runs", "search", {"schema": "test"}), subject, StopFlag(), Progress(1, quiet=True), memo
    )


def _memo(root: Path, **facts: Any) -> Memo:
    return Memo(root / "scores", FACTS | facts)


# -- runs of the same model --------------------------------------------------------------------------------------------


def test_a_second_run_scores_nothing_again_and_names_the_first(tmp_path) -> None:
    first = _book(tmp_path, StandIn(SHAPE, harmed), _memo(tmp_path))
    first.ensure("search", ITEMS, CONFIGS)
    subject = StandIn(SHAPE, harmed)
    second = _book(tmp_path, subject, _memo(tmp_path))
    second.ensure("search", ITEMS, CONFIGS)
    assert subject.asked == []
    assert second.rows == first.rows
    assert second.remembered == len(ITEMS) * len(CONFIGS) == len(second.run.rows())
    assert set(second.run.rows().scored_in) == {first.run.path.name}
    assert first.run.rows().scored_in.isna().all()
    # A resume knows them as its own rows, and where they came from.
    third = ScoreBook(Run.open(second.run.path), subject, StopFlag(), Progress(1, quiet=True), _memo(tmp_path))
    assert (third.rows, third.remembered) == (first.rows, second.remembered)


def test_only_what_is_missing_is_scored(tmp_path) -> None:
    _book(tmp_path, StandIn(SHAPE, harmed), _memo(tmp_path)).ensure("search", ITEMS[:2], CONFIGS[:2])
    subject = StandIn(SHAPE, harmed)
    _book(tmp_path, subject, _memo(tmp_path)).ensure("confirm", ITEMS, CONFIGS)
    known = {(c.id, i.id) for c in CONFIGS[:2] for i in ITEMS[:2]}
    assert set(subject.asked) == {(c.id, i.id) for c in CONFIGS for i in ITEMS} - known
    assert subject.most_asked == 1


def test_a_repeat_that_must_be_real_is_scored_anew(tmp_path) -> None:
    """Else the baseline against itself would never flip."""
    subject = StandIn(SHAPE, harmed)
    book = _book(tmp_path, subject, _memo(tmp_path))
    book.ensure("confirm", ITEMS, [BASELINE])
    book.ensure("aa", ITEMS, [BASELINE], anew=True)
    assert len(subject.asked) == 2 * len(ITEMS)


@pytest.mark.parametrize(
    "other",
    [{"weights_sha256": "1" * 64}, {"dtype": "bfloat16"}, {"code": "x"}, {"mode": "true"}, {"tokenizer_sha256": "y"}],
    ids=lambda x: next(iter(x)),
)
def test_any_other_circumstance_shares_nothing(tmp_path, other) -> None:
    _book(tmp_path, StandIn(SHAPE, harmed), _memo(tmp_path)).ensure("search", ITEMS, CONFIGS)
    subject = StandIn(SHAPE, harmed)
    _book(tmp_path, subject, _memo(tmp_path, **other)).ensure("search", ITEMS, CONFIGS)
    assert len(subject.asked) == len(ITEMS) * len(CONFIGS)


@pytest.mark.parametrize("change", [{"context": "another"}, {"question": "! "}, {"answers": (" no",)}])
def test_an_item_of_the_same_id_but_other_text_is_another_item(tmp_path, change) -> None:
    _book(tmp_path, StandIn(SHAPE, harmed), _memo(tmp_path)).ensure("search", ITEMS, CONFIGS[:1])
    changed = dataclasses.replace(ITEMS[0], **change)
    assert changed.id == ITEMS[0].id
    assert key(changed) != key(ITEMS[0])
    subject = StandIn(SHAPE, harmed)
    _book(tmp_path, subject, _memo(tmp_path)).ensure("search", [changed], CONFIGS[:1])
    assert subject.asked == [(BASELINE.id, changed.id)]


def test_without_a_memo_every_run_scores_for_itself(tmp_path) -> None:
    for _ in range(2):
        subject = StandIn(SHAPE, harmed)
        _book(tmp_path, subject, None).ensure("search", ITEMS, CONFIGS)
        assert len(subject.asked) == len(ITEMS) * len(CONFIGS)


def test_the_same_config_costs_a_real_model_no_forward(tmp_path) -> None:
    loaded = models.load(str(save_tiny(tmp_path / "tiny")), device="cpu")
    asked = build(("math", "code"), split="search", n=1, seed=0).items
    subjects = [LocalSubject(loaded) for _ in range(2)]  # looking at a model takes forwards of its own
    forwards = []
    loaded.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    config = KVConfig(key=Affine(bits=4), value=Affine(bits=4), recent_tokens=8)

    first = _book(tmp_path, subjects[0], _memo(tmp_path))
    first.ensure("search", asked, [BASELINE, config])
    spent = len(forwards)
    assert spent >= 2  # a prefill and a pass over answers
    first.ensure("search", asked, [BASELINE, config])
    # Proposed again: equal in content, another object.
    first.ensure("search", asked, [KVConfig.from_json(config.to_json())])
    again = _book(tmp_path, subjects[1], _memo(tmp_path))
    again.ensure("confirm", asked, [BASELINE, config])
    assert len(forwards) == spent
    assert again.get("confirm", config, asked[0]) == first.get("search", config, asked[0])


# -- files -------------------------------------------------------------------------------------------------------------


def _line_of(memo: Memo, config: KVConfig) -> Path:
    return memo.folder / f"{config.id}.jsonl"


@pytest.mark.parametrize("damage", ["flip", "cut", "garbage"])
def test_a_damaged_line_is_skipped_and_its_item_scored_again(tmp_path, damage) -> None:
    _book(tmp_path, StandIn(SHAPE, harmed), _memo(tmp_path)).ensure("search", ITEMS, CONFIGS[:1])
    path = _line_of(_memo(tmp_path), BASELINE)
    data = path.read_bytes()
    lines = [line for line in data.split(b"\n") if line]
    assert len(lines) == 3
    if damage == "flip":
        at = data.index(b'"nll": ') + 7
        data = data[:at] + (b"9" if data[at : at + 1] != b"9" else b"8") + data[at + 1 :]
    path.write_bytes({"flip": data, "cut": data[:-40], "garbage": data + b"\n\xff\xfe not a line\n"}[damage])
    memo, subject = _memo(tmp_path), StandIn(SHAPE, harmed)
    _book(tmp_path, subject, memo).ensure("search", ITEMS, CONFIGS[:1])
    assert memo.damaged == 1
    assert len(subject.asked) == (0 if damage == "garbage" else 1)
    # What is appended after a torn line is whole again.
    fresh = _memo(tmp_path)
    assert all(fresh.get(BASELINE.id, i) is not None for i in ITEMS)


def test_a_row_under_another_configs_name_is_not_believed(tmp_path) -> None:
    memo = _memo(tmp_path)
    _book(tmp_path, StandIn(SHAPE, harmed), memo).ensure("search", ITEMS, CONFIGS[:1])
    shutil.copy(_line_of(memo, BASELINE), _line_of(memo, CONFIGS[1]))
    assert _memo(tmp_path).get(CONFIGS[1].id, ITEMS[0]) is None


def test_generated_rows_are_not_kept(tmp_path) -> None:
    """Only what a forked cache scored by teacher forcing is asked for here."""
    (row,) = StandIn(SHAPE, harmed).score(ITEMS[:1], CONFIGS[:1])
    memo = _memo(tmp_path)
    memo.put([(ITEMS[0], dataclasses.replace(row, mode="true"))], "run")
    assert memo.get(BASELINE.id, ITEMS[0]) is None
    assert not _line_of(memo, BASELINE).exists()


def _write(root: str, number: int) -> None:
    memo = Memo(Path(root) / "scores", FACTS)
    subject = StandIn(SHAPE, harmed)
    for item in items("search", 40, ("math",)).items[number::4]:
        memo.put([(item, row) for row in subject.score([item], CONFIGS)], f"run{number}")


def test_several_processes_write_one_memo(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(tmp_path), n)) for n in range(4)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(120)
    assert [w.exitcode for w in writers] == [0] * 4
    memo = _memo(tmp_path)
    for n, item in enumerate(items("search", 40, ("math",)).items):
        for config in CONFIGS:
            row, run = memo.get(config.id, item) or (None, "")
            assert row == next(StandIn(SHAPE, harmed).score([item], [config]))
            assert run == f"run{n % 4}"
    assert memo.damaged == 0


def test_contexts_unused_for_longest_make_room(tmp_path) -> None:
    rows = list(StandIn(SHAPE, harmed).score(ITEMS[:1], CONFIGS))

    def kept(code: str, limit_bytes: int = 1 << 30) -> Path:
        memo = Memo(tmp_path / "scores", FACTS | {"code": code}, limit_bytes=limit_bytes)
        memo.put([(ITEMS[0], row) for row in rows], "run")
        return memo.folder

    folders = [kept(str(n)) for n in range(4)]
    for n, folder in enumerate(folders):
        os.utime(folder, (n + 1, n + 1))
    assert _memo(tmp_path, code="0").get(BASELINE.id, ITEMS[0]) is not None  # used now, and so the last to go
    one = sum(f.stat().st_size for f in folders[0].iterdir())
    folders.append(kept("4", limit_bytes=int(2.5 * one)))
    assert [f.exists() for f in folders] == [True, False, False, True, True]


def test_the_facts_lie_beside_the_scores_and_nothing_is_written_without_one(tmp_path) -> None:
    memo = _memo(tmp_path, code="abc")
    assert memo.get(BASELINE.id, ITEMS[0]) is None
    memo.put([], "run")
    assert not (tmp_path / "scores").exists()
    memo.put([(ITEMS[0], row) for row in StandIn(SHAPE, harmed).score(ITEMS[:1], CONFIGS)], "run")
    assert json.loads((memo.folder / "facts.json").read_text()) == FACTS | {"schema": 1, "code": "abc"}


# -- code --------------------------------------------------------------------------------------------------------------


def test_code_that_computes_scores_counts_and_other_code_does_not(tmp_path) -> None:
    for name in ("row.py", "kernels/attend.py", "evals/metrics.py", "search/race.py", "report/page.py", "book.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("pass\n")
    before = code_version(tmp_path)
    for name in ("search/race.py", "report/page.py", "book.py"):
        (tmp_path / name).write_text("changed = True\n")
        assert code_version(tmp_path) == before
    seen = {before}
    for name in ("row.py", "kernels/attend.py", "evals/metrics.py", "kernels/new.py"):
        (tmp_path / name).write_text("changed = True\n")
        seen.add(code_version(tmp_path))
    assert len(seen) == 5
    (tmp_path / "row.py").rename(tmp_path / "row2.py")
    assert code_version(tmp_path) not in seen


def test_nothing_that_scores_is_set_apart() -> None:
    """Whatever the subject imports, directly or not, must count."""
    import ast

    todo, seen = ["subject"], set()
    while todo:
        unit = todo.pop()
        if unit in seen:
            continue
        seen.add(unit)
        files = [PACKAGE / f"{unit}.py"] if (PACKAGE / f"{unit}.py").exists() else list((PACKAGE / unit).rglob("*.py"))
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                names = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else names
                todo += [n.split(".")[1] for n in names if n.startswith("kvlab.")]
    assert {"kernels", "codecs", "policies", "row", "snapshot", "attach", "evals"} <= seen
    # where files lie, and how a loaded model describes itself, change no score
    assert not seen & (APART - {"runs", "provenance", "folders"})


def test_the_version_of_this_package_is_stable() -> None:
    assert code_version() == code_version(PACKAGE)
    assert len(code_version()) == 64


def test_standin_books_need_no_memo(tmp_path) -> None:
    assert standin.book(tmp_path, StandIn(SHAPE, harmed)).memo is None
