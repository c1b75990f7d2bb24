"""Drawing: a figure in both themes, its numbers as a table, a caption, and words for those who cannot see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlab.report.figures.ink import Ink, ink, png, svg


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """`name` is its file name, `table` holds every number drawn, units in the names of its columns."""

    name: str
    title: str
    caption: str
    alt: str
    table: pd.DataFrame
    draw: Callable[[Ink], Figure]

    def figure(self, *, dark: bool = False) -> Figure:
        """The figure, made anew."""
        return self.draw(ink(dark))

    def png(self, *, dark: bool = False) -> bytes:
        return png(self.figure(dark=dark))

    def svg(self, *, dark: bool = False) -> bytes:
        return svg(self.figure(dark=dark))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        data = {"image/png": self.png(), "text/plain": f"{self.title}. {self.caption}\n\n{self.table.to_string()}"}
        return data, {"image/png": {"alt": self.alt}}
