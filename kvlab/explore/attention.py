"""Where attention goes on a prompt: maps, the share of sinks and recent tokens, heavy hitters. Compresses nothing."""

import numpy as np
import pandas as pd
import torch

from kvlab.explore.picture import INK, Picture, heat, legend, mean, name, scale, sheet, split, styles
from kvlab.explore.tracing import Trace
from kvlab.kernels.attend import attention_mass, fold_heads

_SHARES = ("sinks", "recent", "heavy hitters", "rest")


def attention_map(found: Trace, layer: int, head: int | None = None) -> Picture:
    """Probabilities of one query head, or of the mean over heads: queries down, keys across.

    Drawn as the square root, so that small shares show. The table has one line for each key: the mean share it gets
    from the queries that see it.
    """
    if layer not in found.layers:
        raise ValueError(f"layer {layer} was not traced: there are {min(found.layers)} to {max(found.layers)}")
    probs = found.layers[layer].attention()
    if head is not None and not 0 <= head < probs.shape[0]:
        raise ValueError(f"head must lie in [0, {probs.shape[0] - 1}], got {head}")
    shown = probs.mean(0) if head is None else probs[head]
    share = (shown.sum(0) / torch.arange(shown.shape[0], 0, -1)).numpy()
    table = pd.DataFrame({"position": range(len(found.tokens)), "token": found.tokens, "share": share})
    figure, axes = sheet(1, 1, width=5.4, height=4.4)
    whose = "mean over heads" if head is None else f"query head {head}"
    scale(figure, axes[0][0], heat(axes[0][0], shown.sqrt().numpy(), vmin=0, vmax=1), "square root of the probability")
    name(axes[0][0], f"layer {layer}, {whose}", "key, position", "query, position")
    alt = (
        f"Heat map of attention in layer {layer}, {whose}, over {len(table)} tokens. The last query gives "
        f"{float(shown[-1, :4].sum()):.0%} to the first four tokens."
    )
    return Picture(figure, table, alt)


def attention_shares(
    found: Trace, sinks: int = 4, recent: int = 64, hitters: float = 0.1, queries: int = 64
) -> Picture:
    """How the attention of the last `queries` divides, layer by layer, as the mean over heads.

    Heavy hitters are, for each KV head, the `hitters` share of the tokens between sinks and the recent window that get
    most. The table has one line for each layer and KV head.
    """
    rows = []
    for layer, seen in found.layers.items():
        n = min(queries, seen.tokens)
        probs = fold_heads(seen.attention(slice(-n, None)), seen.k.shape[0])
        mass = attention_mass(probs, torch.full((n,), 1 / n))
        middle = mass[:, sinks : max(sinks, seen.tokens - recent)].sort(dim=1, descending=True).values
        count = round(hitters * middle.shape[1])
        parts = (
            mass[:, :sinks].sum(1),
            mass[:, max(sinks, seen.tokens - recent) :].sum(1),
            middle[:, :count].sum(1),
            middle[:, count:].sum(1),
        )
        for h in range(mass.shape[0]):
            rows.append({"layer": layer, "head": h, **{s: float(p[h]) for s, p in zip(_SHARES, parts, strict=True)}})
    table = pd.DataFrame(rows)
    by_layer = split(rows, "layer")
    figure, axes = sheet(1, 1, width=6.4, height=3.2)
    ax, base = axes[0][0], np.zeros(len(by_layer))
    for (share, look), hatch in zip(styles(_SHARES).items(), ("", "///", "...", "\\\\"), strict=True):
        height = np.array([mean(part, share) for part in by_layer.values()])
        paint = {"color": look["color"], "hatch": hatch, "edgecolor": INK.paper, "linewidth": 0.4}
        ax.bar(list(by_layer), height, bottom=base, label=share, **paint)
        base += height
    name(ax, f"attention of the last {queries} queries", "layer", "share, mean over heads")
    legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    words = ", ".join(f"{share} {mean(rows, share):.0%}" for share in _SHARES)
    return Picture(figure, table, f"Stacked bars by layer of where attention goes. Mean over layers: {words}.")


def heavy_hitters(found: Trace, top: int = 12, sinks: int = 4, apart: int = 16) -> Picture:
    """The tokens behind the sinks that are looked at most from afar, summed over layers and heads.

    A token's score is its mean share over the queries at least `apart` tokens later: neither age nor being next to the
    query gains anything. The last tokens, which few such queries see, get none.
    """
    count = len(found.tokens)
    far = max(count - 2 * apart, sinks + 1)  # every token up to here is judged by at least `apart` queries
    total = torch.zeros(count, dtype=torch.float64)
    for seen in found.layers.values():
        total += seen.attention().mean(0).tril(-apart).sum(0).double()
    share = (total / len(found.layers) / torch.arange(count - apart, -apart, -1).clamp_min(1)).numpy()
    table = pd.DataFrame({"position": range(count), "token": found.tokens, "share": share})[:far]
    best = sorted(range(sinks, len(table)), key=lambda n: -share[n])[:top]
    figure, axes = sheet(1, 1, width=7.6, height=3.0)
    ax = axes[0][0]
    ax.vlines(range(far), 0, share[:far], color=INK.over, linewidth=0.7)
    ax.plot(best, share[best], linestyle="none", markersize=6, **styles(["hitters"])["hitters"])
    for n in best[:6]:
        offset = {"xytext": (4, 4), "textcoords": "offset points", "rotation": 25}
        ax.annotate(repr(found.tokens[n]), (n, share[n]), **offset, fontsize=8, color=INK.text)
    ax.set_ylim(0, 1.3 * share[best].max())
    name(ax, "attention from afar, by token (sinks run off the top)", "position", "mean share")
    words = ", ".join(f"{found.tokens[n]!r} at {n}" for n in best[:5])
    alt = f"Attention by token, from queries at least {apart} tokens later. Most looked at behind the sinks: {words}."
    return Picture(figure, table.assign(hitter=[n in best for n in range(len(table))]), alt)
