"""Two scores of a generated answer that must name one or several things: a strict one, and RULER's own.

Both are printed, since they disagree: substrings reward whoever lists everything. Predictions and items are paired by
item id alone. This file refuses to know models and how items are made.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlab.evals import metrics
from kvlab.evals.item import Item, unknown

RULES = ("all", "any")
_SEPARATORS = re.compile(r"[,;/\n]| and ")
_MARK = re.compile(r"^\W*\d+[.)]\s+")
# A point after one or two figures at the start of a word numbers a list.
_END = re.compile(r"(?<!\b\d)(?<!\b\d\d)[.!?][\"')]*(?=\s|$)|\n")
_WORDS_EACH, _WORDS_MORE = 2, 14


def compatible(prediction: str, references: Sequence[str], how: str = "all") -> float:
    """RULER's score (arXiv 2404.06654): control characters become line ends, letter case is ignored, and a reference
    counts where it is a substring. The mean over references for `all`, whether one is in for `any` (its QA tasks)."""
    _check(references, how)
    return metrics.ruler(prediction, [reference.strip() for reference in references], how)


def strict(prediction: str, references: Sequence[str], how: str = "all") -> float:
    """1.0 where every reference (`all`, in any order) or one of them (`any`) is named, and nothing in its stead.

    Letter case is ignored; a reference must stand as whole words, hyphens and figures included: 12 is neither in 312
    nor in 12.5. The answer is over with the sentence that completes it, and up to there a text that lists more than it
    was asked for says nothing. It scores 0 if it names another string of the same shape (a seven-digit number beside a
    seven-digit reference, five capitals beside five capitals, a pair of hyphened words beside a pair), if between
    commas there stands a name of as many words as a named reference, or in a list of several any other word alone, or
    if it has more than 2 words for each word of the references and 14.
    """
    _check(references, how)
    places = {one: hit.end() for one in references if (hit := _find(one, prediction))}
    if not places or (how == "all" and len(places) < len(references)):
        return 0.0
    complete = max(places.values()) if how == "all" else min(places.values())
    end = _END.search(prediction, complete)
    text = prediction[: end.start()] if end else prediction
    known = {_squeeze(reference).lower() for reference in references}
    rivals = [hit for shape in _shapes(list(places)) for hit in re.findall(shape, text) if hit.lower() not in known]
    return float(not rivals and not _lists_more(text, list(places), references, how))


def stands_in(reference: str, text: str) -> bool:
    """Whether `reference` is in `text` as whole words; a hyphen goes on with a word, point and comma with a figure."""
    return _find(reference, text) is not None


def _find(reference: str, text: str) -> re.Match[str] | None:
    return re.search(_whole(r"\s+".join(map(re.escape, reference.split())), reference), text, re.IGNORECASE)


def _whole(pattern: str, reference: str) -> str:
    """`pattern` not as a part of a longer word or figure. A comma joins figures where three of them follow."""
    before = r"(?<!\d,)" if re.match(r"\s*\d{3}(?!\d)", reference) else ""
    return rf"(?<![\w-])(?<!\d\.){before}{pattern}(?![\w-])(?!\.\d)(?!,\d{{3}}(?!\d))"


def _check(references: Sequence[str], how: str) -> None:
    if how not in RULES:
        raise unknown("RULER rule", how, RULES)
    if isinstance(references, str) or not references or not all(one.strip() for one in references):
        raise ValueError(f"references={references!r}: RULER's score needs a list of at least one non-empty reference")


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _shapes(references: Sequence[str]) -> set[str]:
    """Patterns of those references that were made to be told apart: with figures, all capitals, or hyphened."""
    return {_whole(shape, one) for one in references if (shape := _shape(_squeeze(one)))}


def _shape(reference: str) -> str | None:
    figures = any(letter.isdigit() for letter in reference)
    letters = any(letter.isalpha() for letter in reference)
    if figures and letters:
        return "".join("[0-9A-Za-z]" if one.isalnum() else re.escape(one) for one in reference)
    if figures:
        return re.sub(r"\d", lambda _: r"\d", re.escape(reference))
    if reference.isalpha() and reference.isupper() and len(reference) > 1:
        return f"[A-Z]{{{len(reference)}}}"
    if re.fullmatch(r"[A-Za-z]+(-[A-Za-z]+)+", reference):
        return "-".join(["[A-Za-z]+"] * (1 + reference.count("-")))
    return None


def _lists_more(text: str, named: Sequence[str], references: Sequence[str], how: str) -> bool:
    """Whether an entry of the list stands for another answer, or the text is far longer than any list of them."""
    allowed = _WORDS_EACH * sum(len(reference.split()) for reference in references) + _WORDS_MORE
    if len(text.split()) > allowed:
        return True
    words = {word.lower() for reference in references for word in re.findall(r"[\w-]+", reference)}
    names = {len(one.split()) for one in named if all(word[0].isupper() for word in one.split())}
    for entry in _SEPARATORS.split(text):
        found = re.findall(r"[\w-]+", _MARK.sub("", entry))
        new = [word for word in found if word.lower() not in words and not word[0].isdigit()]
        if len(found) == len(new) == 1 and how == "all" and len(references) > 1:
            return True
        if len(found) == len(new) and len(found) in names and all(word[0].isupper() for word in found):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Both:
    """The two scores of one answer, each in [0, 1]."""

    strict: float
    compatible: float


def both(item: Item, text: str) -> Both:
    """Both scores of a generated text, as it was cut at the item's stop strings.

    All of `item.references` are wanted, or where there are none any of `item.answers`.
    """
    references, how = (item.references, "all") if item.references else (item.answers, "any")
    return Both(strict(text, references, how), compatible(text, references, how))


@dataclass(frozen=True, slots=True)
class Summary:
    """Scores by task, n and the means: (n, strict, compatible) for every task, and over tasks."""

    tasks: Mapping[str, tuple[int, float, float]]
    strict: float
    compatible: float

    def text(self) -> str:
        """A table with the formula below it, for reports."""
        rows = [f"{'task':<26}{'n':>6}{'strict':>9}{'RULER':>9}"]
        rows += [f"{name:<26}{n:>6}{ours:>9.3f}{theirs:>9.3f}" for name, (n, ours, theirs) in self.tasks.items()]
        total = sum(n for n, _, _ in self.tasks.values())
        rows.append(f"{'mean over tasks':<26}{total:>6}{self.strict:>9.3f}{self.compatible:>9.3f}")
        return "\n".join([*rows, formula(tuple(self.tasks))])


def formula(tasks: Sequence[str]) -> str:
    """How the mean is taken and over what, in words."""
    return (
        f"mean = (1/{len(tasks)}) * sum over tasks of (1/n_task) * sum over items of the item's score; every task "
        f"weighs alike whatever its n. Tasks: {', '.join(tasks)}. strict: every reference in whole words and nothing "
        "else of its kind, else 0. RULER: share of references that are substrings, letter case ignored; in QA whether "
        "any is."
    )


def summary(items: Sequence[Item], predictions: Mapping[str, str]) -> Summary:
    """Scores of `predictions`, a text for every item id, by task in order of appearance.

    Raises ValueError where an item has no prediction or a prediction no item: what is missing is no zero.
    """
    ids = [item.id for item in items]
    lost, strange = [i for i in ids if i not in predictions], sorted(set(predictions) - set(ids))
    if not ids or len(set(ids)) != len(ids):
        raise ValueError("a summary needs items, each of them once")
    if lost or strange:
        raise ValueError(
            f"predictions and items do not pair: {len(lost)} items without a prediction {lost[:3]}, {len(strange)} "
            f"predictions without an item {strange[:3]}"
        )
    found: dict[str, list[Both]] = {}
    for item in items:
        found.setdefault(item.task, []).append(both(item, predictions[item.id]))
    tasks = {
        name: (len(marks), _mean([m.strict for m in marks]), _mean([m.compatible for m in marks]))
        for name, marks in found.items()
    }
    return Summary(tasks, _mean([row[1] for row in tasks.values()]), _mean([row[2] for row in tasks.values()]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
