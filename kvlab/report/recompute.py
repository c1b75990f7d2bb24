"""Every figure of a result document that item rows decide, once more from the rows alone.

Yields the figure's name, what the document says and what the rows say. Uses the package's own statistics, so that a
difference is one of data. Knows no config: sizes at the workload follow from a formula and are held against each other.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvlab import stats
from kvlab.evals.subject import ItemScore
from kvlab.evals.summary import by_task
from kvlab.report import document as doc
from kvlab.report.layered import layers

Record = dict[str, Any]
_FIELDS = {f.name for f in dataclasses.fields(ItemScore)}


class Figure(NamedTuple):
    """One figure: where it stands, what is printed, and what the rows say."""

    name: str
    printed: Any
    found: Any


class Rows:
    """Item rows by role and config; an item counts once, at its last score."""

    def __init__(self, frame: pd.DataFrame) -> None:
        if not len(frame):
            raise ValueError("the run has no item rows to recompute from")
        held: dict[tuple[str, str], dict[str, Record]] = {}
        for record in frame.to_dict("records"):
            row: Record = {str(k): None if v is None or v != v else v for k, v in record.items()}
            held.setdefault((row["role"], row["config_id"]), {})[row["item_id"]] = row
        self._held = {at: list(by_item.values()) for at, by_item in held.items()}

    def of(self, role: str, config_id: str) -> list[Record]:
        """In the order scored; empty where there are none."""
        return self._held.get((role, config_id), [])

    def everything(self, role: str | None = None) -> list[Record]:
        """All rows, or those of one role."""
        return [row for (held, _), rows in self._held.items() if role in (None, held) for row in rows]

    def pair(self, role: str, base: str, config: str, family: str, *, by_id: bool = True) -> stats.Paired:
        """Scores of two configs on the same items of a family, in the order of item ids or in that of scoring."""
        first, second = (of_family(self.of(role, arm), family) for arm in (base, config))
        first = sorted(first, key=lambda row: row["item_id"]) if by_id else first
        base_scores, scores = ({row["item_id"]: float(row["score"]) for row in arm} for arm in (first, second))
        return stats.Paired.join(base_scores, scores, {row["item_id"]: row["cluster"] for row in first})


def of_family(rows: Iterable[Record], family: str) -> list[Record]:
    return [row for row in rows if row["family"] == family]


def mean(values: Iterable[Any]) -> float | None:
    """None for no values, or where one is not known."""
    held = list(values)
    return float(np.mean(held)) if held and all(v is not None for v in held) else None


def figures(result: Mapping, rows: Rows, config: Mapping) -> Iterator[Figure]:
    """All of them; `config` is the run's own, which fixed margin and sizes beforehand."""
    yield from _counters(result, rows)
    yield from _margin(result, config)
    yield from _baseline(result, rows)
    yield from _controls(result, rows)
    found = _verdicts(result, rows)
    for entry in doc.judged(result):
        name = f"configs confirmed, {entry['label']}"
        yield from _judged(result, rows, entry, found[entry["config_id"]], name)
    yield from _whole(result, found)
    for entry in [*(result.get("anchors") or []), *(result.get("trials") or []), *(result.get("front") or [])]:
        if entry.get("config_id"):
            yield from _searched(result, rows, entry)
    yield from _before_after(result, rows)
    yield from _sizes(result)
    if result.get("sensitivity"):
        made = layers(result["sensitivity"], rows.everything("layers"), rows.everything("search"))
        yield from (Figure(*one) for one in made)


def _counters(result: Mapping, rows: Rows) -> Iterator[Figure]:
    every, said = rows.everything(), result.get("counters") or {}
    found = {
        "items": len({row["item_id"] for row in every}),
        "configs_scored": len({row["config_id"] for row in every}),
        "item_scores": len(every),
        "remembered": sum(isinstance(row.get("scored_in"), str) for row in every),
    }
    yield from (Figure(f"counters, {key}", said[key], value) for key, value in found.items() if key in said)


def _margin(result: Mapping, config: Mapping) -> Iterator[Figure]:
    said, fixed = result.get("margin") or {}, config.get("margin") or {}
    yield from (Figure(f"margin, {key}", said.get(key), fixed[key]) for key in ("value_points", "n") if key in fixed)


def _baseline(result: Mapping, rows: Rows) -> Iterator[Figure]:
    base = result["baseline"]
    own = rows.of("confirm", base["config_id"])
    for family, said in (base.get("families") or {}).items():
        yield from _arm(f"baseline, {family}", said, of_family(own, family))
    if base.get("tasks"):
        yield from _tasks("baseline", base["tasks"], own)


def _arm(name: str, said: Mapping, own: list[Record]) -> Iterator[Figure]:
    """n, mean and Wilson interval of one config's own scores."""
    n = len(own)
    low, high = stats.wilson(sum(row["score"] for row in own), n) if n else (None, None)
    found = {"n": n, "score": mean(row["score"] for row in own), "low": low, "high": high}
    yield from (Figure(f"{name}, {key}", said[key], value) for key, value in found.items() if key in said)


def _tasks(name: str, said: Mapping, own: list[Record]) -> Iterator[Figure]:
    found = by_task(_row(record) for record in own)
    for task, entry in said.items():
        again = found.get(task, {})
        yield from (Figure(f"{name}, task {task}, {key}", value, again.get(key)) for key, value in entry.items())


def _row(record: Record) -> ItemScore:
    row: dict[str, Any] = {k: v for k, v in record.items() if k in _FIELDS}
    row["nll"] = math.nan if row["nll"] is None else row["nll"]
    return ItemScore(**row)


def _controls(result: Mapping, rows: Rows) -> Iterator[Figure]:
    said = result.get("controls") or {}
    base = result["baseline"]["config_id"]
    if again := said.get("aa"):
        first, second = ({row["item_id"]: row for row in rows.of(role, base)} for role in ("confirm", "aa"))
        both = first.keys() & second.keys()
        yield Figure("controls, baseline against itself, n", again["n"], len(both))
        flips = sum(first[item]["score"] != second[item]["score"] for item in both)
        yield Figure("controls, baseline against itself, flips", again["flips"], flips)
        if "share" in again:
            yield Figure("controls, baseline against itself, share", again["share"], flips / max(1, len(both)))
        if again.get("dnll") is not None:
            apart = max(abs(first[i]["nll"] - second[i]["nll"]) for i in both if first[i]["nll"] is not None)
            yield Figure("controls, baseline against itself, nats", again["dnll"], apart)
    caught = _caught(result, rows)
    for family, pair in ((said.get("positive") or {}).get("families") or {}).items():
        name = f"controls, known bad {said['positive'].get('label')}, {family}"
        yield Figure(f"{name}, failed", bool(pair["failed"]), caught.get(family))
        judged = _family(rows, result, said["positive"]["config_id"], family, True)
        yield from (
            Figure(f"{name}, {k}", pair[k], getattr(judged, k)) for k in ("n", "base", "score", "diff") if k in pair
        )
        yield from _ends(name, pair, rows, result, said["positive"]["config_id"], family, True)


def _caught(result: Mapping, rows: Rows) -> dict[str, bool]:
    """Whether the config known to be bad failed, by family."""
    bad = ((result.get("controls") or {}).get("positive") or {}).get("config_id")
    base, margin = result["baseline"]["config_id"], _points(result)
    if bad is None or not len(rows.of("confirm", bad)):
        return {}
    return {
        family: stats.control_failed(rows.pair("confirm", base, bad, family), margin)
        for family in dict.fromkeys(row["family"] for row in rows.of("confirm", bad))
    }


def _points(result: Mapping) -> float:
    return result["margin"]["value_points"] / 100


def _family(
    rows: Rows, result: Mapping, config: str, family: str, caught: bool | None, *, by_id: bool = True
) -> stats.FamilyVerdict:
    paired = rows.pair("confirm", result["baseline"]["config_id"], config, family, by_id=by_id)
    return stats.judge_family(paired, _points(result), control_failed=caught)


def _ends(
    name: str, said: Mapping, rows: Rows, result: Mapping, config: str, family: str, caught: bool | None
) -> Iterator[Figure]:
    """The interval. A resampled one hangs on the order of items: that of ids, or in older runs that of scoring."""
    for key in ("low", "high"):
        found = [getattr(_family(rows, result, config, family, caught, by_id=b), key) for b in (True, False)]
        yield Figure(f"{name}, {key}", said[key], found[1] if same(said[key], found[1]) else found[0])


def _verdicts(result: Mapping, rows: Rows) -> dict[str, tuple[stats.Judgement, stats.Judgement]]:
    """Judgements by config id, over items in the order of ids and in that of scoring."""
    made = [_in_sequence(result, _judgements(result, rows, by_id=b)) for b in (True, False)]
    return {config: (made[0][config], made[1][config]) for config in made[0]}


def _judgements(result: Mapping, rows: Rows, *, by_id: bool) -> dict[str, stats.Judgement]:
    base, caught = result["baseline"]["config_id"], _caught(result, rows)
    out = {}
    for entry in doc.judged(result):
        config, families = entry["config_id"], list(entry["families"])
        pairs = {f: rows.pair("confirm", base, config, f, by_id=by_id) for f in families}
        # A second look counts when it was finished.
        second = None
        if len(rows.of("replicate", config)) and len(rows.of("replicate", config)) == len(rows.of("replicate", base)):
            second = {f: rows.pair("replicate", base, config, f, by_id=by_id) for f in families}
        out[config] = stats.judge(pairs, _points(result), control_failed=caught, replication=second)
    return out


def _in_sequence(result: Mapping, found: dict[str, stats.Judgement]) -> dict[str, stats.Judgement]:
    """Of a search: after the first, from the largest, that does not pass, no further claim is made."""
    if result["schema"] != "kvlab.search/1":
        return found
    asked = next((look["configs"] for look in reversed(result.get("ledger") or []) if "configs" in look), list(found))
    order = asked if set(found) <= set(asked) else list(found)
    passes = [c in found and found[c].verdict in doc.GOOD for c in order]
    tested = stats.fixed_sequence(passes)
    stopped = {c for c, passed, tried in zip(order, passes, tested, strict=True) if passed and not tried}
    return {c: stats.Judgement("INCONCLUSIVE", j.families) if c in stopped else j for c, j in found.items()}


def _judged(
    result: Mapping, rows: Rows, entry: Mapping, found: tuple[stats.Judgement, stats.Judgement], name: str
) -> Iterator[Figure]:
    own = rows.of("confirm", entry["config_id"])
    yield from _measured(name, entry, own)
    stopped = found[0].verdict == "INCONCLUSIVE" and all(f.verdict in doc.GOOD for f in found[0].families.values())
    for family, said in entry["families"].items():
        both = [judgement.families[family].to_dict() for judgement in found]
        for key, value in said.items():
            if key == "note":
                continue
            again = [f.get(key) for f in both]
            if key == "verdict" and stopped:
                again = ["INCONCLUSIVE"] * 2
            resampled = said.get("method") == "cluster-bootstrap" and same(value, again[1])
            yield Figure(f"{name}, {family}, {key}", value, again[1] if resampled else again[0])
    yield Figure(f"{name}, verdict", entry["verdict"], found[0].verdict)
    if entry.get("tasks"):
        yield from _tasks(name, entry["tasks"], own)
    for family, said in (entry.get("likelihood") or {}).items():
        yield from _likelihood(f"{name}, likelihood, {family}", said, rows, result, entry["config_id"], family)


def _likelihood(name: str, said: Mapping, rows: Rows, result: Mapping, config: str, family: str) -> Iterator[Figure]:
    both = [
        (row, full)
        for row, full in _beside_baseline(rows, "confirm", result, config)
        if row["family"] == family and row["nll"] is not None and full is not None
    ]
    lost = [row["nll"] - full for row, full in both]
    low, high = (stats.mean_interval(lost, [row["cluster"] for row, _ in both]) if lost else None) or (None, None)
    found = {"n": len(lost), "dnll": mean(lost), "low": low, "high": high}
    found |= {key: mean(row[key] for row, _ in both) for key in ("kl", "top1")}
    yield from (Figure(f"{name}, {key}", said[key], value) for key, value in found.items() if key in said)


def _beside_baseline(rows: Rows, role: str, result: Mapping, config: str) -> list[tuple[Record, float | None]]:
    """A config's rows, each with the full cache's NLL on the same item."""
    base = {row["item_id"]: row["nll"] for row in rows.of(role, result["baseline"]["config_id"])}
    return [(row, base.get(row["item_id"])) for row in rows.of(role, config)]


def _measured(name: str, said: Mapping, own: list[Record]) -> Iterator[Figure]:
    if not own:
        yield Figure(f"{name}, item rows", "some", "none")
        return
    counts = ("context_tokens", "measured_bytes", "predicted_bytes", "raw16_bytes")
    total = {k: sum(row[k] for row in own) for k in counts}
    found = {
        "context_used": round(total["context_tokens"] / len(own)),
        "predicted_bytes": round(total["predicted_bytes"] / len(own)),
        "measured_bytes": round(total["measured_bytes"] / len(own)),
        "bytes_per_token": round(total["measured_bytes"] / total["context_tokens"], 2),
        "effective_bits": round(16 * total["measured_bytes"] / total["raw16_bytes"], 4),
    }
    yield from (Figure(f"{name}, {key}", said[key], value) for key, value in found.items() if key in said)


def _whole(result: Mapping, found: Mapping[str, tuple[stats.Judgement, stats.Judgement]]) -> Iterator[Figure]:
    """The winner and the word over everything."""
    entries = doc.judged(result)
    good = [e for e in entries if found[e["config_id"]][0].verdict in doc.GOOD and doc.fits(result, e)]
    if result["schema"] == "kvlab.search/1":
        winner = good[-1]["config_id"] if good else None
        shown = good[-1] if good else (entries[0] if entries else None)
        word = found[shown["config_id"]][0].verdict if shown else "INCONCLUSIVE"
    else:
        best = min(good, key=lambda e: e["workload_bytes"], default=None)
        winner = best["config_id"] if best else None
        words = [found[e["config_id"]][0].verdict for e in entries if doc.fits(result, e)]
        obstacle = next((w for w in ("INSENSITIVE", "INCONCLUSIVE", "WORSE") if w in words), None)
        word = found[winner][0].verdict if winner else obstacle
    yield Figure("winner", result.get("winner"), winner)
    yield Figure("verdict", result.get("verdict"), word)


def _searched(result: Mapping, rows: Rows, entry: Mapping) -> Iterator[Figure]:
    name = f"configs searched, {entry['label']} {entry['config_id'][:4]}"
    both = _beside_baseline(rows, "search", result, entry["config_id"])
    found: dict[str, dict[str, Any]] = {}
    for family in dict.fromkeys(row["family"] for row, _ in both):
        own = [(row, full) for row, full in both if row["family"] == family]
        lost = mean(None if full is None else row["nll"] - full for row, full in own)
        found[family] = {"n": len(own), "score": mean(row["score"] for row, _ in own), "dnll": lost}
    for family, said in (entry.get("search") or {}).items():
        again = found.get(family, {"n": 0, "score": None, "dnll": None})
        yield from (Figure(f"{name}, {family}, {key}", said[key], value) for key, value in again.items())
    if "measured_bytes" in entry and both:
        yield from _measured(name, entry, [row for row, _ in both])
    if "dnll" in entry:
        yield Figure(f"{name}, mean dnll", entry["dnll"], mean(f["dnll"] for f in found.values()))


def _before_after(result: Mapping, rows: Rows) -> Iterator[Figure]:
    recorded = result.get("before_after") or {}
    sizes = {e["config_id"]: e.get("workload_bytes") for e in doc.judged(result)}
    for side in ("before", "after"):
        said = recorded.get(side)
        if not said or "config_id" not in said:
            continue
        own = rows.of("confirm", said["config_id"])
        for family, arm in (said.get("families") or {}).items():
            yield from _arm(f"{side}, {family}", arm, of_family(own, family))
        used = round(sum(row["context_tokens"] for row in own) / len(own)) if own else None
        yield Figure(f"{side}, context_used", said["context_used"], used)
        size = doc.raw_bytes(result) if side == "before" else sizes.get(said["config_id"])
        yield Figure(f"{side}, KV bytes", said["kv_bytes_workload"], size)
        if side == "after":
            yield from _measured(side, {k: said[k] for k in ("bytes_per_token", "effective_bits")}, own)


def _sizes(result: Mapping) -> Iterator[Figure]:
    """Sizes at the workload agree with each other: parts with the whole, conversations and bits with the bytes."""
    load, budget = result.get("workload") or {}, result.get("budget_bytes")
    per_token = (result.get("model") or {}).get("raw_bytes_per_token")
    for entry in [*doc.judged(result), *doc.searched(result)]:
        size = entry.get("workload_bytes")
        if not doc.finite(size):
            continue
        name = f"sizes, {entry['label']}"
        if entry.get("streams"):
            yield Figure(f"{name}, bytes at workload", size, sum(entry["streams"].values()))
        if budget is not None and "sessions" in entry and load.get("concurrency"):
            yield Figure(f"{name}, sessions", entry["sessions"], int(budget // (size / load["concurrency"])))
        if budget is not None and "feasible" in entry:
            yield Figure(f"{name}, fits", entry["feasible"], size <= budget)
        if per_token and "workload_effective_bits" in entry and load.get("concurrency"):
            seen = load["context"] * load["concurrency"]
            found = round(16 * size / (per_token * seen), 4)
            yield Figure(f"{name}, effective bits", entry["workload_effective_bits"], found)


def same(printed: Any, found: Any) -> bool:
    """Equal, floats up to rounding in the last digits."""
    if doc.finite(printed) and doc.finite(found):
        return math.isclose(printed, found, rel_tol=1e-9, abs_tol=1e-12)
    return printed == found
