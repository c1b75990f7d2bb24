"""How memory grows: bytes a cache holds against the tokens it has seen, or what a run took against time.

Knows tables of plain numbers: item rows, decode documents, or what a decode loop noted.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvlab.report import document as doc
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import Ink, below, dress, log2_axis, sheet, styles, unit_of

MOST = 8  # lines in one figure; the table has them all
RAW = "16 bit, computed"
HOST, DEVICE = "host, resident", "GPU, in tensors"
POINTS = 200  # in time, of each line
MARKS = 40  # most markers on one line


def memory_over_time(
    frame: pd.DataFrame,
    *,
    budget_bytes: float | None = None,
    about: str = "",
    joined: bool = True,
    name: str = "memory",
    of: str = "cache",
    held: str = "Bytes a cache holds, scales and positions included",
) -> Drawing:
    """Bytes against tokens, or against seconds where the frame has them; one line for each cache.

    `frame` has columns cache (or whatever else `of` says bytes are of), bytes, and tokens or seconds. Raises ValueError
    naming a missing column, or for no rows.
    """
    along = "seconds" if "seconds" in frame.columns else "tokens"
    missing = [c for c in (of, "bytes", along) if c not in frame.columns]
    if missing or frame.empty:
        raise ValueError(f"nothing to draw: need rows of {of}, bytes and tokens or seconds, got {list(frame.columns)}")
    lines = list(dict.fromkeys(frame[of]))
    rows = zip(frame[of], frame[along], frame["bytes"], strict=True)
    records = sorted(({of: line, along: at, "bytes": b} for line, at, b in rows), key=lambda r: r[along])
    table = pd.DataFrame([r for line in lines for r in records if r[of] == line])
    last = {r[of]: r["bytes"] for r in records}
    said = "; ".join(f"{line} {doc.size(float(last[line]))}" for line in lines)
    end = f"{records[-1][along]:,.0f} {along}"
    cut = f" The first {MOST} of {len(lines)} are drawn; the table has all." if len(lines) > MOST else ""
    return Drawing(
        name=name,
        title="Memory as the context grows" if along == "tokens" else "Memory over time",
        caption=f"{held}, against {along}, log2 axis. {about}{cut}".strip(),
        alt=f"Bytes against {along}, one line per {of}. At the end, up to {end}: {said}.",
        table=table,
        draw=lambda paint: _draw(table, of, lines[:MOST], along, budget_bytes, joined, paint),
    )


def memory_of_rows(rows: pd.DataFrame, labels: Mapping[str, str]) -> Drawing:
    """From item rows of a run: measured bytes right after contexts of many lengths, for the configs in `labels`.

    Rows of equal length are one point. Adds what 16 bit would take. Raises ValueError where no row is of those configs.
    """
    own = [r for r in rows.to_dict("records") if r["config_id"] in labels]
    if not own:
        raise ValueError("nothing to draw: no rows of these configs")
    seen: dict[tuple[str, int], list[float]] = {}
    for row in own:
        seen.setdefault((RAW, row["context_tokens"]), []).append(row["raw16_bytes"])
        seen.setdefault((labels[row["config_id"]], row["context_tokens"]), []).append(row["measured_bytes"])
    points = [{"cache": c, "tokens": tokens, "bytes": sum(b) / len(b)} for (c, tokens), b in seen.items()]
    order = {name: n for n, name in enumerate([RAW, *labels.values()])}
    named = pd.DataFrame(sorted(points, key=lambda p: order[str(p["cache"])]))
    n = len({row["item_id"] for row in own})
    return memory_over_time(named, about=f"Measured right after the context of n = {n} items.", joined=False)


def memory_of_process(rows: pd.DataFrame) -> Drawing:
    """From item rows of a run: memory its process held while at work, of the host and of GPUs.

    Of each part of the time the most that was noted is drawn. Raises ValueError for rows without times.
    """
    noted = {"elapsed_s", "host_bytes", "device_bytes"} <= set(rows.columns)
    own = rows.dropna(subset="elapsed_s").reset_index(drop=True) if noted else rows.head(0)
    if own.empty:
        raise ValueError("nothing to draw: these rows note no time")
    part = (own["elapsed_s"] // max(own["elapsed_s"].max() / POINTS, 1e-9)).clip(upper=POINTS - 1)
    points: list[dict[str, Any]] = []
    for name, column in ((HOST, "host_bytes"), (DEVICE, "device_bytes")):
        sizes = own[column].astype(float).dropna()
        most = own.loc[sizes.groupby(part.loc[sizes.index]).idxmax()]
        points += [
            {"memory": name, "seconds": s, "bytes": b} for s, b in zip(most["elapsed_s"], most[column], strict=True)
        ]
    return memory_over_time(
        pd.DataFrame(points, columns=["memory", "seconds", "bytes"]),
        of="memory",
        about=f"Noted with each of {len(own)} rows; what was taken and given back between two is not seen.",
        name="process",
        held="Memory of the process that wrote the run, model and snapshots included, while at work",
    )


def memory_of_decode(document: Mapping[str, Any]) -> Drawing:
    """From a decode bench document: bytes each cache held at every context."""
    rows = [r for r in document["rows"] if r.get("bytes") is not None]
    frame = pd.DataFrame(
        [{"cache": r["name"], "tokens": r["context"], "bytes": r["bytes"]} for r in rows],
        columns=["cache", "tokens", "bytes"],
    )
    return memory_over_time(frame, about=f"{document['model']}, one conversation.")


def _draw(
    table: pd.DataFrame, of: str, names: list[str], along: str, budget: float | None, joined: bool, paint: Ink
) -> Figure:
    shown: Any = table[table[of].isin(names)]
    looks = styles(n for n in names if n != RAW) | {RAW: (paint.text, "")}
    sizes = [float(b) for b in shown["bytes"] if b > 0] + ([budget] if budget else [])
    scale, unit = unit_of(sizes)
    figure = sheet(7.2, 4.4, paint)
    ax = figure.subplots()
    dress(ax, paint)
    for name in names:
        own = shown[(shown[of] == name) & (shown["bytes"] > 0)]
        color, marker = looks[name]
        line = "-" if joined or name == RAW else "none"
        ax.plot(
            own[along], own["bytes"] / scale, color=color, marker=marker, linestyle=line, markersize=5, linewidth=1.2,
            markeredgecolor=paint.paper, markeredgewidth=0.5, markevery=1 + len(own) // MARKS,
        )  # fmt: skip
    if budget:
        ax.axhline(budget / scale, color=paint.text, linewidth=1.1, linestyle=":")
    log2_axis([ax], [s / scale for s in sizes], "y")
    ax.set_xlabel("tokens seen" if along == "tokens" else "seconds", color=paint.text, fontsize=9)
    ax.set_ylabel(f"bytes held, {unit} (log2)", color=paint.text, fontsize=9)
    handles = [
        Line2D([], [], color=looks[n][0], marker=looks[n][1], linestyle="-" if joined or n == RAW else "none", label=n)
        for n in names
    ]
    if budget:
        handles.append(Line2D([], [], color=paint.text, linestyle=":", label=f"budget {doc.size(budget)}"))
    below(figure, handles, paint)
    return figure
