"""Progress for a notebook: one bar that updates itself where a person looks on, lines on file descriptor 2 elsewhere.

No widget: a bar is one output with an id, so that a notebook opened again shows how it ended.
"""

import os
from collections.abc import Callable
from typing import Any

from kvlab.progress import Moment, Progress
from kvlab.runs import Run
from kvlab.show.page import esc
from kvlab.sweep.kernel import in_kernel, watched

_BOX = (
    "display:inline-block;width:16em;height:.7em;vertical-align:baseline;margin-right:.6em;"
    "border:1px solid var(--jp-border-color2,#888);background:var(--jp-layout-color2,transparent)"
)


def progress(total: int, *, quiet: bool = False, listener: Callable[[], None] | None = None) -> Progress:
    """A Progress for `total` units: a bar in JupyterLab and the like, on a terminal too, else a line every 5 s.

    Under papermill lines reach both the notebook and the terminal. KVLAB_PROGRESS=0, plain or bar decides otherwise.
    """
    if not in_kernel():
        return Progress(total, quiet=quiet, listener=listener)
    drawn = not quiet and watched(os.environ)
    draw = _Shown().draw if drawn else None
    # sys.stderr of a kernel reaches the notebook only; the descriptor reaches the terminal as well.
    stream = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    return Progress(total, quiet=quiet, stream=stream, draw=draw, listener=listener)


def shown(run: Run, total: int) -> Progress:
    """What `run_sweep`, `run_search` and the search's `execute` take as `show`: the bar alone."""
    return progress(total)


def bundle(moment: Moment) -> dict[str, Any]:
    """A moment as notebook output."""
    share = min(1.0, moment.done / moment.total)
    inner = f"display:block;width:{100 * share:.0f}%;height:100%;background:#0173b2"
    bar = (
        f'<span role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{100 * share:.0f}" '
        f'style="{_BOX}"><span style="{inner}"></span></span>'
    )
    return {"text/plain": str(moment), "text/html": f"<div>{bar}{esc(moment)}</div>"}


class _Shown:
    """One output that is drawn anew."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, moment: Moment) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle(moment), raw=True, display_id=True)
        else:
            self._handle.update(bundle(moment), raw=True)
