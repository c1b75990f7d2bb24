"""Whether the cells of a notebook ran in their order. A result of cells run out of order may not come back.

What has run is known from the kernel; the order on the page only where the notebook's file is known. Without it a
cell that runs again after others is out of order, since what it needs may be theirs by now.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHOWN = 60


def cells_of(path: Path) -> list[str]:
    """Sources of the code cells of a notebook file, in order; none where it cannot be read as one."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return ["".join(c.get("source", "")) for c in cells if c.get("cell_type") == "code"]


def out_of_order(ran: Sequence[str], page: Sequence[str] = ()) -> str | None:
    """What is out of order, in words: the first cell that ran after one that stands below it, or ran again late.

    `ran` are sources in the order of their runs, `page` those of the notebook. Cells that the page does not have, such
    as injected parameters or those edited since, take no part in its order.
    """
    places = {source.strip(): n for n, source in enumerate(page, start=1)}
    last, seen = 0, {}
    for step, source in enumerate(ran, start=1):
        text = source.strip()
        if not text:
            continue
        place = places.get(text)
        if place is not None and place < last:
            return f"cell {place} ran after cell {last} ({_first(text)})"
        if place is None and text in seen and seen[text] != step - 1:
            return f"a cell ran again after others ({_first(text)})"
        last, seen[text] = max(last, place or 0), step
    return None


def _first(source: str) -> str:
    line = source.splitlines()[0]
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


class Order:
    """Notes the cells that run from now on and warns once, before the cell that would be out of order runs."""

    def __init__(self, page: Callable[[], Sequence[str]] = tuple) -> None:
        self.ran: list[str] = []
        self.found: str | None = None
        self._page = page

    def note(self, source: str) -> str | None:
        """A warning where this cell is the first out of order."""
        self.ran.append(source)
        if self.found is not None:
            return None
        self.found = out_of_order(self.ran, self._page())
        if self.found is None:
            return None
        return f"out of order: {self.found}. Restart the kernel and run all cells before you keep a result"

    def before_cell(self, info: Any) -> None:
        """IPython's `pre_run_cell`."""
        warning = self.note(info.raw_cell or "") if info.store_history else None
        if warning:
            print(warning, file=sys.stderr)
