"""Sparse reading: which chunks each reader chooses for a question, and whether they are those that attention wants.

The question is asked of the full cache; its queries then choose chunks of a cache with a sparse reader, as a decode
step would, and what they miss is weighed by the attention they pay.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from kvlab.attach import Attachment, attach, cache_kwarg
from kvlab.cache import KVLayer
from kvlab.config import KVConfig
from kvlab.explore.picture import INK, Picture, heat, legend, listed, mean, name, records, scale, sheet, split, styles
from kvlab.explore.tracing import Seen, watched
from kvlab.kernels import chunks as kernel
from kvlab.kernels.attend import fold_heads, probabilities
from kvlab.policies import TopK
from kvlab.row import Row
from kvlab.snapshot import Snapshot, take
from kvlab.subject import BASELINE, LocalSubject

MIB = 2**20
READ = "#d55e00"


@dataclass(frozen=True, slots=True, eq=False)
class ChunksRead:
    """`reading` compares the readers, `scores` shows one layer of one of them chunk by chunk."""

    reading: Picture
    scores: Picture


@torch.no_grad()
def chunks_read(
    subject: LocalSubject, context: str, question: str, configs: Mapping[str, KVConfig], layer: int | None = None
) -> ChunksRead:
    """What the last token of `question` reads under each config, all of which need a sparse reader.

    Table of `reading`, one line for each config, layer and KV head: `chunks` there are, `read`, `recall` (share of the
    truly best `read` chunks that were read), `captured` (share of the attention on all chunks that the read ones hold),
    `chance` (recall of reading at random), `reached` (share of all attention, sinks, window and question included, that
    goes to what is read), `stored` and `read_bytes` of the whole cache. `scores` is of `layer`, by
    default the one with the lowest recall: true attention and the reader's score of each chunk.
    """
    dense = [label for label, config in configs.items() if not isinstance(config.reader, TopK)]
    if dense or not configs:
        raise ValueError(f"give configs with a TopK reader by name; {', '.join(dense) or 'none'} reads everything")
    for config in configs.values():
        config.check(subject.shape)
    ids, asked = subject.tokenizer.encode(context), subject.tokenizer.encode(question, add_special_tokens=False)
    rows, detail = [], {}
    centres = subject.centres(list(configs.values()))
    with attach(subject.model, BASELINE, plan=subject.plan, centres=centres) as attachment:
        (snapshot,) = take(subject.model, attachment, [ids], [c.scorer for c in configs.values() if c.budget.evicts])
        wanted = _queries(subject, snapshot, attachment, asked)
        for label, config in configs.items():
            cache = snapshot.fork(config, attachment)
            sizes = {
                "stored": cache.nbytes,
                "read_bytes": config.read_bytes(subject.shape, len(ids)),
                "full": subject.shape.raw_bytes(
                    len(ids), subject.model.dtype.itemsize if config.raw_dtype == "auto" else 2
                ),
            }
            for i in cache.compressed:
                held = cache.layers[i]
                assert isinstance(held, KVLayer)
                chosen = _chosen(held.rows[0], wanted[i])
                if chosen is not None:
                    detail[label, i] = chosen
                    rows += [{"config": label, "layer": i, **row, **sizes} for row in chosen.rows()]
    if not rows:
        raise ValueError(f"{len(ids)} tokens hold too few chunks to choose from: use a longer context")
    table = pd.DataFrame(rows)
    return ChunksRead(_reading(table), _scores(table, detail, layer))


def _queries(subject: LocalSubject, snapshot: Snapshot, attachment: Attachment, asked: list[int]) -> dict[int, Seen]:
    """What the question asks of each layer: its last query, and keys of context and question."""
    cache = snapshot.fork(BASELINE, attachment)
    with watched(cache) as calls:
        ids = torch.tensor([asked], device=subject.model.device)
        subject.model.base_model(input_ids=ids, use_cache=True, **{cache_kwarg(): cache})
    found = {}
    for i, (call,) in calls.items():
        keys = torch.cat([snapshot.keys[i], call.k[0]], dim=1)
        found[i] = Seen(call.q[0, :, -1:], keys, keys[..., :0], call.scale, call.softcap, call.sink_logits)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """Of one layer: attention [N, C] on each chunk, its score [N, C] if the reader has one, and which are read."""

    mass: Tensor
    score: Tensor | None
    read: Tensor

    def rows(self) -> list[dict[str, float]]:
        count = self.mass.shape[1]
        out = []
        for head, (mass, read) in enumerate(zip(self.mass, self.read, strict=True)):
            k = int(read.sum())
            best = torch.zeros_like(read).scatter(0, mass.topk(k).indices, True)
            out.append(
                {
                    "head": head,
                    "chunks": count,
                    "read": k,
                    "recall": float((best & read).sum()) / k,
                    "captured": float(mass[read].sum() / mass.sum().clamp_min(1e-30)),
                    "chance": k / count,
                    "reached": float(1 - mass[~read].sum()),
                }
            )
        return out


def _chosen(row: Row, wanted: Seen) -> _Chosen | None:
    """None where the layer reads everything. Heads of one length only: chunks are compared by where they stand."""
    reader = row.config.reader
    choice = row.select(wanted.q, observe=False)
    if choice is None or not isinstance(reader, TopK):
        return None
    count, size = -(-row.table.length // reader.chunk), reader.chunk
    probs = probabilities(
        fold_heads(wanted.q * wanted.scale, wanted.k.shape[0]) @ wanted.k.mT,
        None,
        wanted.softcap,
        wanted.sink_logits,
        1,
    ).mean(1)
    held = probs.gather(1, row.positions().long().clamp_min(0))
    real = torch.arange(held.shape[1]) < row.table.sizes().unsqueeze(1)
    padded = torch.nn.functional.pad(held * real, (0, count * size - held.shape[1]))
    read = torch.zeros(len(padded), count + 1, dtype=torch.bool)
    read.scatter_(1, torch.where(choice.chunks[:, 0] < 0, count, choice.chunks[:, 0]).long(), True)
    return _Chosen(padded.unflatten(1, (count, size)).sum(2), _score(row, wanted, reader), read[:, :count])


def _score(row: Row, wanted: Seen, reader: TopK) -> Tensor | None:
    """What the reader thinks of each chunk, where it says so by summaries of its own."""
    if not reader.summaries:
        return None
    names = [f"k.{name}" for name in reader.summaries]
    held = row.table.gather(names)
    if reader.bound == "mean":
        return kernel.mean_scores(wanted.q, held[names[0]])[:, 0]
    return kernel.bound_scores(wanted.q, kernel.Bounds(held[names[0]], held[names[1]]))[:, 0]


def _reading(table: pd.DataFrame) -> Picture:
    figure, axes = sheet(1, 3, width=3.7, height=3.3)
    recall, captured, sizes = axes[0]
    by_config = split(records(table), "config")
    for label, look in styles(by_config).items():
        by_layer = split(by_config[label], "layer")
        for ax, column in ((recall, "recall"), (captured, "captured")):
            points = list(by_layer), [mean(part, column) for part in by_layer.values()]
            ax.plot(*points, label=label, markersize=4, linewidth=1.2, **look)
        one = by_config[label][0]
        sizes.plot(one["stored"] / MIB, one["read_bytes"] / MIB, markersize=8, linestyle="none", label=label, **look)
    chance = mean(records(table), "chance")
    recall.axhline(chance, color=INK.text, linewidth=0.9, linestyle=(0, (4, 3)))
    recall.text(0.02, chance + 0.01, "by chance", fontsize=7, color=INK.text, transform=recall.get_yaxis_transform())
    name(recall, "recall of the best chunks", "layer", "share, mean over heads")
    name(captured, "attention captured", "layer", "share, mean over heads")
    for ax in (recall, captured):
        ax.set_ylim(0, 1.05)
    _diagonal(sizes, table)
    legend(sizes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    lines = []
    for label, rows in by_config.items():
        found, luck, held = (mean(rows, column) for column in ("recall", "chance", "captured"))
        stored, read = (rows[0][column] / MIB for column in ("stored", "read_bytes"))
        lines.append(
            f"{label} finds {found:.0%} of the best chunks ({luck:.0%} by chance) and {held:.0%} of their attention, "
            f"stores {stored:.2f} MiB and reads {read:.2f}"
        )
    alt = f"Recall and captured attention by layer, and bytes read against stored. {'; '.join(lines)}."
    return Picture(figure, table, alt)


def _diagonal(ax: Axes, table: pd.DataFrame) -> None:
    """Bytes read against bytes stored; on the dotted line everything that is stored is read."""
    rows = records(table)
    full = max(row["full"] for row in rows) / MIB
    limit = 1.12 * max(full, *(row["stored"] / MIB for row in rows))
    ax.plot(full, full, "X", color=INK.text, label="everything, uncompressed")
    ax.plot([0, limit], [0, limit], color=INK.over, linewidth=0.9, linestyle=":")
    ax.set_xlim(0, limit)
    ax.set_ylim(0, limit)
    name(ax, "bytes", "stored, MiB", "read by a step, MiB")


def _scores(table: pd.DataFrame, detail: Mapping[tuple[str, int], _Chosen], layer: int | None) -> Picture:
    label, rows = next(iter(split(records(table), "config").items()))
    found = {at: mean(part, "recall") for at, part in split(rows, "layer").items()}
    layer = int(min(found, key=found.__getitem__)) if layer is None else layer
    if layer not in found:
        raise ValueError(f"layer {layer} reads everything under {label}: choose one of {listed(found)}")
    chosen = detail[label, layer]
    heads, count = chosen.mass.shape
    every = [(h, c) for h in range(heads) for c in range(count)]
    rows = [
        {
            "head": h,
            "chunk": c,
            "attention": float(chosen.mass[h, c]),
            "score": None if chosen.score is None else float(chosen.score[h, c]),
            "read": bool(chosen.read[h, c]),
        }
        for h, c in every
    ]
    missed = max((row["attention"] for row in rows if not row["read"]), default=0.0)
    alt = (
        f"Heat maps of attention and score by chunk in layer {layer} under {label}; the best chunk that is not read "
        f"holds {missed:.1%} of attention."
    )
    return Picture(_chunks(chosen, f"layer {layer}, {label}"), pd.DataFrame(rows), alt)


def _chunks(chosen: _Chosen, where: str) -> Figure:
    """Attention on each chunk and, where there is one, the score that stands for it; what is read is circled."""
    shown = [(f"attention on each chunk, {where} (circles are read)", chosen.mass.sqrt(), "square root")]
    if chosen.score is not None:
        spread = chosen.score - chosen.score.amin(1, keepdim=True)
        spread = spread / spread.amax(1, keepdim=True).clamp_min(1e-30)
        shown.append(("score from its summary", spread, "within the head"))
    figure, axes = sheet(len(shown), 1, width=7.6, height=1.7, sharex=True)
    head, at = chosen.read.nonzero(as_tuple=True)
    for ax, (title, values, unit) in zip(axes[:, 0], shown, strict=True):
        scale(figure, ax, heat(ax, values.float().numpy()), unit)
        for color, width in ((INK.paper, 1.8), (READ, 1.0)):
            ring = {"markerfacecolor": "none", "markeredgecolor": color, "markeredgewidth": width}
            ax.plot(at, head, "o", markersize=5, **ring)
        ax.set_yticks(range(values.shape[0]))
        name(ax, title, "chunk" if ax is axes[-1, 0] else "", "KV head")
    return figure
