"""One display of what is happening and how long it will take: a bar on a terminal, else a line every 5 s on stderr, or
whatever the caller draws. KVLAB_PROGRESS decides for a person: 0 shows nothing, plain lines, bar a bar.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

FORMS = {"0": "none", "plain": "plain", "bar": "bar"}
_DRAWN_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Moment:
    """How far the work is: `done` of about `total` units, `seconds` since it began, `left_s` if that can be told."""

    stage: str
    done: int
    total: int
    seconds: float
    left_s: float | None
    over: bool = False

    def __str__(self) -> str:
        parts = [f"{self.done / self.total:4.0%}"]
        if self.over:
            parts.append(f"{self.seconds:.0f} s")
        elif self.left_s is not None:
            parts.append(f"{self.left_s:.0f} s left")
        return f"{self.stage}: {', '.join(parts)}"


def form(environ: Mapping[str, str], *, terminal: bool, drawn: bool = False) -> str:
    """none, plain, bar or drawn. Raises ValueError for a KVLAB_PROGRESS that says none of them."""
    asked = environ.get("KVLAB_PROGRESS", "")
    if asked and asked not in FORMS:
        raise ValueError(f"KVLAB_PROGRESS must be one of {', '.join(FORMS)}, got {asked!r}")
    if asked:
        return FORMS[asked]
    return "drawn" if drawn else "bar" if terminal else "plain"


class Progress:
    """Counts units of planned work. `quiet` shows nothing.

    `draw` shows a moment its own way, a few times a second at most, where nothing else is asked for. `listener` is
    called after every unit, whatever is shown.
    """

    def __init__(
        self,
        total: int,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        draw: Callable[[Moment], None] | None = None,
        listener: Callable[[], None] | None = None,
    ) -> None:
        self.stream = stream or sys.stderr
        self.total, self.done, self.stage = max(1, total), 0, ""
        self.every_s, self.listener = every_s, listener
        self._start = self._last = time.monotonic()
        terminal = self.stream.isatty()
        self.form = "none" if quiet else form(os.environ, terminal=terminal, drawn=draw is not None)
        self._draw = draw if self.form == "drawn" else None
        self._shown = -1
        if self._draw is not None:
            self.every_s = min(every_s, _DRAWN_EVERY_S)
            self._draw(self.moment())
        shape = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
        wants = self.form == "bar"
        self._bar = tqdm(total=self.total, file=self.stream, bar_format=shape, leave=False) if wants else None

    @property
    def quiet(self) -> bool:
        return self.form == "none"

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        elif not self.quiet:
            print(text, file=self.stream, flush=True)

    def at(self, stage: str) -> None:
        """What happens now."""
        self.stage = stage
        if self._bar is not None:
            self._bar.set_description_str(stage)

    def add(self, units: int = 1) -> None:
        """Work done. More than was planned stretches the plan."""
        if not units:
            return
        self.done += units
        self.total = max(self.total, self.done)
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.update(units)
        elif time.monotonic() - self._last >= self.every_s:
            self._show(self.moment())
        if self.listener is not None:
            self.listener()

    def moment(self, over: bool = False) -> Moment:
        """How far it is now."""
        seconds = time.monotonic() - self._start
        # The first rows carry a prefill and a warm-up; an estimate from them would frighten.
        early = self.done < 0.03 * self.total or not self.done
        left = None if early else seconds / self.done * (self.total - self.done)
        return Moment(self.stage, self.done, self.total, seconds, left, over)

    def _show(self, moment: Moment) -> None:
        self._last, self._shown = time.monotonic(), moment.done
        if self._draw is not None:
            self._draw(moment)
        elif self.form == "plain":
            print(moment, file=self.stream, flush=True)

    def finish(self) -> None:
        """All work is done, even where more was planned: the last thing shown is 100 %."""
        self.total = max(1, self.done)
        self.done = self.total
        if self._bar is None:
            self._show(self.moment(over=True))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
