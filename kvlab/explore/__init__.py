"""Look into a model's cache: where codecs err, what eviction forgets, what sparse reading finds, what two runs share.

Each function measures and returns a `Picture`: a table of numbers, a static figure, and both in words. `browse` puts
controls beside one where ipywidgets is installed, and the picture alone where it is not.

picture    table, figure, words        tracing  one forward, K, V and queries kept    errors   codecs by layer and head
attention  sinks, heavy hitters        keeping  who stays under which policy          sparse   chunks read, and missed
answering  what a config answers       threshold  how much may go                     comparing  two arms, two runs
"""

import importlib

_HOME = {
    "Picture": "kvlab.explore.picture",
    "answers": "kvlab.explore.answering",
    "attention_map": "kvlab.explore.attention",
    "attention_shares": "kvlab.explore.attention",
    "browse": "kvlab.explore.widgets",
    "channels": "kvlab.explore.errors",
    "chunks_read": "kvlab.explore.sparse",
    "codec_errors": "kvlab.explore.errors",
    "compare_runs": "kvlab.explore.comparing",
    "easy_item": "kvlab.explore.answering",
    "error_map": "kvlab.explore.errors",
    "flips": "kvlab.explore.comparing",
    "hardest": "kvlab.explore.comparing",
    "heavy_hitters": "kvlab.explore.attention",
    "kept_tokens": "kvlab.explore.keeping",
    "loudest": "kvlab.explore.errors",
    "thresholds": "kvlab.explore.threshold",
    "trace": "kvlab.explore.tracing",
}
__all__ = [
    "Picture",
    "answers",
    "attention_map",
    "attention_shares",
    "browse",
    "channels",
    "chunks_read",
    "codec_errors",
    "compare_runs",
    "easy_item",
    "error_map",
    "flips",
    "hardest",
    "heavy_hitters",
    "kept_tokens",
    "loudest",
    "thresholds",
    "trace",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.explore' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
