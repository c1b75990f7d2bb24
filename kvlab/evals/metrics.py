"""Read an answer out of generated text and compare it with the gold answer.

Every parser gives None, never an exception, where there is no answer, and gold answers go through the same code as
predictions. Nothing is executed. This file refuses to know models, prompts and statistics.
"""

import ast
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from kvlab.evals.item import unknown

# grouped thousands first (1,250 and 1,00,000), then plain; a minus after a digit or a letter is an operator
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+")
_MARKED = re.compile(r"####\s*(-?\s?[\d.,/]*\d)")
_RATIO = re.compile(r"(?<![\w./])(-?\d+)/(\d+)(?![\w/]|\.\d)")
_CURRENCY = re.compile(r"[$€£]\s?")
_SPACES = re.compile(r"\s+")
_CONTROL = re.compile(r"[\x00-\x1f]")


def cut(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string that appears after something else than white space."""
    start = len(text) - len(text.lstrip())
    ends = [place for mark in stop if (place := text.find(mark, start)) >= 0]
    return text[: min(ends)] if ends else text


def squeeze(text: str) -> str:
    """White space trimmed and collapsed to single spaces."""
    return _SPACES.sub(" ", text).strip()


def exact(prediction: str, gold: str) -> bool:
    """Equal up to white space."""
    return squeeze(prediction) == squeeze(gold)


def numbers(text: str) -> list[Fraction]:
    """All numbers in order, exactly (a Fraction holds every decimal).

    Thousands separators and currency signs are removed, the minus sign may be Unicode's, and a full stop or comma that
    no digit follows ends a sentence, not a number: `$29.00` is 29, `1,234.` is 1234, `5..` is 5. A per cent sign
    changes nothing: `50%` is 50.
    """
    return [Fraction(found.replace(",", "")) for found in _NUMBER.findall(_ascii(text))]


def _ascii(text: str) -> str:
    """One minus sign, and none of the currency signs that come between it and its number."""
    return _CURRENCY.sub("", text.replace("\u2212", "-").replace("\ufe63", "-").replace("\uff0d", "-"))


def last_number(text: str) -> Fraction | None:
    """The last number of the text. A ratio of whole numbers written without spaces, `3/4`, is its value."""
    plain = _ascii(text)
    found = list(_NUMBER.finditer(plain))
    if not found:
        return None
    ratios = [m for m in _RATIO.finditer(plain) if m.end() >= found[-1].end() and int(m[2])]
    return Fraction(int(ratios[-1][1]), int(ratios[-1][2])) if ratios else Fraction(found[-1].group().replace(",", ""))


def marked_number(text: str) -> Fraction | None:
    """The number right after the last `####`, GSM8K's mark of the answer; None without the mark."""
    marked = _MARKED.findall(_ascii(text))
    return last_number(marked[-1]) if marked else None


def final_number(text: str) -> Fraction | None:
    """The marked number where there is one, else the last number of the text."""
    value = marked_number(text)
    return last_number(text) if value is None else value


def number(prediction: str, gold: str) -> bool:
    """Equal final numbers: 18, 18.0 and $18.00 are the same, 18 and 18.5 are not."""
    value = final_number(prediction)
    return value is not None and value == final_number(gold)


def strict_number(prediction: str, gold: str) -> bool:
    """Equal marked numbers: without `####` there is no answer, however right the last number is."""
    value = marked_number(prediction)
    return value is not None and value == final_number(gold)


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` with nested braces, or the number of a last `\boxed 6`.

    A bare mention in prose is no box. If the last box is never closed, or empty, there is no answer.
    """
    last: str | None = None
    for mark in re.finditer(r"\\boxed(?![A-Za-z])\s*", text):
        rest = text[mark.end() :]
        if rest.startswith("{"):
            last = _braced(rest)
        elif bare := re.match(r"-?\d[\d.,]*", rest):
            last = bare.group().rstrip(".,")
    return last.strip() or None if last is not None else None


def _braced(text: str) -> str | None:
    """The inside of the brace group that `text` starts with; None if it is not closed. `\\{` and `\\}` do not count."""
    depth, place = 0, 0
    while place < len(text):
        letter = text[place]
        if letter == "\\":
            place += 2
            continue
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[1:place]
        place += 1
    return None


def _plain(latex: str) -> str:
    """LaTeX answers as plain text: separators, money, degrees, text boxes and fractions written out."""
    text = latex.replace("{,}", ",").replace(r"\$", "").replace("$", "").replace(r"\%", "%")
    text = re.sub(r"\\[,!;: ]|\\left|\\right|\\displaystyle", "", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\\circ\})", "", text)
    for _ in range(len(text)):  # from the inside out; every step removes one command
        new = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
        new = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)", new)
        new = re.sub(r"\\[dt]?frac\s*(\d)\s*(\d)", r"(\1)/(\2)", new)
        if new == text:
            break
        text = new
    return squeeze(text)


def latex_value(text: str) -> Fraction | None:
    """The single number that a LaTeX answer states (`7 apples` is 7), None where there is none or several."""
    plain = _plain(text)
    ratio = re.fullmatch(r"(-?)\(?(-?[\d.,]+)\)?/\(?(-?[\d.,]+)\)?", plain)
    if ratio:
        above, below = numbers(ratio[2]), numbers(ratio[3])
        if len(above) == len(below) == 1 and below[0]:
            return (-1 if ratio[1] else 1) * above[0] / below[0]
        return None
    found = numbers(plain)
    return found[0] if len(found) == 1 and "/" not in plain and "\\" not in plain else None


def latex(prediction: str, gold: str) -> bool:
    """Equal LaTeX answers, as numbers where both are, else as plain text. Boxes are opened on both sides.

    A prediction without a box has no answer, so that a number in passing is never taken for the result.
    """
    given = boxed(prediction)
    wanted = boxed(gold) if "\\boxed" in gold else gold
    if given is None or wanted is None:
        return False
    left, right = latex_value(given), latex_value(wanted)
    if left is not None and right is not None:
        return left == right
    return left is None and right is None and _plain(given) == _plain(wanted)


def literal(prediction: str, gold: str) -> bool:
    """Equal Python literals of equal types. Expressions such as `x or True` are no literals and never match."""
    left, right = _literal(prediction), _literal(gold)
    return left is not None and right is not None and _same(left[0], right[0])


def is_literal(text: str) -> bool:
    """Whether the text is a Python literal."""
    return _literal(text) is not None


def _literal(text: str) -> tuple[object] | None:
    try:
        return (ast.literal_eval(text.strip()),)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None  # all of them mean: this text is not a literal


def _same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left == right


def contains(prediction: str, gold: str) -> bool:
    """The gold answer stands in the prediction as whole words, letter case ignored; 12 is not in 312 or 12.5."""
    word = re.escape(squeeze(gold))
    return bool(word) and bool(
        re.search(rf"(?<!\w)(?<!\d[.,]){word}(?!\w)(?![.,]\d)", squeeze(prediction), re.IGNORECASE)
    )


def ruler(prediction: str, references: Sequence[str], how: str = "all") -> float:
    """RULER's score: substrings, letter case ignored; the mean over references (`all`) or whether one is in (`any`)."""
    if how not in ("all", "any"):
        raise unknown("RULER rule", how, ("all", "any"))
    if not references:
        raise ValueError("RULER's score needs at least one reference")
    text = _CONTROL.sub("\n", prediction).strip().lower()
    hits = [reference.lower() in text for reference in references]
    return float(any(hits)) if how == "any" else sum(hits) / len(hits)


METRICS: dict[str, Callable[[str, str], bool]] = {
    "exact": exact,
    "number": number,
    "latex": latex,
    "literal": literal,
    "contains": contains,
}
