"""A run folder: how it stands, what it holds, and its result where it has one."""

from collections.abc import Mapping
from typing import Any

from kvlab.show import result
from kvlab.show.page import folded, head, mark, para, table
from kvlab.show.words import columns, line, size

_TONES = {"done": "good", "failed": "bad", "interrupted": "bad", "partial": "open", "running": "open"}


def text(d: Mapping[str, Any]) -> str:
    lines = [f"Run {d['name']}: {d['state']}", *columns(_rows(d))]
    return "\n".join([*lines, "", result.text(d["result"])] if d["result"] else lines)


def html(d: Mapping[str, Any]) -> str:
    config = [[k, line(v, 160)] for k, v in d["config"].items()][:24]
    return "".join(
        [
            head("run", d["name"], d["hash8"]),
            f"<div>{mark(d['state'], _TONES.get(d['state'], 'open'))}</div>",
            table(("", ""), _rows(d), wrap=True),
            folded("Config", table(("", ""), config, wrap=True)),
            result.html(d["result"]) if d["result"] else para("no result yet", "soft"),
        ]
    )


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    rows = [["begun", str(d["created"])], ["rows", f"{d['rows']:,} in {d['parts']} parts, {size(d['bytes'])}"]]
    rows += [["model", line(d["model"], 60)]] if d["model"] else []
    rows += [["took", f"{d['wall_s']:g} s"]] if d["wall_s"] is not None else []
    return [*rows, ["error", line(d["error"], 200)]] if d["error"] else rows
