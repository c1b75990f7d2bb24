"""Rows as they are written: no number, date or gap is made of a text; every broken line is named."""

import gzip
import json
from pathlib import Path

import pandas
import pytest

from kvlab.evals.sources import Source, read


def rows(path: Path) -> list[dict]:
    return [dict(row.values) for row in read(Source(file=path))]


def test_values_stay_as_written(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"a": "2024-01-01", "b": "007"}\n\n{"a": "NA", "b": 7, "c": [1, "x"]}\n')
    assert rows(lines) == [{"a": "2024-01-01", "b": "007"}, {"a": "NA", "b": 7, "c": [1, "x"]}]
    assert [row.place for row in read(Source(file=lines))] == ["a.jsonl line 1", "a.jsonl line 3"]
    assert [row.index for row in read(Source(file=lines))] == [0, 1]
    table = tmp_path / "a.csv"
    table.write_text('\ufeffa,b\n007,NA\n"two\nlines, here",010\n\nlast,\n', encoding="utf-8")
    assert rows(table) == [{"a": "007", "b": "NA"}, {"a": "two\nlines, here", "b": "010"}, {"a": "last", "b": ""}]
    assert [row.place for row in read(Source(file=table))] == ["a.csv line 2", "a.csv line 3", "a.csv line 6"]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    wanted = [{"a": "1", "b": "x\ty"}, {"a": "2", "b": "é"}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, wanted)))
    (tmp_path / "r.json").write_text(json.dumps(wanted))
    (tmp_path / "r.csv").write_text("a,b\n1,x\ty\n2,é\n", encoding="utf-8")
    (tmp_path / "r.tsv").write_text('a\tb\n1\t"x\ty"\n2\té\n', encoding="utf-8")
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress((tmp_path / "r.jsonl").read_bytes()))
    pandas.DataFrame(wanted).to_parquet(tmp_path / "r.parquet")
    for name in ("r.jsonl", "r.json", "r.csv", "r.tsv", "r.jsonl.gz", "r.parquet"):
        assert rows(tmp_path / name) == wanted, name
    (tmp_path / "r.txt").write_text("one\ntwo\n")
    assert rows(tmp_path / "r.txt") == [{"text": "one\ntwo\n"}]


@pytest.mark.parametrize(
    ("name", "body", "pattern"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl line 2 is not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl line 2: a row is an object with named columns, got list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"a\.jsonl line 2: byte .* is no UTF-8"),
        ("a.json", b'[{"a": 1}, 2]', r"a\.json entry 2: a row is an object"),
        ("a.csv", b"a,b\n1,2\n1\n", r"a\.csv line 3 has 1 columns, line 1 names 2: a, b"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv line 1: a column name comes twice"),
        ("a.csv", b'a,b\n1,"2\n', r"a\.csv line 2: unexpected end of data"),
        ("a.jsonl", b"\n\n", r"a\.jsonl holds no rows"),
        ("a.csv", b"", r"a\.csv holds no rows"),
        ("a.xlsx", b"", r"unknown kind of file '\.xlsx'; use \.jsonl"),
        ("a.jsonl.gz", b"plain", r"cannot read a\.jsonl\.gz"),
        ("a.parquet", b"plain", r"cannot read a\.parquet"),
    ],
)
def test_broken_files_are_named_by_line(tmp_path: Path, name: str, body: bytes, pattern: str) -> None:
    path = tmp_path / name
    path.write_bytes(body)
    with pytest.raises(ValueError, match=pattern):
        read(Source(file=path))


def test_a_missing_file_and_a_source_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        read(Source(file=tmp_path / "none.csv"))
    with pytest.raises(ValueError, match="give a local file"):
        read(Source())


def test_hub_sets_are_asked_for_by_revision(monkeypatch) -> None:
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        if args[0] == "gone/away":
            raise ValueError("Couldn't find it\nat all")
        return [{"a": "1"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (row,) = read(Source(hub="me/mine", subset="s", split="test[:5]", revision="abc"))
    assert (row.place, dict(row.values)) == ("me/mine row 1", {"a": "1"})
    assert asked == [(("me/mine", "s"), {"split": "test[:5]", "revision": "abc"})]
    with pytest.raises(ValueError, match="cannot read 'gone/away': ValueError: Couldn't find it"):
        read(Source(hub="gone/away"))
