"""The comparison of runs as one page, as Markdown, and on a terminal. Knows how it reads, not how it was made."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TextIO

import pandas as pd
from rich.console import Console
from rich.text import Text

from kvlab.report import comparison as made
from kvlab.report import document as doc
from kvlab.report import markdown, page, terminal
from kvlab.report.figures.chosen import of_run
from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.pairs import of_comparison
from kvlab.report.files import draw
from kvlab.report.frames import TITLES
from kvlab.runs import Run, write_whole

_TABLES = {"compared_runs": made.run_rows, "compared_pairs": made.pair_rows, "compared_unlike": made.unlike_rows}


def frames(comparison: Mapping) -> dict[str, pd.DataFrame]:
    """Tables by name, those without lines left out."""
    found = {name: make(comparison) for name, make in _TABLES.items()}
    return {name: frame for name, frame in found.items() if not frame.empty}


def write(runs: Sequence[Run], comparison: Mapping, out: Path) -> dict[str, Path]:
    """Write report.html, report.md and figures into `out`; the paths by name."""
    drawings = of_comparison(comparison)
    paths = draw(drawings, out / "figures") if drawings else {}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("html", html(runs, comparison, drawings)), ("md", as_markdown(runs, comparison, drawings))):
        paths[name] = out / f"report.{name}"
        write_whole(paths[name], text.encode())
    return paths


def html(runs: Sequence[Run], comparison: Mapping, drawings: Mapping[str, Drawing]) -> str:
    """One page: what may not be compared, verdicts, differences, then every run folded, provenance last."""
    shown, warning = frames(comparison), made.warning(comparison)
    results = [doc.load(run, partial=True) for run in runs]
    body = [page.alert(warning) if warning else ""]
    body += [page.alert(f"{r['run']}: {doc.partial_line(r)}") for r in results if r.get("partial")]
    body += [f"<h1>{escape(' / '.join(about['run'] for about in comparison['runs']))}</h1>"]
    body += [
        page.verdict(about["verdict"], f"{about['run'][-8:]}: {about['headline']}") for about in comparison["runs"]
    ]
    body += [f"<p>{escape(made.summary(comparison))}</p>"]
    body += [f"<h2>{escape(TITLES[n])}</h2>{page.table(n, f)}" for n, f in shown.items() if n != "compared_unlike"]
    body += [page.picture(d, page.twin(f"figure-{d.name}", "The numbers drawn", d.table)) for d in drawings.values()]
    if "compared_unlike" in shown:
        body.append(f"<h2>{TITLES['compared_unlike']}</h2>{page.table('compared_unlike', shown['compared_unlike'])}")
    for run, result in zip(runs, results, strict=True):
        parts = page.run_parts(result, of_run(result, run.rows()), heading=run.path.name)
        body.append(f'<details class="run"><summary>{escape(run.path.name)}</summary>{parts}</details>')
    body += [page.folded(f"Provenance of {run.path.name}", run.read_json("provenance.json")) for run in runs]
    return page.whole(f"Comparison of {len(runs)} runs", body)


def as_markdown(runs: Sequence[Run], comparison: Mapping, drawings: Mapping[str, Drawing]) -> str:
    """The same as Markdown, without the runs' own reports, which lie in their folders."""
    warning = made.warning(comparison)
    parts = [f"**{markdown.plain(warning)}**"] if warning else []
    results = [doc.load(run, partial=True) for run in runs]
    parts += [f"**{markdown.plain(doc.partial_line(r))}**" for r in results if r.get("partial")]
    parts.append(f"# Comparison of {len(runs)} runs\n\n{markdown.plain(made.summary(comparison))}")
    heads = [f"- {a['run']}: **{a['verdict']}** {markdown.plain(a['headline'])}" for a in comparison["runs"]]
    parts.append("\n".join(heads))
    parts += [f"## {TITLES[n]}\n\n{markdown.table(n, f)}" for n, f in frames(comparison).items()]
    for drawing in drawings.values():
        image = f"![{markdown.plain(drawing.alt)}](figures/{drawing.name}.png)"
        parts.append(f"## {drawing.title}\n\n{image}\n\n{markdown.plain(drawing.caption)}")
    parts += [markdown.folded(f"Provenance of {run.path.name}", run.read_json("provenance.json")) for run in runs]
    return "\n\n".join(parts) + "\n"


def show(comparison: Mapping, stream: TextIO) -> None:
    """Print warning, verdicts and tables."""
    console = Console(file=stream, width=None if stream.isatty() else 150, highlight=False)
    warning = made.warning(comparison)
    if warning:
        console.print(Text(warning, "bold red"))
    for about in comparison["runs"]:
        state = "" if about["state"] == "done" else f" ({about['state']}, not final)"
        console.print(Text.assemble((about["verdict"], "bold"), f"  {about['run']}{state}: {about['headline']}"))
    console.print(Text(made.summary(comparison)))
    for name, frame in frames(comparison).items():
        console.print()
        console.print(terminal.table(name, frame, None))
