"""A figure that follows a run while it is written: one output in a notebook, lines on stderr elsewhere.

At most one update every two seconds, and never more than a tenth of the time: what is watched is what matters. The
last update is the figure that `load` gives.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvlab.nb.bars import progress
from kvlab.nb.loaded import LoadedRun, load, picture
from kvlab.nb.sketch import summary
from kvlab.progress import Progress
from kvlab.report import document as doc
from kvlab.runs import Run
from kvlab.sweep.kernel import in_kernel

_LINE_EVERY_S = 10.0
_SHARE = 0.1


class LivePareto:
    """Give it as `show` to `run_sweep`, `run_search` or the search's `execute`, inside a `with`; or `refresh` it.

    After the block the display shows the run as it ended, whatever that was.
    """

    def __init__(
        self, run: Run | None = None, *, every_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.updates = run, 0
        self._every_s = every_s if in_kernel() else max(every_s, _LINE_EVERY_S)
        self._clock, self._due = clock, clock() + every_s
        self._said: Any = None
        self._handle: Any = None

    def __call__(self, run: Run, total: int) -> Progress:
        """Begin to follow a run that this process is about to write, and show its progress."""
        self.run = run
        return progress(total, listener=self.refresh)

    def __enter__(self) -> "LivePareto":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def refresh(self) -> None:
        """Draw what has been scored by now, unless the last time was a moment ago or nothing is new."""
        if self.run is None or self._clock() < self._due:
            return
        begun = self._clock()
        scored = doc.from_rows(self.run)["scored"]
        done = sum(row["n"] for row in scored)
        if scored and done != self._said:
            self._said = done
            self._draw(self.run, scored)
        took = self._clock() - begun
        self._due = self._clock() + max(self._every_s, took / _SHARE)

    def finish(self) -> LoadedRun | None:
        """The last update: the run as it ended. None where no run was ever begun."""
        if self.run is None:
            return None
        ended = load(self.run)
        if doc.families(ended.result) or ended.result.get("scored"):
            self._put(*picture(self.run, ended.result))
        else:
            self._line(f"{self.run.path.name}: nothing was scored")
        self._line(f"{self.run.path.name} is {ended.state}")
        return ended

    def _draw(self, run: Run, scored: list[dict[str, Any]]) -> None:
        if in_kernel():
            self._put(*picture(run, {"schema": "kvlab.rows/1", "scored": scored}))
        else:
            self._line(f"{run.path.name}: {summary(scored)}")
            self.updates += 1

    def _put(self, data: bytes, words: str) -> None:
        if not in_kernel():
            return
        from IPython.display import Image, display

        image = Image(data=data, format="png", alt=words)
        self.updates += 1
        if self._handle is None:
            self._handle = display(image, display_id=True)
        else:
            self._handle.update(image)

    def _line(self, text: str) -> None:
        if not in_kernel():
            print(text, file=sys.stderr, flush=True)


def live_pareto(run: Run | None = None, *, every_s: float = 2.0) -> LivePareto:
    """A figure that follows a run: `with live_pareto() as live: run_sweep(config, show=live)`."""
    return LivePareto(run, every_s=every_s)
