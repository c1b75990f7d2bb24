"""One figure of the decode bench: milliseconds per token against context, one line for each cache."""

import io
from collections.abc import Mapping
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure


def draw(document: Mapping[str, Any]) -> Figure:
    """Medians as lines, the least and the most of all turns as bars."""
    frame = pd.DataFrame([r for r in document["rows"] if r["ms_per_token"] is not None])
    names = list(dict.fromkeys(frame["name"]))
    colours = dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))
    figure = Figure(figsize=(7.2, 4.4), layout="constrained", dpi=120)
    axes = figure.subplots()
    sns.lineplot(
        frame, x="context", y="ms_per_token", hue="name", style="name", hue_order=names, style_order=names,
        palette=colours, markers=True, dashes=False, errorbar=None, ax=axes,
    )  # fmt: skip
    for name, own in frame.groupby("name", sort=False):
        axes.vlines(own["context"], own["ms_least"], own["ms_most"], color=colours[name], alpha=0.45, linewidth=1)  # type: ignore[index]
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted(frame["context"].unique()))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set(xlabel="tokens in the cache", ylabel="ms per token, median; bars: least and most")
    threads = f"{document['threads']} thread" + ("s" if document["threads"] != 1 else "")
    axes.set_title(f"Decode, {document['model']}, {document['dtype']}, {threads}", fontsize=10)
    axes.legend(title=None, frameon=False, fontsize=8, ncols=2)
    sns.despine(figure)
    return figure


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as bytes of a "png" or "svg" file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, facecolor="white")
    return buffer.getvalue()
