"""Whether a run's report says what its rows say: the document figure by figure, then every table that was printed.

Knows where a run keeps its files. A printed table is found by the name it was given when it was written.
"""

from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd

from kvlab.report import document as doc
from kvlab.report import markdown
from kvlab.report.figures.chosen import of_run
from kvlab.report.files import summary
from kvlab.report.frames import TITLES, readable, tables
from kvlab.report.recompute import Figure, Rows, figures, same
from kvlab.runs import Run


@dataclass(frozen=True, slots=True)
class Checked:
    """How many figures were recomputed, and those that differ."""

    figures: int
    wrong: tuple[Figure, ...]
    code: str | None  # what differs in the code since the run, where anything does


def check(run: Run) -> Checked:
    """Recompute every printed figure of a finished run.

    Raises IncompleteError for an unfinished one, ValueError for rows that cannot be read or paired.
    """
    result = doc.load(run)
    frame = run.rows()
    found = [*figures(result, Rows(frame), run.config), *_printed(run.path, result, frame)]
    wrong = tuple(f for f in found if not same(f.printed, f.found))
    return Checked(len(found), wrong, _code(run) if wrong else None)


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


def _printed(path: Path, result: dict, rows: pd.DataFrame) -> list[Figure]:
    """Tables in files beside the document, against those the document gives."""
    shown = {name: readable(name, frame) for name, frame in tables(result).items()}
    drawn = {f"figure-{name}": readable(name, d.table) for name, d in of_run(result, rows).items()}
    found: list[Figure] = []
    if (path / "summary.parquet").exists():
        found += _cells(
            "summary.parquet", _as_text(pd.read_parquet(path / "summary.parquet")), _as_text(summary(result))
        )
    if (path / "report.html").exists():
        page = _Page()
        page.feed((path / "report.html").read_text(encoding="utf-8"))
        found.append(Figure("report.html, verdict", page.verdict, " ".join(doc.headline(result))))
        for name, frame in page.tables.items():
            expected = shown.get(name, drawn.get(name))
            if expected is not None:
                found += _cells(f"report.html, {TITLES.get(name, name)}", frame, _as_text(expected))
    if (path / "report.md").exists():
        found += _markdown((path / "report.md").read_text(encoding="utf-8"), result)
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


def _markdown(text: str, result: dict) -> list[Figure]:
    lines = text.splitlines()
    found = []
    for name, frame in tables(result).items():
        head = next((n for n, line in enumerate(lines) if line.lstrip("#") == f" {TITLES[name]}"), None)
        if head is None:
            continue
        for n, expected in enumerate(markdown.table(name, frame).splitlines()):
            printed = lines[head + 2 + n] if head + 2 + n < len(lines) else "nothing"
            found.append(Figure(f"report.md, {TITLES[name]}, line {n + 1}", printed, expected))
    return found


class _Page(HTMLParser):
    """The named tables of a page, as text, and its verdict."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, pd.DataFrame] = {}
        self.verdict = ""
        self._name, self._rows = "", []
        self._cell: list[str] | None = None
        self._judging = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "table":
            self._name, self._rows = given.get("data-table") or "", []
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
        elif tag == "table" and self._name and self._rows:
            self.tables[self._name] = pd.DataFrame(self._rows[1:], columns=self._rows[0])
        elif tag == "p" and self._judging:
            self._judging = False
            self.verdict = " ".join(self.verdict.split())

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)
        if self._judging:
            self.verdict += data
