"""One panel per family: every judged config's difference to the full cache with its interval, largest cache on top.

Knows the result document; opens no window and no file.
"""

import textwrap
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvlab.report import document as doc
from kvlab.report import frames
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import Ink, below, dress, mark, sheet, styles


def family_panels(result: Mapping) -> Drawing:
    """Paired differences in points with two-sided 90 % intervals. Raises ValueError where nothing was judged."""
    if not _entries(result):
        raise ValueError("nothing to draw: no config was judged against the full cache")
    return Drawing(
        name="families",
        title="Accuracy against the full cache, family by family",
        caption=_caption(result),
        alt=_alt(result),
        table=frames.family_rows(result),
        draw=lambda paint: _draw(result, paint),
    )


def _entries(result: Mapping) -> list[dict]:
    """Judged configs but the baseline, smallest first: that is from the bottom upwards."""
    baseline = (result.get("baseline") or {}).get("config_id")
    entries = [e for e in doc.judged(result) if e["config_id"] != baseline and e.get("families")]
    return sorted(entries, key=lambda e: (doc.finite(e.get("workload_bytes")), e.get("workload_bytes") or 0))


def _draw(result: Mapping, paint: Ink) -> Figure:
    families, entries = doc.families(result), _entries(result)
    labels = ["\n".join(textwrap.wrap(e["label"], 26)) for e in entries]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = sheet(max(2.6 * len(families) + 2.0, 5.6), 0.22 * lines + 0.22 * len(entries) + 1.5, paint)
    looks = styles(e["config_id"] for e in reversed(entries))
    grid = figure.subplots(1, len(families), sharex=True, sharey=True, squeeze=False)[0]
    for ax, family in zip(grid, families, strict=True):
        dress(ax, paint)
        _panel(ax, result, family, entries, looks, paint)
        ax.set_title(_title(result, family), fontsize=9, color=paint.text, loc="left")
    grid[0].set_yticks(range(len(entries)), labels)
    grid[0].set_ylim(-0.6, len(entries) - 0.4)
    # In the middle panel: a label of the figure would lie under the legend.
    grid[len(grid) // 2].set_xlabel("score difference to the full cache, points", color=paint.text, fontsize=9)
    margins = sorted({100 * p["margin"] for e in entries for p in e["families"].values() if p.get("margin")})
    dashed = f"margin -{'/-'.join(f'{m:g}' for m in margins)} points"
    handles = [Line2D([], [], color=paint.text, linewidth=0.9, linestyle=(0, (4, 3)), label=dashed)] if margins else []
    if any(not doc.fits(result, e) for e in entries):
        handles.append(mark("over budget", paint.over, "X"))
    below(figure, handles, paint)
    return figure


def _panel(ax: Axes, result: Mapping, family: str, entries: list[dict], looks: Mapping, paint: Ink) -> None:
    ax.axvline(0, color=paint.text, linewidth=1)
    for margin in {100 * e["families"][family]["margin"] for e in entries if _margin(e, family)}:
        ax.axvline(-margin, color=paint.text, linewidth=0.9, linestyle=(0, (4, 3)))
    for y, entry in enumerate(entries):
        pair = entry["families"].get(family) or {}
        if not doc.finite(pair.get("diff")):
            continue
        color, marker = looks[entry["config_id"]] if doc.fits(result, entry) else (paint.over, "X")
        x = 100 * pair["diff"]
        if (pair.get("n") or 0) > 1 and doc.finite(pair.get("low")) and doc.finite(pair.get("high")):
            reach = [[x - 100 * pair["low"]], [100 * pair["high"] - x]]
            ax.errorbar(x, y, xerr=reach, color=color, linewidth=1.4, capsize=3, zorder=2, fmt="none")
        ax.plot(x, y, marker, color=color, markersize=7, zorder=4, markeredgecolor=paint.paper, markeredgewidth=0.7)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _margin(entry: Mapping, family: str) -> bool:
    return doc.finite((entry["families"].get(family) or {}).get("margin"))


def _ns(result: Mapping, family: str) -> list[int]:
    return sorted({p["n"] for e in _entries(result) if (p := e["families"].get(family)) and p.get("n") is not None})


def _title(result: Mapping, family: str) -> str:
    ns = _ns(result, family)
    n = f"n = {ns[0]}" if len(ns) == 1 else f"n = {ns[0]} to {ns[-1]}" if ns else "n unknown"
    return f"{family}, {n}"


def _caption(result: Mapping) -> str:
    parts = [
        "Difference to the full cache on the same fresh items, with the two-sided 90% interval of the paired "
        "difference; a bar that stays right of the dashed margin holds. Largest cache on top."
    ]
    if any(1 in _ns(result, f) for f in doc.families(result)):
        parts.append("One item gives no interval: none is drawn.")
    return " ".join(parts)


def _alt(result: Mapping) -> str:
    frame = frames.family_rows(result)
    said = [_words(row) for row in frame.to_dict("records")]
    return f"Dot plot, one panel per family, of score differences with intervals. {' '.join(said)}"


def _words(row: Mapping) -> str:
    if pd.isna(row["diff_points"]):
        return f"{row['config']}, {row['family']}: no difference known."
    known = not pd.isna(row["low_points"]) and row["n"] > 1
    ends = f" [{row['low_points']:+.1f}, {row['high_points']:+.1f}]" if known else ""
    return f"{row['config']}, {row['family']}: {row['diff_points']:+.1f} points{ends}, {row['verdict']}."
