"""The report on a terminal: verdict first, then the tables. Prints to the stream it is given, nothing else."""

from collections.abc import Mapping
from typing import TextIO

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlab.report import document as doc
from kvlab.report.frames import TITLES, readable, tables, wordy

_TONES = {"HOLDS": "bold green", "RISES": "bold green", "WORSE": "bold red", "NOTHING FITS": "bold red"}
# Searched configs would drown the verdict.
_SHOWN = ("before_after", "finalists", "families", "front", "controls", "scored")


def show(result: Mapping, stream: TextIO) -> None:
    """Print verdict, budget line, tables and notes."""
    # A pipe has no width; 80 columns would fold every table.
    console = Console(file=stream, width=None if stream.isatty() else 150, highlight=False)
    if result.get("partial"):
        console.print(Text(doc.partial_line(result), "bold red"))
    word, sentence = doc.headline(result)
    console.print(Text.assemble((word, _TONES.get(word, "bold yellow")), "  ", sentence))
    if result["schema"] != "kvlab.rows/1":
        console.print(Text(doc.budget_line(result)))
    frames = tables(result)
    for name in _SHOWN:
        if name in frames:
            console.print()
            console.print(table(name, frames[name], doc.best(result)))
    for line in doc.warnings(result):
        console.print(Text(f"note: {line}"))


def table(name: str, frame: pd.DataFrame, chosen: Mapping | None) -> Table:
    """A frame for people, the chosen config in bold."""
    shown = Table(title=Text(TITLES[name]), title_justify="left", box=None, pad_edge=False, header_style="bold")
    text = readable(name, frame)
    for column, words in zip(text.columns, wordy(text), strict=True):
        shown.add_column(Text(str(column)), justify="left" if words else "right", overflow="fold")
    for row in text.itertuples(index=False):
        marked = chosen is not None and name == "finalists" and row[0] == chosen["label"]
        shown.add_row(*[Text(str(cell)) for cell in row], style="bold" if marked else None)
    return shown
