"""Numbers and names as people read them, and documents as JSON takes them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

# Control characters would move a terminal's cursor, and HTML has no place for them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe(value: Any) -> str:
    """Text with control and direction characters replaced by a visible mark."""
    return _CONTROL.sub("\ufffd", str(value))


def line(value: Any, limit: int = 80) -> str:
    """One line of at most `limit` characters."""
    return cut(safe(value).replace("\n", "\u21b5").replace("\t", " "), limit)


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "\u2026"


def size(count: float | None) -> str:
    """Bytes, decimal, three digits or more."""
    if not finite(count):
        return "unknown"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def share(part: float, whole: float) -> str:
    """A part of a whole, in per cent."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number one can write down."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, form: str = ".4g") -> str:
    return format(value, form) if finite(value) else "\u2013"


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def plain(value: Any) -> Any:
    """The same in JSON types; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of text as lines, the first column and words to the left, numbers to the right."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(numeric(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    out = []
    for row in rows:
        cells = [
            cell.rjust(width) if to_right and i else cell.ljust(width)
            for i, (cell, width, to_right) in enumerate(zip(row, widths, right, strict=True))
        ]
        out.append((indent + "  ".join(cells)).rstrip())
    return out


def numeric(text: str) -> bool:
    """Whether a cell reads as a number, with or without a unit; an empty one does."""
    return not text or text == "\u2013" or text[0].isdigit() or (text[0] in "+-" and text[1:2].isdigit())
