"""The result document of a sweep, schema kvlab.sweep/1: every arm with bytes, verdicts and likelihoods.

Knows a plan and the rows of its book; scores nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from kvlab import answering, confirm, stats
from kvlab.book import ScoreBook
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet
from kvlab.evals.summary import by_task
from kvlab.policies import Dense
from kvlab.runs import Run
from kvlab.search import document
from kvlab.search.document import Describer
from kvlab.search.engine import Session, versions
from kvlab.subject import BASELINE, LocalSubject
from kvlab.sweep.settings import SweepConfig

SCHEMA = "kvlab.sweep/1"
GOOD = ("HOLDS", "RISES")
LEVEL = 0.90  # of every interval in a document


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep will score: arms by name and where each stands on the axes, items, margin, all fixed before the
    first score."""

    config: SweepConfig
    session: Session
    subject: LocalSubject
    arms: Mapping[str, KVConfig]
    axes: Mapping[str, Mapping[str, Any]]
    control: KVConfig
    items: EvalSet
    margin: confirm.Margin

    def describe(self, book: ScoreBook) -> Describer:
        space = self.session.space
        return Describer(space.shape, space.workload, space.budget, book)


def written(plan: Plan, run: Run, book: ScoreBook, verdicts: confirm.Verdicts) -> dict[str, Any]:
    """The whole document, but for the time it took."""
    session, space, describe = plan.session, plan.session.space, plan.describe(book)
    rows = [
        {
            "format": name,
            "axes": dict(plan.axes[name]),
            **describe.judged(arm, verdicts.judged[arm.id], plan.items),
            # The name it was asked for by; "config" says everything.
            "label": name,
            **_read(plan, arm),
            "likelihood": _likelihood(plan, book, arm),
        }
        for name, arm in plan.arms.items()
        if arm.id in verdicts.judged
    ]
    raw = describe.size(session.raw)
    good = [r for r in rows if r["feasible"] and r["verdict"] in GOOD]
    winner = min(good, key=lambda r: r["workload_bytes"], default=None)
    verdict = winner["verdict"] if winner else _obstacle([r["verdict"] for r in rows if r["feasible"]])
    # The baseline is exact in the model's own dtype; its bytes are shown as 16 bit holds them.
    bits = {"bytes_per_token": float(space.shape.raw_bytes(1)), "effective_bits": 16.0}
    baseline = {"config_id": BASELINE.id, "label": f"uncompressed {session.loaded.dtype}", **bits}
    return {
        "schema": SCHEMA,
        "model": document.model(session.loaded, space.shape, session.subject.plan.compressed),
        "mode": session.subject.plan.mode,
        "sanity": session.sanity,
        "workload": {"context": plan.config.context, "concurrency": plan.config.concurrency},
        "budget_bytes": space.budget,
        "raw_workload_bytes": raw,
        "binding": raw > space.budget,
        "notes": _notes(plan, book, rows, raw),
        "verdict": verdict,
        "winner": winner["config_id"] if winner else None,
        "margin": plan.margin.to_dict(),
        "baseline": {**baseline, "families": verdicts.baseline, "tasks": _tasks(plan, book, BASELINE)},
        "configs": rows,
        "failures": {name: book.failures[arm.id] for name, arm in plan.arms.items() if arm.id in book.failures},
        "controls": document.controls(plan.control, verdicts),
        "ledger": document.ledger(run, plan.items, [r["config_id"] for r in rows], verdict or "NOTHING FITS"),
        "counters": document.counters(book),
        "wall_s": 0.0,
        "run": str(run.path),
        "seed": plan.config.seed,
        "query_aware": plan.config.query_aware,
        "versions": versions(),
    }


def _read(plan: Plan, config: KVConfig) -> dict[str, int]:
    """Bytes that one step of all conversations reads, where any arm reads less than it stores."""
    if all(isinstance(arm.reader, Dense) for arm in plan.arms.values()):
        return {}
    space = plan.session.space
    return {"read_bytes": config.read_bytes(space.shape, space.workload.context) * space.workload.concurrency}


def _likelihood(plan: Plan, book: ScoreBook, config: KVConfig) -> dict[str, dict[str, Any]]:
    """Per family what gold answers lost: nats per token more than with the full cache, KL, how often the best token
    stayed the same. It shows losses that no answer shows; items whose answers were decoded have none."""
    out: dict[str, dict[str, Any]] = {}
    for family in plan.items.families:
        mine = [i for i in plan.items.items if i.family == family]
        both = [(book.get(confirm.ROLE, config, i), book.get(confirm.ROLE, BASELINE, i)) for i in mine]
        both = [(row, full) for row, full in both if isfinite(row.nll) and isfinite(full.nll)]
        if not both:
            continue
        lost = [row.nll - full.nll for row, full in both]
        low, high = stats.mean_interval(lost, [row.cluster for row, _ in both], level=LEVEL) or (None, None)
        out[family] = {
            "n": len(lost),
            "dnll": float(np.mean(lost)),
            "low": low,
            "high": high,
            "kl": float(np.mean([row.kl or 0.0 for row, _ in both])),
            "top1": float(np.mean([row.top1 or 0.0 for row, _ in both])),
        }
    return out


def _tasks(plan: Plan, book: ScoreBook, config: KVConfig) -> dict[str, Any]:
    return by_task(book.get(confirm.ROLE, config, item) for item in plan.items.items)


def _obstacle(verdicts: list[str]) -> str | None:
    """One word for formats of which none holds; None where none fits the budget."""
    if not verdicts:
        return None
    return next((word for word in ("INSENSITIVE", "INCONCLUSIVE", "WORSE") if word in verdicts), None)


def _notes(plan: Plan, book: ScoreBook, rows: list[dict[str, Any]], raw: int) -> list[str]:
    space = plan.session.space
    used = rows[0]["context_used"] if rows else None
    notes = document.notes(plan.session.loaded, space.workload, raw, space.budget, used)
    over = [r["format"] for r in rows if r["verdict"] in GOOD and not r["feasible"]]
    if over:
        notes.insert(0, f"accuracy holds, but not within the budget: {', '.join(over)}")
    if plan.config.query_aware:
        notes.append("the question stood before compression: scores are kinder to every format than in a conversation")
    items, judged = plan.items.items, [r["format"] for r in rows]
    arms = [("uncompressed", BASELINE), *((name, arm) for name, arm in plan.arms.items() if name in judged)]
    found = [(name, [book.get(confirm.ROLE, arm, item) for item in items]) for name, arm in arms]
    notes += answering.notes(items, found, plan.config.allow_code_exec)
    failed = [f"{n}: {book.failures[a.id]}" for n, a in plan.arms.items() if a.id in book.failures]
    return notes + [f"not judged, {reason}" for reason in failed]
