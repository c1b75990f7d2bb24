"""Templates with named fields: `{name}` and nothing else. What a template says can insert text, never compute.

Attributes (`{a.__class__}`), indices, conversions and format specifications are refused when the template is read.
Braces of inserted text are left alone; `{{` and `}}` write braces. This file refuses to know rows and items.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """Alternating literal text and field names, as `parse` reads them. Empty where there is nothing to write."""

    parts: tuple[tuple[str, str | None], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names it uses, in order, each once."""
        return tuple(dict.fromkeys(name for _, name in self.parts if name is not None))

    def render(self, values: Mapping[str, str]) -> str:
        """The text with every field replaced. `values` has them all: the caller has checked."""
        return "".join(literal + ("" if name is None else values[name]) for literal, name in self.parts)


def parse(text: str) -> Template:
    """Read a template. Raises ValueError, naming the field, for anything that is not a plain name in braces."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ and }}}} for braces that are text") from None
    parts: list[tuple[str, str | None]] = []
    for literal, name, specification, conversion in pieces:
        if name is not None and not name.isidentifier():
            raise ValueError(
                f"field {{{name}}} is no plain name: only names of columns may stand in braces, nothing is computed. "
                "Write {{ and }} for braces that are text"
            )
        if specification or conversion:
            raise ValueError(
                f"field {{{name}}} has a conversion or format, which templates do not take: write {{{name}}}"
            )
        parts.append((literal, name))
    return Template(tuple(parts))
