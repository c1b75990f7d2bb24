"""One HTML page that holds everything: no script, no request to anywhere, readable in light and dark and on paper.

Every text from a result is escaped. Knows tables and figures as given, not how they were made.
"""

import base64
import json
from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from kvlab.report import document as doc
from kvlab.report.figures.drawing import Drawing
from kvlab.report.frames import TITLES, readable, tables, wordy
from kvlab.report.noise import told

# In reading order; the figure "pareto" has the searched configs below it, "families" the paired differences.
TABLES = ("scored", "families", "finalists", "front", "controls", "additivity")
TONES = {"HOLDS": "good", "RISES": "good", "WORSE": "bad", "NOTHING FITS": "bad"}
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #59616b; --line: #d5d9de; --band: #f4f6f8;
  --good: #0b6b3a; --bad: #a3211a; --open: #7a5200; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e4e7eb; --soft: #a0a8b2; --line: #3a4048;
  --band: #1e2329; --good: #5fd08d; --bad: #ff8f85; --open: #f0c060; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 80rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.1rem; font-weight: 600; color: var(--soft); margin: 0 }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem } h3 { font-size: 1rem; margin: 1.5rem 0 .4rem }
.verdict { font-size: 1.6rem; line-height: 1.3; margin: .4rem 0 .6rem }
.word { font-weight: 700; color: var(--open) } .good { color: var(--good) } .bad { color: var(--bad) }
.partial { border: 2px solid var(--bad); color: var(--bad); padding: .6rem 1rem; font-weight: 600; margin: 0 0 1.5rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .75rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal }
td.text, th.text { text-align: left }
tr.chosen td { background: var(--band); font-weight: 600 }
figure { margin: 0 } img { max-width: 100%; height: auto } figcaption, .soft { color: var(--soft); font-size: .875rem }
details { margin: .75rem 0 } summary { cursor: pointer; color: var(--soft) }
details.run > summary { font-weight: 600; font-size: 1.05rem; color: var(--ink) }
pre { background: var(--band); padding: .75rem 1rem; overflow-x: auto; font-size: .8125rem }
ul { padding-left: 1.2rem }
"""


def html(result: Mapping, drawings: Mapping[str, Drawing], provenance: Mapping) -> str:
    """The page of one run: the verdict first, provenance last and folded."""
    word, _ = doc.headline(result)
    title = doc.title(result)
    mark = "PARTIAL, " if result.get("partial") else ""
    body = [run_parts(result, drawings, heading=title), folded("Provenance", provenance)]
    return whole(f"{mark}{word}: {title}", body)


def whole(title: str, body: list[str]) -> str:
    """A document around parts that are HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def run_parts(result: Mapping, drawings: Mapping[str, Drawing], *, heading: str) -> str:
    """Everything of one run but its provenance."""
    shown, chosen = tables(result), doc.best(result)
    parts = [
        _partial(result),
        f"<h1>{escape(heading)}</h1>",
        verdict(*doc.headline(result)),
        f"<p>{escape(doc.budget_line(result))}</p>" if result["schema"] != "kvlab.rows/1" else "",
        _section(shown, "before_after", chosen),
        *[_drawing(drawing, shown, chosen) for drawing in drawings.values()],
        *[_section(shown, name, chosen) for name in TABLES],
        _toml(chosen),
        listed("Notes", notes(result)),
        folded("Looks taken at the items", result["ledger"]) if result.get("ledger") else "",
        folded("Counts and versions", _counts(result)) if _counts(result) else "",
    ]
    return "\n".join(part for part in parts if part)


def verdict(word: str, sentence: str) -> str:
    tone = TONES.get(word, "")
    return f'<p class="verdict"><span class="word {tone}">{escape(word)}</span> {escape(sentence)}</p>'


def alert(text: str) -> str:
    return f'<p class="partial" role="alert">{escape(text)}</p>'


def notes(result: Mapping) -> list[str]:
    """What a reader must know: warnings, scores that fall where bytes grow, the rule of the margin."""
    lines = [*doc.warnings(result), *told(result)]
    rule = (result.get("margin") or {}).get("rule") if isinstance(result.get("margin"), Mapping) else None
    return [*lines, f"Margin: {rule}"] if rule else lines


def listed(title: str, lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2><ul>{items}</ul>" if items else ""


def folded(title: str, content: object) -> str:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def picture(drawing: Drawing, twin: str) -> str:
    """A figure that follows the reader's theme, its caption, and its numbers folded below."""
    return (
        f"<h2>{escape(drawing.title)}</h2><figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{_data(drawing.png(dark=True))}">'
        f'<img src="{_data(drawing.png())}" alt="{escape(drawing.alt)}"></picture>'
        f"<figcaption>{escape(drawing.caption)}</figcaption></figure>{twin}"
    )


def table(name: str, frame: pd.DataFrame, chosen: Mapping | None = None) -> str:
    """A frame for people. `name` says which it is, for whoever checks the page against the rows."""
    text = readable(name, frame)
    words = wordy(text)
    label = (chosen or {}).get("label")
    head = "".join(
        f'<th{_class(w)} scope="col">{escape(str(c))}</th>' for c, w in zip(text.columns, words, strict=True)
    )
    lines = []
    for row in text.itertuples(index=False):
        mark = ' class="chosen"' if label is not None and name == "finalists" and row[0] == label else ""
        cells = "".join(f"<td{_class(w)}>{escape(str(v))}</td>" for v, w in zip(row, words, strict=True))
        lines.append(f"<tr{mark}>{cells}</tr>")
    rows = "".join(lines)
    named = f'<table data-table="{escape(name)}">'
    return f'<div class="wide">{named}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def twin(name: str, title: str, frame: pd.DataFrame, chosen: Mapping | None = None) -> str:
    return f"<details><summary>{escape(title)}</summary>{table(name, frame, chosen)}</details>"


def _partial(result: Mapping) -> str:
    return alert(doc.partial_line(result)) if result.get("partial") else ""


def _section(shown: Mapping[str, pd.DataFrame], name: str, chosen: Mapping | None) -> str:
    return f"<h2>{escape(TITLES[name])}</h2>{table(name, shown[name], chosen)}" if name in shown else ""


def _drawing(drawing: Drawing, shown: Mapping[str, pd.DataFrame], chosen: Mapping | None) -> str:
    if drawing.name == "pareto" and "configs" in shown:
        return picture(drawing, twin("configs", TITLES["configs"], shown["configs"], chosen))
    if drawing.name in ("pareto", "families"):
        return picture(drawing, "")  # its numbers stand in a table of their own, below
    return picture(drawing, twin(f"figure-{drawing.name}", "The numbers drawn", drawing.table))


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _class(wordy: bool) -> str:
    return ' class="text"' if wordy else ""


def _toml(chosen: Mapping | None) -> str:
    if not chosen or not chosen.get("toml"):
        return ""
    return f"<h2>Settings to use</h2><pre>{escape(chosen['toml'])}</pre>"


def _counts(result: Mapping) -> dict[str, Any]:
    return {k: result[k] for k in ("counters", "wall_s", "seed", "versions") if result.get(k) is not None}
