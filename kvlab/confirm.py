"""Confirmation: configs judged on items nobody chose them by, beside an A/A control and a config known to be bad.

The margin is fixed before a score exists. Used by the search for its finalists and by sweeps for all their formats.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlab import stats
from kvlab.book import ScoreBook, UnscorableError
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet, Item
from kvlab.subject import BASELINE

ROLE, AA_ROLE, REPLICATE_ROLE = "confirm", "aa", "replicate"


@dataclass(frozen=True, slots=True)
class Margin:
    """The largest loss of accuracy that counts as none, in score units, and why it is that one."""

    value: float
    n: int
    rule: str

    @classmethod
    def planned(cls, n: int) -> "Margin":
        """The smallest of 2, 3, 5 and 10 points that a lossless config can pass with n items per family."""
        try:
            value = stats.planned_margin(n)
        except ValueError as error:
            return cls(0.10, n, f"10 points, which n={n} cannot decide: {error}")
        return cls(value, n, f"the smallest of 2, 3, 5, 10 points a lossless config can pass at n={n} per family")

    def to_dict(self) -> dict[str, Any]:
        return {"value_points": round(self.value * 100, 6), "n": self.n, "rule": self.rule}


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a confirmation found, by config id; and its controls."""

    margin: Margin
    judged: dict[str, stats.Judgement]
    baseline: dict[str, dict[str, Any]]
    aa: dict[str, Any]
    positive: dict[str, dict[str, Any]]


def judge_arms(
    book: ScoreBook, items: EvalSet, arms: Sequence[KVConfig], control: KVConfig, margin: Margin, stage: str = "confirm"
) -> Verdicts:
    """Score baseline, control and `arms` on `items`, and judge every arm against the baseline, family by family."""
    configs = list(dict.fromkeys([BASELINE, control, *arms]))
    for start in range(0, len(items), book.items_at_once):
        part = items.items[start : start + book.items_at_once]
        book.progress.at(f"{stage}: item {start + 1} of {len(items)}")
        book.ensure(ROLE, part, configs, persist=False)
        # By itself and in another order: rows then meet other rows in a forward than beside the other configs.
        book.ensure(AA_ROLE, part[::-1], [BASELINE], persist=False, anew=True)
    failed = [c for c in (BASELINE, control) if c.id in book.failures]
    if failed:
        raise UnscorableError(f"a control cannot be scored, so nothing can be judged: {book.failures[failed[0].id]}")
    positive = _positive(book, items, control, margin)
    caught = {f: bool(row["failed"]) for f, row in positive.items()}
    judged = {
        c.id: stats.judge(_paired(book, ROLE, items, c), margin.value, control_failed=caught)
        for c in dict.fromkeys(arms)
        if c.id not in book.failures
    }
    return Verdicts(margin, judged, _baseline(book, items), _aa(book, items), positive)


def replicate(book: ScoreBook, items: EvalSet, fresh: EvalSet, config: KVConfig, verdicts: Verdicts) -> stats.Judgement:
    """A second look at a config that seems to rise, on fresh items; without it no rise is claimed."""
    book.progress.at(f"replicate: {config.label}")
    book.ensure(REPLICATE_ROLE, fresh.items, [BASELINE, config], persist=False)
    if config.id in book.failures:
        return verdicts.judged[config.id]
    return stats.judge(
        _paired(book, ROLE, items, config),
        verdicts.margin.value,
        control_failed={f: bool(row["failed"]) for f, row in verdicts.positive.items()},
        replication=_paired(book, REPLICATE_ROLE, fresh, config),
    )


def replicate_rises(
    book: ScoreBook, items: EvalSet, fresh: Callable[[], EvalSet], configs: Sequence[KVConfig], verdicts: Verdicts
) -> Verdicts:
    """The same verdicts after a second look at each of `configs` that seems to rise; `fresh` makes the second items."""
    judged, second = dict(verdicts.judged), None
    for config in configs:
        if config.id in judged and seems_to_rise(judged[config.id]):
            second = second or fresh()
            judged[config.id] = replicate(book, items, second, config, verdicts)
    return replace(verdicts, judged=judged)


def seems_to_rise(judgement: stats.Judgement) -> bool:
    """Whether some family is superior so far, which a replication would have to show again."""
    return judgement.verdict == "HOLDS" and any("superior" in f.note for f in judgement.families.values())


def in_sequence(order: Sequence[KVConfig], verdicts: Verdicts) -> dict[str, stats.Judgement]:
    """Fixed-sequence testing from largest to smallest: after the first that does not pass, no further claim is made.

    This keeps the chance of any false claim at the level of one test. Later configs keep their figures.
    """
    passes = [c.id in verdicts.judged and verdicts.judged[c.id].verdict in ("HOLDS", "RISES") for c in order]
    tested = stats.fixed_sequence(passes)
    out: dict[str, stats.Judgement] = {}
    for n, config in enumerate(order):
        judgement = verdicts.judged.get(config.id)
        if judgement is not None:
            stopped = not tested[n] and passes[n]
            out[config.id] = stats.Judgement("INCONCLUSIVE", _stopped(judgement)) if stopped else judgement
    return out


def _stopped(judgement: stats.Judgement) -> dict[str, stats.FamilyVerdict]:
    note = "not tested: a larger config did not pass, and the sequence stops there"
    return {name: replace(f, verdict="INCONCLUSIVE", note=note) for name, f in judgement.families.items()}


def _of(items: EvalSet, family: str) -> list[Item]:
    """In the order of ids: resampling hangs on an order, and rows alone must give the same interval again."""
    return sorted((i for i in items.items if i.family == family), key=lambda i: i.id)


def _paired(book: ScoreBook, role: str, items: EvalSet, config: KVConfig) -> dict[str, stats.Paired]:
    return {
        family: stats.Paired.join(
            {i.id: book.get(role, BASELINE, i).score for i in _of(items, family)},
            {i.id: book.get(role, config, i).score for i in _of(items, family)},
            {i.id: i.cluster for i in _of(items, family)},
        )
        for family in items.families
    }


def _baseline(book: ScoreBook, items: EvalSet) -> dict[str, dict[str, Any]]:
    return family_scores([(i, book.get(ROLE, BASELINE, i).score) for i in items.items])


def family_scores(scored: Sequence[tuple[Item, float]]) -> dict[str, dict[str, Any]]:
    """n, mean and Wilson 95 % interval of each family."""
    groups: dict[str, list[float]] = {}
    for item, score in scored:
        groups.setdefault(item.family, []).append(score)
    out = {}
    for family, scores in groups.items():
        low, high = stats.wilson(sum(scores), len(scores))
        out[family] = {"n": len(scores), "score": sum(scores) / len(scores), "low": low, "high": high}
    return out


def _aa(book: ScoreBook, items: EvalSet) -> dict[str, Any]:
    """The baseline against itself: `flips` of `n` items score otherwise the second time, a `share` of them.

    It is scored again beside other rows than before, so a flip is noise of the harness, and `share` the least
    difference that means anything. `dnll` is how far nats per token were apart at most, None where none were taken.
    """
    pairs = [(book.get(ROLE, BASELINE, i), book.get(AA_ROLE, BASELINE, i)) for i in items.items]
    flips = sum(first.score != second.score for first, second in pairs)
    apart = [abs(first.nll - second.nll) for first, second in pairs]
    finite = [x for x in apart if math.isfinite(x)]
    return {
        "n": len(items),
        "flips": flips,
        "share": flips / len(items) if len(items) else 0.0,
        "dnll": max(finite) if finite else None,
    }


def _positive(book: ScoreBook, items: EvalSet, control: KVConfig, margin: Margin) -> dict[str, dict[str, Any]]:
    out = {}
    for family, paired in _paired(book, ROLE, items, control).items():
        found = stats.judge_family(paired, margin.value, control_failed=True)
        row: Mapping[str, Any] = found.to_dict()
        caught = stats.control_failed(paired, margin.value)
        out[family] = {k: row[k] for k in ("n", "base", "score", "diff", "low", "high")} | {"failed": caught}
    return out
