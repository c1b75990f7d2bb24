"""What each layer loses alone, as a heat map: layers downwards, formats across, keys and values beside each other.

Knows the `sensitivity` part of a search's result. Formats that were not measured, but follow from those that were, are
marked in their headings.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from kvlab.report.figures.drawing import Drawing
from kvlab.report.figures.ink import Ink, dress, sheet

LEAST = 1e-7  # nats; below this KL is rounding
_STREAMS = {"K": "keys", "V": "values"}


def layer_map(sensitivity: Mapping) -> Drawing:
    """KL in nats at the answers with one layer encoded and all else uncompressed. Raises ValueError for no layers."""
    if not sensitivity or not sensitivity.get("layers"):
        raise ValueError("nothing to draw: this run did not tell layers apart")
    table = sensitivity_table(sensitivity)
    worst = table.loc[table["kl_nats"].idxmax()]
    n = sensitivity["items_per_family"]
    derived = "" if all(sensitivity["measured"]) else " Formats with an asterisk were not measured: they follow from "
    derived += "" if all(sensitivity["measured"]) else "those that were, a factor of about four for each bit."
    return Drawing(
        name="layers",
        title="What each layer loses alone",
        caption=(
            f"KL to the full cache at the answers, nats, mean over families, n = {n} items a family, with one layer's "
            f"keys or values encoded and all else uncompressed. Logarithmic colours, brighter is worse.{derived}"
        ),
        alt=(
            f"Heat map of {len(sensitivity['layers'])} layers by formats of keys and values. The most is lost by "
            f"{_STREAMS[worst['stream']]} of layer {worst['layer']} as {worst['format']}: {worst['kl_nats']:.3g} nats."
        ),
        table=table,
        draw=lambda paint: _draw(sensitivity, paint),
    )


def sensitivity_table(sensitivity: Mapping) -> pd.DataFrame:
    """One line per layer, stream and format: KL in nats, and whether it was measured."""
    return pd.DataFrame(
        [
            {
                "layer": layer,
                "stream": stream,
                "format": name,
                "kl_nats": row[n],
                "measured": sensitivity["measured"][n],
            }
            for stream in _STREAMS
            for layer, row in zip(sensitivity["layers"], sensitivity["kl"][stream], strict=True)
            for n, name in enumerate(sensitivity["formats"][stream])
        ]
    )


def _draw(sensitivity: Mapping, paint: Ink) -> Figure:
    layers = sensitivity["layers"]
    values = {s: np.maximum(np.asarray(sensitivity["kl"][s], dtype=float), LEAST) for s in _STREAMS}
    low, high = min(v.min() for v in values.values()), max(v.max() for v in values.values())
    norm = LogNorm(low, high if high > low else low * 10)
    formats = max(len(sensitivity["formats"][s]) for s in _STREAMS)
    figure = sheet(max(6.4, 0.7 * 2 * formats + 2.2), max(2.6, 0.17 * len(layers) + 1.7), paint)
    grid = figure.subplots(1, 2, sharey=True)
    for ax, stream in zip(grid, _STREAMS, strict=True):
        dress(ax, paint)
        ax.grid(visible=False)
        image = ax.imshow(values[stream], norm=norm, cmap="cividis", aspect="auto", interpolation="nearest")
        names = sensitivity["formats"][stream]
        said = [f"{n}{'' if m else ' *'}" for n, m in zip(names, sensitivity["measured"], strict=True)]
        ax.set_xticks(range(len(names)), said, rotation=40, ha="right", rotation_mode="anchor")
        ax.set_title(_STREAMS[stream], fontsize=10, color=paint.text, loc="left")
    step = max(1, len(layers) // 16)
    grid[0].set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    grid[0].set_ylabel("layer", color=paint.text, fontsize=9)
    bar = figure.colorbar(image, ax=list(grid), shrink=0.9, pad=0.02)
    bar.set_label("KL at the answers, nats", color=paint.text, fontsize=9)
    bar.ax.tick_params(colors=paint.text, labelsize=8)
    bar.ax.minorticks_off()
    return figure
