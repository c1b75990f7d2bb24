"""Read a finished run and show it: tables, one figure, one HTML page. Knows result documents, never models or caches.

Names load on first use, so that `python -m kvlab.report --help` answers before pandas and matplotlib are needed.
"""

import importlib

_HOME = {
    "alt": "kvlab.report.figures.tradeoff",
    "best": "kvlab.report.document",
    "caption": "kvlab.report.figures.tradeoff",
    "headline": "kvlab.report.document",
    "html": "kvlab.report.page",
    "load": "kvlab.report.document",
    "pareto": "kvlab.report.figures.tradeoff",
    "tables": "kvlab.report.frames",
    "write": "kvlab.report.files",
}
__all__ = ["alt", "best", "caption", "headline", "html", "load", "pareto", "tables", "write"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
