"""Figures of a sweep beside bytes against accuracy: what every config loses, and losses along an axis.

One column per family. They show nats per answer token, which move long before an answer does, with 90 % intervals;
verdicts are of answers. Knows the result document; opens no window and no file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from kvlab.report import document as doc
from kvlab.report.figures.ink import HUES, LIGHT, MARKERS, Ink, below, dress, log2_axis, sheet

TITLES = {
    "losses": "Nats per answer token lost against the full cache, by config",
    "curves": "Losses against the full cache along an axis of the sweep",
}
# Colour and marker by verdict: what answers showed. Indices into the colour-blind palette.
_WORDS = {"RISES": (2, "^"), "HOLDS": (2, "o"), "INCONCLUSIVE": (1, "D"), "WORSE": (3, "X"), "INSENSITIVE": (7, "s")}
_LINES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
_AXES = {
    "keep": ("share of tokens kept (log2)", 1.0),
    "read": ("share of chunks read (log2)", 1.0),
    "read_bytes": ("read by a step at the workload, GiB (log2)", float(2**30)),
    "workload_bytes": ("KV cache at the workload, GiB (log2)", float(2**30)),
    "workload_effective_bits": ("bits a value at the workload (log2)", 1.0),
}
_NATS = "lost, nats per answer token"
_ASIDE = 1.15  # from the first to the last point of one place
_STRAIGHT = 0.05  # nats up to which the scale is linear


def losses(result: Mapping[str, Any], ink: Ink = LIGHT) -> Figure:
    """Every judged config on a line of its own, largest on top: change of nats per answer token with its interval.

    Raises ValueError where no answers were forced, so that there are no likelihoods.
    """
    families, entries = _families(result), _entries(result)
    height = 0.27 * len(entries) + 1.5
    figure = sheet(max(2.9 * len(families) + 2.6, 6.0), max(height, 2.6), ink)
    palette = _palette()
    (axes,) = figure.subplots(1, len(families), sharey=True, sharex=True, squeeze=False)
    for ax, family in zip(axes, families, strict=True):
        dress(ax, ink)
        ax.axvline(0, color=ink.text, linewidth=1)
        for row, entry in enumerate(entries):
            found, word = entry["likelihood"].get(family), entry["families"][family]["verdict"]
            if found:
                color, marker = _WORDS[word]
                _point(ax, found, row, palette[color], marker, ink)
        _straight_then_log(ax, entries, families)
        ax.set_title(_title(result, family), fontsize=10, color=ink.text, loc="left")
        ax.set_xlabel(_NATS, color=ink.text, fontsize=9)
    names = [f"{e.get('format', e['label'])}  {e['workload_effective_bits']:.2f} bit" for e in entries]
    axes[0].set_yticks(range(len(entries)), names, fontsize=8, color=ink.text)
    axes[0].set_ylim(len(entries) - 0.4, -0.6)
    words = [w for w in _WORDS if any(p["verdict"] == w for e in entries for p in e["families"].values())]
    marks = [_mark(f"answers: {w}", palette[_WORDS[w][0]], _WORDS[w][1], "none") for w in words]
    below(figure, marks, ink)
    return figure


def curves(result: Mapping[str, Any], x: str, hue: str, style: str, ink: Ink = LIGHT) -> Figure:
    """Losses along `x`: nats above, answers in points below. Colour is `hue`, line and marker are `style`, both names
    of axes. Configs that do not stand on these axes, such as one that keeps everything, are lines across.

    Raises ValueError for an axis that no config of the sweep stands on.
    """
    families, entries = _families(result), _entries(result)
    placed = [e for e in entries if all(_at(e, axis) is not None for axis in (x, hue, style))]
    if x not in _AXES or not placed:
        raise ValueError(f"no config stands on {x}, {hue} and {style}: x may be {', '.join(_AXES)}")
    figure = sheet(max(3.5 * len(families), 5.6), 6.4, ink)
    grid = figure.subplots(2, len(families), sharex=True, sharey="row", squeeze=False)
    asked = [e for e in doc.judged(result) if e in placed]  # a legend in the order of the parameters
    hues, styles = (list(dict.fromkeys(_at(e, axis) for e in asked)) for axis in (hue, style))
    for column, family in zip(grid.T, families, strict=True):
        for ax, lost in zip(column, (_nats_of, _points_of), strict=True):
            dress(ax, ink)
            ax.axhline(0, color=ink.text, linewidth=1)
            for n, h in enumerate(hues):
                for m, s in enumerate(styles):
                    mine = [e for e in placed if (_at(e, hue), _at(e, style)) == (h, s)]
                    shift = _ASIDE ** ((n * len(styles) + m) / max(1, len(hues) * len(styles) - 1) - 0.5)
                    _line(ax, [(_at(e, x) / _AXES[x][1] * shift, lost(e, family)) for e in mine], n, m, ink)
        margin = placed[0]["families"][family]["margin"]
        column[1].axhline(-100 * margin, color=ink.text, linewidth=0.9, linestyle=(0, (4, 3)))
        column[0].set_title(_title(result, family), fontsize=10, color=ink.text, loc="left")
        column[1].set_xlabel(_AXES[x][0], color=ink.text, fontsize=9)
    _scales(grid, [_at(e, x) / _AXES[x][1] for e in placed], ink)
    palette = _palette()
    marks = [_mark(f"{hue} {h}", palette[n % HUES], "o", "-") for n, h in enumerate(hues)]
    if len(styles) > 1:
        marks += [_mark(f"{style} {s}", ink.text, MARKERS[m], _LINES[m % 4]) for m, s in enumerate(styles)]
    marks.append(_mark(f"margin -{100 * placed[0]['families'][families[0]]['margin']:g} points", ink.text, "", "--"))
    below(figure, marks, ink)
    return figure


def _families(result: Mapping[str, Any]) -> list[str]:
    found = [f for f in doc.families(result) if any(f in (e.get("likelihood") or {}) for e in doc.judged(result))]
    if not found:
        raise ValueError("no likelihoods to draw: answers were decoded, or the run is no sweep")
    return found


def _entries(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return sorted((e for e in doc.judged(result) if e.get("likelihood")), key=lambda e: -e["workload_bytes"])


def _at(entry: Mapping[str, Any], axis: str) -> Any:
    """Where a config stands on an axis, None where it does not."""
    return entry["axes"].get(axis, entry.get(axis))


def _nats_of(entry: Mapping[str, Any], family: str) -> tuple[float, float | None, float | None]:
    found = entry["likelihood"][family]
    return found["dnll"], found["low"], found["high"]


def _points_of(entry: Mapping[str, Any], family: str) -> tuple[float, float | None, float | None]:
    found = entry["families"][family]
    return tuple(None if found[k] is None else 100 * found[k] for k in ("diff", "low", "high"))  # type: ignore


def _line(ax: Axes, points: Sequence[tuple[float, tuple]], n: int, m: int, ink: Ink) -> None:
    """One curve with its intervals."""
    color = _palette()[n % HUES]
    points = sorted(points)
    for at, (y, low, high) in points:
        if doc.finite(low) and doc.finite(high):
            ax.plot([at, at], [low, high], color=color, linewidth=1.1, alpha=0.6, zorder=2)
        ax.plot(
            at, y, MARKERS[m], color=color, markersize=5.5, zorder=4, markeredgecolor=ink.paper, markeredgewidth=0.6
        )
    line = [at for at, _ in points], [found[0] for _, found in points]
    ax.plot(*line, color=color, linewidth=1.2, linestyle=_LINES[m % 4], zorder=3)


def _point(ax: Axes, found: Mapping[str, Any], row: int, color: Any, marker: str, ink: Ink) -> None:
    if doc.finite(found["low"]) and doc.finite(found["high"]):
        ax.plot([found["low"], found["high"]], [row, row], color=color, linewidth=1.6, zorder=2)
    ax.plot(
        found["dnll"],
        row,
        marker,
        color=color,
        markersize=6.5,
        zorder=3,
        markeredgecolor=ink.paper,
        markeredgewidth=0.6,
    )


def _straight_then_log(ax: Axes, entries: Sequence[Mapping[str, Any]], families: Sequence[str]) -> None:
    found = [e["likelihood"][f] for e in entries for f in families if f in e["likelihood"]]
    ends = [v for f in found for v in (f["low"], f["high"], f["dnll"]) if doc.finite(v)]
    low, high = min([*ends, -_STRAIGHT / 2]), max([*ends, _STRAIGHT])
    ax.set_xscale("symlog", linthresh=_STRAIGHT)
    ax.set_xlim(1.3 * low, 1.3 * high)
    ticks = [t for t in (-5, -1, -0.2, -0.05, 0, 0.05, 0.2, 1, 5) if 1.3 * low <= t <= 1.3 * high]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _scales(grid: Any, at: Sequence[float], ink: Ink) -> None:
    """Axes of all panels, and what the rows are."""
    log2_axis(grid.flat, at)
    for ax in grid[0]:
        ax.set_yscale("symlog", linthresh=_STRAIGHT)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    grid[0][0].set_ylabel(_NATS, color=ink.text, fontsize=9)
    grid[1][0].set_ylabel("score difference, points", color=ink.text, fontsize=9)


def _title(result: Mapping[str, Any], family: str) -> str:
    return f"{family} (full cache {result['baseline']['families'][family]['score']:.2f})"


def _palette() -> Any:
    return sns.color_palette("colorblind", HUES)


def _mark(label: str, color: Any, marker: str, line: Any) -> Line2D:
    return Line2D([], [], color=color, marker=marker, linestyle=line, markersize=6, linewidth=1.2, label=label)
