"""Result documents and run folders as the plain data that notebooks show. Decides nothing that a report would not."""

from collections.abc import Mapping
from typing import Any

import pyarrow.parquet as pq

from kvlab.report import document as doc
from kvlab.report.repeat import flip_floor
from kvlab.runs import Run

_UNITS = {
    False: "points against the baseline on the same items [90 % interval]; of the baseline, per cent right [95 %]",
    True: "per cent right [95 % interval]",
}


def result_document(result: Mapping[str, Any], labels: Mapping[str, str] = {}) -> dict[str, Any]:
    """A result of any schema the report reads, as `kvlab.show` takes it: the judged ones largest first.

    `labels` name configs by id where the document does not: one summed up from rows.
    """
    word, sentence = doc.headline(result)
    about = [doc.budget_line(result)] if result["schema"] != "kvlab.rows/1" else []
    margin = result.get("margin")
    if isinstance(margin, Mapping):
        about.append(f"margin {margin['value_points']:g} points, n = {margin['n']} a family: {margin['rule']}")
    about += [*_controls(result), _UNITS[result["schema"] == "kvlab.rows/1"]]
    return {
        "schema": "kvlab.result/1",
        "run": str(result.get("run", "")).rpartition("/")[2],
        "model": (result.get("model") or {}).get("name") or "",
        "word": word,
        "sentence": sentence,
        "about": about,
        "partial": result.get("partial"),
        "families": doc.families(result) or _families(result),
        "baseline": _baseline(result),
        "configs": _scored(result, labels) if result["schema"] == "kvlab.rows/1" else _judged(result),
        "notes": doc.warnings(result),
    }


def run_document(run: Run) -> dict[str, Any]:
    """A run folder: state, counts and sizes of what lies there, and its result where it has one."""
    parts = sorted((run.path / "items").glob("part-*.parquet"))
    status, state = run.status, run.state()
    has_result = (run.path / "result.json").exists()
    known = has_result and run.read_json("result.json").get("schema") in doc.SCHEMAS
    result = doc.load(run, partial=True) if known else None
    model = (run.read_json("provenance.json").get("model") or {}) if (run.path / "provenance.json").exists() else {}
    return {
        "schema": "kvlab.run/1",
        "name": run.path.name,
        "hash8": run.hash8,
        "state": state,
        "created": status["created"],
        "wall_s": status.get("wall_s"),
        "error": status.get("error"),
        "model": model.get("name") if isinstance(model, Mapping) else str(model),
        "parts": len(parts),
        "rows": sum(pq.read_metadata(p).num_rows for p in parts),
        "bytes": sum(p.stat().st_size for p in parts),
        "config": {k: v for k, v in run.config.items() if isinstance(v, str | int | float | bool | list | dict)},
        "result": result_document(result, labels_of(run) if result["schema"] == "kvlab.rows/1" else {})
        if result
        else None,
    }


def _controls(result: Mapping[str, Any]) -> list[str]:
    found = result.get("controls") or {}
    positive = found.get("positive") or {}
    if not found.get("aa") or not positive.get("families"):
        return []
    missed = [name for name, pair in positive["families"].items() if not pair.get("failed")]
    caught = f"missed on {', '.join(missed)}" if missed else "caught"
    return [f"controls: {flip_floor(found['aa'])}; known bad {positive['label']}, {caught}"]


def _baseline(result: Mapping[str, Any]) -> dict[str, Any]:
    base = result.get("baseline") or {}
    families = {f: _interval(v, ("n", "score", "low", "high")) for f, v in (base.get("families") or {}).items()}
    bits = base.get("effective_bits", 16.0 if base else None)
    return {
        "label": base.get("label", "full cache"),
        "bytes": doc.raw_bytes(result),
        "bits": bits,
        "families": families,
    }


def _judged(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = sorted(doc.judged(result), key=lambda e: -(e.get("workload_bytes") or 0))
    return [
        {
            "label": e.get("format") or e["label"],
            "config_id": e["config_id"],
            "bytes": e.get("workload_bytes"),
            "read": e.get("read_bytes"),
            "fits": "yes" if doc.fits(result, e) else "no",
            "bits": e.get("workload_effective_bits", e.get("effective_bits")),
            "verdict": e.get("verdict") or "–",
            "families": {
                f: _interval(p, ("n", "diff", "low", "high", "margin", "verdict"))
                for f, p in (e.get("families") or {}).items()
            },
        }
        for e in entries
    ]


def labels_of(run: Run) -> dict[str, str]:
    """Names of configs by id, as a run's rows have them."""
    rows = run.rows()
    known = {"config_id", "label"} <= set(rows.columns)
    return dict(zip(rows["config_id"], rows["label"], strict=True)) if known else {}


def _families(result: Mapping[str, Any]) -> list[str]:
    found = {row["family"] for row in result.get("scored") or []}
    return [f for f in doc.FAMILY_ORDER if f in found] + sorted(found - set(doc.FAMILY_ORDER))


def _scored(result: Mapping[str, Any], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a run without a result has scored: means and no verdict."""
    groups: dict[str, dict[str, Any]] = {}
    for row in result["scored"]:
        config = row["config_id"]
        about = {"label": labels.get(config, config), "config_id": config, "bits": row["effective_bits"]}
        fresh = {**about, "bytes": None, "fits": "", "verdict": "no verdict", "families": {}}
        entry = groups.setdefault(config, fresh)
        score = f"{100 * row['score']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        entry["families"][row["family"]] = {"n": row["n"], "verdict": score}
    return list(groups.values())


def _interval(found: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: found.get(name) for name in names}
