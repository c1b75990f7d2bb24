"""Differences between runs with their intervals, one panel per family. Knows the comparison of runs."""

import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.report.comparison import pair_rows
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.flips import flips_of
from kvlab.report.figures.ink import Ink, dress, sheet, style


def of_comparison(comparison: Mapping) -> dict[str, Drawing]:
    """Differences and flips, by name; none where no item is shared."""
    table = pair_rows(comparison)
    if table.empty:
        return {}
    labelled = table.assign(config=[_label(comparison, row) for row in table.to_dict("records")])
    flips = flips_of(labelled, name="flips", title="Answers lost and gained between runs", against="the first run")
    return {"differences": differences(labelled), "flips": flips}


def differences(table: pd.DataFrame) -> Drawing:
    """Paired differences in points with 90 % intervals, from the columns of `pair_rows`."""
    said = [
        f"{r['config']}, {r['family']}: {r['diff_points']:+.1f} points{_ends(r)}, n = {r['n']}."
        for r in table.to_dict("records")
    ]
    single = " One item gives no interval: none is drawn." if 1 in set(table["n"]) else ""
    return Drawing(
        name="differences",
        title="Differences between runs",
        caption=(
            "The other run minus the first on the items both scored, with the two-sided 90% interval of the paired "
            f"difference.{single}"
        ),
        alt=f"Dot plot, one panel per family, of differences between runs. {' '.join(said)}",
        table=table,
        draw=lambda paint: _draw(table, paint),
    )


def _label(comparison: Mapping, row: Mapping) -> str:
    return row["config"] if len(comparison["runs"]) == 2 else f"{row['config']} ({row['other_run'][-8:]})"


def _ends(row: Mapping) -> str:
    return "" if pd.isna(row["low_points"]) else f" [{row['low_points']:+.1f}, {row['high_points']:+.1f}]"


def _draw(table: pd.DataFrame, paint: Ink) -> Figure:
    families, labels = list(dict.fromkeys(table["family"])), list(dict.fromkeys(table["config"]))
    wrapped = ["\n".join(textwrap.wrap(label, 30)) for label in labels]
    lines = sum(label.count("\n") + 1 for label in wrapped)
    figure = sheet(max(2.6 * len(families) + 2.4, 5.6), 0.22 * lines + 0.22 * len(labels) + 1.1, paint)
    grid = figure.subplots(1, len(families), sharex=True, sharey=True, squeeze=False)[0]
    for ax, family in zip(grid, families, strict=True):
        dress(ax, paint)
        own: Any = table[table["family"] == family]
        _panel(ax, own, labels, paint)
        ns = sorted(set(own["n"]))
        n = f"{ns[0]}" if len(ns) == 1 else f"{ns[0]} to {ns[-1]}"
        ax.set_title(f"{family}, n = {n}", fontsize=9, color=paint.text, loc="left")
    grid[0].set_yticks(range(len(labels)), wrapped)
    grid[0].set_ylim(len(labels) - 0.4, -0.6)
    grid[len(grid) // 2].set_xlabel("difference to the first run, points", color=paint.text, fontsize=9)
    return figure


def _panel(ax: Axes, own: pd.DataFrame, labels: list[str], paint: Ink) -> None:
    ax.axvline(0, color=paint.text, linewidth=1)
    for row in own.to_dict("records"):
        y, x = labels.index(row["config"]), row["diff_points"]
        color, marker = style(y)
        if row["n"] > 1 and not pd.isna(row["low_points"]):
            reach = [[x - row["low_points"]], [row["high_points"] - x]]
            ax.errorbar(x, y, xerr=reach, color=color, linewidth=1.4, capsize=3, zorder=2, fmt="none")
        ax.plot(x, y, marker, color=color, markersize=7, zorder=4, markeredgecolor=paint.paper, markeredgewidth=0.7)
