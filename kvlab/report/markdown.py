"""A report as Markdown, to paste into an issue or a message: verdict first, provenance last and folded.

Figures are named as files beside it. Text from a result cannot break out of a cell or become a tag.
"""

import json
import re
from collections.abc import Mapping

import pandas as pd

from kvlab.report import document as doc
from kvlab.report.figures.drawing import Drawing
from kvlab.report.frames import TITLES, readable, tables, wordy
from kvlab.report.page import TABLES, notes

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def markdown(result: Mapping, drawings: Mapping[str, Drawing], provenance: Mapping, *, level: int = 1) -> str:
    """The report of one run; figures are taken to lie in `figures/` beside it."""
    body = [f"{'#' * level} {plain(doc.title(result))}", run_parts(result, drawings, level=level + 1)]
    return "\n\n".join([*body, folded("Provenance", provenance)]) + "\n"


def run_parts(result: Mapping, drawings: Mapping[str, Drawing], *, level: int) -> str:
    """Everything of one run but its provenance."""
    shown, (word, sentence), chosen = tables(result), doc.headline(result), doc.best(result)
    head = "#" * level
    parts = [f"**{plain(doc.partial_line(result))}**"] if result.get("partial") else []
    parts.append(f"**{plain(word)}** {plain(sentence)}")
    if result["schema"] != "kvlab.rows/1":
        parts.append(plain(doc.budget_line(result)))
    for name in ("before_after", *TABLES):
        if name in shown:
            parts.append(f"{head} {TITLES[name]}\n\n{table(name, shown[name])}")
    for drawing in drawings.values():
        image = f"![{plain(drawing.alt)}](figures/{drawing.name}.png)"
        parts.append(f"{head} {plain(drawing.title)}\n\n{image}\n\n{plain(drawing.caption)}")
    if chosen and chosen.get("toml"):
        parts.append(f"{head} Settings to use\n\n```toml\n{chosen['toml'].replace('```', '')}\n```")
    lines = notes(result)
    if lines:
        parts.append(f"{head} Notes\n\n" + "\n".join(f"- {plain(line)}" for line in lines))
    return "\n\n".join(parts)


def table(name: str, frame: pd.DataFrame) -> str:
    """A frame for people as a Markdown table."""
    text = readable(name, frame)
    words = wordy(text)
    lines = [_line(text.columns), _line("---" if w else "---:" for w in words)]
    return "\n".join([*lines, *(_line(plain(str(v)) for v in row) for row in text.itertuples(index=False))])


def folded(title: str, content: object) -> str:
    text = json.dumps(content, indent=1, ensure_ascii=False).replace("```", "")
    return f"<details><summary>{plain(title)}</summary>\n\n```json\n{text}\n```\n\n</details>"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _line(cells) -> str:
    return f"| {' | '.join(cells)} |"
