"""The result document of a run, as the report sees it: what was judged, what fits the budget, which one is best.

Understands the schemas in SCHEMAS and refuses others. Never trusts a recorded winner that does not fit the budget.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from kvlab.runs import Run
from kvlab.stats import wilson

SCHEMAS = ("kvlab.search/1", "kvlab.sweep/1", "kvlab.rows/1")
FAMILY_ORDER = ("retrieval", "math", "code")
GOOD = ("HOLDS", "RISES")


class IncompleteError(RuntimeError):
    """The run has not finished, and nobody asked for a partial view."""


def load(run: Run, *, partial: bool = False) -> dict:
    """The result document of a run.

    A run that is not done raises IncompleteError; with partial=True it gives what there is: the result document if
    one was written, else the item rows summed up (schema kvlab.rows/1), marked by the key "partial" naming the state.
    """
    state = run.state()
    has_result = (run.path / "result.json").exists()
    if state == "done" and has_result:
        return check(run.read_json("result.json"), run.path.name)
    what = f"run {run.path.name} is {state}" if state != "done" else f"run {run.path.name} has no result.json"
    if not partial:
        raise IncompleteError(f"{what}, not complete. Resume it, or pass --partial to see what there is")
    result = check(run.read_json("result.json"), run.path.name) if has_result else from_rows(run)
    noted = {"error": run.status["error"]} if state == "failed" and run.status.get("error") else {}
    return {**result, **noted, "partial": state if state != "done" else "done without a result"}


def check(result: Any, name: str) -> dict:
    """The same document, if its schema is known."""
    schema = result.get("schema") if isinstance(result, Mapping) else None
    if schema not in SCHEMAS:
        raise ValueError(f"result.json of {name} has schema {schema!r}, this report reads {', '.join(SCHEMAS)}")
    return dict(result)


def from_rows(run: Run) -> dict:
    """Sum up item rows of a run without a result: per config and family n, mean, Wilson interval and, against the
    full cache where it was scored on the same items, the mean difference of NLL. No verdict: none was reached."""
    # Layers that were scored alone tell layers apart, and are no settings.
    records = [r for r in run.rows().to_dict("records") if r.get("role") != "layers"]
    rows = {(r["config_id"], r["mode"], r["item_id"]): r for r in records}  # an item counts once, at its last score
    full = {(r["mode"], r["item_id"]): r["nll"] for r in rows.values() if not finite(r["kl"])}
    groups: dict[tuple, list[dict]] = {}
    for row in rows.values():
        groups.setdefault((row["config_id"], row["family"], row["split"]), []).append(row)
    scored = []
    for (config, family, split), part in groups.items():
        total = float(sum(r["score"] for r in part))
        low, high = wilson(total, len(part))
        paired = [r["nll"] - full[at] for r in part if (at := (r["mode"], r["item_id"])) in full and finite(r["nll"])]
        line = {"config_id": config, "family": family, "split": split, "n": len(part), "score": total / len(part)}
        bits = 16 * sum(r["measured_bytes"] for r in part) / sum(r["raw16_bytes"] for r in part)
        dnll = sum(paired) / len(paired) if paired else None
        scored.append({**line, "low": low, "high": high, "dnll": dnll, "effective_bits": bits})
    return {"schema": "kvlab.rows/1", "run": run.path.name, "scored": scored}


def judged(result: Mapping) -> list[dict]:
    """Configs confirmed on fresh items: the finalists of a search, all configs of a sweep."""
    return list(result.get("finalists") or result.get("configs") or [])


def searched(result: Mapping) -> list[dict]:
    """Configs scored while searching, anchors included, each once."""
    entries = [*(result.get("anchors") or []), *(result.get("trials") or [])]
    return list({entry["config_id"]: entry for entry in reversed(entries)}.values())[::-1]


def families(result: Mapping) -> list[str]:
    """Families in reading order."""
    named = [result.get("baseline") or {}, *judged(result)]
    seen = {f for entry in named for f in entry.get("families") or {}}
    seen |= {f for entry in searched(result) for f in entry.get("search") or {}}
    return sorted(seen, key=lambda f: (FAMILY_ORDER.index(f) if f in FAMILY_ORDER else len(FAMILY_ORDER), f))


def fits(result: Mapping, entry: Mapping) -> bool:
    """Whether a config's bytes at the workload are known and within the budget; any known size where none is set."""
    size, budget = entry.get("workload_bytes"), result.get("budget_bytes")
    return finite(size) and (budget is None or size <= budget)


def best(result: Mapping) -> dict | None:
    """The config to use: the recorded winner of a search, the smallest that holds in a sweep. None when there is none;
    never one over the budget, never one whose verdict is not HOLDS or RISES."""
    good = [e for e in judged(result) if fits(result, e) and e.get("verdict") in GOOD]
    if result["schema"] == "kvlab.search/1":
        return next((e for e in good if e["config_id"] == result.get("winner")), None)
    baseline = (result.get("baseline") or {}).get("config_id")
    return min((e for e in good if e["config_id"] != baseline), key=lambda e: e["workload_bytes"], default=None)


def title(result: Mapping) -> str:
    """Model and run, without the folders that are nobody else's business."""
    model = str((result.get("model") or {}).get("name") or "unknown model")
    model = model.rpartition("/")[2] if model.startswith(("/", "~", ".")) else model
    return f"{model}, {str(result.get('run') or 'run').rpartition('/')[2]}"


def partial_line(result: Mapping) -> str:
    """What a report of an unfinished run says on top."""
    state = str(result["partial"])
    word = "FAILED" if state == "failed" else "PARTIAL"
    error = f" ({result['error']})" if result.get("error") else ""
    return f"{word}: the run is {state}{error}. Nothing here is final."


def headline(result: Mapping) -> tuple[str, str]:
    """One word and one sentence: the verdict and what it means."""
    if result["schema"] == "kvlab.rows/1":
        return "NO VERDICT", "The run stopped before anything was confirmed."
    chosen = best(result)
    if chosen:
        names = ", ".join(families(result))
        gain = " and rises where marked" if chosen["verdict"] == "RISES" else ""
        asked = result["schema"] == "kvlab.sweep/1" or result.get("goal") == "smallest"
        smallest = "The smallest that holds is " if asked else ""
        what = f"{smallest}{chosen['label']} at {size(chosen['workload_bytes'])}"
        return chosen["verdict"], f"{what}: accuracy holds on {names}{gain}, margin {_margins(chosen)} points."
    entries = [*judged(result), *searched(result)]
    if result.get("budget_bytes") is not None and not any(fits(result, e) for e in entries):
        return "NOTHING FITS", _nothing_fits(result, entries)
    word = _overall(result)
    wanted = _would_decide(result)
    more = f" About {wanted:,} items a family would decide." if word == "INCONCLUSIVE" and wanted else ""
    return word, f"No config is shown to hold {_within(result)}.{more}"


def warnings(result: Mapping) -> list[str]:
    """What a reader must know before trusting the document, then the run's own notes."""
    lines = []
    recorded = next((e for e in judged(result) if e["config_id"] == result.get("winner")), None)
    if recorded and not fits(result, recorded):
        lines.append(f"The recorded winner {recorded['label']} exceeds the budget and is not shown as best.")
    lost = [e.get("label", e["config_id"]) for e in searched(result) if not _scored(e)]
    if lost:
        lines.append(f"{len(lost)} configs have no finite score and are not drawn: {', '.join(lost[:8])}.")
    looks = len(result.get("ledger") or [])
    if looks > 1:
        some = f"one of {looks} in up to {min(5 * looks, 100)}%"
        lines.append(
            f"This was look {looks} at these items: each errs in up to 5%, {some}. Another seed draws fresh ones."
        )
    return [*lines, *(str(note) for note in result.get("notes") or [])]


def budget_line(result: Mapping) -> str:
    """The budget, the workload it is for, and what the raw cache would need."""
    where = workload(result)
    raw, budget = raw_bytes(result), result.get("budget_bytes")
    if budget is None:
        return f"No budget set. At {where} the raw cache needs {size(raw)}."
    if not finite(raw):
        return f"Budget {size(budget)} for {where}."
    if raw <= budget:
        return f"Budget {size(budget)} for {where}. The raw cache needs {size(raw)} and fits: the budget does not bind."
    over = f"{raw / budget:.1f} times the budget, over budget"
    return f"Budget {size(budget)} for {where}. The raw cache needs {size(raw)}: {over}."


def workload(result: Mapping) -> str:
    """The workload in words."""
    given = result.get("workload") or {}
    return f"{given.get('context', '?')} tokens x {given.get('concurrency', '?')} conversations"


def raw_bytes(result: Mapping) -> float | None:
    """Bytes of the uncompressed cache at the workload."""
    if result.get("raw_workload_bytes") is not None:
        return result["raw_workload_bytes"]
    baseline = (result.get("baseline") or {}).get("config_id")
    return next((e.get("workload_bytes") for e in judged(result) if e["config_id"] == baseline), None)


def size(count: float | None) -> str:
    """Bytes for people, decimal first (budgets are given so), binary beside it from a gigabyte on."""
    if not finite(count):
        return "unknown"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            binary = f" ({count / 2**30:.2f} GiB)" if unit == "GB" else ""
            return f"{count / scale:.2f} {unit}{binary}"
    return f"{count:.0f} B"


def finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _scored(entry: Mapping) -> bool:
    return any(finite(f.get("dnll")) for f in (entry.get("search") or {}).values())


def _overall(result: Mapping) -> str:
    recorded = result.get("verdict")
    if recorded and recorded not in GOOD:
        return recorded
    words = [str(e["verdict"]) for e in judged(result) if e.get("verdict") not in (*GOOD, None)]
    return words[0] if words else "INCONCLUSIVE"


def _margins(entry: Mapping) -> str:
    return " / ".join(f"{m:g}" for m in sorted({100 * f["margin"] for f in entry["families"].values()}))


def _would_decide(result: Mapping) -> int | None:
    """The fewest items a family that would decide some config: one that fits and whose open families all can be."""
    open_ones = ([f for f in e["families"].values() if f.get("verdict") == "INCONCLUSIVE"] for e in _fitting(result))
    needs = [[f.get("n_needed") for f in families] for families in open_ones if families]
    return min((max(need) for need in needs if all(need)), default=None)


def _fitting(result: Mapping) -> list[dict]:
    return [e for e in judged(result) if fits(result, e) and e.get("verdict") == "INCONCLUSIVE"]


def _within(result: Mapping) -> str:
    budget = result.get("budget_bytes")
    return f"within {size(budget)}" if budget is not None else "accuracy"


def _nothing_fits(result: Mapping, entries: list[dict]) -> str:
    known = [e for e in [*entries, *(result.get("nearest_misses") or [])] if finite(e.get("workload_bytes"))]
    if not known:
        return "No feasible setting, and no config has a known size."
    near = min(known, key=lambda e: e["workload_bytes"])
    miss = near["workload_bytes"] - result["budget_bytes"]
    return f"No feasible setting. The smallest is {near['label']} at {size(near['workload_bytes'])}, {size(miss)} over."
