"""What a notebook needs: `setup()` first, then progress, a live Pareto, runs loaded or watched. Never loads torch.

session    setup, places, provenance         order    cells that ran out of order
bars       progress in Lab, headless, piped  live     a figure that follows a run
sketch     what it draws before the result   loaded   a run read back
watching   a run that another process writes
"""

import importlib

_HOME = {
    "LivePareto": "kvlab.nb.live",
    "LoadedRun": "kvlab.nb.loaded",
    "Session": "kvlab.nb.session",
    "live_pareto": "kvlab.nb.live",
    "load": "kvlab.nb.loaded",
    "progress": "kvlab.nb.bars",
    "setup": "kvlab.nb.session",
    "shown": "kvlab.nb.bars",
    "watch": "kvlab.nb.watching",
}
__all__ = ["LivePareto", "LoadedRun", "Session", "live_pareto", "load", "progress", "setup", "shown", "watch"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.nb' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
