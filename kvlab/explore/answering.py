"""What a config answers: one question, several configs, the answer decoded and measured against the full cache's."""

import re
from collections.abc import Iterable, Mapping

import pandas as pd
from matplotlib.figure import Figure

from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.explore.picture import INK, Picture, name, records, sheet, styles
from kvlab.subject import BASELINE, LocalSubject

COLUMNS = ("config", "answer", "right", "kl", "nll", "bytes", "share")


def easy_item(subject: LocalSubject, items: Iterable[Item]) -> tuple[Item, bool]:
    """The first item that the full cache answers, and True; the first of all and False where it answers none."""
    known = list(items)
    if not known:
        raise ValueError("no item to choose from")
    for item in known:
        (row,) = subject.score([item], [BASELINE])
        if row.exact == 1:
            return item, True
    return known[0], False


def answers(subject: LocalSubject, item: Item, configs: Mapping[str, KVConfig], *, decode: bool = True) -> Picture:
    """One line for each config: the answer it decodes, whether it is right, and how far it is from the full cache.

    `kl` and `nll` are nats per token of the gold answer, forced; `bytes` what the cache holds after the context,
    `share` of what 16 bit would hold. An answer is right if it grades as right, or begins with the gold one. Without
    `decode` an answer is the likeliest token at each place of the gold one.
    """
    wanted = list(configs.values())
    scored = dict(zip(configs, subject.score([item], wanted), strict=True))
    spoken = dict(zip(configs, subject.generate([item], wanted), strict=True)) if decode else scored
    rows = []
    for label, row in scored.items():
        said = spoken[label]
        rows.append(
            {
                "config": label,
                "answer": said.prediction.strip(),
                "right": bool(said.score == 1) or starts(said.prediction, item),
                "kl": 0.0 if row.kl is None else row.kl,
                "nll": row.nll,
                "bytes": row.measured_bytes,
                "share": row.measured_bytes / row.raw16_bytes,
            }
        )
    table = pd.DataFrame(rows, columns=COLUMNS)
    return Picture(_bars(table), table, _alt(table, item))


def starts(text: str, item: Item) -> bool:
    """Whether a text begins with one of the gold answers, as a whole word: models write on after it."""
    return any(re.match(rf"{re.escape(gold.strip())}(?!\w)", text.strip()) for gold in item.answers)


def right(table: pd.DataFrame) -> list[str]:
    """The configs of a table of answers that were right."""
    return [row["config"] for row in records(table) if row["right"]]


def _bars(table: pd.DataFrame) -> Figure:
    rows = records(table)
    figure, axes = sheet(1, 2, width=4.2, height=0.42 * len(rows) + 1.1, sharey=True)
    look = styles(["right", "wrong"])
    paint = {
        "color": [look["right" if row["right"] else "wrong"]["color"] for row in rows],
        "hatch": ["" if row["right"] else "///" for row in rows],
        "edgecolor": INK.paper,
    }
    left, other = axes[0]
    for ax, column, label in (
        (left, "share", "bytes, share of 16 bit"),
        (other, "kl", "KL to the full cache, nats/token"),
    ):
        ax.barh(range(len(rows)), [row[column] for row in rows], **paint)
        name(ax, "", label)
    left.set_yticks(range(len(rows)), [row["config"] for row in rows])
    left.invert_yaxis()
    for place, row in enumerate(rows):
        said = f" {_short(row['answer'])}, {'right' if row['right'] else 'wrong'}"
        other.annotate(said, (row["kl"], place), va="center", fontsize=8, color=INK.text)
    other.set_xlim(0, 2.4 * max(*(row["kl"] for row in rows), 1e-3))
    return figure


def _short(answer: str) -> str:
    """An answer as it fits beside a bar; dollar signs would start a formula."""
    return repr(answer if len(answer) <= 24 else answer[:23] + "…").replace("$", r"\$")


def _alt(table: pd.DataFrame, item: Item) -> str:
    lines = [
        f"{row['config']} answers {_short(row['answer'])}, {'right' if row['right'] else 'wrong'}, with "
        f"{row['share']:.0%} of 16-bit bytes and KL {row['kl']:.3g}"
        for row in records(table)
    ]
    return f"Bars of bytes and KL. Asked: {item.question!r}, gold {item.answers[0].strip()!r}. {'; '.join(lines)}."
