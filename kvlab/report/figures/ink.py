"""Colours, markers, axes and files that all figures share. One palette, told apart by marker as well as by colour.

Knows no result.
"""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

MARKERS = "osD^vP*h"
HUES = 8  # more are not told apart; a hue comes back with another marker
GIB = 2**30
# Inches of a legend: what an entry takes besides its words, a character of them, a line.
_ENTRY, _LINE = (0.55, 0.066), 0.165


@dataclass(frozen=True, slots=True)
class Ink:
    """Colours of one theme."""

    paper: str
    text: str
    faint: str
    over: str


LIGHT = Ink(paper="#ffffff", text="#1b1f24", faint="#d5d9de", over="#8a9099")
DARK = Ink(paper="#15181c", text="#e4e7eb", faint="#3a4048", over="#8a9099")


def ink(dark: bool) -> Ink:
    return DARK if dark else LIGHT


def style(n: int) -> tuple[Any, str]:
    """Colour and marker of the n-th thing drawn."""
    return sns.color_palette("colorblind", HUES)[n % HUES], MARKERS[(n + n // HUES) % len(MARKERS)]


def styles(names: Iterable[str]) -> dict[str, tuple[Any, str]]:
    """Colour and marker by name, in the order given."""
    return {name: style(n) for n, name in enumerate(dict.fromkeys(names))}


def sheet(width: float, height: float, paint: Ink) -> Figure:
    """An empty figure of so many inches; no window is opened."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    figure.set_facecolor(paint.paper)
    return figure


def dress(ax: Axes, paint: Ink) -> None:
    """Quiet axes: a faint grid behind, two spines."""
    ax.set_facecolor(paint.paper)
    ax.grid(color=paint.faint, linewidth=0.5)
    ax.set_axisbelow(True)
    ax.tick_params(colors=paint.text, labelsize=8)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(paint.over)


def log2_axis(axes: Iterable[Axes], sizes: Sequence[float], which: str = "x") -> None:
    """One log2 axis with room at both ends, ticks at powers of two, or between them when the span is short."""
    for ax in axes:
        axis = ax.xaxis if which == "x" else ax.yaxis
        (ax.set_xscale if which == "x" else ax.set_yscale)("log", base=2)
        if sizes:
            (ax.set_xlim if which == "x" else ax.set_ylim)(min(sizes) / 1.25, max(sizes) * 1.25)
            narrow = max(sizes) / min(sizes) < 6
            axis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5) if narrow else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axis.set_minor_formatter(NullFormatter())


def unit_of(sizes: Sequence[float]) -> tuple[float, str]:
    """Bytes in one unit that suits the largest, and its name."""
    most = max(sizes, default=0)
    return next(((s, n) for s, n in ((GIB, "GiB"), (2**20, "MiB")) if most >= s), (2**10, "KiB"))


def mark(label: str, color: Any, marker: str, **more: Any) -> Line2D:
    """A legend entry of one marker."""
    return Line2D([], [], color=color, marker=marker, linestyle="none", markersize=7, label=label, **more)


def below(figure: Figure, handles: Sequence[Any], paint: Ink) -> None:
    """A legend under the figure, so that it covers nothing: as many columns as its longest entry allows, and more
    paper where it is long."""
    if not handles:
        return
    widest = _ENTRY[0] + _ENTRY[1] * max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), round(figure.get_figwidth() / 2.2), int(figure.get_figwidth() / widest)))
    lines = math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + _LINE * max(0, lines - 3))
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=paint.text,
    )


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """The figure as SVG bytes, the same for the same figure: no date, fixed ids, text kept as text."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kvlab", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", facecolor=figure.get_facecolor(), metadata={"Date": None})
    return buffer.getvalue()
