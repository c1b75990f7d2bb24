"""Two arms of a run item by item, the hardest items, and two runs side by side. Reads run folders; scores nothing.

Only what was asked of all is compared: two runs must have judged the same items, told by the hash of their set.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvlab import stats
from kvlab.explore.picture import INK, Picture, heat, legend, listed, mean, name, records, scale, sheet, split, styles
from kvlab.recorded import items_of
from kvlab.runs import Run

ROLE = "confirm"
OUTCOMES = ("right in both", "lost", "gained", "wrong in both")


def judged(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of the judged pass by label and item, the full cache first, a config known to be bad as `... (control)`.

    Raises ValueError for a run that judged nothing yet.
    """
    bad = _control(run)
    rows = [
        row | {"label": f"{row['label']} (control)" if row["config_id"] == bad else row["label"]}
        for row in records(run.rows())
        if row.get("role") == ROLE
    ]
    # The full cache has no distance to itself.
    base = {row["config_id"] for row in rows if row["kl"] is None or row["kl"] != row["kl"]}
    if not base:
        raise ValueError(f"{run.path.name} has judged no item yet: let it go on, or open another run")
    by_label = split(sorted(rows, key=lambda row: row["config_id"] not in base), "label")
    return {label: {row["item_id"]: row for row in part} for label, part in by_label.items()}


def _control(run: Run) -> str | None:
    """The config that was there to be caught, where the run got that far."""
    if not (run.path / "result.json").exists():
        return None
    return ((run.read_json("result.json").get("controls") or {}).get("positive") or {}).get("config_id")


def _items_hash(run: Run) -> str:
    return run.read_json("provenance.json")["evalset"][ROLE]


def _arms(run: Run) -> tuple[dict[str, dict[str, dict[str, Any]]], str, list[str]]:
    """All arms of a run, the full cache's label, and those of the others but the control."""
    arms = judged(run)
    base, *others = arms
    compressed = [label for label in others if not label.endswith("(control)")]
    if not compressed:
        raise ValueError(f"{run.path.name} judged the full cache alone")
    return arms, base, compressed


def flips(run: Run, label: str | None = None) -> Picture:
    """One arm against the full cache on the same items: loss on each, and which answers were lost or gained.

    `label` is by default the arm with the most flips, the control left out. The table has one line for each item:
    `base` and `score`, `base_nll` and `nll` in nats per answer token, `outcome`, and both predictions.
    """
    arms, base, others = _arms(run)
    tables = {other: _paired(arms[base], arms[other]) for other in others}
    if label is not None and label not in tables:
        raise ValueError(f"{run.path.name} judged no {label!r}; there are {listed(others)}")
    chosen = label or max(tables, key=lambda one: sum(row["outcome"] in OUTCOMES[1:3] for row in tables[one]))
    rows = tables[chosen]
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    alt = (
        f"Scatter of the loss on {len(rows)} items under the full cache against {chosen}. "
        + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        + "."
    )
    return Picture(_scatter(rows, chosen, counts), pd.DataFrame(rows), alt)


def _paired(base: Mapping[str, Mapping], other: Mapping[str, Mapping]) -> list[dict[str, Any]]:
    rows = []
    for item_id in base.keys() & other.keys():
        old, new = base[item_id], other[item_id]
        both = (old["score"] >= 0.5, new["score"] >= 0.5)
        outcome = OUTCOMES[{(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}[both]]
        rows.append(
            {
                "item_id": item_id,
                "family": old["family"],
                "outcome": outcome,
                "base": old["score"],
                "score": new["score"],
                "base_nll": old["nll"],
                "nll": new["nll"],
                "base_answer": old["prediction"].strip(),
                "answer": new["prediction"].strip(),
            }
        )
    return sorted(rows, key=lambda row: row["item_id"])


def _scatter(rows: Sequence[Mapping[str, Any]], label: str, counts: Mapping[str, int]) -> Figure:
    figure, axes = sheet(1, 1, width=5.4, height=3.9)
    ax = axes[0][0]
    reach = [row[key] for row in rows for key in ("base_nll", "nll") if row[key] == row[key]]
    low, high = max(min(reach, default=0.1), 1e-4), max(reach, default=1.0)
    ax.plot([low, high], [low, high], color=INK.over, linewidth=1, linestyle=":")
    for outcome, look in styles(OUTCOMES).items():
        own = [row for row in rows if row["outcome"] == outcome]
        points = [max(row["base_nll"], 1e-4) for row in own], [max(row["nll"], 1e-4) for row in own]
        ax.plot(*points, linestyle="none", markersize=6, alpha=0.8, label=f"{outcome}: {counts[outcome]}", **look)
    ax.set_xscale("log")
    ax.set_yscale("log")
    name(ax, f"{label}, n = {len(rows)}", "loss under the full cache, nats per answer token", f"loss under {label}")
    legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def hardest(run: Run, top: int = 12) -> Picture:
    """The items on which the compressed arms together lost most against the full cache, and what each arm made of them.

    Colour is the loss added, in nats per answer token; a cross is a wrong answer. The table has one line for each item:
    `added`, the mean over arms, then question, gold answer and the answer of each arm, where the items can be made
    again.
    """
    arms, base, others = _arms(run)
    shared = set.intersection(*(set(rows) for rows in arms.values()))
    added = {i: float(np.mean([arms[o][i]["nll"] - arms[base][i]["nll"] for o in others])) for i in shared}
    worst = sorted(shared, key=lambda i: (-added[i], i))[:top]
    items = items_of(run, [ROLE])
    rows = [
        {
            "item_id": i,
            "added": added[i],
            "question": items[i].question,
            "gold": items[i].answers[0].strip(),
            **{label: arms[label][i]["prediction"].strip() for label in (base, *others)},
        }
        for i in worst
    ]
    figure, axes = sheet(1, 1, width=1.3 * len(others) + 3.4, height=0.3 * len(worst) + 1.3)
    ax = axes[0][0]
    grid = [[arms[o][i]["nll"] - arms[base][i]["nll"] for o in others] for i in worst]
    scale(figure, ax, heat(ax, grid), "loss added, nats per answer token")
    wrong = [(x, y) for y, i in enumerate(worst) for x, o in enumerate(others) if arms[o][i]["score"] < 0.5]
    cross = {"linestyle": "none", "markersize": 6}
    for width, color in ((3.0, INK.paper), (1.4, "#d55e00")):
        ax.plot([x for x, _ in wrong], [y for _, y in wrong], "x", markeredgewidth=width, color=color, **cross)
    ax.set_xticks(range(len(others)), ["\n".join(textwrap.wrap(o, 16)) for o in others])
    ax.set_yticks(range(len(worst)), worst)
    name(ax, f"hardest of {len(shared)} items (cross: wrong)")
    first = rows[0]
    alt = (
        f"Heat map of loss added by {listed(others)} on the {len(worst)} hardest of {len(shared)} items. Hardest: "
        f"{first['question']!r}, gold {first['gold']!r}, {first['added']:+.2f} nats per answer token on average."
    )
    return Picture(figure, pd.DataFrame(rows), alt)


def compare_runs(first: Run, second: Run) -> Picture:
    """Every arm of two runs against the full cache of its own run, on the items both judged.

    The table has one line for each run, arm and family: `n`, `base` and `score`, `lost` and `gained` answers,
    `diff_points` with its two-sided 90 % interval (score interval of the paired difference; none of one item). The full
    cache of the second run against that of the first comes first: it must not flip. Raises ValueError for runs that
    judged different items or used different weights.
    """
    for what, ours, theirs in (
        ("items", _items_hash(first), _items_hash(second)),
        ("weights", *(run.config["identity"]["weights_sha256"] for run in (first, second))),
    ):
        if ours != theirs:
            raise ValueError(
                f"{first.path.name} and {second.path.name} cannot be compared item by item: other {what} "
                f"({ours[:12]} and {theirs[:12]}). Compare each with its own full cache instead"
            )
    ours, theirs = judged(first), judged(second)
    base, other = next(iter(ours)), next(iter(theirs))
    rows = _arm("both", "full cache, again", ours[base], theirs[other])
    for run, arms, own in ((first, ours, base), (second, theirs, other)):
        for label in list(arms)[1:]:
            rows += _arm(run.hash8, label, arms[own], arms[label])
    again = rows[: len(split(rows, "family"))]
    lines = [f"{r['config']} of {r['run']} on {r['family']} {r['diff_points']:+.1f} points" for r in rows[len(again) :]]
    same = sum(row["lost"] + row["gained"] for row in again)
    alt = (
        f"Differences to the full cache with 90% intervals, by run. The full caches differ in {same} answers. "
        f"{'; '.join(lines)}."
    )
    return Picture(_forest(rows), pd.DataFrame(rows), alt)


def _arm(run: str, label: str, base: Mapping[str, Mapping], arm: Mapping[str, Mapping]) -> list[dict[str, Any]]:
    """One row for each family."""
    rows = []
    for family, part in split(_paired(base, arm), "family").items():
        n, lost, gained = len(part), *(sum(row["outcome"] == word for row in part) for word in OUTCOMES[1:3])
        # Of one item there is no interval.
        low, high = (100 * end for end in stats.tango_interval(lost, gained, n)) if n > 1 else (None, None)
        scores = {"base": mean(part, "base"), "score": mean(part, "score")}
        points = {"diff_points": 100 * (gained - lost) / n, "low_points": low, "high_points": high}
        rows.append(
            {"run": run, "config": label, "family": family, "n": n, **scores, "lost": lost, "gained": gained, **points}
        )
    return rows


def _forest(rows: Sequence[dict[str, Any]]) -> Figure:
    by_family = split(rows, "family")
    places = list(dict.fromkeys((row["run"], row["config"]) for row in rows))
    figure, axes = sheet(1, len(by_family), width=3.0, height=0.34 * len(places) + 1.3, sharey=True, sharex=True)
    looks = styles(row["run"] for row in rows)
    for n, (ax, (family, part)) in enumerate(zip(axes[0], by_family.items(), strict=True)):
        ax.axvline(0, color=INK.text, linewidth=1)
        for row in part:
            y, look = places.index((row["run"], row["config"])), looks[row["run"]]
            if row["low_points"] is not None:
                ax.plot([row["low_points"], row["high_points"]], [y, y], color=look["color"], linewidth=1.6)
            ax.plot(row["diff_points"], y, markersize=7, linestyle="none", **look)
        name(ax, f"{family}, n = {part[0]['n']}")
        if n == 0:
            ax.set_yticks(range(len(places)), [f"{config} ({run})" for run, config in places])
            ax.invert_yaxis()
    ends = ", with 90% interval" if all(row["n"] > 1 for row in rows) else "; one item gives no interval"
    figure.supxlabel(f"difference to the full cache, points{ends}", fontsize=9, color=INK.text)
    return figure
