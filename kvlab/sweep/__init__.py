"""F6: sweeps, from thin notebooks: named configs judged on fresh items, or a whole search. `python -m kvlab.sweep fp8`.

catalog    the sweeps by name        params    values as people type them    settings  typed parameters
formats    names of codecs           arms      what a sweep compares         places    where things lie
runner     model to verdicts         document  the result as plain data      spot      a search in a notebook
result     what a finished one shows figures   losses and curves             kernel    clean output
notebook   parameters of its cells   execution papermill from outside
"""

import importlib

_HOME = {
    "FORMATS": "kvlab.sweep.formats",
    "SWEEPS": "kvlab.sweep.catalog",
    "SpotConfig": "kvlab.sweep.settings",
    "SweepConfig": "kvlab.sweep.settings",
    "SweepRun": "kvlab.sweep.result",
    "notebook_setup": "kvlab.sweep.kernel",
    "parameters": "kvlab.sweep.notebook",
    "run_search": "kvlab.sweep.spot",
    "run_sweep": "kvlab.sweep.runner",
}
__all__ = [
    "FORMATS",
    "SWEEPS",
    "SpotConfig",
    "SweepConfig",
    "SweepRun",
    "notebook_setup",
    "parameters",
    "run_search",
    "run_sweep",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.sweep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
