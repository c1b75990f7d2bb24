"""Accuracy that holds, by memory: for every budget, the score of the best config that fits it and was shown to hold.

Knows the result document. Only judged configs count; what was merely searched is optimistic.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvlab.report import document as doc
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import Ink, below, dress, log2_axis, mark, sheet, style
from kvlab.report.noise import told
from kvlab.stats import wilson

GB = 1e9
_SMALL = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def budget_curve(result: Mapping) -> Drawing:
    """Score per family with 95 % Wilson intervals against bytes at the workload, and a line along what holds.

    Raises ValueError where no config was judged at a known size.
    """
    table = curve_table(result)
    if table.empty:
        raise ValueError("nothing to draw: no config of a known size was judged")
    flagged = told(result)
    # The table is sorted by size.
    least = next((row for row in table.to_dict("records") if row["holds"]), None)
    said = f"The least that holds is {least['config']} at {doc.size(least['workload_bytes'])}." if least else ""
    return Drawing(
        name="budget",
        title="Accuracy that holds, by memory",
        caption=" ".join(
            [
                f"Score on fresh items with 95% Wilson intervals (n = {_ns(table)} a family) against the KV cache at "
                f"{doc.workload(result)}, log2 axis. Filled: shown to hold in every family. Hollow: not shown. The "
                "line is the best score that holds within each budget; dotted, the full cache.",
                *(["One item gives no interval: none is drawn."] if 1 in set(table["n"]) else []),
                *flagged,
            ]
        ),
        alt=f"Score against memory, one panel per family. {said or 'No config is shown to hold.'} {' '.join(flagged)}",
        table=table,
        draw=lambda paint: _draw(result, table, paint),
    )


def curve_table(result: Mapping) -> pd.DataFrame:
    """One line per judged config and family, smallest first: size, score, interval, verdict, and whether it holds."""
    baseline = (result.get("baseline") or {}).get("config_id")
    lines = []
    for entry in doc.judged(result):
        if entry["config_id"] == baseline or not doc.finite(entry.get("workload_bytes")):
            continue
        for family in doc.families(result):
            pair = (entry.get("families") or {}).get(family) or {}
            if not doc.finite(pair.get("score")):
                continue
            low, high = wilson(pair["score"] * pair["n"], pair["n"])
            lines.append(
                {
                    "config": entry["label"],
                    "workload_bytes": entry["workload_bytes"],
                    "fits": doc.fits(result, entry),
                    "family": family,
                    "n": pair["n"],
                    "score": pair["score"],
                    "low": low,
                    "high": high,
                    "verdict": entry.get("verdict"),
                    "holds": entry.get("verdict") in doc.GOOD,
                }
            )
    return pd.DataFrame(sorted(lines, key=lambda line: line["workload_bytes"]))


def held_steps(table: pd.DataFrame, family: str) -> list[tuple[float, float]]:
    """Size and score of what holds, smallest first, each better than every smaller one: the best for every budget."""
    held = [row for row in table.to_dict("records") if row["holds"] and row["family"] == family]
    steps: list[tuple[float, float]] = []
    for row in sorted(held, key=lambda row: row["workload_bytes"]):
        if not steps or row["score"] > steps[-1][1]:
            steps.append((float(row["workload_bytes"]), float(row["score"])))
    return steps


def _draw(result: Mapping, table: pd.DataFrame, paint: Ink) -> Figure:
    families = list(dict.fromkeys(table["family"]))
    figure = sheet(max(3.4 * len(families), 5.6), 3.6, paint)
    grid = figure.subplots(1, len(families), sharex=True, sharey=True, squeeze=False)[0]
    raw, budget = doc.raw_bytes(result), result.get("budget_bytes")
    sizes = [s for s in (*table["workload_bytes"], raw, budget) if doc.finite(s) and s > 0]
    scale, unit = next(((s, u) for s, u in _SMALL if max(sizes) >= s), (1.0, "B"))
    for n, (ax, family) in enumerate(zip(grid, families, strict=True)):
        dress(ax, paint)
        _panel(ax, result, table, family, scale, style(n), paint)
        if budget is not None:
            ax.axvline(budget / scale, color=paint.text, linewidth=1.1, linestyle=(0, (1, 1)))
        own: Any = table[table["family"] == family]
        ax.set_title(f"{family}, n = {_ns(own)}", fontsize=10, color=paint.text, loc="left")
    log2_axis(grid, [s / scale for s in sizes])
    grid[0].set_ylabel("score", color=paint.text, fontsize=9)
    grid[0].set_ylim(-0.03, 1.03)
    grid[len(grid) // 2].set_xlabel(f"KV cache at the workload, {unit} (log2)", color=paint.text, fontsize=9)
    handles = [
        mark("holds", paint.text, "o"),
        mark("not shown to hold", paint.text, "o", markerfacecolor="none"),
        Line2D([], [], color=paint.text, linewidth=1.2, label="best that holds within a budget"),
        Line2D([], [], color=paint.text, linewidth=1, linestyle=":", label="full cache"),
    ]
    if not all(table["fits"]):
        handles.append(mark("over budget", paint.over, "X"))
    if budget is not None:
        label = f"budget {doc.size(budget).split(' (')[0]}"
        handles.append(Line2D([], [], color=paint.text, linewidth=1.1, linestyle=(0, (1, 1)), label=label))
    below(figure, handles, paint)
    return figure


def _panel(ax: Axes, result: Mapping, table: pd.DataFrame, family: str, scale: float, look: tuple, paint: Ink) -> None:
    color, marker = look
    base = ((result.get("baseline") or {}).get("families") or {}).get(family) or {}
    if doc.finite(base.get("score")):
        ax.axhline(base["score"], color=paint.text, linewidth=1, linestyle=":")
    for row in table.to_dict("records"):
        if row["family"] != family:
            continue
        x, y = row["workload_bytes"] / scale, row["score"]
        own, shape = (color, marker) if row["fits"] else (paint.over, "X")
        if row["n"] > 1:
            reach = [[y - row["low"]], [row["high"] - y]]
            ax.errorbar(x, y, yerr=reach, color=own, linewidth=1.2, capsize=3, fmt="none", zorder=2)
        ax.plot(x, y, shape, color=own, markersize=7, zorder=4, markerfacecolor=own if row["holds"] else paint.paper)
    steps = held_steps(table, family)
    if steps:
        x, y = [s / scale for s, _ in steps], [score for _, score in steps]
        end = max(doc.raw_bytes(result) or 0, steps[-1][0]) / scale
        ax.step([*x, end], [*y, y[-1]], where="post", color=color, linewidth=1.2, zorder=1)


def _ns(table: pd.DataFrame) -> str:
    ns = sorted(set(table["n"].astype(int)))
    return f"{ns[0]}" if len(ns) == 1 else f"{ns[0]} to {ns[-1]}"
