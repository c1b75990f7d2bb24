"""The search bench's document for a terminal."""

from collections.abc import Mapping
from typing import Any

from kvlab.bench.text import columns


def table(document: Mapping[str, Any]) -> str:
    """Seconds, prefills and memory of each side, the ratios, and how far scores agree."""
    d = document
    low, high = d["context_tokens"]
    head = (
        f"{d['model']}, {d['dtype']}, {d['threads']} thread(s): {d['configs']} configs x {d['items']} items, "
        f"{low} to {high} context and {d['answer_tokens']} answer tokens, least of {d['repeats']} turns"
    )
    rows = [["side", "s per config x item", "CPU s", "prefills", "peak MiB"]]
    for name in ("kvlab", "kvpress", "limit"):
        if (side := d[name]) is not None:
            prefills = d["items"] if name == "limit" else side["prefills"]
            peak = f"{side['peak_bytes'] / 2**20:,.0f}" if side.get("peak_bytes") else "-"
            times = [f"{side[field]:.4f}" for field in ("s_per_config_item", "cpu_s_per_config_item")]
            rows.append([name, *times, f"{prefills:,}", peak])
    lines = [head, *columns(rows)]
    if d["speedup"] is not None:
        lines.append(f"speedup: {d['speedup']:.2f} (by CPU time {d['cpu_speedup']:.2f})")
    least = d["limit"]
    lines.append(
        f"limit_ratio: {d['limit_ratio']:.3f} (by CPU time {d['cpu_limit_ratio']:.3f}); "
        f"prefill {least['prefill_s']:.3f} s, forced row {least['row_s']:.4f} s at {least['rows']} rows"
    )
    if (agreement := d["agreement"]) is not None:
        lines += ["", f"uncompressed: max |NLL difference| {agreement['uncompressed_nll_max_abs_diff']:.1e}"]
        lines += columns([["method", "pairs", "kvlab NLL", "kvpress NLL", "mean diff", "s.e.", "max |diff|"], *(
            [
                m["method"],
                str(m["pairs"]),
                *(f"{m[name]:.3f}" for name in ("kvlab_nll", "kvpress_nll")),
                f"{m['mean_diff']:+.4f}",
                "-" if m["standard_error"] is None else f"{m['standard_error']:.4f}",
                f"{m['max_abs_diff']:.4f}",
            ]
            for m in agreement["methods"]
        )])  # fmt: skip
        lines += [f"{m['method']}: {m['difference']}" for m in agreement["methods"]]
    lines += ["", *d["notes"], ""]
    lines += [f"{t['name']}: {t['value']:.4g} ({t['limit']:g}), ok: {t['ok']}" for t in d["targets"]]
    return "\n".join([*lines, f"ok: {d['ok']}"])
