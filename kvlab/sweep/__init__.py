"""F6: judge several storage formats on fresh items, from a thin notebook. `python -m kvlab.sweep fp8`.

settings   typed parameters      formats     names of codecs               places   where things lie
runner     model to verdicts     result      what a finished sweep shows
kernel     clean output          notebook    parameters of its cells       execution   papermill from outside
"""

import importlib

_HOME = {
    "FORMATS": "kvlab.sweep.formats",
    "SweepConfig": "kvlab.sweep.settings",
    "SweepRun": "kvlab.sweep.result",
    "notebook_setup": "kvlab.sweep.kernel",
    "parameters": "kvlab.sweep.notebook",
    "run_sweep": "kvlab.sweep.runner",
}
__all__ = ["FORMATS", "SweepConfig", "SweepRun", "notebook_setup", "parameters", "run_sweep"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.sweep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
