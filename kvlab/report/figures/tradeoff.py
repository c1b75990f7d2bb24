"""What a config costs in bytes against what it does to accuracy, one column per family.

Upper row: configs confirmed on fresh items, difference to the baseline with its 90 % interval. Lower row: everything
scored while searching, optimistic and without intervals. Knows the result document; opens no window and no file.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from kvlab.report import document as doc
from kvlab.report import frames
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import Ink, below, dress, ink, log2_axis, mark, sheet, styles, unit_of

NAMES = 12  # most names written beside searched points in one panel; the table below the figure has them all


def tradeoff_drawing(result: Mapping) -> Drawing:
    """`pareto` with its words; the table has the lower row's numbers, `frames.family_rows` those of the upper one."""
    return Drawing(
        name="pareto",
        title="Bytes against accuracy",
        caption=caption(result),
        alt=alt(result),
        table=frames.configs(result) if doc.searched(result) else frames.family_rows(result),
        draw=lambda paint: _pareto(result, paint),
    )


def pareto(result: Mapping, *, dark: bool = False) -> Figure:
    """Bytes at the workload (log2) against score difference in points and, below, delta NLL, per family.

    Configs over the budget are grey crosses and take no part in the front. Needs at least one family.
    """
    return _pareto(result, ink(dark))


def _pareto(result: Mapping, paint: Ink) -> Figure:
    families = doc.families(result)
    if not families:
        raise ValueError("nothing to draw: the result names no family with scores")
    rows = [draw for draw, entries in ((_confirmed, doc.judged(result)), (_searched, doc.searched(result))) if entries]
    rows = rows or [_confirmed]
    figure = sheet(max(3.7 * len(families), 5.6), 3.1 * len(rows) + 1.1, paint)
    grid = figure.subplots(len(rows), len(families), sharex=True, sharey="row", squeeze=False)
    looks = _looks(result)
    for draw, axes in zip(rows, grid, strict=True):
        for ax, family in zip(axes, families, strict=True):
            dress(ax, paint)
            draw(ax, result, family, looks, paint)
            _budget(ax, result, paint)
        axes[0].set_ylabel(_AXES[draw], color=paint.text, fontsize=9)
    for ax, family in zip(grid[0], families, strict=True):
        ax.set_title(_title(result, family), fontsize=10, color=paint.text, loc="left")
    _scale_x([ax for axes in grid for ax in axes], result)
    for ax in grid[-1]:
        ax.set_xlabel(f"KV cache at the workload, {_unit(result)[1]} (log2)", color=paint.text, fontsize=9)
    _legend(figure, result, looks, paint)
    if _searched in rows:
        figure.draw_without_rendering()  # labels are placed in pixels, which exist only after a layout
        for ax, family in zip(grid[rows.index(_searched)], families, strict=True):
            _label(ax, _unnamed(result, family, looks), paint)
    return figure


def caption(result: Mapping) -> str:
    """What the figure shows, which intervals, how many items."""
    parts = [f"KV cache at {doc.workload(result)}, log2 axis."]
    if doc.judged(result):
        ns = sorted({f["n"] for e in doc.judged(result) for f in e.get("families", {}).values() if f.get("n")})
        n = f"n = {ns[0]}" if len(ns) == 1 else f"n = {ns[0]} to {ns[-1]}" if ns else "n unknown"
        parts.append(
            f"Difference to the raw cache on the same fresh items ({n} a family), with two-sided 90% intervals of the "
            "paired difference; a bar that stays above the dashed margin holds. Points of equal size are set apart."
        )
        if 1 in ns:
            parts.append("One item gives no interval: none is drawn.")
    if doc.searched(result):
        parts.append(
            "Lower row: every config scored while searching, on search items, lower is better, no intervals; the line "
            "joins the best of those that saw all items."
        )
    if result.get("budget_bytes") is not None:
        parts.append(f"Grey crosses exceed the budget of {doc.size(result['budget_bytes'])}: {_over(result)}.")
    if result.get("seed") is not None:
        parts.append(f"Seed {result['seed']}.")
    return " ".join(parts)


def _over(result: Mapping) -> str:
    """How many configs do not fit, of those that each row draws."""
    rows = {"confirmed": doc.judged(result), "searched": doc.searched(result)}
    sized = {name: [e for e in entries if _has_size(e)] for name, entries in rows.items() if entries}
    counted = {name: (sum(not doc.fits(result, e) for e in own), len(own)) for name, own in sized.items()}
    return " and ".join(f"{over} of {n} {name}" for name, (over, n) in counted.items()) or "none was scored"


def alt(result: Mapping) -> str:
    """The figure in words, for those who cannot see it."""
    lines = [f"Scatter plot per family of KV bytes at the workload against accuracy. {doc.budget_line(result)}"]
    for entry in doc.judged(result):
        points = [
            f"{name} {100 * pair['diff']:+.1f} points"
            for name, pair in (entry.get("families") or {}).items()
            if doc.finite(pair.get("diff"))
        ]
        over = "" if doc.fits(result, entry) else ", over budget"
        lines.append(f"{entry['label']}: {doc.size(entry.get('workload_bytes'))}{over}; {', '.join(points)}.")
    return " ".join(lines)


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other beats in both coordinates (lower is better), by ascending first coordinate."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def side_by_side(sizes: Mapping[str, float], near: float = 1.03, step: float = 1.035) -> dict[str, float]:
    """Factors that set points of (nearly) equal size beside each other, centred on where they belong."""
    groups: list[list[str]] = []
    for name in sorted(sizes, key=lambda n: sizes[n]):
        if groups and sizes[name] <= sizes[groups[-1][-1]] * near:
            groups[-1].append(name)
        else:
            groups.append([name])
    return {name: step ** (i - (len(g) - 1) / 2) for g in groups for i, name in enumerate(g)}


def _confirmed(ax: Axes, result: Mapping, family: str, looks: Mapping, paint: Ink) -> None:
    """Paired differences with intervals, the baseline at zero, the margin below it."""
    ax.axhline(0, color=paint.text, linewidth=1)
    for margin in {100 * p["margin"] for p in _pairs(result, family) if p.get("margin") is not None}:
        ax.axhline(-margin, color=paint.text, linewidth=0.9, linestyle=(0, (4, 3)))
    raw, scale = doc.raw_bytes(result), _unit(result)[0]
    baseline = (result.get("baseline") or {}).get("config_id")
    shift = side_by_side({e["config_id"]: e["workload_bytes"] for e in doc.judged(result) if _has_size(e)})
    if doc.finite(raw):
        inside = doc.fits(result, {"workload_bytes": raw})
        ax.plot(
            raw / scale, 0, "s" if inside else "X", color=paint.text if inside else paint.over, markersize=7, zorder=3
        )
    for entry in doc.judged(result):
        pair = (entry.get("families") or {}).get(family) or {}
        if entry["config_id"] == baseline or not (doc.finite(pair.get("diff")) and _has_size(entry)):
            continue
        color, marker = looks[entry["config_id"]] if doc.fits(result, entry) else (paint.over, "X")
        x, y = entry["workload_bytes"] / scale * shift[entry["config_id"]], 100 * pair["diff"]
        if (pair.get("n") or 0) > 1 and doc.finite(pair.get("low")) and doc.finite(pair.get("high")):
            reach = [[y - 100 * pair["low"]], [100 * pair["high"] - y]]
            ax.errorbar(x, y, yerr=reach, color=color, linewidth=1.4, capsize=3, zorder=2, fmt="none")
        ax.plot(x, y, marker, color=color, markersize=7, zorder=4, markeredgecolor=paint.paper, markeredgewidth=0.7)
    reach = [100 * v for f in doc.families(result) for p in _pairs(result, f) for v in _extent(p) if doc.finite(v)]
    ax.set_ylim(1.08 * min(reach, default=0) - 1, 1.08 * max(reach, default=0) + 1)
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _searched(ax: Axes, result: Mapping, family: str, looks: Mapping, paint: Ink) -> None:
    """Search scores without intervals, and the front of what fits and has seen every item: few items flatter."""
    ax.axhline(0, color=paint.text, linewidth=1)
    inside, scale = [], _unit(result)[0]
    every = max((_seen(entry, family) for entry in doc.searched(result)), default=0)
    for entry in doc.searched(result):
        y = ((entry.get("search") or {}).get(family) or {}).get("dnll")
        if not (doc.finite(y) and _has_size(entry)):
            continue
        x, fits = entry["workload_bytes"] / scale, doc.fits(result, entry)
        inside += [(x, y)] if fits and _seen(entry, family) == every else []
        color, marker = looks.get(entry["config_id"], (paint.text, ".")) if fits else (paint.over, "X")
        faint = 1.0 if entry["config_id"] in looks else 0.55
        ax.plot(x, y, marker, color=color, alpha=faint, markersize=6, zorder=3, markeredgecolor="none")
    best = front(inside)
    ax.step([x for x, _ in best], [y for _, y in best], where="post", color=paint.text, linewidth=0.9, zorder=1)
    ax.set_yscale("symlog", linthresh=0.1)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.2g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _seen(entry: Mapping, family: str) -> int:
    """Items of a family that a searched config was scored on."""
    return ((entry.get("search") or {}).get(family) or {}).get("n") or 0


_AXES = {_confirmed: "score difference, points", _searched: "delta NLL, nats per answer token"}


def _looks(result: Mapping) -> dict[str, tuple]:
    """Colour and marker of each judged config; a colour comes back, with another marker, after eight."""
    baseline = (result.get("baseline") or {}).get("config_id")
    return styles(e["config_id"] for e in doc.judged(result) if e["config_id"] != baseline)


def _extent(pair: Mapping) -> tuple:
    """What of a pair must be in view: the interval, or the point where there is none, and the margin."""
    known = pair.get("n", 0) > 1 and doc.finite(pair.get("low"))
    ends = (pair.get("low"), pair.get("high")) if known else (pair.get("diff"),)
    return (*ends, -(pair.get("margin") or 0))


def _pairs(result: Mapping, family: str) -> list[dict]:
    return [e["families"][family] for e in doc.judged(result) if family in (e.get("families") or {})]


def _has_size(entry: Mapping) -> bool:
    return doc.finite(entry.get("workload_bytes")) and entry["workload_bytes"] > 0


def _unnamed(result: Mapping, family: str, looks: Mapping) -> list[tuple[float, float, str]]:
    """Searched points that the legend does not name, anchors first: they get a name only where there is room."""
    anchors = {e["config_id"] for e in doc.searched(result) if e.get("anchor")}
    anchors |= {e["config_id"] for e in result.get("anchors") or []}
    entries, scale = sorted(doc.searched(result), key=lambda e: e["config_id"] not in anchors), _unit(result)[0]
    return [
        (e["workload_bytes"] / scale, e["search"][family]["dnll"], e.get("label", e["config_id"]))
        for e in entries
        if e["config_id"] not in looks and _has_size(e) and doc.finite((e["search"].get(family) or {}).get("dnll"))
    ]


def _label(ax: Axes, points: Sequence[tuple[float, float, str]], paint: Ink) -> None:
    """Name points beside them, leaving out every name that would cover another name, a point, or the frame."""
    box = ax.get_window_extent()
    marked = [line for line in ax.lines if line.get_marker() not in ("", "None")]
    spots = [ax.transData.transform(point) for line in marked for point in np.asarray(line.get_xydata())]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in spots]
    places = {"left": (6, 0), "right": (-6, 0), "center": (0, 7)}  # offsets in points, by alignment
    for x, y, name in points[:NAMES]:
        for align, offset in places.items():
            style = {"fontsize": 7, "color": paint.text, "ha": align, "va": "center", "zorder": 5}
            text = ax.annotate(name, (x, y), offset, textcoords="offset points", **style)
            text.set_path_effects([withStroke(linewidth=2.5, foreground=paint.paper)])  # readable across a line
            text.set_in_layout(False)
            room = text.get_window_extent()
            inside = box.x0 <= room.x0 and room.x1 <= box.x1 and box.y0 <= room.y0 and room.y1 <= box.y1
            if inside and not any(room.overlaps(other) for other in taken):
                taken.append(room)
                break
            text.remove()


def _title(result: Mapping, family: str) -> str:
    found = ((result.get("baseline") or {}).get("families") or {}).get(family)
    return f"{family} (baseline {found['score']:.2f})" if found and doc.finite(found.get("score")) else family


def _budget(ax: Axes, result: Mapping, paint: Ink) -> None:
    if result.get("budget_bytes") is not None:
        ax.axvline(result["budget_bytes"] / _unit(result)[0], color=paint.text, linewidth=1.1, linestyle=":")


def _sizes(result: Mapping) -> list[float]:
    """Everything that has a place on the axis of bytes."""
    sizes = [e.get("workload_bytes") for e in (*doc.judged(result), *doc.searched(result))]
    return [s for s in (*sizes, doc.raw_bytes(result), result.get("budget_bytes")) if doc.finite(s) and s > 0]


def _unit(result: Mapping) -> tuple[float, str]:
    return unit_of(_sizes(result))


def _scale_x(axes: list[Axes], result: Mapping) -> None:
    log2_axis(axes, [s / _unit(result)[0] for s in _sizes(result)])


def _legend(figure: Figure, result: Mapping, looks: Mapping, paint: Ink) -> None:
    entries = {e["config_id"]: e for e in doc.judged(result)}
    over = mark("over budget", paint.over, "X")
    handles = [
        mark(f"{entries[c]['label']}: {entries[c].get('verdict')}", *style)
        for c, style in looks.items()
        if doc.fits(result, entries[c])
    ]
    if doc.searched(result):
        handles.append(mark("searched", paint.text, "."))
        handles.append(Line2D([], [], color=paint.text, linewidth=0.9, label="best of what fits"))
    raw, budget = doc.raw_bytes(result), result.get("budget_bytes")
    if doc.finite(raw) and doc.fits(result, {"workload_bytes": raw}):
        handles.append(mark("raw cache", paint.text, "s"))
    if budget is not None:
        scale, unit = _unit(result)
        label = f"budget {budget / scale:.2f} {unit}"
        handles += [over, Line2D([], [], color=paint.text, linewidth=1.1, linestyle=":", label=label)]
    margins = sorted({100 * p["margin"] for f in doc.families(result) for p in _pairs(result, f) if p.get("margin")})
    if margins:
        label = f"margin -{'/-'.join(f'{m:g}' for m in margins)} points"
        handles.append(Line2D([], [], color=paint.text, linewidth=0.9, linestyle=(0, (4, 3)), label=label))
    below(figure, handles, paint)
