"""A study that many workers share: how many trials in which state, the best that is feasible, a small plane of both."""

from collections.abc import Mapping
from typing import Any

from kvlab.show.config import value
from kvlab.show.drawing import points
from kvlab.show.page import folded, head, para, table
from kvlab.show.words import columns, cut, line, number

_UNREAD = "not read, since showing it would ask the network; kvlab.study.summary.view(board) asks"


def text(d: Mapping[str, Any]) -> str:
    if "trials" not in d:
        return f"Study {line(d['study'])} in {line(d['storage'])}: {_UNREAD}"
    lines = [f"Study {line(d['study'])} ({d['objective']}): {_counts(d)}", f"  {_best(d)}"]
    return "\n".join([*lines, *columns([_HEADER, *_rows(d)])] if d["feasible"] else lines)


def html(d: Mapping[str, Any]) -> str:
    if "trials" not in d:
        return head("study", line(d["study"]), line(d["storage"])) + para(_UNREAD, "soft")
    failed = [[str(f["number"]), f["kind"], line(f["said"], 160)] for f in d["failed"][:12]]
    more = f", the first {len(failed)} of {len(d['failed'])}" if len(d["failed"]) > len(failed) else ""
    return "".join(
        [
            head("study", line(d["study"]), d["objective"], "sealed" if d["sealed"] else "open"),
            para(_counts(d)),
            para(_best(d)),
            table(_HEADER, _rows(d)),
            folded(f"Value against constraint, {len(d['points'])} trials", _plane(d), shown=True),
            folded(f"Failed{more}", table(("trial", "why", "said"), failed, wrap=True)),
        ]
    )


_HEADER = ["trial", "value", "violation", "what"]


def _counts(d: Mapping[str, Any]) -> str:
    counted = ", ".join(f"{n} {state}" for state, n in d["trials"].items() if n) or "nothing posted"
    return f"{counted}; {d['duplicates']} of them duplicates" if d["duplicates"] else counted


def _best(d: Mapping[str, Any]) -> str:
    if d["best"]:
        return f"best feasible: trial {d['best']['number']}, {number(d['best']['value'])} (lower is better)"
    if d["nearest_miss"]:
        miss = d["nearest_miss"]
        return f"nothing feasible; nearest is trial {miss['number']}, over by {number(miss['violation'])}"
    return "nothing complete yet"


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    return [
        [str(r["number"]), number(r["value"]), number(r["violation"]), cut(line(value(r["config"]), 120), 120)]
        for r in d["feasible"]
    ]


def _plane(d: Mapping[str, Any]) -> str:
    marks = [(p[0], p[1], p[0] <= 0) for p in d["points"]]
    if not marks:
        return ""
    front = [(x, y) for x, y in d["front"]]
    inside = sum(m[2] for m in marks)
    words = (
        f"Scatter of {len(marks)} complete trials, constraint to the right and value upwards, both better when "
        f"smaller: {inside} feasible, {len(marks) - inside} not, {len(front)} on the front"
    )
    return points(marks, front, words) + para(
        "right: how far over the constraint; up: value; lower left is better; crosses break the constraint", "soft"
    )
