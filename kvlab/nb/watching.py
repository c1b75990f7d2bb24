"""Look on while another process writes a run. Reads only; ends by itself when the run ends or its process is gone."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvlab.nb.live import LivePareto
from kvlab.nb.loaded import LoadedRun, load
from kvlab.runs import Run
from kvlab.sweep.places import default_root


def watch(
    run: str | Path | Run,
    *,
    root: Path | None = None,
    every_s: float = 2.0,
    timeout_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> LoadedRun:
    """Follow a run until it is done, failed or interrupted, its process is dead, or `timeout_s` is over; then give it.

    Interrupting the kernel ends the watching and not the run. A writer on another machine that died cannot be told
    from a live one: give a timeout there. Raises as `load`.
    """
    found = run if isinstance(run, Run) else Run.open(run, root=default_root() if root is None else root)
    until = None if timeout_s is None else time.monotonic() + timeout_s
    live = LivePareto(found, every_s=every_s)
    try:
        while found.state() == "running" and (until is None or time.monotonic() < until):
            live.refresh()
            sleep(every_s)
    except KeyboardInterrupt:
        print(f"stopped watching; {found.path.name} goes on", file=sys.stderr)
    return live.finish() or load(found)
