"""Rows of a described set as items: each row once, split by what it is, in a seeded order.

What can be compressed is in the context; what is asked comes after it. Everything is checked when a set is loaded, so
that no row fails later. This file refuses to know scores and models.
"""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.evals import columns, windows
from kvlab.evals.bundled import bundled
from kvlab.evals.item import SPLITS, CodeCheck, EvalSet, Item, unknown
from kvlab.evals.sources import Row, read
from kvlab.evals.template import Template
from kvlab.evals.userset import SetSpec, read_spec

PUBLIC = ("gsm8k", "humaneval", "mbpp", "cruxeval", "wikitext", "text")
"""Sets that are described in evalsets/; their rows are read from the hub or from a local file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One item to be, without its split. `group` decides the split; entries of a group share a source."""

    index: str
    group: str
    cluster: str
    context: str
    question: str
    cue: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    check: CodeCheck | None = None


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """A set with its rows read and checked."""

    spec: SetSpec
    entries: tuple[Entry, ...]

    def size(self, split: str) -> int:
        """Items in a split."""
        return sum(split_of(self.spec.name, entry.group) == split for entry in self.entries)

    def items(self, split: str, n: int, seed: int = 0, query_aware: bool = False) -> tuple[Item, ...]:
        """At most `n` items. The split depends on the rows alone, the order on the seed; entries of a group stay
        together, and a smaller `n` gives a prefix."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        if n < 1:
            raise ValueError(f"n={n} items: at least 1 is needed")
        name = self.spec.name
        groups: dict[str, list[Entry]] = {}
        for entry in self.entries:
            if split_of(name, entry.group) == split:
                groups.setdefault(entry.group, []).append(entry)
        order = sorted(groups, key=lambda group: _sha(f"{name}|{split}|{seed}|{group}"))
        chosen = [entry for group in order for entry in groups[group]][:n]
        return tuple(_item(self.spec, entry, split, seed, query_aware) for entry in chosen)


def split_of(task: str, key: str) -> str:
    """The split of a source row, by the first 32 bits u of sha256: search u < .35, confirm u < .85, else replicate."""
    u = int(_sha(f"{task}|{key}")[:8], 16) / 2**32
    return "search" if u < 0.35 else "confirm" if u < 0.85 else "replicate"


def find_spec(name: str) -> SetSpec:
    """A set that comes with kvlab by name, or a `.toml` file."""
    if name.endswith(".toml"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"no file {name!r}; check the path")
        return read_spec(path)
    if name not in PUBLIC:
        raise unknown("public set", name, list(PUBLIC))
    spec = read_spec(bundled(f"{name}.toml"))
    assert spec.source.file is not None
    return dataclasses.replace(spec, source=dataclasses.replace(spec.source, file=None, offline=spec.source.file.name))


def at(spec: SetSpec, place: str) -> SetSpec:
    """The set with its rows from elsewhere: a local file, a folder that holds the set's file, or another hub id."""
    path = Path(place).expanduser()
    if path.is_dir():
        named = spec.source.offline or (spec.source.file.name if spec.source.file else None)
        if named is None:
            raise ValueError(f"set {spec.name} names no file to look for in {place!r}; give the file itself")
        path = path / named
        if not path.is_file():
            raise ValueError(f"no file {named!r} in {place!r}; set {spec.name} is kept under that name")
    elif not path.is_file() and (path.suffix or place.startswith((".", "/", "~"))):
        raise ValueError(f"no file {place!r}; pass a local file or a hub id such as {spec.source.hub or 'owner/name'}")
    source = spec.source
    if path.is_file():
        return dataclasses.replace(spec, source=dataclasses.replace(source, file=path))
    return dataclasses.replace(spec, source=dataclasses.replace(source, file=None, hub=place))


def load(spec: SetSpec) -> LoadedSet:
    """Read and check every row. Raises ValueError that names the row where one does not fit the description."""
    entries: dict[tuple[str, str], Entry] = {}
    rows = read(spec.source)
    if spec.text is not None and spec.text.join is not None:
        whole = spec.text.join.join(str(_cell(row, row.values, spec.text.column)) for row in rows)
        rows = [Row(spec.source.name, 0, {spec.text.column: whole})]
    for row in rows:
        for one, entry in _entries(spec, row):
            try:
                _item(spec, entry, SPLITS[0], 0, False)
            except ValueError as error:
                raise ValueError(f"{row.place}: {error}") from None
            entries.setdefault((entry.group, one), entry)  # rows that repeat are taken once
    return LoadedSet(spec, tuple(entries.values()))


def load_set(
    name: str, source: str | None = None, *, split: str, n: int, seed: int = 0, query_aware: bool = False
) -> EvalSet:
    """`n` items of a set by name or `.toml` file; `source` is a local file or a hub id in place of the set's own.

    Raises ValueError when the source cannot be read, a row does not fit, or it holds fewer than `n` items.
    """
    spec = find_spec(name)
    loaded = load(spec if source is None else at(spec, source))
    items = loaded.items(split, n, seed, query_aware)
    if len(items) < n:
        raise ValueError(
            f"{loaded.spec.source.name} has {len(items)} rows in split {split!r}, {n} were asked for; ask for fewer"
        )
    return EvalSet(f"{spec.name}/{split}/{seed}", spec.version, items)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _item(spec: SetSpec, entry: Entry, split: str, seed: int, query_aware: bool) -> Item:
    if query_aware and not entry.cue:
        raise ValueError(f"set {spec.name} has no cue, so its question cannot go before compression; add template.cue")
    return Item(
        id=f"{spec.name}/{split}/{seed}/{entry.index}",
        task=spec.name,
        family=spec.family,
        context=entry.context + entry.question if query_aware else entry.context,
        question=entry.cue if query_aware else entry.question + entry.cue,
        answers=entry.answers,
        choices=entry.choices,
        cluster=entry.cluster,
        stop=spec.stop,
        max_new_tokens=spec.max_new_tokens,
        metric=spec.metric,
        forced=spec.forced,
        check=entry.check,
    )


# -- a row ---------------------------------------------------------------------------------------------------------


def _entries(spec: SetSpec, row: Row) -> Iterator[tuple[str, Entry]]:
    """The entries of a row, each with what makes it itself within its group."""
    if spec.text is not None:
        yield from _windows(spec, spec.text, row)
        return
    group = _group(spec, row)
    cluster = f"{spec.name}-{_sha(group)[:12]}" if spec.cluster else f"{spec.name}-{row.index}"
    for number, values in enumerate(_each(spec, row)):
        index = f"{row.index}-{number}" if spec.each else str(row.index)
        part = _Rendered(spec, row, values)
        answers = part.texts("answers")
        if not answers:
            raise ValueError(f"{row.place}: there is no answer")
        # Rows of a cluster are told apart by all they hold; without one, an equal key is the same row again.
        one = _canonical(values) if spec.cluster or spec.each else ""
        check = None
        if "tests" in spec.templates:
            check = CodeCheck(before=part.text("before"), entry=part.text("entry"), tests=part.text("tests"))
        yield (
            one,
            Entry(
                index=index,
                group=group,
                cluster=cluster,
                context=part.text("context"),
                question=part.text("question"),
                cue=part.text("cue"),
                answers=answers,
                choices=part.texts("choices"),
                check=check,
            ),
        )


def _windows(spec: SetSpec, asked: windows.Windows, row: Row) -> Iterator[tuple[str, Entry]]:
    text = _cell(row, row.values, asked.column)
    if not isinstance(text, str):
        raise ValueError(f"{row.place}: column {asked.column!r} holds a list, not running text")
    for number, window in enumerate(windows.cut(text, asked.context, asked.follow)):
        # Neighbours share their subject: a few windows in a row are one cluster, and stay in one split.
        group = f"{row.index}-{number // windows.NEIGHBOURS}"
        yield (
            str(number),
            Entry(
                index=f"{row.index}-{number}",
                group=group,
                cluster=f"{spec.name}-{group}",
                context=window.context,
                question=window.lead,
                cue="",
                answers=(window.follow,),
            ),
        )


def _group(spec: SetSpec, row: Row) -> str:
    named = spec.cluster or spec.key
    if not named:
        return _canonical(row.values)
    value = _cell(row, row.values, named)
    return value if isinstance(value, str) else json.dumps(value)


def _canonical(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def _each(spec: SetSpec, row: Row) -> list[Mapping[str, Any]]:
    """The row, or the row with each entry of its list in turn."""
    if not spec.each:
        return [row.values]
    found = _found(row, row.values, spec.each)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{row.place}: column {spec.each!r} must hold a list with at least one entry")
    own = {name: value for name, value in row.values.items() if name != spec.each}
    return [own | (dict(one) if isinstance(one, Mapping) else {spec.each: one}) for one in found]


def _found(row: Row, values: Mapping[str, Any], name: str) -> Any:
    try:
        return columns.column(values, name)
    except KeyError:
        near = difflib.get_close_matches(name, list(values), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{row.place} has no column {name!r}{hint} It has {', '.join(map(str, values))}") from None


def _cell(row: Row, values: Mapping[str, Any], name: str) -> columns.Value:
    value = _found(row, values, name)
    try:
        return columns.text_of(value)
    except ValueError as error:
        raise ValueError(f"{row.place}: column {name!r} {error}") from None


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The templates of a set over one row."""

    spec: SetSpec
    row: Row
    values: Mapping[str, Any]

    def text(self, part: str) -> str:
        (one,) = self.spec.templates[part]
        found = self._fields(one)
        lists = [name for name, value in found.items() if not isinstance(value, str)]
        if lists:
            raise ValueError(
                f"{self.row.place}: field {lists[0]!r} of {part} is a list; only answers and choices take one"
            )
        return one.render({name: str(value) for name, value in found.items()})

    def texts(self, part: str) -> tuple[str, ...]:
        """Every template of the part; one that uses a list is written for each entry."""
        out: list[str] = []
        for one in self.spec.templates[part]:
            found = self._fields(one)
            lists = {name: value for name, value in found.items() if not isinstance(value, str)}
            if len(lists) > 1:
                raise ValueError(f"{self.row.place}: a template of {part} uses two lists: {', '.join(lists)}")
            plain = {name: value for name, value in found.items() if isinstance(value, str)}
            if not lists:
                out.append(one.render(plain))
            for name, values in lists.items():
                out += [one.render(plain | {name: value}) for value in values]
        return tuple(dict.fromkeys(out))

    def _fields(self, one: Template) -> dict[str, columns.Value]:
        out = {}
        for field in one.fields:
            name, *steps = self.spec.columns.get(field, (field,))
            value = _cell(self.row, self.values, name)
            try:
                out[field] = columns.apply(value, steps)
            except ValueError as error:
                raise ValueError(f"{self.row.place}: field {field!r}: {error}") from None
        return out
