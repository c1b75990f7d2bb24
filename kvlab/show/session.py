"""A notebook's session: one line of provenance, and where things are."""

from collections.abc import Mapping
from typing import Any

from kvlab.show.page import folded, para, table
from kvlab.show.words import columns, line


def text(d: Mapping[str, Any]) -> str:
    return "\n".join([d["line"], *columns(_rows(d))])


def html(d: Mapping[str, Any]) -> str:
    return para(d["line"], "soft") + folded("Where things are", table(("", ""), _rows(d), wrap=True))


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    return [[name, line(path, 160)] for name, path in d["places"].items()]
