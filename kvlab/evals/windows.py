"""Running text cut into windows: what is compressed, a few words to go on with, and what has to be predicted.

Cuts fall between words, so that every tokenizer sees whole ones. Lengths are estimates: items do not depend on a model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.evals.draft import estimate_tokens

NEIGHBOURS = 4
"""Windows in a row that count as one cluster."""
LEAD = 4
"""Tokens after the compressed context that are given, not predicted."""
_PIECES = re.compile(r"\s*\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Running text as items: the `column` that holds it, `context` tokens to compress, `follow` tokens to predict.

    With `join` all rows are one text with that between them; without it every row is a text of its own.
    """

    column: str
    context: int
    follow: int
    join: str | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """`context + lead + follow` is a stretch of the text, white space included."""

    context: str
    lead: str
    follow: str


def cut(text: str, context: int, follow: int) -> Iterator[Window]:
    """Windows one after the other that share no word; what is left at the end, too short for one, is dropped."""
    parts: list[list[str]] = [[]]
    limits, used = (context, LEAD, follow), 0
    for found in _PIECES.finditer(text):
        piece = found.group()
        parts[-1].append(piece)
        used += estimate_tokens(piece)
        if used < limits[len(parts) - 1]:
            continue
        used = 0
        if len(parts) < 3:
            parts.append([])
            continue
        first, lead, rest = ("".join(part) for part in parts)
        yield Window(first.lstrip(), lead, rest)
        parts = [[]]
