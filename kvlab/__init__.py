"""kvlab: how far can a model's KV cache be compressed before accuracy stops holding?

Axis alphabet used everywhere: B rows, H query heads, N KV heads, Q new tokens, T cached tokens, D head dim,
G quantization group, P page tokens. Layout is `B N T D`, as in transformers.

Importing kvlab changes nothing and imports neither torch nor transformers: names load on first use. `attach` is
`kvlab.attach.attach`: a name here that is also a module would be either of the two, by order of imports.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "KVConfig": "kvlab.config",
    "KVCache": "kvlab.cache",
    "StackedCache": "kvlab.stacked",
    "Snapshot": "kvlab.snapshot",
    "SnapshotStore": "kvlab.snapshot",
    "make_plan": "kvlab.attach",
    "load": "kvlab.models",
    "LocalSubject": "kvlab.subject",
}
__all__ = [
    "KVCache",
    "KVConfig",
    "LocalSubject",
    "Snapshot",
    "SnapshotStore",
    "StackedCache",
    "load",
    "make_plan",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
