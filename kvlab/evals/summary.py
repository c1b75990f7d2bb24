"""What the rows of one config say beside their scores: how often no answer could be read, benchmark scores, outcomes of
code, lengths, perplexity. Plain data for reports; refuses to know models, and never mixes two forms in one figure.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvlab.evals.execution import pass_at_k
from kvlab.evals.subject import ItemScore


def by_task(rows: Iterable[ItemScore]) -> dict[str, dict[str, Any]]:
    """One entry for each task, in order of appearance. `rows` are of one config."""
    groups: dict[str, list[ItemScore]] = {}
    for row in rows:
        groups.setdefault(row.task, []).append(row)
    return {task: _entry(group) for task, group in groups.items()}


def _entry(rows: Sequence[ItemScore]) -> dict[str, Any]:
    forms = sorted({row.form for row in rows})
    if len(forms) > 1:
        raise ValueError(f"task {rows[0].task!r} has rows of forms {', '.join(forms)}; a mean over both means nothing")
    entry: dict[str, Any] = {
        "form": forms[0],
        "n": len(rows),
        "score": _mean([row.score for row in rows]),
        "mean_answer_tokens": _mean([row.answer_tokens for row in rows]),
    }
    return entry | (_generated(rows) if forms[0] == "generate" else _forced(rows))


def _generated(rows: Sequence[ItemScore]) -> dict[str, Any]:
    failed = sum(row.extracted is False for row in rows)
    out: dict[str, Any] = {"extraction_failures": failed, "extraction_failure_rate": failed / len(rows)}
    marked = [row.benchmark for row in rows if row.benchmark is not None]
    if marked:
        out["benchmark_score"] = _mean(marked)
    sampled = [(row.samples, row.right) for row in rows if row.samples is not None and row.right is not None]
    if len(sampled) == len(rows):
        least = int(min(n for n, _ in sampled))
        out["pass_at_k"] = {f"{k}": _mean([pass_at_k(int(n), int(c), k) for n, c in sampled]) for k in _ks(least)}
    outcomes = Counter(row.outcome for row in rows if row.outcome is not None)
    if outcomes:
        out["outcomes"] = dict(sorted(outcomes.items()))
    return out


def _ks(least: int) -> list[int]:
    """1, the powers of ten below, and all: those k that so many samples can tell."""
    return sorted({1, least, *(k for k in (10, 100) if k < least)})


def _forced(rows: Sequence[ItemScore]) -> dict[str, Any]:
    """`perplexity` weighs every answer token alike, so it is the corpus figure and no mean over items."""
    tokens = sum(row.answer_tokens for row in rows)
    nll = math.fsum(row.nll * row.answer_tokens for row in rows) / tokens
    return {"nll": nll, "perplexity": math.exp(min(nll, 700.0))}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def extraction_note(arms: Iterable[tuple[str, dict[str, dict[str, Any]]]]) -> str | None:
    """One sentence on failed extractions of every arm, given as label and `by_task`; None if nothing was generated."""
    parts = []
    for label, tasks in arms:
        found = [entry for entry in tasks.values() if entry["form"] == "generate"]
        if found:
            failed, n = sum(entry["extraction_failures"] for entry in found), sum(entry["n"] for entry in found)
            parts.append(f"{label} {failed} of {n}")
    return f"no answer could be read in: {'; '.join(parts)}" if parts else None


def pass_note(arms: Iterable[tuple[str, dict[str, dict[str, Any]]]]) -> str | None:
    """One sentence on pass@k of every arm, the mean over its tasks' items; None if no item was answered repeatedly."""
    parts = []
    for label, tasks in arms:
        found = [entry for entry in tasks.values() if "pass_at_k" in entry]
        shared = [k for k in found[0]["pass_at_k"] if all(k in e["pass_at_k"] for e in found)] if found else []
        n = sum(entry["n"] for entry in found)
        shown = [f"@{k} {sum(e['pass_at_k'][k] * e['n'] for e in found) / n:.3f}" for k in shared]
        parts += [f"{label} {', '.join(shown)}"] if shown else []
    return f"pass@k over all items: {'; '.join(parts)}" if parts else None
