"""One run folder at a glance: what was asked, what came of it, what it cost, what lies there. Plain data and text."""

import json
from collections.abc import Mapping
from typing import Any

from kvlab.report import document as doc
from kvlab.runs import Run

SCHEMA = "kvlab.show/1"


def about(run: Run) -> dict[str, Any]:
    """Settings, state, verdict, counters and files of a run."""
    made = run.read_json("provenance.json")
    result = doc.load(run, partial=True) if _known(run) else None
    word, sentence = doc.headline(result) if result else (None, None)
    model = (result or {}).get("model") or made.get("model") or {}
    files = sorted(p for p in run.path.rglob("*") if p.is_file() and not p.name.startswith("."))
    status = run.status
    return {
        "schema": SCHEMA,
        "run": run.path.name,
        "path": str(run.path),
        "state": run.state(),
        "error": status.get("error"),
        "created": status["created"],
        "updated": status["updated"],
        "verdict": word,
        "headline": sentence,
        "model": {k: model.get(k) for k in ("name", "weights_sha256", "dtype", "layers") if model.get(k) is not None},
        "settings": run.config.get("request", run.config),
        "margin": (result or {}).get("margin") or run.config.get("margin"),
        "counters": (result or {}).get("counters") or {"rows": len(run.rows())},
        "wall_s": status.get("wall_s"),
        "cpu_s": status.get("cpu_s"),
        "peak_rss_bytes": status.get("peak_rss_bytes"),
        "machine": {k: made.get(k) for k in ("cpu", "cores", "gpus")} | {"host": status.get("host")},
        "code": made.get("git"),
        "files": {str(p.relative_to(run.path)): p.stat().st_size for p in files},
    }


def _known(run: Run) -> bool:
    """Whether there is a result of a schema that reports read."""
    path = run.path / "result.json"
    return path.exists() and run.read_json("result.json").get("schema") in doc.SCHEMAS


def text(found: Mapping[str, Any]) -> str:
    """The same for people."""
    error = f" ({found['error']})" if found["error"] else ""
    lines = [found["run"], f"state      {found['state']}{error}, {found['created']} to {found['updated']}"]
    if found["verdict"]:
        lines.append(f"verdict    {found['verdict']}  {found['headline']}")
    lines.append(f"model      {_pairs(found['model'])}")
    lines.append(f"settings   {_pairs(found['settings'])}")
    if found["margin"]:
        points, n = found["margin"].get("value_points"), found["margin"].get("n")
        lines.append(f"margin     {points} points, n = {n} a family")
    lines.append(f"counters   {_pairs(found['counters'])}")
    peak = doc.size(found["peak_rss_bytes"])
    lines.append(f"cost       {found['wall_s']} s, {found['cpu_s']} s of CPU, at most {peak} of memory")
    lines.append(f"machine    {_pairs(found['machine'])}")
    lines.append(f"code       {_pairs(found['code'] or {})}")
    lines.append(f"files      {doc.size(sum(found['files'].values()))} in {found['path']}")
    return "\n".join([*lines, *(f"  {doc.size(size):>10}  {name}" for name, size in found["files"].items())])


def _pairs(held: Mapping[str, Any]) -> str:
    said = {k: v if isinstance(v, str) else json.dumps(v) for k, v in held.items() if v is not None}
    return ", ".join(f"{k} {v}" for k, v in said.items()) or "not recorded"
