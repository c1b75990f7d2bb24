"""Write the report of a run to disk: figures, page, summary table. Knows where files go; nothing of what they say."""

from pathlib import Path

import pandas as pd

from kvlab.report import document as doc
from kvlab.report.figures import pareto, png, svg
from kvlab.report.frames import tables
from kvlab.report.page import html
from kvlab.runs import Run, write_whole


def write(run: Run, *, out: Path | None = None, partial: bool = False) -> dict[str, Path]:
    """Write figures/pareto.png, figures/pareto.svg, report.html and summary.parquet into the run, or into `out`.

    Returns the paths by name. A run without families to draw gets no figure. Raises IncompleteError for a run that
    is not done unless partial=True, OSError when the folder cannot be written.
    """
    result = doc.load(run, partial=partial)
    target = Path(out) if out is not None else run.path
    paths: dict[str, Path] = {}
    (target / "figures").mkdir(parents=True, exist_ok=True)
    figures = {}
    if doc.families(result):
        figures = {"pareto": pareto(result), "pareto-dark": pareto(result, dark=True)}
        paths["png"], paths["svg"] = target / "figures" / "pareto.png", target / "figures" / "pareto.svg"
        write_whole(paths["png"], png(figures["pareto"]))
        write_whole(paths["svg"], svg(figures["pareto"]))
    paths["html"] = target / "report.html"
    write_whole(paths["html"], html(result, figures, run.read_json("provenance.json")).encode())
    frames = tables(result)
    summary = frames.get("families", frames.get("scored", pd.DataFrame()))
    paths["summary"] = target / "summary.parquet"
    write_whole(paths["summary"], summary.to_parquet(index=False))
    return paths
