"""One display on stderr: what is happening and how long it will take. A bar on a terminal, else a line every 5 s."""

import sys
import time
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Counts units of planned work. `quiet` shows nothing."""

    def __init__(self, total: int, *, quiet: bool = False, stream: TextIO | None = None, every_s: float = 5.0) -> None:
        self.stream = stream or sys.stderr
        self.total, self.done, self.stage = max(1, total), 0, ""
        self.quiet, self.every_s = quiet, every_s
        self._start = self._last = time.monotonic()
        terminal = self.stream.isatty() and not quiet
        form = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
        self._bar = tqdm(total=self.total, file=self.stream, bar_format=form, leave=False) if terminal else None

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
            return
        now = time.monotonic()
        if not self.quiet and now - self._last >= self.every_s:
            self._last = now
            # The first rows carry a prefill and a warm-up; an estimate from them would frighten.
            early = self.done < 0.03 * self.total
            left = (now - self._start) / self.done * (self.total - self.done)
            ending = "" if early else f", {left:.0f} s left"
            print(f"{self.stage}: {self.done / self.total:4.0%}{ending}", file=self.stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
