"""Runs beside each other: whether they may be compared at all, and paired differences on the items they share.

The first run is the one that others are compared with. Knows run folders and their rows; judges nothing anew.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvlab import stats
from kvlab.report import document as doc
from kvlab.runs import Run

SCHEMA = "kvlab.comparison/1"
# What must be alike for a difference of scores or bytes to be one of configs.
ALIKE = ("machine", "model", "items", "margin", "workload")


class UnlikeError(ValueError):
    """Runs that differ in more than their configs, and nobody allowed that."""


def facts(run: Run) -> dict[str, str]:
    """What scores and bytes hang on besides the config, by the names of ALIKE; then what is only told: code, seeds."""
    made = run.read_json("provenance.json")
    result = run.read_json("result.json") if (run.path / "result.json").exists() else {}
    model = result.get("model") or made.get("model") or {}
    margin = result.get("margin") or run.config.get("margin") or {}
    git = made.get("git") or {}
    gpus = ", ".join(g.get("name", "?") for g in made.get("gpus") or []) or "no GPU"
    sha = (made.get("evalset") or {}).get("confirm")
    weights = str(model.get("weights_sha256"))[:12]
    return {
        "machine": f"{run.status.get('host')}, {made.get('cpu')}, {made.get('cores')} cores, {gpus}",
        "model": f"{model.get('name')} {weights} {model.get('dtype')}",
        "items": f"sha256 {sha[:12]}" if sha else "not recorded",
        "margin": f"{margin.get('value_points', '?')} points, n = {margin.get('n', '?')}",
        "workload": doc.workload(result) if result.get("workload") else "not recorded",
        "budget": doc.size(result["budget_bytes"]) if result.get("budget_bytes") is not None else "none",
        "seed": str(result.get("seed", (made.get("seeds") or {}).get("items"))),
        "code": f"{str(git.get('sha'))[:12]}{' with changes' if git.get('dirty') else ''}",
        "torch": str((made.get("packages") or {}).get("torch")),
    }


def unlike(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What differs between the runs: its name, each run's value, and whether a comparison must be allowed for it."""
    told = [facts(run) for run in runs]
    return [
        {"what": name, "values": [f[name] for f in told], "refused": name in ALIKE}
        for name in told[0]
        if len({f[name] for f in told}) > 1
    ]


def refuse_unlike(runs: Sequence[Run]) -> None:
    """Raise UnlikeError naming every difference that needs to be allowed."""
    found = [d for d in unlike(runs) if d["refused"]]
    if found:
        said = "; ".join(f"{d['what']}: {' against '.join(dict.fromkeys(d['values']))}" for d in found)
        raise UnlikeError(f"these runs differ in more than their configs ({said}). Pass --allow-different to see them")


def compare(runs: Sequence[Run], *, allow_different: bool = False, configs: Sequence[str] = ()) -> dict[str, Any]:
    """The comparison as plain data, schema kvlab.comparison/1.

    `configs` names one config of each run, by id or label; by default each run's best, or the first that was judged.
    Raises UnlikeError, or ValueError for fewer than two runs or an unknown config.
    """
    if len(runs) < 2:
        raise ValueError(f"a comparison needs at least two runs, got {len(runs)}")
    if configs and len(configs) != len(runs):
        raise ValueError(f"name one config for each of {len(runs)} runs, got {len(configs)}")
    if not allow_different:
        refuse_unlike(runs)
    results = [doc.load(run, partial=True) for run in runs]
    sides = [
        _Side(run.path.name, result, _chosen(result, configs[n] if configs else None), _confirmed(run))
        for n, (run, result) in enumerate(zip(runs, results, strict=True))
    ]
    return {
        "schema": SCHEMA,
        "runs": [_about(side) for side in sides],
        "unlike": unlike(runs),
        "pairs": [pair for other in sides[1:] for pair in _pairs(sides[0], other)],
    }


@dataclass(frozen=True, slots=True)
class _Side:
    """One run of a comparison: its document, the config that stands for it, and its confirmed rows."""

    name: str
    result: Mapping
    config: Mapping | None
    rows: pd.DataFrame

    @property
    def base(self) -> str | None:
        return (self.result.get("baseline") or {}).get("config_id")

    def of(self, config: str | None) -> pd.DataFrame:
        found: Any = self.rows[self.rows["config_id"] == config]
        return found


def _chosen(result: Mapping, named: str | None) -> dict | None:
    entries = doc.judged(result)
    if named is None:
        # A search judges its favourite first; of a sweep's formats the smallest says most.
        favourite = entries[0] if entries else None
        if result["schema"] == "kvlab.sweep/1":
            favourite = min(
                (e for e in entries if doc.finite(e.get("workload_bytes"))),
                key=lambda e: e["workload_bytes"],
                default=None,
            )
        return doc.best(result) or favourite
    found = next((e for e in entries if named in (e["config_id"], e["label"], e.get("format"))), None)
    if found is None:
        known = ", ".join(e.get("format", e["label"]) for e in entries) or "none"
        raise ValueError(f"run {result.get('run')} judged no config {named!r}; it judged {known}")
    return found


def _about(side: _Side) -> dict[str, Any]:
    word, sentence = doc.headline(side.result)
    result, config = side.result, side.config or {}
    return {
        "run": side.name,
        "state": result.get("partial") or "done",
        "verdict": word,
        "headline": sentence,
        "config": config.get("label"),
        "config_verdict": config.get("verdict"),
        "workload_bytes": config.get("workload_bytes"),
        "bytes_per_token": config.get("bytes_per_token"),
        "effective_bits": config.get("effective_bits"),
        "wall_s": result.get("wall_s"),
    }


def _confirmed(run: Run) -> pd.DataFrame:
    frame: Any = run.rows()
    if not len(frame) or "role" not in frame.columns:
        return pd.DataFrame(columns=["config_id", "item_id", "family", "cluster", "score"])
    own = frame[frame["role"] == "confirm"]
    return own.drop_duplicates(["config_id", "item_id"], keep="last")


def _pairs(first: _Side, other: _Side) -> Iterator[dict[str, Any]]:
    """The full caches against each other, every config both runs judged, and the chosen ones."""
    wanted = [("full cache", first.base, other.base, "full cache in both")]
    shared = {e["config_id"] for e in doc.judged(other.result)} - {first.base}
    for entry in doc.judged(first.result):
        if entry["config_id"] in shared:
            wanted.append(("same config", entry["config_id"], entry["config_id"], f"{entry['label']} in both"))
    if first.config and other.config and first.config["config_id"] != other.config["config_id"]:
        label = f"{other.config['label']} against {first.config['label']}"
        wanted.append(("chosen", first.config["config_id"], other.config["config_id"], label))
    for kind, one, two, label in wanted:
        families = _families(first.of(one), other.of(two))
        if families:
            yield {"kind": kind, "label": label, "first": first.name, "other": other.name, "families": families}


def _families(one: pd.DataFrame, two: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The other minus the first, on items of the same id."""
    out = {}
    for family in dict.fromkeys(one["family"]):
        arms = [part[part["family"] == family].set_index("item_id").sort_index() for part in (one, two)]
        ids = arms[0].index.intersection(arms[1].index).sort_values()
        if not len(ids):
            continue
        first, second = (arm.loc[ids] for arm in arms)
        paired = stats.Paired.join(first["score"].to_dict(), second["score"].to_dict(), first["cluster"].to_dict())
        # No margin is judged here: the difference, its interval and the flips are what is wanted.
        found = stats.judge_family(paired, 0.1, control_failed=True)
        known = found.method != "none"
        out[family] = {
            "n": found.n,
            "first": found.base,
            "other": found.score,
            "diff": found.diff,
            "low": found.low if known else None,
            "high": found.high if known else None,
            "b": found.b,
            "c": found.c,
            "p": found.p,
        }
    return out


def pair_rows(comparison: Mapping) -> pd.DataFrame:
    """One line per pair and family; differences in points, the other run minus the first."""
    return pd.DataFrame(
        [
            {
                "config": pair["label"],
                "other_run": pair["other"],
                "family": family,
                "n": found["n"],
                "first": found["first"],
                "second": found["other"],
                **{f"{k}_points": None if found[k] is None else 100 * found[k] for k in ("diff", "low", "high")},
                **{k: found[k] for k in ("b", "c", "p")},
            }
            for pair in comparison["pairs"]
            for family, found in pair["families"].items()
        ]
    )


def run_rows(comparison: Mapping) -> pd.DataFrame:
    """One line per run."""
    keys = (
        "run",
        "state",
        "verdict",
        "config",
        "config_verdict",
        "workload_bytes",
        "bytes_per_token",
        "effective_bits",
    )
    return pd.DataFrame([{k: about[k] for k in keys} for about in comparison["runs"]])


def unlike_rows(comparison: Mapping) -> pd.DataFrame:
    """One line per difference, one column per run."""
    names, found = [about["run"] for about in comparison["runs"]], comparison["unlike"]
    return pd.DataFrame([{"what": d["what"], **dict(zip(names, d["values"], strict=True))} for d in found])


def warning(comparison: Mapping) -> str | None:
    """What must stand on top where unlike runs were allowed."""
    found = [d for d in comparison["unlike"] if d["refused"]]
    if not found:
        return None
    what = ", ".join(d["what"] for d in found)
    more = " Items of one id may differ in text." if any(d["what"] == "items" for d in found) else ""
    return f"DIFFERENT {what.upper()}: these runs do not differ in their configs alone.{more}"


def summary(comparison: Mapping) -> str:
    """One sentence: what was compared, and whether the full caches agree."""
    full = [p for p in comparison["pairs"] if p["kind"] == "full cache"]
    n = sum(f["n"] for p in full for f in p["families"].values())
    flips = sum(f["b"] + f["c"] for p in full for f in p["families"].values())
    runs = len(comparison["runs"])
    if not full:
        return f"{runs} runs, and no item that two of them scored: nothing can be paired."
    agree = "the full caches agree on all of them" if not flips else f"the full caches differ on {flips}"
    return f"{runs} runs, {n} shared items; {agree}."
