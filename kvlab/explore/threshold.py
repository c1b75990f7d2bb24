"""How much may go: one scorer, a threshold turned up step by step; bytes, distance and answer at each step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.explore.answering import answers
from kvlab.explore.picture import INK, Picture, legend, listed, name, records, sheet, styles
from kvlab.policies import AttentionMass, Scorer, Threshold, Unlimited
from kvlab.subject import LocalSubject

STEPS = (0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 0.95)
PLAIN = KVConfig(raw_dtype="float16")


def thresholds(
    subject: LocalSubject,
    item: Item,
    scorer: Scorer = AttentionMass(),  # noqa: B008 - frozen
    quantiles: Sequence[float] = STEPS,
    base: KVConfig = PLAIN,
    chosen: float | None = None,
) -> Picture:
    """Evict tokens whose score lies below a quantile of their block, for each of `quantiles`; 0 keeps everything.

    The rest of the config is `base`. The table has one line for each quantile: `quantile`, `answer`, `right`, `kl`,
    `nll`, `bytes` and `share` of 16 bit. `chosen` is one of them, to be pointed at.
    """
    configs = {f"{q:g}": _at(base, scorer, q) for q in quantiles}
    table = answers(subject, item, configs).table.rename(columns={"config": "quantile"})
    table["quantile"] = table["quantile"].astype(float)
    return curve(table, scorer.label, chosen)


def _at(base: KVConfig, scorer: Scorer, quantile: float) -> KVConfig:
    budget = Threshold(quantile=quantile) if quantile else Unlimited()
    return dataclasses.replace(base, scorer=scorer, budget=budget)


def curve(table: pd.DataFrame, label: str, chosen: float | None = None) -> Picture:
    """The picture of a table of `thresholds`, one quantile of it `chosen`."""
    rows = records(table)
    known = [row["quantile"] for row in rows]
    if chosen is not None and chosen not in known:
        raise ValueError(f"quantile {chosen} was not measured: choose one of {listed(f'{q:g}' for q in known)}")
    figure, axes = sheet(1, 2, width=4.2, height=3.1)
    looks = styles(["right", "wrong"])
    for ax, column in zip(axes[0], ("share", "kl"), strict=True):
        ax.plot(known, [row[column] for row in rows], color=INK.over, linewidth=1.1, zorder=1)
        for word, look in looks.items():
            part = [row for row in rows if row["right"] == (word == "right")]
            points = [row["quantile"] for row in part], [row[column] for row in part]
            ax.plot(*points, linestyle="none", markersize=7, label=f"answer {word}", **look)
        if chosen is not None:
            ax.axvline(chosen, color=INK.text, linewidth=1, linestyle=":")
    name(axes[0][0], f"bytes under {label}", "threshold, quantile", "share of 16 bit")
    name(axes[0][1], "distance from the full cache", "threshold, quantile", "KL, nats per token")
    axes[0][0].set_ylim(0, None)
    legend(axes[0][1], loc="upper left")
    if chosen is not None:
        row = rows[known.index(chosen)]
        said = row["answer"][:30].replace("$", r"\$")
        title = f"threshold {chosen:g}: {row['share']:.0%} of the bytes, answer {said!r}"
        figure.suptitle(title, fontsize=10, color=INK.text)
    return Picture(figure, table, _alt(rows, label))


def _alt(rows: Sequence[Mapping[str, Any]], label: str) -> str:
    held = [row for row in rows if row["right"]]
    first, last = rows[0], rows[-1]
    far = "never right"
    if held:
        best = min(held, key=lambda row: row["share"])
        far = f"still right at {best['quantile']:g} with {best['share']:.0%} of 16-bit bytes"
    return (
        f"Bytes and KL against the threshold under {label}: from {first['share']:.0%} and {first['kl']:.3g} nats at "
        f"{first['quantile']:g} to {last['share']:.0%} and {last['kl']:.3g} at {last['quantile']:g}; the answer "
        f"is {far}."
    )
