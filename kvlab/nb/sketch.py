"""The figure of a run that has no result yet: every config scored so far, bits against loss, one column per family.

Drawn from item rows. Knows no bytes at the workload, which only a result has; so bits a value stand in for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvlab.report import document as doc
from kvlab.report.figures import ink, tradeoff

_NAMES = 5


def sketch(scored: Sequence[Mapping[str, Any]], labels: Mapping[str, str], *, dark: bool = False) -> Figure:
    """`scored` as `kvlab.report.document.from_rows` gives it; `labels` are names by config id."""
    paint = ink.ink(dark)
    families, measure = _families(scored), _measure(scored)
    figure = ink.sheet(max(3.7 * len(families), 5.6), 3.9, paint)
    grid = figure.subplots(1, max(1, len(families)), sharex=True, sharey=True, squeeze=False)[0]
    splits = [s for s in ("search", "confirm", "replicate") if any(r["split"] == s for r in scored)]
    for ax, family in zip(grid, families or [""], strict=True):
        ink.dress(ax, paint)
        ax.set_title(family, fontsize=10, color=paint.text, loc="left")
        ax.set_xlabel("bits a value, measured (log2)", color=paint.text, fontsize=9)
        mine = [r for r in scored if r["family"] == family and doc.finite(r[measure])]
        _draw(ax, mine, measure, splits, paint)
        _name(ax, _best(mine, measure), measure, labels, paint)
    bits = [r["effective_bits"] for r in scored]
    ink.log2_axis(grid, bits)
    grid[0].set_ylabel(_AXES[measure], color=paint.text, fontsize=9)
    if measure == "dnll":
        grid[0].set_yscale("symlog", linthresh=0.1)
        grid[0].set_ylim(top=1.3 * max((r["dnll"] for r in scored if doc.finite(r["dnll"])), default=0.1) + 0.01)
        grid[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles = [ink.mark(f"{split} items", *ink.style(n)) for n, split in enumerate(splits)]
    ink.below(figure, handles, paint)
    return figure


_AXES = {"dnll": "delta NLL, nats per answer token", "score": "score"}


def alt(scored: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """The sketch in words: how much there is, and per family the smallest that loses least."""
    measure = _measure(scored)
    words = [f"{summary(scored)} Scatter plot per family of measured bits a value against {_AXES[measure]}."]
    for family in _families(scored):
        mine = [r for r in scored if r["family"] == family and doc.finite(r[measure])]
        best = [f"{labels.get(r['config_id'], r['config_id'])} {r['effective_bits']:.2f} bits {r[measure]:+.3f}"
                for r in _best(mine, measure)[:_NAMES]]  # fmt: skip
        if best:
            words.append(f"{family}, best of each size: {', '.join(best)}.")
    return " ".join(words)


def summary(scored: Sequence[Mapping[str, Any]]) -> str:
    """Counts, in a sentence."""
    configs, n = len({r["config_id"] for r in scored}), sum(r["n"] for r in scored)
    return f"{n:,} scores of {configs} configs so far, no verdict yet." if scored else "No score yet."


def _families(scored: Sequence[Mapping[str, Any]]) -> list[str]:
    found = {r["family"] for r in scored}
    return [f for f in doc.FAMILY_ORDER if f in found] + sorted(found - set(doc.FAMILY_ORDER))


def _measure(scored: Sequence[Mapping[str, Any]]) -> str:
    """Loss against the full cache where it is known: answers that were decoded have a score only."""
    return "dnll" if any(doc.finite(r["dnll"]) for r in scored) else "score"


def _draw(ax: Any, mine: Sequence[Mapping[str, Any]], measure: str, splits: Sequence[str], paint: ink.Ink) -> None:
    if measure == "dnll":
        ax.axhline(0, color=paint.text, linewidth=1)
    for row in mine:
        color, marker = ink.style(splits.index(row["split"]))
        x, y = row["effective_bits"], row[measure]
        if measure == "score" and row["n"] > 1:
            reach = [[y - row["low"]], [row["high"] - y]]
            ax.errorbar(x, y, yerr=reach, color=color, linewidth=1, capsize=2, fmt="none")
        ax.plot(x, y, marker, color=color, markersize=6, markeredgecolor=paint.paper, markeredgewidth=0.6)


def _best(mine: Sequence[Mapping[str, Any]], measure: str) -> list[Mapping[str, Any]]:
    """What nothing beats in bits and loss, among those that have seen most items: few items flatter."""
    sign = 1 if measure == "dnll" else -1
    every = max((r["n"] for r in mine), default=0)
    at = {(r["effective_bits"], sign * r[measure]): r for r in mine if r["n"] == every}
    return [at[point] for point in tradeoff.front(list(at))]


def _name(ax: Any, best: Sequence[Mapping[str, Any]], measure: str, labels: Mapping[str, str], paint: ink.Ink) -> None:
    for n, row in enumerate(best[:_NAMES]):
        name = labels.get(row["config_id"], row["config_id"])
        # The largest stands at the right edge, where a name would leave the frame.
        left = n > 0 and row is best[-1]
        style: dict[str, Any] = {"fontsize": 7, "color": paint.text, "textcoords": "offset points"}
        at = {"xytext": (-5, 5), "ha": "right"} if left else {"xytext": (5, 5)}
        ax.annotate(name, (row["effective_bits"], row[measure]), **at, **style)
