"""One sweep from model to verdicts: every format judged against the full cache on the same fresh items.

An unfinished run of the same config is gone on with; no item is scored twice.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvlab import confirm
from kvlab.answering import scoring
from kvlab.book import Interrupted, ScoreBook, StopFlag
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet
from kvlab.progress import Progress
from kvlab.report.files import write
from kvlab.runs import Run, config_hash, find
from kvlab.search import document
from kvlab.search.engine import Session, open_session, versions
from kvlab.search.settings import Request, UsageError, writable
from kvlab.search.sizing import fastest
from kvlab.search.space import Space
from kvlab.subject import BASELINE, LocalSubject
from kvlab.sweep.arms import Arm, arms
from kvlab.sweep.document import SCHEMA, Plan, written
from kvlab.sweep.kernel import telling
from kvlab.sweep.places import default_root
from kvlab.sweep.result import SweepRun
from kvlab.sweep.settings import SweepConfig

SLUG = "sweep"


def run_sweep(
    config: SweepConfig, *, quiet: bool = False, show: Callable[[Run, int], Progress] | None = None
) -> SweepRun:
    """Judge every format of the config and write run folder and report.

    Raises UsageError, before the model is loaded, where the run could not be written; ModelError and BrokenBaseline
    for the model; Interrupted, with everything saved, when asked to stop. `show` gives what shows the progress of so
    many units, by default lines on stderr.
    """
    root = Path(config.out).expanduser() if config.out else default_root()
    writable(root)
    plan = make_plan(config)
    run = start(plan, root)
    with telling() as stream:
        print(f"run: {run.path}", file=stream)
        planned = _planned_rows(plan)
        _execute(plan, run, show(run, planned) if show else Progress(planned, quiet=quiet, stream=stream))
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
    named = {arm.name: (arm, _built(arm, config, space)) for arm in arms(config)}
    named = {name: both for name, both in named.items() if both[1] != BASELINE}
    # A prefill observes what the arms here need, and nothing else.
    scorers = [built.scorer for _, built in named.values() if built.budget.evicts]
    subject = LocalSubject(session.loaded, scorers=scorers, store=found.store, plan=found.plan)
    return Plan(
        config,
        session,
        subject,
        {name: built for name, (_, built) in named.items()},
        {name: arm.axes() for name, (arm, _) in named.items()},
        space.control(),
        _items(config, session, "confirm", config.items),
        confirm.Margin.planned(config.items),
    )


def _built(arm: Arm, config: SweepConfig, space: Space) -> KVConfig:
    try:
        built = arm.build(space)
        built.check(space.shape)
        if built.centring not in space.centrings:
            raise ValueError("its keys cannot be centred")
    except ValueError as error:
        raise UsageError(f"format {arm.name} cannot store {config.model}: {error}. Leave it out of formats") from None
    return built


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
            run.write_json("result.json", written(plan, run, book, verdicts) | {"wall_s": wall})
            state = "done"
            progress.finish()
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
