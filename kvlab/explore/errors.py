"""Where a codec errs: K and V by layer and head, what that does to attention's output, and what it costs in bits.

Everything behind the sinks is encoded by the codecs of a config, centre taken out where it has one, and compared with
what the model computed. Nothing is evicted; the recent window is encoded too, so that every token counts.
"""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvlab.attach import attach
from kvlab.centre import Centre
from kvlab.config import KVConfig
from kvlab.explore.picture import Picture, heat, legend, listed, mean, name, records, scale, sheet, split, styles
from kvlab.explore.tracing import Seen, Trace
from kvlab.layer import LayerConfig
from kvlab.subject import BASELINE, LocalSubject

QUERIES = 64
SINKS = 4
_MEASURES = {
    "k_error": "relative L2 error of K",
    "v_error": "relative L2 error of V",
    "output_error": "relative L2 error of the output",
    "output_error_k": "the same, K alone compressed",
    "output_error_v": "the same, V alone compressed",
}


def codec_errors(
    subject: LocalSubject,
    found: Trace,
    configs: Mapping[str, KVConfig],
    measures: Sequence[str] = ("k_error", "output_error"),
) -> Picture:
    """Errors of each config's codecs on a traced prompt, drawn by layer as the mean over heads.

    The table has one line for each config, layer and KV head: relative L2 of K, of V, and of the attention output of
    the last 64 queries with both compressed, with K alone and with V alone; `k_bits` and `v_bits` are stored bits per
    value of a full page, scales and zeros included. Raises ValueError for a config that does not fit the model.
    """
    for config in configs.values():
        config.check(subject.shape)
    rows = []
    with attach(
        subject.model, BASELINE, plan=subject.plan, centres=subject.centres(list(configs.values()))
    ) as attachment:
        for label, config in configs.items():
            centres = attachment.centres(config.centring)
            for layer, rule in config.layers(found.layers).items():
                centre = None if centres is None else centres[layer]
                rows += [{"config": label, "layer": layer, **row} for row in _layer(rule, found.layers[layer], centre)]
    table = pd.DataFrame(rows)
    return Picture(_lines(table, measures), table, _words(table))


def errors_of(rule: LayerConfig, seen: Seen, centre: Centre | None = None) -> tuple[Tensor, Tensor]:
    """K and V [N, T, .] as they read back: sinks as they are, the rest encoded and decoded."""
    first = rule.sink_tokens
    last = seen.tokens - (seen.tokens - first) % rule.page_tokens  # whole pages: per-channel groups run along them
    keys, values = seen.k.clone(), seen.v.clone()
    if last <= first:
        raise ValueError(
            f"{seen.tokens} tokens hold no page of {rule.page_tokens} behind {first} sinks: use a longer prompt"
        )
    places = slice(first, last)
    k = seen.k[:, places]
    packed = rule.key.encode(k if centre is None else centre.take_out(k, places, last))
    read = rule.key.decode(packed, k.shape[2], torch.float32)
    keys[:, places] = (read if centre is None else centre.put_back(read, places, last)).to(keys.dtype)
    v = seen.v[:, places]
    values[:, places] = rule.value.decode(rule.value.encode(v), v.shape[2], torch.float32).to(values.dtype)
    return keys, values


def _layer(rule: LayerConfig, seen: Seen, centre: Centre | None) -> list[dict[str, float]]:
    """One row for each KV head."""
    keys, values = errors_of(rule, seen, centre)
    part = slice(rule.sink_tokens, None)
    asked = slice(-QUERIES, None)
    own = seen.outputs(asked)
    outputs = {
        "output_error": seen.outputs(asked, keys, values),
        "output_error_k": seen.outputs(asked, keys),
        "output_error_v": seen.outputs(asked, values=values),
    }
    heads = seen.k.shape[0]
    of = {"k_error": (keys[:, part], seen.k[:, part]), "v_error": (values[:, part], seen.v[:, part])}
    of |= {n: (x.unflatten(0, (heads, -1)), own.unflatten(0, (heads, -1))) for n, x in outputs.items()}
    measured = {n: _relative(x, y) for n, (x, y) in of.items()}
    bits = {
        "k_bits": rule.key.effective_bits(seen.k.shape[2], rule.page_tokens, torch.float16),
        "v_bits": rule.value.effective_bits(seen.v.shape[2], rule.page_tokens, torch.float16),
    }
    return [{"head": h, **{n: float(x[h]) for n, x in measured.items()}, **bits} for h in range(heads)]


def _relative(x: Tensor, y: Tensor) -> Tensor:
    """||x - y|| / ||y|| by head, over everything else."""
    x, y = x.double().flatten(1), y.double().flatten(1)
    return (x - y).norm(dim=1) / y.norm(dim=1).clamp_min(1e-30)


def _lines(table: pd.DataFrame, measures: Sequence[str]) -> Figure:
    unknown = [m for m in measures if m not in _MEASURES]
    if unknown:
        raise ValueError(f"unknown measure {unknown[0]!r}; there are {', '.join(_MEASURES)}")
    figure, axes = sheet(1, len(measures), width=4.6, height=3.4, sharex=True)
    by_config = split(records(table), "config")
    for ax, measure in zip(axes[0], measures, strict=True):
        for label, look in styles(by_config).items():
            by_layer = split(by_config[label], "layer")
            points = list(by_layer), [mean(part, measure) for part in by_layer.values()]
            ax.plot(*points, label=label, markersize=4, linewidth=1.2, **look)
        ax.set_yscale("log")
        name(ax, _MEASURES[measure], "layer", "mean over heads, log scale")
    legend(axes[0][-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _words(table: pd.DataFrame) -> str:
    lines = []
    for label, rows in split(records(table), "config").items():
        k, v, output, k_bits, v_bits = (
            mean(rows, c) for c in ("k_error", "v_error", "output_error", "k_bits", "v_bits")
        )
        lines.append(f"{label}: K {k:.1%}, V {v:.1%}, output {output:.1%} at {k_bits:.2f} and {v_bits:.2f} bits")
    return f"Lines of relative error against layer, one for each config. Means: {'; '.join(lines)}."


def error_map(table: pd.DataFrame, measure: str = "k_error") -> Picture:
    """Layer by head, one heat map for each config of a table of `codec_errors`, on one colour scale."""
    by_config = split(records(table), "config")
    figure, axes = sheet(1, len(by_config), width=1.6, height=4.0, sharey=True)
    every = [row[measure] for rows in by_config.values() for row in rows]
    lines, shown = [], None
    for n, (ax, (label, own)) in enumerate(zip(axes[0], by_config.items(), strict=True)):
        layers, heads = (sorted({row[key] for row in own}) for key in ("layer", "head"))
        by_place = {(row["layer"], row["head"]): row[measure] for row in own}
        shown = heat(ax, [[by_place[i, h] for h in heads] for i in layers], vmin=min(every), vmax=max(every))
        ax.set_xticks(range(len(heads)), [str(h) for h in heads])
        ax.set_yticks(range(0, len(layers), step := max(1, len(layers) // 10)), [str(i) for i in layers[::step]])
        name(ax, "\n".join(textwrap.wrap(label, 13)), "KV head", "" if n else "layer")
        worst = max(own, key=lambda row: row[measure])
        lines.append(f"{label}: worst {worst[measure]:.1%} in layer {worst['layer']}, head {worst['head']}")
    scale(figure, axes, shown, _MEASURES[measure])
    kept = table.filter(["config", "layer", "head", measure])
    return Picture(figure, kept, f"Heat maps of {_MEASURES[measure]}. {'; '.join(lines)}.")


def loudest(found: Trace) -> tuple[int, int]:
    """Layer and KV head whose largest key channel stands out most above its median one."""
    standing = {}
    for layer, seen in found.layers.items():
        peaks = seen.k[:, SINKS:].abs().amax(1)
        for head, ratio in enumerate(peaks.amax(1) / peaks.median(1).values):
            standing[layer, head] = float(ratio)
    return max(standing, key=standing.__getitem__)


def channels(found: Trace, layer: int, head: int = 0) -> Picture:
    """K and V of one head as |value| by token and channel: where a channel is large and constant, K shows stripes.

    The table has one line for each channel and stream: mean, standard deviation over tokens, largest magnitude, and
    `constancy`, |mean| over the standard deviation. Sinks are left out.
    """
    if layer not in found.layers:
        raise ValueError(f"layer {layer} was not traced: choose one of {listed(found.layers)}")
    seen = found.layers[layer]
    if not 0 <= head < seen.k.shape[0]:
        raise ValueError(f"head must lie in [0, {seen.k.shape[0] - 1}], got {head}")
    figure, axes = sheet(1, 2, width=4.4, height=3.4)
    parts, lines = [], []
    for ax, stream, x in ((axes[0][0], "K", seen.k[head]), (axes[0][1], "V", seen.v[head])):
        values = x[SINKS:].double().numpy()
        scale(figure, ax, heat(ax, np.abs(values)), f"|{stream}|")
        name(ax, f"{stream}, layer {layer}, head {head}", "channel", "token")
        mean, spread, peak = values.mean(0), values.std(0), np.abs(values).max(0)
        columns = {"mean": mean, "std": spread, "peak": peak, "constancy": np.abs(mean) / np.maximum(spread, 1e-12)}
        parts.append(pd.DataFrame({"stream": stream, "channel": range(len(mean)), **columns}))
        top = int(peak.argmax())
        ratio = peak[top] / np.median(peak)
        lines.append(f"{stream}: largest in channel {top}, {ratio:.1f} times the peak of the median channel")
    return Picture(figure, pd.concat(parts), f"Heat maps of magnitudes by token and channel. {'; '.join(lines)}.")
