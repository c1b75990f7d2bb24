"""The sweeps by name: a notebook, one line of what it asks, and the defaults that make it that question.

To add one, write its notebook and add a line here. Imports nothing heavy: `--help` reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# What a notebook shows only where its question is about it; everywhere else the settings' own defaults hold.
AXES = ("scorers", "keep", "scopes", "read", "chunks", "bounds")


@dataclass(frozen=True, slots=True)
class Sweep:
    """`defaults` are parameters as text or numbers, where they differ from the settings' own. `search` looks for the
    best cache instead of judging named ones."""

    notebook: str
    what: str
    defaults: Mapping[str, str | int | float]
    search: bool = False


SWEEPS: dict[str, Sweep] = {
    "fp8": Sweep("fp8_sweep.ipynb", "one byte a value: two FP8 formats and INT8", {}),
    "int4": Sweep(
        "int4_sweep.ipynb",
        "four bits and fewer: axis, group, rotation, centring; K4 to K2",
        {
            "budget_gb": 8.0,
            "formats": "int8,int4,int4_g64,int4_channel,int4_rotated,int4_centred,int4_centred_rotated,k4v3,k4v2,k3v3,"
            "k2v2,int2_channel",
        },
    ),
    "eviction": Sweep(
        "eviction_sweep.ipynb",
        "fewer tokens: who is kept, how many, and who shares the budget",
        {
            "budget_gb": 24.2,
            "formats": "raw",
            "scorers": "window,h2o,snapkv,keynorm,keydiff,expected",
            "keep": "0.75,0.5,0.25",
            "scopes": "head,layer",
            "items": 32,
        },
    ),
    "sparse": Sweep(
        "sparse_sweep.ipynb",
        "reading less than is stored: share, chunk and bound",
        {
            "budget_gb": 28.0,
            "formats": "raw",
            "read": "1,0.5,0.25,0.125",
            "chunks": "16,32",
            "bounds": "minmax,mean",
        },
    ),
    "sweet_spot": Sweep(
        "sweet_spot.ipynb", "the whole search for the best cache that fits a budget, as a report", {}, search=True
    ),
}
