"""Sets of questions described by TOML: where rows are, which columns matter, how a row reads, how answers are graded.

The public sets that come with kvlab are described the same way. Every mistake is named with its line. This file refuses
to read rows and to know models.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvlab.evals import grading, template
from kvlab.evals.columns import check_steps
from kvlab.evals.item import FAMILIES, FORCED, unknown
from kvlab.evals.sources import Source
from kvlab.evals.template import Template
from kvlab.evals.windows import Windows

_TOP = (
    "name", "version", "family", "metric", "forced", "stop", "max_new_tokens", "key", "cluster", "each",
    "source", "columns", "template", "check", "text",
)  # fmt: skip
_TABLES: dict[str, tuple[str, ...]] = {
    "source": ("hub", "subset", "split", "revision", "file"),
    "template": ("context", "question", "cue", "answer", "answers", "choices"),
    "check": ("before", "entry", "tests"),
    "text": ("column", "context", "follow", "join"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSpec:
    """One set as its TOML describes it. `templates` by part: context, question, cue, answers, choices, and those of the
    check; `columns` maps a field to its column and steps. `cluster`, `key` and `each` name columns or are empty."""

    name: str
    version: int
    family: str
    source: Source
    metric: str
    forced: str
    stop: tuple[str, ...]
    max_new_tokens: int
    key: str
    cluster: str
    each: str
    columns: Mapping[str, tuple[str, ...]]
    templates: Mapping[str, tuple[Template, ...]]
    text: Windows | None


def read_spec(path: Path) -> SetSpec:
    """The set a `.toml` file describes; its data file is looked for beside it."""
    return parse_spec(path.read_text(encoding="utf-8"), path.name, path.parent)


def parse_spec(text: str, where: str, folder: Path) -> SetSpec:
    """Read and check a description. Raises ValueError with `where` and the line."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not valid TOML: {error}") from None
    return _Reader(text, data, where).spec(folder)


@dataclass(frozen=True, slots=True)
class _Reader:
    """The parsed TOML beside its text, so that an error can name a line."""

    text: str
    data: Mapping[str, Any]
    where: str

    def fail(self, table: str, key: str, why: object) -> NoReturn:
        raise ValueError(f"{self.where} line {_line(self.text, table, key)}: {why}") from None

    def spec(self, folder: Path) -> SetSpec:
        self._known_keys()
        for key in ("name", "family", "source"):
            if key not in self.data:
                raise ValueError(f"{self.where}: {key!r} is missing; a set has at least name, family, [source]")
        windows = self._windows()
        metric, forced = self._scoring(windows)
        return SetSpec(
            name=self._name(),
            version=self._whole("", "version", 1),
            family=self._one_of("family", FAMILIES, "", "family"),
            source=self._source(folder),
            metric=metric,
            forced=forced,
            stop=self._texts("", "stop", ("\n",)),
            max_new_tokens=self._whole("", "max_new_tokens", 16),
            key=self._string("", "key", ""),
            cluster=self._string("", "cluster", ""),
            each=self._string("", "each", ""),
            columns=self._columns(),
            templates=self._templates(windows, metric),
            text=windows,
        )

    def _known_keys(self) -> None:
        for key, value in self.data.items():
            if key not in _TOP:
                self.fail("", key, unknown("key", key, _TOP))
            if key in (*_TABLES, "columns"):
                if not isinstance(value, dict):
                    self.fail("", key, f"{key} is a table: write [{key}]")
                for inner in value:
                    if key in _TABLES and inner not in _TABLES[key]:
                        self.fail(key, inner, unknown(f"key in [{key}]", inner, _TABLES[key]))

    def _scoring(self, windows: Windows | None) -> tuple[str, str]:
        if windows is not None:
            for key in ("metric", "forced", "template", "check", "each"):
                if key in self.data:
                    self.fail("", key, f"{key} does not go with [text]: running text is scored token by token")
            return "likelihood", "tokens"
        metric = self._one_of("metric", grading.NAMES, "exact", "metric")
        if (metric == "execute") != ("check" in self.data):
            self.fail("", "metric", "metric 'execute' and a [check] with tests belong together")
        forced = self._one_of("forced score", FORCED, "tokens" if metric == "execute" else "exact", "forced")
        return metric, forced

    def _name(self) -> str:
        name = self._string("", "name", "")
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
            self.fail("", "name", f"name {name!r}: use small letters, digits, '_', '-' and '.'")
        return name

    def _source(self, folder: Path) -> Source:
        hub, file = self._string("source", "hub", ""), self._string("source", "file", "")
        if not hub and not file:
            self.fail("", "source", "[source] needs hub (a hub id) or file (a file beside this one)")
        return Source(
            hub=hub or None,
            subset=self._string("source", "subset", "") or None,
            split=self._string("source", "split", "test"),
            revision=self._string("source", "revision", "") or None,
            file=folder / file if file else None,
        )

    def _windows(self) -> Windows | None:
        if "text" not in self.data:
            return None
        return Windows(
            column=self._string("text", "column", "text"),
            context=self._whole("text", "context", 400),
            follow=self._whole("text", "follow", 64),
            join=self._string("text", "join", "") if "join" in self.data["text"] else None,
        )

    def _columns(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for field, value in self.data.get("columns", {}).items():
            found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
            if not found or not all(isinstance(one, str) and one for one in found):
                self.fail("columns", field, f"{field} is a column, or a list of a column and its steps, got {value!r}")
            if not field.isidentifier():
                self.fail("columns", field, f"{field!r} is no plain name, so no template could use it")
            try:
                check_steps(found[1:])
            except ValueError as error:
                self.fail("columns", field, error)
            out[field] = found
        return out

    def _templates(self, windows: Windows | None, metric: str) -> dict[str, tuple[Template, ...]]:
        if windows is not None:
            return {}
        given: dict[str, tuple[str, ...]] = {}
        for part in ("context", "question", "cue"):
            given[part] = (self._string("template", part, ""),)
        given["answers"] = self._texts("template", "answers", ())
        if "answer" in self.data.get("template", {}):
            if given["answers"]:
                self.fail("template", "answer", "give answer or answers, not both")
            given["answers"] = (self._string("template", "answer", ""),)
        given["choices"] = self._texts("template", "choices", ())
        if metric == "execute":
            given |= {part: (self._string("check", part, ""),) for part in ("before", "entry", "tests")}
        for part in ("context", "answers"):
            if not any(given[part]):
                raise ValueError(f"{self.where}: [template] needs {part}; it is text with columns in braces")
        if not any(given["question"]) and not any(given["cue"]):
            raise ValueError(f"{self.where}: [template] needs question or cue: what comes after the compressed context")
        return {part: tuple(self._template(part, text) for text in texts) for part, texts in given.items()}

    def _template(self, part: str, text: str) -> Template:
        try:
            return template.parse(text)
        except ValueError as error:
            table = "check" if part in _TABLES["check"] else "template"
            key = "answer" if part == "answers" and "answer" in self.data["template"] else part
            self.fail(table, key, f"{key}: {error}")

    # -- values of a type --------------------------------------------------------------------------------------------

    def _get(self, table: str, key: str) -> Any:
        return (self.data.get(table, {}) if table else self.data).get(key)

    def _string(self, table: str, key: str, default: str) -> str:
        value = self._get(table, key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(table, key, f"{key} must be text, got {value!r}")
        return value

    def _whole(self, table: str, key: str, default: int) -> int:
        value = self._get(table, key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(table, key, f"{key} must be a whole number from 1, got {value!r}")
        return value

    def _texts(self, table: str, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self._get(table, key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            self.fail(table, key, f"{key} must be a list of texts, got {value!r}")
        return tuple(value)

    def _one_of(self, kind: str, known: tuple[str, ...], default: str, key: str) -> str:
        value = self._string("", key, default)
        if value not in known:
            self.fail("", key, unknown(kind, value, known))
        return value


def _line(text: str, table: str, key: str) -> int:
    """The line where a key of a table is written; the table's own line, or 1, where it is not found."""
    inside, best = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        head = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        if head:
            inside = head[1]
            if inside == (table or key):
                best = number
                if not table:
                    return number
        elif inside == table and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*(?:\.[\w.]+\s*)?=""", line):
            return number
    return best
