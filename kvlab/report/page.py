"""One HTML page that holds everything: no script, no request to anywhere, readable in light and dark and on paper.

Every text from a result is escaped. Knows tables and figures as given, not how they were made.
"""

import base64
import json
from collections.abc import Mapping
from html import escape

import pandas as pd
from matplotlib.figure import Figure

from kvlab.report import document as doc
from kvlab.report.figures import alt, caption, png
from kvlab.report.frames import TITLES, readable, tables, wordy

_TABLES = ("scored", "families", "finalists", "front", "controls", "additivity")
TONES = {"HOLDS": "good", "RISES": "good", "WORSE": "bad", "NOTHING FITS": "bad"}
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #59616b; --line: #d5d9de; --band: #f4f6f8;
  --good: #0b6b3a; --bad: #a3211a; --open: #7a5200; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e4e7eb; --soft: #a0a8b2; --line: #3a4048;
  --band: #1e2329; --good: #5fd08d; --bad: #ff8f85; --open: #f0c060; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.1rem; font-weight: 600; color: var(--soft); margin: 0 }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem }
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
pre { background: var(--band); padding: .75rem 1rem; overflow-x: auto; font-size: .8125rem }
ul { padding-left: 1.2rem }
"""


def html(result: Mapping, figures: Mapping[str, Figure], provenance: Mapping) -> str:
    """The page. `figures` maps a name to a figure; a twin named `<name>-dark` is shown to those who prefer dark."""
    shown = tables(result)
    word, sentence = doc.headline(result)
    chosen = doc.best(result)
    mark = "PARTIAL, " if result.get("partial") else ""
    title = f"{(result.get('model') or {}).get('name', 'unknown model')}, {result.get('run', 'run')}"
    body = [
        _partial(result),
        f"<h1>{escape(str(title))}</h1>",
        f'<p class="verdict"><span class="word {TONES.get(word, "")}">{escape(word)}</span> {escape(sentence)}</p>',
        f"<p>{escape(doc.budget_line(result))}</p>" if result["schema"] != "kvlab.rows/1" else "",
        _section(shown, "before_after", chosen),
        *[_figure(name, figures, result, shown, chosen) for name in figures if not name.endswith("-dark")],
        *[
            _section(shown, name, chosen)
            for name in ("scored", "families", "finalists", "front", "controls", "additivity")
        ],
        _toml(chosen),
        _notes(result),
        _folded("Looks taken at the items", result["ledger"]) if result.get("ledger") else "",
        _folded("Counts and versions", _counts(result)) if _counts(result) else "",
        _folded("Provenance", provenance),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{mark}{escape(word)}: {escape(str(title))}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _partial(result: Mapping) -> str:
    if not result.get("partial"):
        return ""
    state = escape(str(result["partial"]))
    return f'<p class="partial" role="alert">PARTIAL: the run is {state}. Nothing here is final.</p>'


def _section(shown: Mapping[str, pd.DataFrame], name: str, chosen: Mapping | None) -> str:
    return f"<h2>{escape(TITLES[name])}</h2>{_table(name, shown[name], chosen)}" if name in shown else ""


def _figure(
    name: str, figures: Mapping[str, Figure], result: Mapping, shown: Mapping[str, pd.DataFrame], chosen: Mapping | None
) -> str:
    dark = figures.get(f"{name}-dark")
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">' if dark else ""
    twin = ""
    if "configs" in shown:
        table = _table("configs", shown["configs"], chosen)
        twin = f"<details><summary>{escape(TITLES['configs'])}</summary>{table}</details>"
    return (
        f"<h2>Bytes against accuracy</h2><figure><picture>{source}"
        f'<img src="{_data(figures[name])}" alt="{escape(alt(result))}"></picture>'
        f"<figcaption>{escape(caption(result))}</figcaption></figure>"
        f"{twin}"
    )


def _data(figure: Figure) -> str:
    return "data:image/png;base64," + base64.b64encode(png(figure)).decode()


def _table(name: str, frame: pd.DataFrame, chosen: Mapping | None) -> str:
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
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _class(wordy: bool) -> str:
    return ' class="text"' if wordy else ""


def _toml(chosen: Mapping | None) -> str:
    if not chosen or not chosen.get("toml"):
        return ""
    return f"<h2>Settings to use</h2><pre>{escape(chosen['toml'])}</pre>"


def _notes(result: Mapping) -> str:
    lines = doc.warnings(result)
    rule = (result.get("margin") or {}).get("rule") if isinstance(result.get("margin"), Mapping) else None
    lines += [f"Margin: {rule}"] if rule else []
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""


def _counts(result: Mapping) -> dict:
    return {k: result[k] for k in ("counters", "wall_s", "seed", "versions") if result.get(k) is not None}


def _folded(title: str, content: object) -> str:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
