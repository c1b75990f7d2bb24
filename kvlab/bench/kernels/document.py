"""From answers to figures: bandwidths, speed-ups and the table. No torch.

A speed-up is a ratio of two times whose outputs were both right; where either check failed, or a small check of the
same kernel and format did, there is none.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvlab.bench.kernels.cases import SPARSE_SPEEDUP_TARGET, Case, target_of
from kvlab.bench.text import columns

SCHEMA = "kvlab.bench.kernels/1"
Row = dict[str, Any]


def row_of(case: Case, result: Mapping[str, Any]) -> Row:
    """What a child found out about a case, with the case's own fields."""
    s = case.shape
    shape = {"B": s.B, "L": s.L, "kv_heads": s.N, "gqa": s.G, "head_dim": s.D, "page_tokens": s.P, "window": s.window}
    return {"case": case.name, "kernel": case.kernel, "pair": case.pair, "variant": case.variant} | shape | dict(result)


def broken(checks: Iterable[Row]) -> set[tuple[str, str]]:
    """(kernel, pair) of every check that failed or could not be made."""
    return {(row["kernel"], row["pair"]) for row in checks if not right(row)}


def right(row: Row) -> bool:
    """Whether a row's output was compared and found equal."""
    return "error" not in row and bool(row["check"]["ok"])


def with_figures(rows: Sequence[Row], checks: Sequence[Row], copy_gb_s: float | None) -> list[Row]:
    """Rows with GB/s, share of the copy bandwidth and speed-ups, None where there is nothing to say."""
    distrusted = broken(checks)
    usable = {row["case"]: row for row in rows if right(row) and (row["kernel"], row["pair"]) not in distrusted}
    return [row | _figures(row, usable, copy_gb_s) for row in rows]


def _figures(row: Row, usable: Mapping[str, Row], copy_gb_s: float | None) -> Row:
    found: Row = dict.fromkeys(("gb_s", "copy_share", "target_share", "x_sdpa", "x_own_bf16", "x_dense"))
    if row["case"] not in usable or row.get("times") is None:
        return found
    found["gb_s"] = row["bytes"] / row["times"]["p50"] / 1e3
    found["copy_share"] = found["gb_s"] / copy_gb_s if copy_gb_s else None
    if row["kernel"] not in ("decode", "sparse"):
        return found
    if row["kernel"] == "decode" and not row["variant"]:
        found["target_share"] = target_of(row["pair"])
    found["x_sdpa"] = _speedup(row, usable.values(), kernel="sdpa")
    found["x_own_bf16"] = _speedup(row, usable.values(), kernel="decode", pair="raw", variant="")
    if row["kernel"] == "sparse":
        same_page = {"page_tokens": row["page_tokens"]}
        found["x_dense"] = _speedup(row, usable.values(), kernel="decode", pair=row["pair"], variant="", **same_page)
    return found


def _speedup(row: Row, others: Iterable[Row], **wanted: Any) -> float | None:
    """How many times quicker than the quickest other row of the same size that is as `wanted`."""
    size = ("B", "L", "kv_heads", "gqa", "head_dim", "window")
    times = [
        other["times"]["p50"]
        for other in others
        if other.get("times") is not None
        and all(other[name] == row[name] for name in size)
        and all(other[name] == value for name, value in wanted.items())
    ]
    return min(times) / row["times"]["p50"] if times else None


def problems(rows: Iterable[Row]) -> list[str]:
    """Every check that failed and every case that could not run."""
    found = []
    for row in rows:
        if "error" in row:
            found.append(f"{row['case']}: {row['error']}")
        elif not right(row):
            check = row["check"]
            found.append(f"{row['case']}: off by {check['error']} of {check['tolerance']} ({check['reference']})")
    return found


def table(document: Mapping[str, Any]) -> str:
    """The rows for people: what was measured, then what it means."""
    device = document["device"]
    lines = [f"{device.get('name')}, torch {device.get('torch')}, triton {device.get('triton')}"]
    if device.get("copy_gb_s"):
        lines += [f"copy {device['copy_gb_s']:.0f} GB/s; an empty graph takes {device['floor_us']:.1f} us"]
    head = ("case", "impl", "check", "us", "GB/s", "copy", "target", "x sdpa", "x bf16", "x dense")
    body = [_cells(row) for row in document["rows"]]
    lines += columns([head, *body]) if body else []
    if document["tuning"]:
        lines += ["", "best launch options of each format", *columns(_tuned(document["tuning"]))]
    checked = document["checks"]
    lines += ["", f"{sum(right(row) for row in checked)} of {len(checked)} checks right"]
    lines += [f"not run: {entry['case']}: {entry['reason']}" for entry in document["skipped"]]
    lines += [f"PROBLEM {text}" for text in document["problems"]]
    return "\n".join([*lines, f"{document['seconds']:.0f} s, ok: {document['ok']}"])


def _cells(row: Row) -> tuple[str, ...]:
    times, check = row.get("times"), row.get("check")
    error = "none" if check is None else "NaN" if check["error"] is None else f"{check['error']:.0e}"
    verdict = f"{error}" if right(row) else f"{error} FAIL"
    reach = row.get("target_share")
    return (
        row["case"],
        row.get("impl", ""),
        verdict,
        f"{times['p50']:.1f}" if times else "",
        _number(row["gb_s"], ".0f"),
        _number(row["copy_share"], ".0%"),
        "" if reach is None or row["copy_share"] is None else f"{reach:.0%}" + _met(row["copy_share"] >= reach),
        _number(row["x_sdpa"], ".2f"),
        _number(row["x_own_bf16"], ".2f"),
        _number(row["x_dense"], ".2f") + (_met(row["x_dense"] >= SPARSE_SPEEDUP_TARGET) if row["x_dense"] else ""),
    )


def _met(yes: bool) -> str:
    return " +" if yes else " -"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _tuned(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The quickest options of each case that were right, beside those in use."""
    best: dict[str, Row] = {}
    for row in rows:
        times = row.get("times")
        if right(row) and times and (row["case"] not in best or times["p50"] < best[row["case"]]["times"]["p50"]):
            best[row["case"]] = row
    used = {row["case"]: row for row in rows if row["in_use"] and row.get("times")}
    lines = [("case", "best", "us", "in use", "us", "gain")]
    for case, row in best.items():
        now = used.get(case)
        gain = f"{now['times']['p50'] / row['times']['p50'] - 1:.0%}" if now else ""
        now_us = f"{now['times']['p50']:.1f}" if now else ""
        lines.append((case, row["label"], f"{row['times']['p50']:.1f}", now["label"] if now else "", now_us, gain))
    return lines
