"""Which figures a run has: those its document and rows have the numbers for, in reading order."""

from collections.abc import Callable, Iterator, Mapping

import pandas as pd

from kvlab.report import document as doc
from kvlab.report.figures.budgets import budget_curve
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.flips import flips_matrix
from kvlab.report.figures.growth import memory_of_process, memory_of_rows
from kvlab.report.figures.multiples import family_panels
from kvlab.report.figures.parts import bytes_by_stream, streams_of
from kvlab.report.figures.sensitivity import layer_map
from kvlab.report.figures.tradeoff import tradeoff_drawing


def of_run(result: Mapping, rows: pd.DataFrame | None = None) -> dict[str, Drawing]:
    """Drawings by name; `rows` are the item rows, for what only they know."""
    return {drawing.name: drawing for drawing in _all(result, rows)}


def _all(result: Mapping, rows: pd.DataFrame | None) -> Iterator[Drawing]:
    if doc.families(result):
        yield tradeoff_drawing(result)
    if any(e.get("families") for e in _others(result)):
        yield family_panels(result)
        yield flips_matrix(result)
        yield from _if(lambda: budget_curve(result))
    streams = streams_of(doc.judged(result))
    if len(streams):
        yield bytes_by_stream(streams, where=f"at {doc.workload(result)}", raw_bytes=doc.raw_bytes(result))
    if result.get("sensitivity"):
        yield layer_map(result["sensitivity"])
    labels = {e["config_id"]: e["label"] for e in _others(result)}
    if rows is not None and len(rows) and labels:
        yield from _if(lambda: memory_of_rows(rows, labels))
    if rows is not None and len(rows):
        yield from _if(lambda: memory_of_process(rows))


def _others(result: Mapping) -> list[dict]:
    baseline = (result.get("baseline") or {}).get("config_id")
    return [e for e in doc.judged(result) if e["config_id"] != baseline]


def _if(make: Callable[[], Drawing]) -> Iterator[Drawing]:
    """The drawing, or nothing where its numbers are not there."""
    try:
        yield make()
    except ValueError as error:
        if not str(error).startswith("nothing to draw"):
            raise
