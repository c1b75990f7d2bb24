"""Answers lost and gained against the full cache on the same items: configs by families, one cell for each pair.

Knows the result document. A net of zero may hide many flips, so a cell shows both counts and is coloured by the net.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvlab.report import document as doc
from kvlab.report import frames
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import Ink, dress, sheet

CLEAR = 0.05  # exact two-sided p at which a cell is framed


def flips_matrix(result: Mapping) -> Drawing:
    """Lost and gained answers per judged config and family. Raises ValueError where nothing was judged."""
    return flips_of(
        frames.family_rows(result),
        name="flips",
        title="Answers lost and gained",
        against="the full cache",
    )


def flips_of(rows: pd.DataFrame, *, name: str, title: str, against: str) -> Drawing:
    """The same from a table with columns config, family, n, b (lost), c (gained) and p."""
    if rows.empty or not {"config", "family", "n", "b", "c"} <= set(rows.columns) or all(rows["b"].isna()):
        raise ValueError("nothing to draw: no paired answers")
    table: Any = rows[[c for c in ("config", "family", "n", "b", "c", "p") if c in rows.columns]].reset_index(drop=True)
    return Drawing(
        name=name,
        title=title,
        caption=(
            f"Items answered worse (lost) and better (gained) than by {against}, of n each. Colour: gained minus lost, "
            f"as a share of n. A frame: exact two-sided p at most {CLEAR:g}, not corrected for the number of cells."
        ),
        alt=f"Table of flips against {against}. " + " ".join(_words(row) for row in table.to_dict("records")),
        table=table,
        draw=lambda paint: _draw(table, paint),
    )


def _words(row: Mapping) -> str:
    return f"{row['config']}, {row['family']}: lost {row['b']:.0f}, gained {row['c']:.0f} of {row['n']:.0f}."


def _draw(table: pd.DataFrame, paint: Ink) -> Figure:
    configs, families = list(dict.fromkeys(table["config"])), list(dict.fromkeys(table["family"]))
    labels = ["\n".join(textwrap.wrap(str(c), 30)) for c in configs]
    lines = sum(max(2, label.count("\n") + 1) for label in labels)
    figure = sheet(1.35 * len(families) + 3.4, 0.21 * lines + 1.0, paint)
    ax = figure.subplots()
    dress(ax, paint)
    ax.grid(visible=False)
    nets = [abs(r["c"] - r["b"]) / r["n"] for r in table.to_dict("records") if r["n"] and doc.finite(r["b"])]
    scale = Normalize(-max([*nets, 0.05]), max([*nets, 0.05]))
    colors = sns.color_palette("PuOr", as_cmap=True)
    for row in table.to_dict("records"):
        if pd.isna(row["b"]) or pd.isna(row["c"]) or not row["n"]:
            continue
        x, y = families.index(row["family"]), configs.index(row["config"])
        _cell(ax, (x, y), row, colors(scale((row["c"] - row["b"]) / row["n"])), paint)
    ax.set_xlim(-0.5, len(families) - 0.5)
    ax.set_ylim(len(configs) - 0.5, -0.5)
    ax.set_yticks(range(len(configs)), labels)
    ax.set_xticks(range(len(families)), [_heading(table, f) for f in families])
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=9)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return figure


def _cell(ax: Axes, at: tuple[int, int], row: Mapping, color: tuple, paint: Ink) -> None:
    x, y = at
    ax.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=color, edgecolor="none"))
    if doc.finite(row.get("p")) and row["p"] <= CLEAR:
        frame = Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, facecolor="none", edgecolor=paint.text, linewidth=2)
        ax.add_patch(frame)
    r, g, b, _ = color
    dark = 0.299 * r + 0.587 * g + 0.114 * b < 0.5  # luma: which text reads on this cell
    text = f"lost {row['b']:.0f}\ngained {row['c']:.0f}"
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color="#ffffff" if dark else "#1b1f24")


def _heading(table: pd.DataFrame, family: str) -> str:
    ns = sorted(set(table.loc[table["family"] == family, "n"].dropna().astype(int)))
    return f"{family}\nn = {ns[0] if len(ns) == 1 else f'{ns[0]} to {ns[-1]}'}" if ns else family
