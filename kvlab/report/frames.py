"""Result document -> data frames of numbers, and those frames -> text for a person. Units live in the column names."""

from collections.abc import Mapping

import pandas as pd

from kvlab.report import document as doc
from kvlab.report.repeat import reading
from kvlab.stats import wilson

# Column -> (heading with unit, how a value reads). A column without an entry reads as it is.
COLUMNS = {
    "workload_bytes": ("bytes at workload", doc.size),
    "read_bytes": ("read per step", doc.size),
    "predicted_bytes": ("predicted", doc.size),
    "measured_bytes": ("measured", doc.size),
    "bytes_per_token": ("bytes/token", lambda v: f"{v:,.0f}"),
    "effective_bits": ("effective bits", lambda v: f"{v:.2f}"),
    "sessions": ("sessions in budget", lambda v: f"{v:.0f}"),
    "fits": ("fits budget", lambda v: "yes" if v else "no, over"),
    "base": ("baseline", lambda v: f"{v:.3f}"),
    "score": ("score", lambda v: f"{v:.3f}"),
    "low": ("95% low", lambda v: f"{v:.3f}"),
    "high": ("95% high", lambda v: f"{v:.3f}"),
    "diff_points": ("difference, points", lambda v: f"{v:+.1f}"),
    "low_points": ("90% low", lambda v: f"{v:+.1f}"),
    "high_points": ("90% high", lambda v: f"{v:+.1f}"),
    "margin_points": ("margin, points", lambda v: f"{v:g}"),
    "p": ("exact p", lambda v: f"{v:.3g}"),
    "b": ("lost (b)", lambda v: f"{v:.0f}"),
    "c": ("gained (c)", lambda v: f"{v:.0f}"),
    "flips": ("flips", lambda v: f"{v:.0f}"),
    "n": ("n", lambda v: f"{v:.0f}"),
    "n_needed": ("n needed", lambda v: f"{v:,.0f}"),
    "dnll": ("delta NLL, nats/token", lambda v: f"{v:+.4f}"),
    "front_dnll": ("mean delta NLL, nats/token", lambda v: f"{v:+.4f}"),
    "spearman": ("rank correlation", lambda v: f"{v:.2f}"),
    "pearson_log": ("correlation of logs", lambda v: f"{v:.2f}"),
    "median_measured_over_predicted": ("measured / predicted, median", lambda v: f"{v:.2f}"),
    "failed": ("caught", lambda v: "yes" if v else "no"),
    "kl_nats": ("KL, nats", lambda v: f"{v:.3g}"),
    "measured": ("measured", lambda v: "yes" if v else "by law"),
    "bytes": ("bytes", doc.size),
    "tokens": ("tokens", lambda v: f"{v:,.0f}"),
    "seconds": ("seconds", lambda v: f"{v:,.1f}"),
    "share": ("share", lambda v: f"{100 * v:.1f}%"),
    "holds": ("holds", lambda v: "yes" if v else "not shown"),
    "config_verdict": ("its verdict", str),
    "other_run": ("other run", lambda v: v[-8:]),
    "first": ("score, first", lambda v: f"{v:.3f}"),
    "second": ("score, other", lambda v: f"{v:.3f}"),
}
TITLES = {
    "before_after": "Before and after",
    "finalists": "Configs confirmed on fresh items",
    "families": "Accuracy against the baseline, per family",
    "front": "Best search score of every size (optimistic, not a result)",
    "controls": "Controls",
    "additivity": "Losses of layers added up, against what whole configs lost (KL)",
    "configs": "Configs scored while searching (optimistic, not a result)",
    "scored": "Scored so far",
    "compared_runs": "The runs",
    "compared_pairs": "Differences on shared items, the other run minus the first",
    "compared_unlike": "What differs besides configs",
}
_MEASURES = (
    ("kv_bytes_workload", "KV bytes at the workload"),
    ("bytes_per_token", "bytes per token"),
    ("effective_bits", "effective bits per value"),
    ("context_used", "context used, tokens"),
    ("ttft_ms", "time to first token, ms"),
    ("latency_ms_mean", "mean latency, ms"),
    ("tokens_per_s", "tokens/s"),
)


def tables(result: Mapping) -> dict[str, pd.DataFrame]:
    """Frames of numbers, named as in TITLES, in reading order; those without rows are left out.

    Differences, intervals and margins of pairs are in points (hundredths of a score); bytes are bytes.
    """
    if result["schema"] == "kvlab.rows/1":
        made = {"scored": pd.DataFrame(result["scored"])}
    else:
        made = {
            "before_after": before_after(result),
            "finalists": finalists(result),
            "families": family_rows(result),
            "front": front(result),
            "controls": controls(result),
            "additivity": additivity(result),
            "configs": configs(result),
        }
    return {name: frame for name, frame in made.items() if not frame.empty}


def before_after(result: Mapping) -> pd.DataFrame:
    """One line per measure: before (raw cache) and after, accuracy with a 95 % interval, n, verdict.

    After is the best config, or, where none holds, the finalist that was timed, named as not shown to hold.
    """
    recorded = result.get("before_after") or {}
    best, timed = doc.best(result), recorded.get("after") or {}
    chosen = best or next((e for e in doc.judged(result) if e["config_id"] == timed.get("config_id")), None)
    before = {**_known(result, result.get("baseline")), **(recorded.get("before") or {})}
    after = {**_known(result, chosen), **(recorded.get("after") or {})} if chosen else {}
    lines: list[dict] = []
    if chosen:
        doubt = "" if best else " (not shown to hold)"
        lines.append({"measure": "setting", "before": before.get("label"), "after": chosen["label"] + doubt})
    lines += [
        {"measure": name, "before": before.get(key), "after": after.get(key)}
        for key, name in _MEASURES
        if before.get(key) is not None or after.get(key) is not None
    ]
    for family in doc.families(result):
        old, new = ((side.get("families") or {}).get(family) or {} for side in (before, after))
        pair = ((chosen or {}).get("families") or {}).get(family) or {}
        lines.append(
            {
                "measure": f"accuracy, {family}",
                "before": old.get("score"),
                "before_low": old.get("low"),
                "before_high": old.get("high"),
                "after": new.get("score"),
                "after_low": new.get("low"),
                "after_high": new.get("high"),
                "n": new.get("n") or old.get("n"),
                "verdict": pair.get("verdict"),
            }
        )
    return pd.DataFrame(lines)


def finalists(result: Mapping) -> pd.DataFrame:
    """One line per judged config, largest first; the raw cache leads where it was not judged itself."""
    keys = (
        "workload_bytes",
        "read_bytes",
        "predicted_bytes",
        "measured_bytes",
        "bytes_per_token",
        "effective_bits",
        "sessions",
    )
    entries = doc.judged(result)
    baseline = result.get("baseline") or {}
    if baseline and baseline.get("config_id") not in {e["config_id"] for e in entries}:
        entries = [{**baseline, "workload_bytes": doc.raw_bytes(result)}, *entries]
    lines = [
        {
            "config": e["label"],
            "verdict": "baseline" if e["config_id"] == baseline.get("config_id") else e.get("verdict"),
            "fits": doc.fits(result, e),
            **{k: e.get(k) for k in keys},
            "config_id": e["config_id"],
        }
        for e in entries
    ]
    frame = pd.DataFrame(lines)
    return frame.dropna(axis="columns", how="all") if len(frame) else frame


def family_rows(result: Mapping) -> pd.DataFrame:
    """One line per judged config and family: the paired comparison and its verdict. Twin of the figure's upper row."""
    lines = []
    baseline = (result.get("baseline") or {}).get("config_id")
    for entry in doc.judged(result):
        if entry["config_id"] == baseline:
            continue  # a baseline against itself is a control, not a finding
        for family in doc.families(result):
            pair = (entry.get("families") or {}).get(family)
            if pair:
                points = {f"{k}_points": _points(pair.get(k)) for k in ("diff", "low", "high", "margin")}
                kept = {k: pair.get(k) for k in ("b", "c", "p", "n_needed")}
                head = {"config": entry["label"], "family": family, "verdict": pair.get("verdict"), "n": pair.get("n")}
                lines.append({**head, "base": pair.get("base"), "score": pair.get("score"), **points, **kept})
    return pd.DataFrame(lines)


def controls(result: Mapping) -> pd.DataFrame:
    """The same config twice must not flip; a known-bad config must be caught."""
    recorded = result.get("controls") or {}
    lines = []
    again = recorded.get("aa")
    if again:
        lines.append(
            {"control": "baseline against itself", "n": again["n"], "flips": again["flips"], "reading": reading(again)}
        )
    bad = recorded.get("positive") or {}
    for family, pair in (bad.get("families") or {}).items():
        lines.append(
            {
                "control": f"known bad: {bad.get('label')}",
                "family": family,
                "n": pair.get("n"),
                **{f"{k}_points": _points(pair.get(k)) for k in ("diff", "low", "high")},
                "reading": "caught" if pair.get("failed") else "NOT caught: family insensitive",
            }
        )
    order = ("control", "family", "n", "flips", "diff_points", "low_points", "high_points", "reading")
    frame = pd.DataFrame(lines, columns=order)
    return frame.dropna(axis="columns", how="all") if len(frame) else frame


def front(result: Mapping) -> pd.DataFrame:
    """Searched configs that nothing beats in bytes and score, smallest first, where a search asked for all sizes."""
    rows = (result.get("front") or []) if result.get("goal") in ("map", "smallest") else []
    lines = [
        {
            "config": e["label"],
            "workload_bytes": e["workload_bytes"],
            "effective_bits": e.get("workload_effective_bits"),
            "front_dnll": e["dnll"],
            "n": sum(f["n"] for f in e["search"].values()),
            "verdict": next((j["verdict"] for j in doc.judged(result) if j["config_id"] == e["config_id"]), None),
        }
        for e in rows
    ]
    return pd.DataFrame(lines)


def additivity(result: Mapping) -> pd.DataFrame:
    """How well sums over layers told the loss of whole configs; one line for each kind of items."""
    found = (result.get("sensitivity") or {}).get("additivity") or {}
    kinds = (("same_items", "those the layers were measured on"), ("other_items", "others"))
    return pd.DataFrame([{"items": name, **found[key]} for key, name in kinds if found.get(key)])


def configs(result: Mapping) -> pd.DataFrame:
    """One line per searched config and family, smallest first. Twin of the figure's lower row."""
    lines = [
        {
            "config": e.get("label", e["config_id"]),
            "anchor": "yes" if e.get("anchor") or _is_anchor(result, e) else "",
            "workload_bytes": e.get("workload_bytes"),
            "effective_bits": e.get("effective_bits"),
            "fits": doc.fits(result, e),
            "family": family,
            "n": found.get("n"),
            "score": found.get("score"),
            "dnll": found.get("dnll"),
        }
        for e in doc.searched(result)
        for family, found in (e.get("search") or {}).items()
    ]
    return pd.DataFrame(lines).sort_values("workload_bytes", kind="stable") if lines else pd.DataFrame()


def readable(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The same frame as text: headings with units, intervals beside their estimate, a dash for what is not known."""
    if name == "before_after":
        return _readable_before_after(frame)
    text = pd.DataFrame(index=frame.index)
    for column in frame.columns:
        heading, form = COLUMNS.get(column, (column, str))
        gaps = frame[column].isna()
        text[heading] = ["–" if gap else form(v) for v, gap in zip(frame[column], gaps, strict=True)]
    return text


def wordy(text: pd.DataFrame) -> list[bool]:
    """Which columns of a readable frame read as words (aligned left): the first, and those without a digit."""
    return [i == 0 or not text[column].str.contains(r"\d").any() for i, column in enumerate(text.columns)]


def _readable_before_after(frame: pd.DataFrame) -> pd.DataFrame:
    lines = []
    for row in frame.to_dict("records"):
        cells = {side: _cell(row["measure"], row, side) for side in ("before", "after")}
        n, verdict = row.get("n"), row.get("verdict")
        lines.append(
            {
                "measure": row["measure"] + (" [95% interval]" if row["measure"].startswith("accuracy") else ""),
                **cells,
                "n": f"{n:.0f}" if doc.finite(n) else "",
                "verdict": verdict if isinstance(verdict, str) else "",
            }
        )
    return pd.DataFrame(lines)


def _cell(measure: str, row: Mapping, side: str) -> str:
    value = row.get(side)
    if isinstance(value, str):
        return value
    if not doc.finite(value):
        return "–"
    if measure.startswith("KV bytes"):
        return doc.size(value)
    if measure.startswith("accuracy"):
        low, high = row.get(f"{side}_low"), row.get(f"{side}_high")
        return f"{value:.3f} [{low:.3f}, {high:.3f}]" if doc.finite(low) else f"{value:.3f}"
    if measure.startswith(("context", "bytes")) or measure.endswith(", ms"):
        return f"{value:,.0f}"
    return f"{value:.2f}"


def _known(result: Mapping, entry: Mapping | None) -> dict:
    """What a baseline or a judged config says about itself, where no before/after was measured."""
    if not entry:
        return {}
    is_base = entry.get("config_id") == (result.get("baseline") or {}).get("config_id")
    return {
        "kv_bytes_workload": doc.raw_bytes(result) if is_base else entry.get("workload_bytes"),
        "bytes_per_token": entry.get("bytes_per_token"),
        "effective_bits": entry.get("effective_bits") or (16.0 if is_base else None),
        "families": entry.get("families")
        if is_base
        else {f: _arm(p) for f, p in (entry.get("families") or {}).items()},
    }


def _arm(pair: Mapping) -> dict:
    """The config's own arm of a paired comparison, whose recorded interval bounds the difference and not the score."""
    n, score = pair.get("n"), pair.get("score")
    low, high = wilson(score * n, n) if n and score is not None else (None, None)
    return {"n": n, "score": score, "low": low, "high": high}


def _is_anchor(result: Mapping, entry: Mapping) -> bool:
    return entry["config_id"] in {a["config_id"] for a in result.get("anchors") or []}


def _points(value: float | None) -> float | None:
    return None if value is None else 100 * value
