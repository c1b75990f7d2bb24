"""Drawing: a figure in both themes, its numbers as a table, a caption, and words for those who cannot see it."""

from collections.abc import Callable
from dataclasses import dataclass, field
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
    _made: dict[tuple[str, bool], bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def figure(self, *, dark: bool = False) -> Figure:
        """The figure, made anew."""
        return self.draw(ink(dark))

    def png(self, *, dark: bool = False) -> bytes:
        return self._once("png", dark)

    def svg(self, *, dark: bool = False) -> bytes:
        return self._once("svg", dark)

    def _once(self, kind: str, dark: bool) -> bytes:
        # A page and a file both want it, and drawing takes long: one figure, laid out once, gives both kinds.
        if (kind, dark) not in self._made:
            figure = self.figure(dark=dark)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            for name, made in {"png": png, "svg": svg}.items():
                # The dark one is for pages, which take the PNG.
                if name == kind or not dark:
                    self._made[name, dark] = made(figure)
        return self._made[kind, dark]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        data = {"image/png": self.png(), "text/plain": f"{self.title}. {self.caption}\n\n{self.table.to_string()}"}
        return data, {"image/png": {"alt": self.alt}}
