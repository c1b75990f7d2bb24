"""Milliseconds per token against the context, one line for each cache: the figure of the decode bench.

Knows documents of schema kvlab.bench.decode/1.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import MARKERS, Ink, below, dress, mark, sheet, styles

_COLUMNS = ("name", "context", "ms_per_token", "ms_least", "ms_most", "bytes", "bytes_16bit")


def decode_times(document: Mapping[str, Any]) -> Drawing:
    """Medians as lines, the least and the most of all turns as bars. Raises ValueError where nothing was timed."""
    table = pd.DataFrame([{c: r.get(c) for c in _COLUMNS} for r in document["rows"] if r["ms_per_token"] is not None])
    if table.empty:
        raise ValueError("nothing to draw: no cache was timed")
    threads = f"{document['threads']} thread" + ("s" if document["threads"] != 1 else "")
    turns = document.get("turns")
    n = f" of n = {turns} turns" if turns else ""
    timed: list[Any] = table.to_dict("records")
    most = max(r["context"] for r in timed)
    longest = sorted((r for r in timed if r["context"] == most), key=lambda r: r["ms_per_token"])
    said = "; ".join(f"{r['name']} {r['ms_per_token']:.1f}" for r in longest)
    return Drawing(
        name="decode",
        title=f"Decode, {document['model']}, {document['dtype']}, {threads}",
        caption=f"Milliseconds per token, median{n}; bars: least and most. Caches took turns on the same tokens.",
        alt=f"Milliseconds per token against tokens in the cache. At {most:,} tokens: {said}.",
        table=table,
        draw=lambda paint: _draw(document, table, threads, paint),
    )


def _draw(document: Mapping, table: pd.DataFrame, threads: str, paint: Ink) -> Figure:
    names = list(dict.fromkeys(table["name"]))
    looks = styles(names)
    figure = sheet(7.2, 4.6, paint)
    ax = figure.subplots()
    dress(ax, paint)
    sns.lineplot(
        table, x="context", y="ms_per_token", hue="name", style="name", hue_order=names, style_order=names,
        palette={n: looks[n][0] for n in names}, markers={n: looks[n][1] for n in names}, dashes=False,
        errorbar=None, legend=False, markeredgecolor=paint.paper, ax=ax,
    )  # fmt: skip
    for name, own in table.groupby("name", sort=False):
        color = looks[str(name)][0]
        ax.vlines(own["context"], own["ms_least"], own["ms_most"], color=color, alpha=0.45, linewidth=1)
    ax.set_ylim(bottom=0)
    ax.set_xticks(sorted(table["context"].unique()))
    ax.tick_params(axis="x", labelrotation=45)
    ax.set_xlabel("tokens in the cache", color=paint.text, fontsize=9)
    ax.set_ylabel("ms per token, median; bars: least and most", color=paint.text, fontsize=9)
    title = f"Decode, {document['model']}, {document['dtype']}, {threads}"
    ax.set_title(title, fontsize=10, color=paint.text, loc="left")
    below(figure, [mark(n, *looks[n], linewidth=0) for n in names], paint)
    assert all(marker in MARKERS for _, marker in looks.values())
    return figure
