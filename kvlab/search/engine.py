"""One search from model to verdict: load, size, race, confirm, time, write. Resumable at any point.

A resumed run takes the same steps over the rows it already has, so it ends where an uninterrupted one would.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch
import transformers

from kvlab import confirm, models
from kvlab.answering import scoring
from kvlab.book import Interrupted, ScoreBook, Scoring, StopFlag
from kvlab.calibration import facts
from kvlab.centring import CentringError
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet
from kvlab.evals.sets import Choice, choose
from kvlab.layer import Centring
from kvlab.memo import Memo
from kvlab.models import Loaded
from kvlab.progress import Progress
from kvlab.runs import Run, listing
from kvlab.search import document
from kvlab.search.memory import memo_of
from kvlab.search.settings import Request, UsageError
from kvlab.search.sizing import SEEN, SEEN_OF_A_FRONT, Sizes, Speed, fastest, fit, with_wishes
from kvlab.search.space import Space
from kvlab.search.stages import arms, run_stages
from kvlab.search.workload import Workload
from kvlab.snapshot import SnapshotStore
from kvlab.subject import BASELINE, LocalSubject, snapshot_identity

SLUG = "search"
_PATIENCE = 1.25  # times the minutes asked for; what is planned above that is said


@dataclass(slots=True)
class Session:
    """A loaded model with its space, subject and item sets."""

    request: Request
    loaded: Loaded
    subject: LocalSubject
    space: Space
    sanity: dict[str, Any]
    centring: dict[str, Any] | None = None  # what a measured mean of keys depends on, where keys can be centred
    choice: Choice = field(default_factory=choose)
    memo: Memo | None = None  # scores of earlier runs of this model

    @property
    def raw(self) -> KVConfig:
        return self.space.anchors()["raw"]

    def items(self, split: str, n: int) -> EvalSet:
        """`n` items of each family; of those at the end of a search or for a second look, as many as there are."""
        most = self.choice.most(self.request.families, split)
        if most is not None and split != "confirm":
            n = min(n, most)
        return self.choice.build(
            self.request.families,
            split=split,
            n=n,
            seed=self.request.seed,
            count=lambda text: len(self.loaded.tokenizer.encode(text)),
        )

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed: a difference here means other scores or other trials."""
        return {
            "weights_sha256": self.loaded.weights_sha256,
            "dtype": self.loaded.dtype,
            "space": self.space.hash,
            "items": self.items("search", 2).sha256,
            "versions": versions(),
        }

    def notes(self, context_used: int | None) -> list[str]:
        """What a reader must know of this model and workload; `context_used` is the context that was evaluated."""
        raw = self.space.workload.bytes(self.raw, self.space.shape)
        return document.notes(self.loaded, self.space.workload, raw, self.space.budget, context_used)

    def layer_rows(self, items: int, depth: int) -> int | None:
        """Scores still needed to tell layers apart on so many items of each family, in so many formats of each stream;
        None where it is not asked for.
        """
        layers = self.space.shape.compressed
        if self.request.layers == "uniform" or len(layers) < 2:
            return None
        asked = self.items("search", items).items if items else ()
        probes = self.space.formats().probes(layers, depth)
        return sum(self.memo is None or self.memo.get(c.id, i) is None for c in probes for i in asked)

    @staticmethod
    def versions() -> dict[str, str]:
        return versions()


def versions() -> dict[str, str]:
    from kvlab import __version__

    return {
        "kvlab": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "optuna": optuna.__version__,
    }


def open_session(request: Request) -> Session:
    """Read the sets, load the model, check that it works uncompressed, and lay out the space."""
    choice = _chosen(request)
    loaded = models.load(request.model)
    sanity = models.sanity(loaded)
    workload = Workload(request.context, request.concurrency)
    probe = LocalSubject(loaded)
    raw_dtype = "auto" if loaded.model.dtype.itemsize == 2 else "float16"
    space = Space(probe.shape, workload, request.budget_bytes, raw_dtype, _centrings(probe))
    store = SnapshotStore(snapshot_identity(loaded), memory_bytes=2 << 30, disk_bytes=4 << 30)
    subject = LocalSubject(loaded, scorers=space.scorers(), store=store, plan=probe.plan)
    centring = facts(loaded) if "mean" in space.centrings else None
    return Session(request, loaded, subject, space, sanity, centring, choice, memo_of(loaded, subject))


def _chosen(request: Request) -> Choice:
    """The sets asked for, with all rows read: what is wrong with them is said before a model is loaded."""
    try:
        choice = choose(request.sets)
        choice.build(request.families, split="confirm", n=request.items or 2, seed=request.seed)
    except ValueError as error:
        raise UsageError(f"sets: {error}") from None
    return choice


def _centrings(subject: LocalSubject) -> tuple[Centring, ...]:
    """What the model's keys allow. A mean is measured here, once for its weights, so that no trial waits for it."""
    if subject.plan.mode == "dense":
        return ("none",)
    try:
        subject.centres([KVConfig(centring="mean")])
    except CentringError:
        return ("none",)
    return ("none", "mean")


def plan(session: Session) -> tuple[Sizes, Speed, int]:
    """Sizes for the requested minutes, from speeds measured on the first items; and the threads that gave them."""
    anchors = session.space.anchors()
    # Anchors store and read plainly; trials also evict, centre and share budgets, which takes longer.
    tried = dict.fromkeys([BASELINE, *anchors.values(), *session.space.first_configs()])
    speed, threads = fastest(session.subject, session.items("search", 4), list(tried))
    request = session.request
    sizes = fit(request.minutes, speed, len(request.families), len(anchors), **_costs(session))
    sizes = with_wishes(sizes, request.trials, request.items)
    return _available(session, sizes), speed, threads


def _costs(session: Session) -> dict[str, Any]:
    """What a search of this kind does besides."""
    mode = session.request.mode
    seen = SEEN if mode == "best" else SEEN_OF_A_FRONT
    return {"layer_rows": session.layer_rows, "arms": arms(mode), "seen": seen}


def _available(session: Session, sizes: Sizes) -> Sizes:
    """Sizes that the sets can fill. What was asked for explicitly has been checked."""
    search, confirmed = (session.choice.most(session.request.families, split) for split in ("search", "confirm"))
    return dataclasses.replace(
        sizes,
        search_items=sizes.search_items if search is None else min(sizes.search_items, search),
        confirm_items=sizes.confirm_items if confirmed is None else min(sizes.confirm_items, confirmed),
    )


def dry_run(session: Session) -> dict[str, Any]:
    """What a run would do: bytes of the anchors, sizes of the stages, estimated seconds."""
    sizes, speed, threads = plan(session)
    request, space = session.request, session.space
    describe = {name: _size_row(session, config) for name, config in space.anchors().items()}
    return {
        "schema": "kvlab.search.plan/1",
        "model": document.model(session.loaded, session.subject.shape, session.subject.plan.compressed),
        "goal": request.mode,
        "mode": session.subject.plan.mode,
        "workload": {"context": request.context, "concurrency": request.concurrency},
        "budget_bytes": request.budget_bytes,
        "raw_workload_bytes": space.workload.bytes(session.raw, space.shape),
        "anchors": describe,
        "sizes": dataclasses.asdict(sizes),
        "layer_rows": session.layer_rows(sizes.layer_items, sizes.layer_formats),
        "margin": confirm.Margin.planned(sizes.confirm_items).to_dict(),
        "speed": {k: round(v, 4) for k, v in dataclasses.asdict(speed).items()},
        "threads": threads,
        "estimated_s": _estimated(session, sizes, speed),
        "notes": session.notes(None),
    }


def _estimated(session: Session, sizes: Sizes, speed: Speed) -> int:
    """Seconds that the stages will take at this speed."""
    anchors = len(session.space.anchors())
    return round(sizes.seconds(speed, len(session.request.families), anchors, **_costs(session)))


def _size_row(session: Session, config: KVConfig) -> dict[str, Any]:
    space = session.space
    size = space.workload.bytes(config, space.shape)
    return {"label": config.label, "workload_bytes": size, "feasible": size <= space.budget}


def start(session: Session, root: Path) -> Run:
    """A new run folder, its sizes fixed from measured speed before any trial."""
    sizes, speed, threads = plan(session)
    previous = _previous_best(session, root)
    config = {
        "schema": document.SCHEMA,
        "request": session.request.to_dict(),
        "identity": session.identity(),
        "sizes": dataclasses.asdict(sizes),
        "margin": confirm.Margin.planned(sizes.confirm_items).to_dict(),
        "previous_best": previous.to_dict() if previous else None,
        # More threads sum in another order: a resumed run keeps to the count it began with.
        "threads": threads,
    }
    extra = {
        "model": document.model(session.loaded, session.subject.shape, session.subject.plan.compressed),
        "dtype": session.loaded.dtype,
        "attention": session.subject.plan.mode,
        "threads": threads,
        "centring": session.centring,
        "seeds": {"items": session.request.seed, "sampler": session.request.seed},
        "device": session.loaded.device,
        "sanity": session.sanity,
        "speed": dataclasses.asdict(speed),
        "estimated_s": _estimated(session, sizes, speed),
        "evalset": {
            split: session.items(split, n).sha256
            for split, n in (("search", sizes.search_items), ("confirm", sizes.confirm_items))
        },
    }
    return Run.create(root, SLUG, config, extra_provenance=extra)


def forecast(run: Run) -> str:
    """How long a run was planned to take when it was made, and what to do where that is more than was asked for."""
    made, asked = run.read_json("provenance.json"), run.config["request"]["minutes"]
    planned = f"planned: about {made['estimated_s'] / 60:.1f} minutes"
    if made["estimated_s"] <= _PATIENCE * 60 * asked:
        return planned
    speed = made["speed"]
    return (
        f"{planned}, not {asked:g}: a prefill takes {speed['prefill_s']:.2g} s and a score {speed['row_s']:.2g} s here "
        "now, and a verdict needs so many. A machine with less to do is faster; --items and --trials ask for less"
    )


def _previous_best(session: Session, root: Path) -> KVConfig | None:
    """The confirmed winner of the latest finished search on the same weights, to start from."""
    runs = listing(root)
    for name in reversed(list(runs.name)) if len(runs) else []:
        if f"-{SLUG}-" not in name:
            continue
        run = Run.open(root / name)
        if not run.is_complete() or not (run.path / "result.json").exists():
            continue
        result = run.read_json("result.json")
        if result["model"]["weights_sha256"] != session.loaded.weights_sha256 or not result["winner"]:
            continue
        won = next(f for f in result["finalists"] if f["config_id"] == result["winner"])
        return KVConfig.from_dict(won["config"])
    return None


def check_resumable(session: Session, run: Run) -> None:
    """Raise UsageError naming what differs between a run and the present model, space, items or versions."""
    before, now = run.config["identity"], session.identity()
    different = [f"{k}: {before.get(k)} then, {now[k]} now" for k in now if before.get(k) != now[k]]
    if different:
        raise UsageError(
            f"{run.path.name} cannot be resumed, its scores would not compare: {'; '.join(different)}. Start a new run"
        )


def execute(
    session: Session,
    run: Run,
    *,
    quiet: bool = False,
    share: Callable[[StopFlag], Scoring] | None = None,
    show: Callable[[Run, int], Progress] | None = None,
) -> dict[str, Any]:
    """Race, confirm and write; returns the result document. Raises Interrupted with everything saved.

    `share` gives what scores items, where other processes help with that. `show` gives
    what shows the progress of so many units, by default lines or a bar on stderr.
    """
    sizes = Sizes(**run.config["sizes"])
    torch.set_num_threads(run.config["threads"])
    request = session.request
    how = {"generate": request.generate, "allow_code_exec": request.allow_code_exec, "sampling": request.sampling}
    answers = scoring(session.subject, **how)
    with run.lock(), StopFlag() as stop, answers as scores:
        begun = time.monotonic()
        earlier = float(run.status.get("wall_s", 0.0))
        planned = _planned_rows(session, sizes)
        progress = show(run, planned) if show else Progress(planned, quiet=quiet)
        run.set_status("running")
        # The memo holds forced rows; what is decoded is decoded anew.
        memo = None if request.generate else session.memo
        book = ScoreBook(run, share(stop) if share else scores, stop, progress, memo)
        # In the run's own folder: a resume finds them, and no other run's prefills are mistaken for this one's.
        session.subject.store.keep_in(run.path / "snapshots")
        progress.add(len(book.rows))
        try:
            result = run_stages(session, run, book, sizes)
            result["wall_s"] = round(earlier + time.monotonic() - begun, 2)
            _write(run, result)
            session.subject.store.discard()
            failed = sum(t["state"] == "failed" for t in result["trials"])
            run.set_status("done", wall_s=result["wall_s"], failed_trials=failed, **book.counts())
            progress.finish()
            return result
        except (Interrupted, KeyboardInterrupt):
            book.save()
            run.set_status("interrupted", wall_s=round(earlier + time.monotonic() - begun, 2), **book.counts())
            raise
        except BaseException as error:
            run.set_status("failed", error=f"{type(error).__name__}: {error}", **book.counts())
            raise
        finally:
            progress.close()


def _planned_rows(session: Session, sizes: Sizes) -> int:
    families, costs = len(session.request.families), _costs(session)
    probes = session.space.formats().probes(session.space.shape.compressed, sizes.layer_formats)
    layers = len(probes) * families * sizes.layer_items
    search = families * sizes.search_items * (len(session.space.anchors()) + 1)
    trials = round(sizes.trials * families * sizes.search_items * costs["seen"])
    return layers + search + trials + families * sizes.confirm_items * costs["arms"]


def _write(run: Run, result: dict[str, Any]) -> None:
    winner = next((f for f in result["finalists"] if f["config_id"] == result["winner"]), None)
    if winner is not None:
        load, model = result["workload"], result["model"]
        head = [
            f"{winner['verdict']}: {winner['label']}",
            f"{winner['workload_bytes']:,} of {result['budget_bytes']:,} bytes at {load['context']} tokens x "
            f"{load['concurrency']}",
            f"{model['name']} {model['weights_sha256'][:12]}, run {run.path.name}",
        ]
        run.write_text("sweet_spot.toml", "".join(f"# {line}\n" for line in head) + "\n" + winner["toml"])
    run.write_json("result.json", result)
