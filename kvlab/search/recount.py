"""Every size in a result document once more, from the configs on record, the model's shape and the workload.

Rows prove bytes at the contexts that were scored; what a budget is compared with lies at the workload, far beyond them,
and follows from the same formula. A run that keeps no configs or no shape gives nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from kvlab.config import KVConfig
from kvlab.layer import ModelShape
from kvlab.recorded import recorded
from kvlab.report import document as doc
from kvlab.report.recompute import Figure
from kvlab.runs import Run
from kvlab.search.workload import Workload


def sizes(run: Run, result: Mapping) -> Iterator[Figure]:
    """Sizes at the workload as printed, then predicted bytes of every row.

    Raises ValueError for a config on record that does not have its id.
    """
    configs, described = recorded(run), (result.get("model") or {}).get("shape")
    if not configs or described is None:
        return
    shape, load = ModelShape.from_dict(described), Workload(**result["workload"])
    front = result.get("front") or []
    for entry in [*doc.judged(result), *doc.searched(result), *front]:
        # Of a trial of which nothing fits there is no config.
        if entry.get("config_id"):
            yield from _entry(entry, configs.get(entry["config_id"]), shape, load, result.get("budget_bytes"))
    yield from _rows(run.rows(), configs, shape)


def _entry(
    entry: Mapping, config: KVConfig | None, shape: ModelShape, load: Workload, budget: int | None
) -> Iterator[Figure]:
    name = f"sizes by formula, {entry['label']}"
    if config is None:
        yield Figure(f"{name}, config on record", entry["config_id"], None)
        return
    found: dict[str, Any] = {
        "workload_bytes": load.bytes(config, shape),
        "read_bytes": config.read_bytes(shape, load.context) * load.concurrency,
        "workload_effective_bits": round(config.effective_bits(shape, load.context), 4),
    }
    if budget is not None:
        found["sessions"] = load.sessions(config, shape, budget)
        found["longest_context"] = load.longest(config, shape, budget)
    yield from (Figure(f"{name}, {key}", entry[key], value) for key, value in found.items() if key in entry)
    by_stream = config.bytes_by_stream(shape, load.context)
    for stream, printed in (entry.get("streams") or {}).items():
        yield Figure(f"{name}, {stream}", printed, by_stream.get(stream, 0) * load.concurrency)


def _rows(rows: pd.DataFrame, configs: Mapping[str, KVConfig], shape: ModelShape) -> Iterator[Figure]:
    """Each config at each context it was scored at."""
    seen = rows[["config_id", "label", "context_tokens", "predicted_bytes"]].drop_duplicates()
    for key, label, context, printed in seen.itertuples(index=False):
        found = configs[key].predicted_bytes(shape, context) if key in configs else None
        yield Figure(f"rows, {label} at {context} tokens, predicted", printed, found)
