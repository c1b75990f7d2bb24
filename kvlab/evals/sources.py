"""Rows of a public or private set: a hub id through `datasets`, or a local file that serves as its offline form.

JSON Lines, CSV and text are read here, line by line: a row can then be named by its line, and values stay as they are
written. A dataframe reader would turn `007` into 7, `NA` into nothing and `2024-01-01` into a date. This file refuses
to know items.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
_LONGEST_FIELD = 1 << 24


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it stands, for messages; its number from 0; its columns."""

    place: str
    index: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from: a local `file`, or else hub id `hub` with `subset`, `split` and `revision`.

    `offline` is what the same rows are called as a file, wherever a reader keeps it.
    """

    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    revision: str | None = None
    file: Path | None = None
    offline: str | None = None

    @property
    def name(self) -> str:
        """How messages name it."""
        return self.file.name if self.file is not None else self.hub or "nothing"


def read(source: Source) -> list[Row]:
    """All rows in order. Raises ValueError where the source cannot be read, naming the line where there is one."""
    if source.file is None:
        if source.hub is None:
            raise ValueError("this set has no rows of its own: give a local file, written name=FILE")
        return list(_hub(source))
    path = source.file.expanduser()
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind not in FORMATS:
        raise ValueError(
            f"{path.name}: unknown kind of file {kind!r}; use {', '.join(FORMATS)}, or .gz of the text ones"
        )
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}; check the path, or give a hub id")
    rows = list(_parquet(path) if kind == ".parquet" else _written(path, kind))
    if not rows:
        raise ValueError(f"{path.name} holds no rows")
    return rows


def _text(path: Path) -> str:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path.name}: {error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{path.name} line {line}: byte {error.start} is no UTF-8; save the file as UTF-8") from None


def _written(path: Path, kind: str) -> Iterator[Row]:
    text = _text(path)
    if kind == ".txt":
        yield Row(path.name, 0, {"text": text})
    elif kind in (".csv", ".tsv"):
        yield from _csv(path.name, text, "\t" if kind == ".tsv" else ",")
    elif kind == ".json" and text.lstrip().startswith("["):
        yield from _array(path.name, text)
    else:
        yield from _jsonl(path.name, text)


def _jsonl(name: str, text: str) -> Iterator[Row]:
    index = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{name} line {number} is not valid JSON: {error}") from None
        yield Row(f"{name} line {number}", index, _object(values, f"{name} line {number}"))
        index += 1


def _array(name: str, text: str) -> Iterator[Row]:
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None
    for index, value in enumerate(values):
        yield Row(f"{name} entry {index + 1}", index, _object(value, f"{name} entry {index + 1}"))


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a row is an object with named columns, got {type(value).__name__}")
    return value


def _csv(name: str, text: str, separator: str) -> Iterator[Row]:
    """Rows under the names of the first one; each is placed at the line it begins on, since a value may span lines."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) != len(names):
            raise ValueError(f"{name} line 1: a column name comes twice: {', '.join(names)}")
        index, begins = 0, reader.line_num + 1
        for cells in reader:
            place, begins = f"{name} line {begins}", reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(names):
                raise ValueError(f"{place} has {len(cells)} columns, line 1 names {len(names)}: {', '.join(names)}")
            yield Row(place, index, dict(zip(names, cells, strict=True)))
            index += 1
    except csv.Error as error:
        raise ValueError(f"{name} line {reader.line_num}: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read {path.name}: {_first_line(error)}") from None
    for index, values in enumerate(rows):
        yield Row(f"{path.name} row {index + 1}", index, values)


def _hub(source: Source) -> Iterator[Row]:
    """Rows of a hub set. `datasets` is imported here: it is heavy and most runs need none of it."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    assert source.hub is not None
    try:
        loaded = datasets.load_dataset(source.hub, source.subset, split=source.split, revision=source.revision)
        for index, row in enumerate(loaded):
            yield Row(f"{source.hub} row {index + 1}", index, dict(row))
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise ValueError(
            f"cannot read {source.hub!r}: {type(error).__name__}: {_first_line(error)}. Check the id, the subset, the "
            "split and the network, or give a local file"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
