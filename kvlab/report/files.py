"""Write the report of a run to disk: figures, page, Markdown, summary table. Knows where files go, nothing of their
words.
"""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from kvlab.report import document as doc
from kvlab.report.figures.chosen import of_run
from kvlab.report.figures.drawing import Drawing
from kvlab.report.frames import tables
from kvlab.report.markdown import markdown
from kvlab.report.page import html
from kvlab.runs import Run, write_whole


def write(run: Run, *, out: Path | None = None, partial: bool = False) -> dict[str, Path]:
    """Write figures/*.png and .svg, report.html, report.md and summary.parquet into the run, or into `out`.

    Returns the paths by name; "png" and "svg" are those of bytes against accuracy. A run without families to draw gets
    no figure. Raises IncompleteError for a run that is not done unless partial=True, OSError when the folder cannot be
    written.
    """
    result = doc.load(run, partial=partial)
    target = Path(out) if out is not None else run.path
    drawings, provenance = of_run(result, run.rows()), run.read_json("provenance.json")
    paths = draw(drawings, target / "figures")
    paths["html"] = target / "report.html"
    write_whole(paths["html"], html(result, drawings, provenance).encode())
    paths["md"] = target / "report.md"
    write_whole(paths["md"], markdown(result, drawings, provenance).encode())
    paths["summary"] = target / "summary.parquet"
    write_whole(paths["summary"], summary(result).to_parquet(index=False))
    return paths


def summary(result: Mapping) -> pd.DataFrame:
    """The table that is kept as parquet: paired comparisons, or what was scored so far."""
    frames = tables(result)
    return frames.get("families", frames.get("scored", pd.DataFrame()))


def draw(drawings: Mapping[str, Drawing], folder: Path) -> dict[str, Path]:
    """Every drawing as PNG and SVG in a folder; the paths of the first one, by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name, drawing in drawings.items():
        for kind, data in (("png", drawing.png()), ("svg", drawing.svg())):
            path = folder / f"{name}.{kind}"
            write_whole(path, data)
            paths.setdefault(kind, path)
    return paths
