"""One sweep from model to verdicts: every format judged against the full cache on the same fresh items.

An unfinished run of the same config is gone on with; no item is scored twice.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlab import answering, confirm
from kvlab.answering import scoring
from kvlab.book import Interrupted, ScoreBook, StopFlag
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet
from kvlab.evals.summary import by_task
from kvlab.progress import Progress
from kvlab.report.files import write
from kvlab.runs import Run, config_hash, find
from kvlab.search import document
from kvlab.search.document import Describer
from kvlab.search.engine import Session, open_session, versions
from kvlab.search.settings import Request, UsageError, writable
from kvlab.search.sizing import fastest
from kvlab.subject import BASELINE, LocalSubject
from kvlab.sweep.formats import FORMATS
from kvlab.sweep.kernel import live_stderr
from kvlab.sweep.places import default_root
from kvlab.sweep.result import SweepRun
from kvlab.sweep.settings import SweepConfig

SCHEMA = "kvlab.sweep/1"
SLUG = "sweep"
GOOD = ("HOLDS", "RISES")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep will score: arms by format name, items, margin, all fixed before the first score."""

    config: SweepConfig
    session: Session
    subject: LocalSubject
    arms: Mapping[str, KVConfig]
    control: KVConfig
    items: EvalSet
    margin: confirm.Margin

    def describe(self, book: ScoreBook) -> Describer:
        space = self.session.space
        return Describer(space.shape, space.workload, space.budget, book)


def run_sweep(config: SweepConfig, *, quiet: bool = False) -> SweepRun:
    """Judge every format of the config and write run folder and report.

    Raises UsageError, before the model is loaded, where the run could not be written; ModelError and BrokenBaseline
    for the model; Interrupted, with everything saved, when asked to stop.
    """
    root = Path(config.out).expanduser() if config.out else default_root()
    writable(root)
    plan = make_plan(config)
    run = start(plan, root)
    with live_stderr() as stream:
        print(f"run: {run.path}", file=stream)
        _execute(plan, run, Progress(_planned_rows(plan), quiet=quiet, stream=stream))
    write(run)
    return SweepRun.open(run.path)


def make_plan(config: SweepConfig) -> Plan:
    """Load and check the model, and lay out arms, items and margin."""
    session = open_session(
        Request(
            budget_bytes=config.budget_bytes,
            model=config.model,
            context=config.context,
            concurrency=config.concurrency,
            families=config.families,
            sets=config.sets,
            items=config.items,
            seed=config.seed,
        )
    )
    space, found = session.space, session.subject
    # No format here needs what a scorer observes, so the prefill need not observe.
    subject = LocalSubject(session.loaded, store=found.store, plan=found.plan)
    arms = {name: space.build(*FORMATS[name]) for name in config.formats}
    for name, arm in arms.items():
        try:
            arm.check(space.shape)
        except ValueError as error:
            raise UsageError(f"format {name} cannot store {config.model}: {error}. Leave it out of formats") from None
    arms = {name: arm for name, arm in arms.items() if arm != BASELINE}
    items = _items(config, session, "confirm", config.items)
    return Plan(config, session, subject, arms, space.control(), items, confirm.Margin.planned(config.items))


def _items(config: SweepConfig, session: Session, split: str, n: int) -> EvalSet:
    try:
        return session.choice.build(
            config.families,
            split=split,
            n=n,
            seed=config.seed,
            query_aware=config.query_aware,
            count=lambda text: len(session.loaded.tokenizer.encode(text)),
        )
    except ValueError as error:
        raise UsageError(f"sets: {error}") from None


def start(plan: Plan, root: Path) -> Run:
    """The newest unfinished run of this plan under `root`, else a new one."""
    session, loaded = plan.session, plan.session.loaded
    config = {
        "schema": SCHEMA,
        "request": plan.config.to_dict(),
        "identity": {
            "weights_sha256": loaded.weights_sha256,
            "dtype": loaded.dtype,
            "arms": {name: arm.id for name, arm in plan.arms.items()},
            "control": plan.control.id,
            "items": plan.items.sha256,
            "versions": versions(),
        },
        "margin": plan.margin.to_dict(),
    }
    for path in find(root, config_hash(config)):
        run = Run.open(path)
        if run.state() in ("interrupted", "failed"):
            return run
    extra = {
        "model": document.model(loaded, session.space.shape, session.subject.plan.compressed),
        "dtype": loaded.dtype,
        "attention": session.subject.plan.mode,
        "seeds": {"items": plan.config.seed},
        "device": loaded.device,
        "sanity": session.sanity,
        "evalset": {"confirm": plan.items.sha256},
        "notebook": plan.config.to_params(),
    }
    return Run.create(root, SLUG, config, extra_provenance=extra)


def _planned_rows(plan: Plan) -> int:
    return len(plan.items) * (len(plan.arms) + 3)  # baseline twice, and the control


def _execute(plan: Plan, run: Run, progress: Progress) -> None:
    with run.lock(), StopFlag() as stop, scoring(plan.subject, **plan.config.answers()) as scores:
        begun, earlier = time.monotonic(), float(run.status.get("wall_s", 0.0))
        run.set_status("running", threads=_settle_threads(plan, run.status.get("threads")))
        book = ScoreBook(run, scores, stop, progress)
        progress.add(len(book.rows))
        state, noted = "failed", {}
        try:
            verdicts = _judge(plan, book)
            wall = round(earlier + time.monotonic() - begun, 2)
            run.write_json("result.json", _document(plan, run, book, verdicts) | {"wall_s": wall})
            state = "done"
        except (Interrupted, KeyboardInterrupt):
            state = "interrupted"
            raise
        except BaseException as error:
            noted = {"error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            book.save()
            wall = round(earlier + time.monotonic() - begun, 2)
            run.set_status(state, wall_s=wall, prefills=book.prefills, **noted)
            progress.close()


def _settle_threads(plan: Plan, before: int | None) -> int:
    """The thread count that serves these items best; a resumed run keeps to the one it began with."""
    if before is None and len(plan.items) >= 2 * max(2, len(plan.items.families)):
        before = fastest(plan.subject, plan.items, [BASELINE, *plan.arms.values()])[1]
    torch.set_num_threads(before or torch.get_num_threads())
    return torch.get_num_threads()


def _judge(plan: Plan, book: ScoreBook) -> confirm.Verdicts:
    arms = list(plan.arms.values())
    verdicts = confirm.judge_arms(book, plan.items, arms, plan.control, plan.margin, stage="sweep")
    config, session = plan.config, plan.session
    most = session.choice.most(config.families, "replicate")
    n = config.items if most is None else min(config.items, most)
    return confirm.replicate_rises(book, plan.items, lambda: _items(config, session, "replicate", n), arms, verdicts)


def _document(plan: Plan, run: Run, book: ScoreBook, verdicts: confirm.Verdicts) -> dict[str, Any]:
    session, space, describe = plan.session, plan.session.space, plan.describe(book)
    rows = [
        {"format": name, **describe.judged(arm, verdicts.judged[arm.id], plan.items)}
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
