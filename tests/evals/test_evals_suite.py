"""Suites as TOML: the bundled one agrees with the code, and wrong ones are named."""

import hashlib
import re
from pathlib import Path

import pytest

from kvlab.evals.bundled import bundled, sentences
from kvlab.evals.suite import load_suite, parse_suite
from kvlab.evals.tasks import DEFAULT_SUITE, SUITE_VERSION, TASKS, build


def test_the_bundled_suite_is_the_default() -> None:
    suite = load_suite("default")
    assert dict(suite.tasks) == DEFAULT_SUITE
    assert suite.version == SUITE_VERSION
    assert dict(suite.lengths) == {name: TASKS[name].length for names in DEFAULT_SUITE.values() for name in names}
    families = list(suite.tasks)
    explicit = build(families, split="search", n=4, seed=0, suite=suite.tasks, length=suite.lengths)
    assert explicit.sha256 == build(families, split="search", n=4, seed=0).sha256


def test_a_suite_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nversion = 3\n[families]\nmath = ["add1"]\n[lengths]\nadd1 = 90\n')
    suite = load_suite(path)
    assert (suite.name, suite.version, dict(suite.tasks), dict(suite.lengths)) == (
        "mine", 3, {"math": ("add1",)}, {"add1": 90},
    )  # fmt: skip
    path.write_text("name = ")
    with pytest.raises(ValueError, match=r"mine\.toml is not valid TOML"):
        load_suite(path)


GOOD = {"name": "s", "version": 1, "families": {"math": ["add1"]}, "lengths": {"add1": 90}}


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"lenghts": {}}, "unknown key 'lenghts'; did you mean 'lengths'"),
        ({"version": 0}, "version=0 must be"),
        ({"version": True}, "version=True must be"),
        ({"families": {"maths": ["add1"]}}, "did you mean 'math'"),
        ({"families": {"math": []}}, "must list different task names"),
        ({"families": {"math": ["add1", "add1"]}}, "must list different task names"),
        ({"families": {"code": ["add1"]}}, "belongs to family 'math', not 'code'"),
        ({"families": {"math": ["ad1"]}}, "did you mean 'add1"),
        ({"lengths": {"add2": 90}}, "did you mean 'add1'"),
        ({"lengths": {"add1": 0}}, "length of 'add1' is 0"),
        ({"lengths": {"add1": 1.5}}, "length of 'add1' is 1.5"),
    ],
)
def test_wrong_suites_are_named(changes: dict, pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(pattern)):
        parse_suite({**GOOD, **changes})


def test_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match="key 'lengths' is missing"):
        parse_suite({key: value for key, value in GOOD.items() if key != "lengths"})


def test_bundled_text_is_the_one_on_record() -> None:
    body = bundled("plain_prose.txt").read_bytes()
    sources = bundled("SOURCES.md").read_text(encoding="utf-8")
    assert hashlib.sha256(body).hexdigest() in sources
    assert len(body) > 12_000
    lines = sentences()
    assert len(set(lines)) == len(lines) > 200
    assert not any(letter.isdigit() for line in lines for letter in line)
    with pytest.raises(FileNotFoundError, match=r"'nothing\.txt' is not in"):
        bundled("nothing.txt")
