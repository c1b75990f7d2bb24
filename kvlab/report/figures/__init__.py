"""Figures of results: each is a `Drawing` with its numbers as a table, a caption and words for those who cannot see it.

Every function takes plain data (result documents, data frames, bench documents). Names load on first use.
"""

import importlib

_HOME = {
    "Drawing": "kvlab.report.figures.drawing",
    "alt": "kvlab.report.figures.tradeoff",
    "budget_curve": "kvlab.report.figures.budgets",
    "bytes_by_stream": "kvlab.report.figures.parts",
    "caption": "kvlab.report.figures.tradeoff",
    "decode_times": "kvlab.report.figures.decoding",
    "family_panels": "kvlab.report.figures.multiples",
    "flips_matrix": "kvlab.report.figures.flips",
    "front": "kvlab.report.figures.tradeoff",
    "layer_map": "kvlab.report.figures.sensitivity",
    "memory_of_decode": "kvlab.report.figures.growth",
    "memory_of_process": "kvlab.report.figures.growth",
    "memory_of_rows": "kvlab.report.figures.growth",
    "memory_over_time": "kvlab.report.figures.growth",
    "of_run": "kvlab.report.figures.chosen",
    "pareto": "kvlab.report.figures.tradeoff",
    "png": "kvlab.report.figures.ink",
    "side_by_side": "kvlab.report.figures.tradeoff",
    "svg": "kvlab.report.figures.ink",
    "tradeoff_drawing": "kvlab.report.figures.tradeoff",
}
__all__ = [
    "Drawing",
    "alt",
    "budget_curve",
    "bytes_by_stream",
    "caption",
    "decode_times",
    "family_panels",
    "flips_matrix",
    "front",
    "layer_map",
    "memory_of_decode",
    "memory_of_process",
    "memory_of_rows",
    "memory_over_time",
    "of_run",
    "pareto",
    "png",
    "side_by_side",
    "svg",
    "tradeoff_drawing",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.report.figures' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
