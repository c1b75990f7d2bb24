"""Columns of a row as named texts for templates: a column as it is, or after a few named steps.

`["question", "squeeze", "last_sentence"]` takes the column `question`, trims its spaces and keeps its last sentence.
Every step is a pure function of text; a new one is one line in STEPS. This file refuses to know templates and items.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab.evals.item import unknown

Value = str | list[str]


def split_last_sentence(text: str) -> tuple[str, str]:
    """All sentences but the last, and the last one. A full stop inside a number ends no sentence."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"')]?(?= +[A-Z$\d\"'])", text)]
    place = ends[-1] if ends else 0
    return text[:place].strip(), text[place:].strip()


def _split_last_line(text: str) -> tuple[str, str]:
    """Everything before the last line that is not blank, and that line; line ends between them left out."""
    head, _, last = text.rstrip().rpartition("\n")
    return head, last


STEPS: dict[str, Callable[[str], str]] = {
    "strip": str.strip,
    "strip_end": str.rstrip,
    "squeeze": lambda text: " ".join(text.split()),
    "unix_lines": lambda text: text.replace("\r\n", "\n").replace("\r", "\n"),
    "last_sentence": lambda text: split_last_sentence(text)[1],
    "but_last_sentence": lambda text: split_last_sentence(text)[0],
    "last_line": lambda text: _split_last_line(text)[1],
    "but_last_line": lambda text: _split_last_line(text)[0],
    "before_space": lambda text: f" {text}" if text else "",
    "after_hashes": lambda text: text.rpartition("####")[2].strip(),
    "no_calculator": lambda text: re.sub(r"<<[^<>]*>>", "", text),
}
"""Text to text. `before_space` puts a space in front of what is not empty; `after_hashes` and `no_calculator` read
GSM8K's answers."""
LIST_STEPS: dict[str, Callable[[list[str]], Value]] = {
    "lines": lambda values: "\n".join(values),
    "but_last": lambda values: values[:-1],
    "last": lambda values: values[-1] if values else "",
    "first": lambda values: values[0] if values else "",
}
"""What takes a column that holds a list; every other step is done to each of its entries."""


def check_steps(steps: Sequence[str]) -> None:
    """Raise ValueError for a step that does not exist."""
    for step in steps:
        if step not in STEPS and step not in LIST_STEPS:
            raise unknown("step", step, [*STEPS, *LIST_STEPS])


def column(values: Mapping[str, Any], path: str) -> Any:
    """The value of a column; `a.b` looks into columns that hold objects. KeyError where there is none."""
    found: Any = values
    for name in [path] if path in values else path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise KeyError(path)
        found = found[name]
    return found


def text_of(value: Any) -> Value:
    """A cell as text, or a list of texts. Raises ValueError for a cell that is empty or an object."""
    if isinstance(value, str):
        return value
    if value is None:
        raise ValueError("is empty")
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        inner = [text_of(one) for one in value]
        if all(isinstance(one, str) for one in inner):
            return inner  # type: ignore[return-value]
    raise ValueError(f"holds {type(value).__name__}, not text")


def apply(value: Value, steps: Sequence[str]) -> Value:
    """The steps in order. Raises ValueError where a list step meets plain text."""
    for step in steps:
        if step in LIST_STEPS:
            if isinstance(value, str):
                raise ValueError(f"step {step!r} needs a column that holds a list")
            value = LIST_STEPS[step](value)
        else:
            value = STEPS[step](value) if isinstance(value, str) else [STEPS[step](one) for one in value]
    return value
