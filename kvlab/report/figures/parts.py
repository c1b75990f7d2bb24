"""Where the bytes of a cache go: codes, scales, raw tokens, positions, one stacked bar for each cache.

Knows a table of bytes by stream; told apart by colour and by hatching.
"""

import textwrap
from collections.abc import Iterable, Mapping

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvlab.report import document as doc
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import HUES, Ink, below, dress, sheet, unit_of

_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")


def bytes_by_stream(frame: pd.DataFrame, *, where: str = "at the workload", raw_bytes: float | None = None) -> Drawing:
    """One bar per cache, the first on top, parts in the order given. `frame` has columns cache, stream and bytes.

    A bar starts at zero, so the axis is linear. Raises ValueError for a missing column or no bytes.
    """
    missing = [c for c in ("cache", "stream", "bytes") if c not in frame.columns]
    if missing or frame.empty:
        raise ValueError(f"nothing to draw: need rows of cache, stream and bytes, got {list(frame.columns)}")
    rows = zip(frame["cache"], frame["stream"], frame["bytes"], strict=True)
    records: list[dict] = [{"cache": c, "stream": s, "bytes": b} for c, s, b in rows if b > 0]
    totals = _totals(records)
    records = [{**r, "share": r["bytes"] / totals[r["cache"]]} for r in records]
    table = pd.DataFrame(records)
    said = [
        f"{cache}: {doc.size(total)}, {', '.join(_share(r) for r in records if r['cache'] == cache)}."
        for cache, total in totals.items()
    ]
    line = f" Dashed: 16 bit, {doc.size(raw_bytes)}." if raw_bytes else ""
    return Drawing(
        name="streams",
        title="Where the bytes go",
        caption=f"Bytes {where}, by what they store.{line}",
        alt=f"Stacked bars of bytes by stream. {' '.join(said)}",
        table=table,
        draw=lambda paint: _draw(table, raw_bytes, where, paint),
    )


def streams_of(entries: Iterable[Mapping]) -> pd.DataFrame:
    """The table that `bytes_by_stream` takes, from entries of a result document that say their streams."""
    lines = [
        {"cache": entry["label"], "stream": stream, "bytes": count}
        for entry in entries
        for stream, count in (entry.get("streams") or {}).items()
    ]
    return pd.DataFrame(lines, columns=["cache", "stream", "bytes"])


def _totals(records: Iterable[Mapping]) -> dict[str, float]:
    """Bytes of each cache, in order of appearance."""
    sums: dict[str, float] = {}
    for row in records:
        sums[row["cache"]] = sums.get(row["cache"], 0.0) + row["bytes"]
    return sums


def _share(row: Mapping) -> str:
    return f"{row['stream']} {100 * row['share']:.1f}%"


def _draw(table: pd.DataFrame, raw: float | None, where: str, paint: Ink) -> Figure:
    caches, streams = list(dict.fromkeys(table["cache"])), list(dict.fromkeys(table["stream"]))
    labels = ["\n".join(textwrap.wrap(str(c), 26)) for c in caches]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = sheet(7.6, 0.22 * lines + 0.24 * len(caches) + 1.4, paint)
    ax = figure.subplots()
    dress(ax, paint)
    ax.grid(visible=False, axis="y")
    records = table.to_dict("records")
    scale, unit = unit_of([*_totals(records).values(), raw or 0])
    palette = sns.color_palette("colorblind", HUES)
    looks = {s: (palette[n % HUES], _HATCHES[(n + n // HUES) % len(_HATCHES)]) for n, s in enumerate(streams)}
    for y, cache in enumerate(caches):
        left = 0.0
        for row in (r for r in records if r["cache"] == cache):
            color, hatch = looks[row["stream"]]
            ax.barh(
                y, row["bytes"] / scale, left=left, color=color, hatch=hatch, edgecolor=paint.paper, linewidth=0.5,
                height=0.62,
            )  # fmt: skip
            left += row["bytes"] / scale
    if raw:
        ax.axvline(raw / scale, color=paint.text, linewidth=1, linestyle=(0, (4, 3)))
    ax.set_yticks(range(len(caches)), labels)
    ax.set_ylim(len(caches) - 0.5, -0.5)
    ax.set_xlabel(f"bytes {where}, {unit}", color=paint.text, fontsize=9)
    handles = [Patch(facecolor=c, hatch=h, edgecolor=paint.paper, label=s) for s, (c, h) in looks.items()]
    below(figure, handles, paint)
    return figure
