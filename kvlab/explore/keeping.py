"""Who stays: the tokens that each policy keeps of a prompt, by layer, head and position.

The prompt goes through the same snapshot and eviction as any evaluation; this file only reads what was kept.
"""

from collections.abc import Mapping

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvlab.attach import attach
from kvlab.cache import KVCache, KVLayer
from kvlab.config import KVConfig
from kvlab.explore.picture import INK, Picture, heat, mean, name, records, scale, sheet, split
from kvlab.explore.tracing import span_of, words
from kvlab.snapshot import take
from kvlab.subject import BASELINE, LocalSubject

MARKED = "#d55e00"


def kept_tokens(
    subject: LocalSubject, text: str, configs: Mapping[str, KVConfig], mark: str = "", tokens: int = 4096
) -> Picture:
    """What each config keeps of `text`; `mark` is a part of it to watch, such as a needle.

    One panel for each config: position across, layer down, the share of heads that hold the token; the marked part lies
    between dotted lines. The table has one line for each config, layer and KV head: tokens `seen` and `kept`,
    `marked_kept` (the share of the marked part that is held) and `bytes` of the whole cache.
    """
    if not configs:
        raise ValueError("no config to look at: give at least one by name")
    for config in configs.values():
        config.check(subject.shape)
    ids = subject.tokenizer.encode(text)[:tokens]
    spelled = words(subject, ids)
    part = span_of(text, spelled, mark) if mark else None
    held, rows = {}, []
    scorers = [c.scorer for c in configs.values() if c.budget.evicts]
    centres = subject.centres(list(configs.values()))
    with attach(subject.model, BASELINE, plan=subject.plan, centres=centres) as attachment:
        (snapshot,) = take(subject.model, attachment, [ids], scorers)
        for label, config in configs.items():
            cache = snapshot.fork(config, attachment)
            held[label] = kept_of(cache, len(ids))
            rows += _rows(label, cache, held[label], part)
    table = pd.DataFrame(rows)
    return Picture(_panels(held, part), table, _alt(table, len(ids), mark))


def kept_of(cache: KVCache, tokens: int, row: int = 0) -> dict[int, Tensor]:
    """For each compressed layer a mask [N, T]: which KV head holds which of the first `tokens` positions."""
    masks = {}
    for i in cache.compressed:
        layer = cache.layers[i]
        assert isinstance(layer, KVLayer)
        one = layer.rows[row]
        mask = torch.zeros(len(one.table.counts), one.seen, dtype=torch.bool)
        mask[:, : one.n_sinks] = True
        mask[:, one.seen - one.n_window :] = True
        positions = one.positions().cpu()
        for head, count in enumerate(one.table.counts):
            mask[head, positions[head, :count].long()] = True
        masks[i] = mask[:, :tokens]
    return masks


def _rows(label: str, cache: KVCache, held: Mapping[int, Tensor], part: slice | None) -> list[dict]:
    return [
        {
            "config": label,
            "layer": layer,
            "head": head,
            "seen": mask.shape[1],
            "kept": int(mask[head].sum()),
            "marked_kept": None if part is None else float(mask[head, part].float().mean()),
            "bytes": cache.nbytes,
        }
        for layer, mask in held.items()
        for head in range(mask.shape[0])
    ]


def _panels(held: Mapping[str, Mapping[int, Tensor]], part: slice | None) -> Figure:
    columns = min(2, len(held))
    figure, axes = sheet(-(-len(held) // columns), columns, width=5.2, height=2.5, sharex=True, sharey=True)
    for ax in axes.flat[len(held) :]:
        ax.set_visible(False)
    shown = None
    for n, (ax, (label, masks)) in enumerate(zip(axes.flat, held.items(), strict=False)):
        grid = torch.stack([mask.float().mean(0) for mask in masks.values()])
        shown = heat(ax, grid.numpy(), vmin=0, vmax=1)
        step = max(1, len(masks) // 6)
        ax.set_yticks(range(0, len(masks), step), [str(i) for i in list(masks)[::step]])
        for edge in () if part is None else (part.start - 0.5, part.stop - 0.5):
            ax.axvline(edge, color=INK.paper, linewidth=2.4)
            ax.axvline(edge, color=MARKED, linewidth=1.2, linestyle=(0, (2, 1)))
        name(ax, label, "position" if n >= len(held) - columns else "", "layer" if n % columns == 0 else "")
    scale(figure, axes, shown, "share of heads that hold the token")
    return figure


def _alt(table: pd.DataFrame, tokens: int, mark: str) -> str:
    lines = []
    for label, rows in split(records(table), "config").items():
        line = f"{label} keeps {mean(rows, 'kept') / tokens:.0%}"
        if mark:
            whole = sum(row["marked_kept"] == 1 for row in rows) / len(rows)
            line += (
                f", all of the marked part in {whole:.0%} of heads, {mean(rows, 'marked_kept'):.0%} of it on average"
            )
        lines.append(line)
    return f"Heat maps of the tokens kept, by layer and position, of {tokens}. {'; '.join(lines)}."
