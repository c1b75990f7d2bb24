"""A set of items: how many of what, and the hash that says they are the same."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvlab.show.page import head, para, table
from kvlab.show.words import columns, line

_MOST = 40


def text(d: Mapping[str, Any]) -> str:
    return "\n".join([f"EvalSet {line(d['name'])} v{d['version']}: {_about(d)}", *columns([_HEADER, *_rows(d)])])


def html(d: Mapping[str, Any]) -> str:
    return (
        head("items", line(d["name"]), f"version {d['version']}") + para(_about(d), "soft") + table(_HEADER, _rows(d))
    )


_HEADER = ["family", "task", "split", "items", "clusters", "mean context, characters"]


def rows_of(items: Any) -> list[dict[str, Any]]:
    """One entry for each task and split, in order of appearance."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for item in items:
        groups.setdefault((item.family, item.task, item.split), []).append(item)
    return [
        {
            "family": family,
            "task": task,
            "split": split,
            "items": len(group),
            "clusters": len(Counter(i.cluster for i in group)),
            "mean_context_characters": round(sum(len(i.context) for i in group) / len(group)),
        }
        for (family, task, split), group in groups.items()
    ]


def _about(d: Mapping[str, Any]) -> str:
    return f"{d['n']:,} items, sha256 {d['sha256'][:12]}"


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [line(g["family"], 20), line(g["task"], 40), g["split"], f"{g['items']:,}", f"{g['clusters']:,}",
         f"{g['mean_context_characters']:,}"]
        for g in d["tasks"][:_MOST]
    ]  # fmt: skip
    more = len(d["tasks"]) - _MOST
    return rows if more <= 0 else [*rows, ["...", f"{more} more tasks", "", "", "", ""]]
