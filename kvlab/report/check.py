"""Whether a run's report says what its rows say: the document figure by figure, then every table that was printed, and
so for a comparison of runs.

Knows where a run keeps its files. A printed table is found by the name it was given when it was written.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd

from kvlab.report import beside, markdown
from kvlab.report import document as doc
from kvlab.report.comparison import compare
from kvlab.report.figures.chosen import of_run
from kvlab.report.figures.pairs import of_comparison
from kvlab.report.files import summary
from kvlab.report.frames import TITLES, readable, tables
from kvlab.report.recompute import Figure, Rows, figures, same
from kvlab.runs import Run


@dataclass(frozen=True, slots=True)
class Checked:
    """How many figures were recomputed, and those that differ."""

    figures: int
    wrong: tuple[Figure, ...]
    code: str | None = None  # what differs in the code since the run, where anything does


# Sizes of a document once more from configs: who knows configs says how.
Sizes = Callable[[Run, Mapping], Iterable[Figure]]


def check(run: Run, folder: Path | None = None, *, sizes: Sizes | None = None) -> Checked:
    """Recompute every printed figure of a finished run, its report lying in `folder`, by default its own.

    Raises IncompleteError for an unfinished one, ValueError for rows that cannot be read or paired.
    """
    result = doc.load(run)
    frame = run.rows()
    found = [*figures(result, Rows(frame), run.config), *_printed(folder or run.path, result, frame)]
    found += sizes(run, result) if sizes else []
    return _checked(found, run)


def check_comparison(runs: Sequence[Run], folder: Path) -> Checked:
    """Make a comparison again from the runs and hold the page and the Markdown in `folder` against it.

    What the runs themselves say is checked run by run. Raises FileNotFoundError where there is no page.
    """
    again = compare(runs, allow_different=True)
    frames, drawn = beside.frames(again), of_comparison(again)
    page = _read(folder / "report.html")
    found: list[Figure] = []
    for name, frame in frames.items():
        printed = page.tables.get((0, name), pd.DataFrame())
        found += _cells(f"comparison, {TITLES[name]}", printed, _as_text(readable(name, frame)))
    for name, drawing in drawn.items():
        printed = page.tables.get((0, f"figure-{name}"), pd.DataFrame())
        found += _cells(f"comparison, figure {name}", printed, _as_text(readable(name, drawing.table)))
    for n, run in enumerate(runs, start=1):
        result = doc.load(run, partial=True)
        found += _tables(page, n, f"comparison, {run.path.name}", result, run.rows())
    return _checked(found + _markdown((folder / "report.md").read_text(encoding="utf-8"), frames), *runs)


def _checked(found: Sequence[Figure], *runs: Run) -> Checked:
    wrong = tuple(f for f in found if not same(f.printed, f.found))
    code = next((said for run in runs if (said := _code(run))), None) if wrong else None
    return Checked(len(found), wrong, code)


def sentence(figure: Figure) -> str:
    return f"{figure.name}: printed {_text(figure.printed)}, the rows give {_text(figure.found)}"


def _text(value: object) -> str:
    return f"{value:.10g}" if doc.finite(value) else "nothing" if value is None else str(value)


def _code(run: Run) -> str | None:
    """Rules of judging may have changed since: said beside a difference, never instead of it."""
    from kvlab.provenance import provenance

    then, now = run.read_json("provenance.json").get("git"), provenance()["git"]
    if not then or not now or then == now:
        return None
    return f"the run was made by commit {then['sha'][:12]}, this is {now['sha'][:12]}: rules may have changed since"


def _printed(folder: Path, result: dict, rows: pd.DataFrame) -> list[Figure]:
    """Tables in files beside the document, against those the document gives."""
    found: list[Figure] = []
    if (folder / "summary.parquet").exists():
        printed = _as_text(pd.read_parquet(folder / "summary.parquet"))
        found += _cells("summary.parquet", printed, _as_text(summary(result)))
    if (folder / "report.html").exists():
        page = _read(folder / "report.html")
        found.append(Figure("report.html, verdict", page.verdict, " ".join(doc.headline(result))))
        found += _tables(page, 0, "report.html", result, rows)
    if (folder / "report.md").exists():
        found += _markdown((folder / "report.md").read_text(encoding="utf-8"), tables(result))
    return found


def _tables(page: "_Page", part: int, where: str, result: dict, rows: pd.DataFrame) -> list[Figure]:
    """The named tables of one run on a page: the whole page, or one of its folded parts."""
    expected = {name: readable(name, frame) for name, frame in tables(result).items()}
    expected |= {f"figure-{name}": readable(name, d.table) for name, d in of_run(result, rows).items()}
    found: list[Figure] = []
    for (at, name), frame in page.tables.items():
        if at == part and name in expected:
            found += _cells(f"{where}, {TITLES.get(name, name)}", frame, _as_text(expected[name]))
    return found


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({str(c): [str(v) for v in frame[c]] for c in frame.columns})


def _cells(where: str, printed: pd.DataFrame, expected: pd.DataFrame) -> list[Figure]:
    if len(printed) != len(expected) or list(printed.columns) != list(expected.columns):
        shapes = [f"{len(f)} lines of {', '.join(f.columns)}" for f in (printed, expected)]
        return [Figure(where, *shapes)]
    first = expected.columns[0] if len(expected.columns) else ""
    return [
        Figure(f"{where}, {expected[first][n]}, {column}", printed[column][n], expected[column][n])
        for column in expected.columns
        for n in range(len(expected))
    ]


def _markdown(text: str, frames: Mapping[str, pd.DataFrame]) -> list[Figure]:
    lines = text.splitlines()
    found = []
    for name, frame in frames.items():
        head = next((n for n, line in enumerate(lines) if line.lstrip("#") == f" {TITLES[name]}"), None)
        if head is None:
            continue
        for n, expected in enumerate(markdown.table(name, frame).splitlines()):
            printed = lines[head + 2 + n] if head + 2 + n < len(lines) else "nothing"
            found.append(Figure(f"report.md, {TITLES[name]}, line {n + 1}", printed, expected))
    return found


def _read(path: Path) -> "_Page":
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


class _Page(HTMLParser):
    """The named tables of a page, as text, by the folded run they stand in (0: in none), and its first verdict."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, str], pd.DataFrame] = {}
        self.verdict = ""
        self._folds: list[int] = [0]  # which run each open <details> belongs to
        self._runs = 0
        self._name, self._rows = "", []
        self._cell: list[str] | None = None
        self._judging = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "table":
            self._name, self._rows = given.get("data-table") or "", []
        elif tag == "details":
            self._runs += given.get("class") == "run"
            self._folds.append(self._runs if given.get("class") == "run" else self._folds[-1])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "p" and given.get("class") == "verdict" and not self.verdict:
            self._judging = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self._rows[-1].append("".join(self._cell))
            self._cell = None
        elif tag == "details":
            self._folds.pop()
        elif tag == "table" and self._name and self._rows:
            self.tables[self._folds[-1], self._name] = pd.DataFrame(self._rows[1:], columns=self._rows[0])
        elif tag == "p" and self._judging:
            self._judging = False
            self.verdict = " ".join(self.verdict.split())

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)
        if self._judging:
            self.verdict += data
