"""The stages of one search, in order: layers, race, choice, confirmation; and the document of what they found.

Every stage only asks the book, so all of it can be taken again from rows that are there already.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlab import answering, confirm
from kvlab.book import ScoreBook
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet
from kvlab.runs import Run
from kvlab.search import document
from kvlab.search.choice import FINALISTS, STEPS, finalists, front, sequence, spread
from kvlab.search.document import Describer
from kvlab.search.mixing import Mixer
from kvlab.search.race import ROLE, Race, Racer
from kvlab.search.sensitivity import Sensitivity, UnmeasuredError, additivity, measure
from kvlab.search.sizing import Sizes
from kvlab.search.space import Space
from kvlab.stats import Judgement
from kvlab.subject import BASELINE

if TYPE_CHECKING:
    from kvlab.search.engine import Session

BATCH = 8
_TIMED_STEPS, _TIMED_REPEATS = 8, 3
GOOD = ("HOLDS", "RISES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the stages of a search came to."""

    space: Space
    table: Sensitivity | None
    why_uniform: str | None
    race: Race
    racer: Racer
    fresh: EvalSet
    chosen: tuple[KVConfig, ...]
    margin: confirm.Margin
    verdicts: confirm.Verdicts | None = None
    judged: Mapping[str, Judgement]

    @property
    def winner(self) -> KVConfig | None:
        """The smallest that was shown to hold."""
        held = [c for c in self.chosen if c.id in self.judged and self.judged[c.id].verdict in GOOD]
        return held[-1] if held else None

    @property
    def shown(self) -> KVConfig | None:
        """The winner, or where there is none the first that was judged."""
        return self.winner or next((c for c in self.chosen if c.id in self.judged), None)


def arms(mode: str) -> int:
    """Configs that a confirmation scores: the baseline twice, the control, int8, and what is judged."""
    return 4 + (STEPS if mode == "smallest" else FINALISTS)


def run_stages(session: "Session", run: Run, book: ScoreBook, sizes: Sizes) -> dict[str, Any]:
    """All stages, and the result document. Deterministic over a book that holds their scores."""
    request = session.request
    searched = session.items("search", sizes.search_items)
    space, table, why = _layered(session, book, sizes, searched)
    anchors = space.anchors()
    racer = Racer(space, book, searched, n_items=sizes.search_items, seed=request.seed, front=request.mode != "best")
    previous = run.config["previous_best"]
    race = racer.run(sizes.trials, BATCH, list(anchors.values()), KVConfig.from_dict(previous) if previous else None)
    chosen = _chosen(request.mode, race, racer, len(searched))
    fresh = session.items("confirm", sizes.confirm_items)
    margin = confirm.Margin.planned(sizes.confirm_items)
    found = Found(
        space=space,
        table=table,
        why_uniform=why,
        race=race,
        racer=racer,
        fresh=fresh,
        chosen=tuple(chosen),
        margin=margin,
        judged={},
    )
    if chosen:
        verdicts = confirm.judge_arms(book, fresh, [*chosen, anchors["int8"]], space.control(), margin)
        verdicts = confirm.replicate_rises(
            book, fresh, lambda: session.items("replicate", sizes.confirm_items), chosen, verdicts
        )
        found = replace(found, verdicts=verdicts, judged=confirm.in_sequence(chosen, verdicts))
    return _document(session, run, book, found)


def _layered(
    session: "Session", book: ScoreBook, sizes: Sizes, searched: EvalSet
) -> tuple[Space, Sensitivity | None, str | None]:
    """The space with formats by layer where the layers could be told apart, the table, and else why not."""
    space, layers = session.space, session.space.shape.compressed
    if session.request.layers == "uniform":
        return space, None, "--layers uniform"
    if len(layers) < 2:
        return space, None, f"the model has {len(layers)} layers to compress"
    if not sizes.layer_items:
        return space, None, "telling layers apart would take too much of the time: more --minutes allow it"
    items = searched.head(sizes.layer_items)
    try:
        table = measure(book, items, space.formats(), layers, sizes.layer_formats)
    except UnmeasuredError as error:
        return space, None, f"layers could not be told apart: {error}"
    return replace(space, mixer=Mixer(table, space.shape, space.workload)), table, None


def _chosen(mode: str, race: Race, racer: Racer, n_items: int) -> list[KVConfig]:
    """Who is judged, from the largest to the smallest."""
    size = {t.config.id: racer.size(t.config) for t in race.trials if t.config}
    if mode == "best":
        return finalists(race, n_items, size, first=racer.safest(race))
    choose = spread if mode == "map" else sequence
    return choose(front(race, n_items, size), size)


def _answer_notes(session: "Session", book: ScoreBook, found: Found) -> list[str]:
    """How often no answer could be read, for every arm that was judged; and what was not run."""
    judged = [c for c in found.chosen if c.id in found.judged]
    rows = [
        (c.label, [book.get(confirm.ROLE, c, item) for item in found.fresh.items])
        for c in ([BASELINE, *judged] if judged else [])
    ]
    return answering.notes(found.fresh.items, rows, session.request.allow_code_exec)


def _document(session: "Session", run: Run, book: ScoreBook, found: Found) -> dict[str, Any]:
    space, request, anchors = found.space, session.request, found.space.anchors()
    describe = Describer(space.shape, space.workload, space.budget, book)
    shown, winner = found.shown, found.winner
    rows = [describe.judged(c, found.judged[c.id], found.fresh) for c in found.chosen if c.id in found.judged]
    verdict = found.judged[shown.id].verdict if shown else "INCONCLUSIVE"
    references = document.anchors(describe, anchors, found.racer.items, found.verdicts, found.fresh)
    trials = document.trials(describe, found.race, found.racer, (c.id for c in anchors.values()))
    used = rows[0]["context_used"] if rows else None
    return {
        "schema": document.SCHEMA,
        "goal": request.mode,
        "model": document.model(session.loaded, space.shape, session.subject.plan.compressed),
        "mode": session.subject.plan.mode,
        "workload": {"context": request.context, "concurrency": request.concurrency},
        "budget_bytes": space.budget,
        "raw_workload_bytes": describe.size(session.raw),
        "binding": describe.size(session.raw) > space.budget,
        "notes": [
            *document.held_elsewhere(references),
            *session.notes(used),
            *_layer_notes(session, found),
            *_answer_notes(session, book, found),
        ],
        "verdict": verdict,
        "winner": winner.id if winner else None,
        "margin": found.margin.to_dict(),
        "baseline": {
            "config_id": BASELINE.id,
            "label": "raw",
            "families": found.verdicts.baseline if found.verdicts else {},
        },
        "anchors": references,
        "finalists": rows,
        "front": document.front(describe, found.race, found.racer, anchors),
        "sensitivity": _sensitivity(book, found),
        "controls": document.controls(space.control(), found.verdicts),
        "trials": trials,
        "rungs": list(found.race.rungs),
        "before_after": _timed(session, describe, found.fresh, shown) if shown else None,
        "nearest_misses": _misses(describe, anchors | {"smallest": space.smallest()}) if not rows else [],
        "ledger": document.ledger(run, found.fresh, [c.id for c in found.chosen], verdict),
        "counters": document.counters(book),
        "wall_s": 0.0,
        "run": str(run.path),
        "seed": request.seed,
        "versions": session.versions(),
    }


def _sensitivity(book: ScoreBook, found: Found) -> dict[str, Any] | None:
    """The table, and how far its sums told what whole configs lost."""
    if found.table is None:
        return None
    configs = {c: t.config for c, t in found.race.feasible().items() if t.config is not None}
    return found.table.to_dict() | {"additivity": additivity(found.table, book, ROLE, found.racer.items, configs)}


def _layer_notes(session: "Session", found: Found) -> list[str]:
    asked = session.request.layers == "auto"
    return [f"all layers share their formats: {found.why_uniform}"] if asked and found.why_uniform else []


def _timed(session: "Session", describe: Describer, fresh: EvalSet, shown: KVConfig) -> dict[str, Any]:
    prompt = session.subject.tokenizer.encode(max((i.context for i in fresh.items[:12]), key=len))
    describe.book.progress.at("timing before and after")
    timings = session.subject.time([BASELINE, shown], prompt, _TIMED_STEPS, _TIMED_REPEATS)
    return document.before_after(describe, fresh, shown, session.raw, timings)


def _misses(describe: Describer, anchors: Mapping[str, KVConfig]) -> list[dict[str, Any]]:
    """Smallest first: how far each reference is from the budget."""
    rows = [{"name": name, **describe.config(c)} for name, c in anchors.items()]
    return sorted(rows, key=lambda r: r["workload_bytes"])[:3]
