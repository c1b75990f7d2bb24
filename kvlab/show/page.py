"""Pieces of HTML for notebook output: one scoped style, tables, folds, pictures. No script, no address, all escaped.

Colours come from Jupyter's theme where there is one, else from the page around. The same text as plain output goes
along in a <pre> that the style hides: where a notebook is not trusted and its styles are dropped, that is what shows.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kvlab.show.words import numeric, safe

_DARK = (
    '[data-jp-theme-light="false"] .kvlab-show,.vscode-dark .kvlab-show,html[data-theme="dark"] .kvlab-show'
    "{--k-good:#5fd08d;--k-bad:#ff8f85;--k-open:#f0c060;--k-fill:#56b4e9}"
)
STYLE = (
    ".kvlab-text{display:none}"
    ".kvlab-show{display:block!important;--k-good:#0b6b3a;--k-bad:#a3211a;--k-open:#7a5200;--k-fill:#0173b2;"
    "--k-line:var(--jp-border-color2,rgba(128,128,128,.4));--k-band:var(--jp-layout-color2,rgba(128,128,128,.14));"
    "color:var(--jp-content-font-color1,inherit);"
    "font:13px/1.5 var(--jp-content-font-family,system-ui,sans-serif);max-width:64rem;overflow-x:auto}"
    ".kvlab-show .k-head{font-weight:600}"
    ".kvlab-show .k-kind,.kvlab-show .k-soft{color:var(--jp-content-font-color2,inherit);font-weight:400}"
    ".kvlab-show .k-badge{border:1px solid var(--k-line);border-radius:3px;padding:0 .4em;margin-left:.5em;"
    "font-weight:400;font-size:12px;white-space:nowrap}"
    ".kvlab-show .k-good{color:var(--k-good);font-weight:600}.kvlab-show .k-bad{color:var(--k-bad);font-weight:600}"
    ".kvlab-show .k-open{color:var(--k-open);font-weight:600}"
    # Classes are named again and again to outweigh what Jupyter says of every table.
    ".kvlab-show .k-t.k-t{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px;margin:.3em 0;"
    "border:0}"
    ".kvlab-show .k-t.k-t.k-t tr{background:none}"
    ".kvlab-show .k-t.k-t th,.kvlab-show .k-t.k-t td{text-align:left;padding:.15em 1.2em .15em 0;border:0;"
    "border-bottom:1px solid var(--k-line);vertical-align:top;white-space:nowrap;background:none;font-size:13px}"
    ".kvlab-show .k-t.k-t th{font-weight:600;color:var(--jp-content-font-color2,inherit)}"
    ".kvlab-show .k-t.k-t .k-n{text-align:right}"
    ".kvlab-show .k-t.k-t .k-wrap{white-space:pre-wrap;overflow-wrap:anywhere}"
    ".kvlab-show pre{background:var(--k-band);color:inherit;padding:.5em .8em;margin:.3em 0;white-space:pre-wrap;"
    "overflow-wrap:anywhere;font:12px/1.45 var(--jp-code-font-family,monospace);max-height:24em;overflow:auto}"
    ".kvlab-show summary{cursor:pointer;color:var(--jp-content-font-color2,inherit)}"
    ".kvlab-show svg{display:block;width:100%;max-width:40rem;background:rgba(128,128,128,.14)}"
    ".kvlab-show i{display:inline-block;width:.7em;height:.7em;margin-right:.35em}" + _DARK
)


def framed(text: str, body: str) -> str:
    """The whole output: style, plain text for where styles are dropped, and the body for where they are not."""
    return (
        f'<style>{STYLE}</style><pre class="kvlab-text">{esc(text)}</pre>'
        f'<div class="kvlab-show" style="display:none">{body}</div>'
    )


def esc(value: Any) -> str:
    """Text that HTML takes for text."""
    return escape(safe(value))


def head(kind: str, name: Any, *badges: str) -> str:
    """The first line: what it is, what it is called, and how it stands."""
    marks = "".join(f'<span class="k-badge">{esc(b)}</span>' for b in badges if b)
    return f'<div class="k-head"><span class="k-kind">{esc(kind)}</span> {esc(name)}{marks}</div>'


def para(text: Any, tone: str = "") -> str:
    """A line; `tone` is good, bad, open or soft."""
    return f"<div{_class(tone)}>{esc(text)}</div>"


def mark(text: Any, tone: str = "") -> str:
    """Words in a tone, within a line."""
    return f"<span{_class(tone)}>{esc(text)}</span>"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, wrap: bool = False) -> str:
    """Cells are text or Html. Columns of numbers stand to the right."""
    rows = [[c if isinstance(c, Html) else str(c) for c in row] for row in rows]
    if not rows:
        return ""
    # Without a header the first column names what is beside it, and that may be anything.
    named = any(header)
    right = [
        i > 0 and named and all(not isinstance(r[i], Html) and numeric(r[i]) for r in rows) for i in range(len(header))
    ]
    top = "".join(f'<th scope="col"{_cell(r, False)}>{esc(h)}</th>' for h, r in zip(header, right, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{_cell(r, wrap)}>{_inner(c)}</td>" for c, r in zip(row, right, strict=True)) + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{top}</tr></thead>" if named else ""
    return f'<table class="k-t">{top}<tbody>{body}</tbody></table>'


def folded(summary: str, body: str, *, shown: bool = False) -> str:
    """Something behind a line that opens it."""
    return f"<details{' open' if shown else ''}><summary>{esc(summary)}</summary>{body}</details>" if body else ""


def pre(text: str) -> str:
    return f"<pre>{esc(text)}</pre>"


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def _inner(cell: str) -> str:
    return cell if isinstance(cell, Html) else esc(cell)


def _class(tone: str) -> str:
    return f' class="k-{tone}"' if tone else ""


def _cell(right: bool, wrap: bool) -> str:
    return ' class="k-n"' if right else ' class="k-wrap"' if wrap else ""
