"""A picture: one figure, the table it was drawn from, and both in words. Knows no model.

Figures take colours, markers and paper from the report, so that a notebook and a report look alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.report.figures import ink

INK = ink.LIGHT
MAP = "cividis"


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """`table` holds every number that is drawn, `alt` says in words what the figure shows."""

    figure: Figure
    table: pd.DataFrame
    alt: str

    @property
    def png(self) -> bytes:
        """The figure as PNG bytes, the same for the same figure."""
        return ink.png(self.figure)

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"image/png": self.png, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}


def sheet(rows: int, columns: int, *, width: float = 4.2, height: float = 3.0, **more: Any) -> tuple[Figure, Any]:
    """An empty figure and its axes [rows, columns], dressed; sizes in inches for each panel."""
    figure = Figure(figsize=(max(width * columns, 5.0), height * rows), layout="constrained", dpi=110)
    figure.set_facecolor(INK.paper)
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for ax in axes.flat:
        ink.dress(ax, INK)
    return figure, axes


def name(ax: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Title and axis labels, units included by the caller."""
    ax.set_title(title, fontsize=10, color=INK.text, loc="left")
    ax.set_xlabel(x, fontsize=9, color=INK.text)
    ax.set_ylabel(y, fontsize=9, color=INK.text)


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker by name, as keywords of a plot."""
    return {one: {"color": color, "marker": marker} for one, (color, marker) in ink.styles(names).items()}


def heat(ax: Axes, values: Any, **more: Any) -> Any:
    """A heat map, row 0 at the top; returns what a colour bar is made for."""
    ax.grid(visible=False)
    return ax.imshow(values, aspect="auto", cmap=MAP, interpolation="nearest", **more)


def legend(ax: Axes, **more: Any) -> None:
    """A legend without a frame, in the ink of the text."""
    ax.legend(fontsize=8, frameon=False, labelcolor=INK.text, **more)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain dicts."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def split(rows: Iterable[dict[str, Any]], by: str) -> dict[Any, list[dict[str, Any]]]:
    """Rows by what they have in one column, in the order these come."""
    parts: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row[by], []).append(row)
    return parts


def mean(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    """Mean of a column; NaN where there are no rows."""
    return sum(float(row[column]) for row in rows) / len(rows) if rows else math.nan


def scale(figure: Figure, ax: Any, shown: Any, label: str) -> None:
    """A colour bar beside `ax`, or beside several of them."""
    bar = figure.colorbar(shown, ax=ax, pad=0.02, fraction=0.05)
    bar.set_label(label, fontsize=8, color=INK.text)
    bar.ax.tick_params(labelsize=7, colors=INK.text)


def listed(words: Iterable[object]) -> str:
    """`a, b and c`."""
    *most, last = [str(w) for w in words] or [""]
    return f"{', '.join(most)} and {last}" if most else last
