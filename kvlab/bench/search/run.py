"""The search bench: the same items, tokens and kept counts through kvlab and, in an environment of its own, through
kvpress; and how far kvlab is from the least that the model itself takes. Sides take turns; of each the least counts.
"""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from kvlab.bench.search.items import Asked, make
from kvlab.bench.search.kvpress_side import forget_high_water, high_water
from kvlab.bench.search.limit import Limit, Spent, clocked
from kvlab.bench.search.methods import Arm, arms
from kvlab.bench.search.peer import Peer
from kvlab.evals.subject import ItemScore
from kvlab.models import Loaded
from kvlab.snapshot import SnapshotStore
from kvlab.subject import BASELINE, LocalSubject, snapshot_identity

SCHEMA = "kvlab.bench.search/1"
# How many times less kvlab takes than kvpress, by configs and answer tokens.
SPEEDUPS = {(16, 8): 8.0, (64, 8): 15.0, (16, 24): 5.0, (64, 24): 9.0}
LIMIT_RATIO = 1.5
# Nats per token: float32 sums in another order, and methods of one definition whose scores nearly tie.
UNCOMPRESSED, SAME_METHOD = 1e-3, 0.02

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure. `pairs` is how many pairs of config and item the peer is timed on."""

    peer_python: Path | None = None
    configs: int = 16
    answer_tokens: int = 8
    items: int = 8
    context_tokens: int = 400
    pairs: int = 16
    repeats: int = 3
    seed: int = 0


@dataclass(slots=True)
class Measured:
    """What the turns gave: least times, most memory, and scores, which every turn finds anew and must find alike."""

    ours: Spent | None = None
    ours_peak: int | None = None
    prefills: int = 0
    rows: dict[tuple[str, str], ItemScore] = field(default_factory=dict)
    limit: Limit = field(default_factory=Limit)
    peer: list[dict[str, Any]] = field(default_factory=list)
    peer_peak: int | None = None
    peer_full: list[dict[str, Any]] = field(default_factory=list)
    peer_versions: dict[str, str] | None = None


def run(say: Say, loaded: Loaded, request: Request) -> dict[str, Any]:
    """The whole document. Raises PeerError where the peer cannot be asked, before anything is measured."""
    asked = make(loaded.tokenizer, request.items + 1, request.context_tokens, request.answer_tokens, request.seed)
    warm, asked = asked[-1], asked[:-1]
    chosen = arms(request.configs, request.context_tokens)
    subject = LocalSubject(loaded, scorers=[arm.method.scorer for arm in chosen])
    found = Measured()
    if request.peer_python is None:
        _turns(say, subject, chosen, asked, warm, request, None, found)
    else:
        with Peer(request.peer_python) as peer:
            say(f"starting {request.peer_python}")
            found.peer_versions = peer.start(_order(loaded, chosen, asked))
            _turns(say, subject, chosen, asked, warm, request, peer, found)
    return _document(loaded, request, chosen, asked, found)


def _order(loaded: Loaded, chosen: Sequence[Arm], asked: Sequence[Asked]) -> dict[str, Any]:
    """What the peer is to load and will be asked about."""
    return {
        "model": str(loaded.model.name_or_path),
        "dtype": loaded.dtype,
        "threads": torch.get_num_threads(),
        "configs": [
            {"id": arm.config.id, "method": arm.method.name, "settings": arm.method.settings} for arm in chosen
        ],
        "items": [
            {
                "context": one.context,
                "question": one.question,
                "answer": one.answer,
                "kept": {arm.config.id: arm.kept(len(one.context)) for arm in chosen},
            }
            for one in asked
        ],
    }


def sample(configs: int, items: int, pairs: int) -> list[tuple[int, int]]:
    """Pairs spread evenly over the configs, the items taking turns; all of them if there are no more."""
    if pairs >= configs * items:
        return [(c, i) for c in range(configs) for i in range(items)]
    return [(n * configs // pairs % configs, n % items) for n in range(pairs)]


# -- measuring -------------------------------------------------------------------------------------------------------


def _turns(
    say: Say,
    subject: LocalSubject,
    chosen: Sequence[Arm],
    asked: Sequence[Asked],
    warm: Asked,
    request: Request,
    peer: Peer | None,
    found: Measured,
) -> None:
    list(subject.score([warm.item], [arm.config for arm in chosen], persist=False))
    pairs = sample(len(chosen), len(asked), request.pairs)
    if peer is not None:
        say("scores of the uncompressed cache over there")
        found.peer_full = peer.ask({"pairs": [(None, i) for i in range(len(asked))]})["pairs"]
    for turn in range(request.repeats):
        say(f"turn {turn + 1} of {request.repeats}: kvlab")
        _ours(subject, chosen, asked, found)
        say(f"turn {turn + 1} of {request.repeats}: limit")
        found.limit.turn(subject.model, asked, most_rows=len(chosen) * len(asked))
        if peer is not None:
            say(f"turn {turn + 1} of {request.repeats}: kvpress, {len(pairs)} pairs")
            reply = peer.ask({"pairs": pairs})
            found.peer_peak = max(found.peer_peak or 0, reply["peak_bytes"] or 0) or None
            found.peer = [_least(*both) for both in zip(found.peer or reply["pairs"], reply["pairs"], strict=True)]


def _ours(subject: LocalSubject, chosen: Sequence[Arm], asked: Sequence[Asked], found: Measured) -> None:
    """One pass over all configs and items with nothing remembered from the last."""
    subject.store, before = SnapshotStore(snapshot_identity(subject.loaded)), subject.counters.prefills
    forget_high_water()
    scores: list[ItemScore] = []
    configs = [arm.config for arm in chosen]
    # The uncompressed cache is scored too, for it is what the others are compared with; its time is in the total.
    spent = clocked(lambda: scores.extend(subject.score([one.item for one in asked], [BASELINE, *configs])))
    found.ours_peak = max(found.ours_peak or 0, high_water() or 0) or None
    found.ours, found.prefills = spent.least(found.ours), subject.counters.prefills - before
    found.rows = {(row.config_id, row.item_id): row for row in scores}


def _least(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """One pair measured twice: the lesser of each time."""
    return dict(b) | {name: min(a[name], b[name]) for name in ("seconds", "cpu_seconds", "prefill_seconds")}


# -- the document ----------------------------------------------------------------------------------------------------


def _document(
    loaded: Loaded, request: Request, chosen: Sequence[Arm], asked: Sequence[Asked], found: Measured
) -> dict[str, Any]:
    pairs = sample(len(chosen), len(asked), request.pairs)
    ours, limit = _ours_figures(chosen, asked, found), _limit_figures(chosen, asked, found)
    theirs = _peer_figures(chosen, asked, found) if found.peer else None
    figures = {
        "kvlab": ours,
        "kvpress": theirs,
        "limit": limit,
        "speedup": theirs and theirs["s_per_config_item"] / ours["s_per_config_item"],
        "cpu_speedup": theirs and theirs["cpu_s_per_config_item"] / ours["cpu_s_per_config_item"],
        "limit_ratio": ours["s_per_config_item"] / limit["s_per_config_item"],
        "cpu_limit_ratio": ours["cpu_s_per_config_item"] / limit["cpu_s_per_config_item"],
        "agreement": _agreement(chosen, asked, pairs, found) if found.peer else None,
    }
    targets = _targets(request, len(asked), figures)
    lengths = [len(one.context) for one in asked]
    return {
        "schema": SCHEMA,
        "model": loaded.name,
        "dtype": loaded.dtype,
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peer": found.peer_versions},
        "configs": len(chosen),
        "items": len(asked),
        "context_tokens": [min(lengths), max(lengths)],
        "question_tokens": [min(len(one.question) for one in asked), max(len(one.question) for one in asked)],
        "answer_tokens": request.answer_tokens,
        "repeats": request.repeats,
        "arms": [
            {"method": a.method.name, "share": a.share, "label": a.config.label, "config_id": a.config.id}
            for a in chosen
        ],
        **figures,
        "notes": _notes(theirs is not None),
        "targets": targets,
        "ok": all(t["ok"] for t in targets),
    }


def _ours_figures(chosen: Sequence[Arm], asked: Sequence[Asked], found: Measured) -> dict[str, Any]:
    assert found.ours is not None
    pairs = len(chosen) * len(asked)
    return {
        "s_per_config_item": found.ours.wall / pairs,
        "cpu_s_per_config_item": found.ours.cpu / pairs,
        "pairs": pairs,
        "prefills": found.prefills,
        "peak_bytes": found.ours_peak,
    }


def _peer_figures(chosen: Sequence[Arm], asked: Sequence[Asked], found: Measured) -> dict[str, Any]:
    return {
        "s_per_config_item": statistics.fmean(p["seconds"] for p in found.peer),
        "cpu_s_per_config_item": statistics.fmean(p["cpu_seconds"] for p in found.peer),
        "prefill_s": statistics.fmean(p["prefill_seconds"] for p in found.peer),
        "pairs": len(found.peer),
        "prefills": len(chosen) * len(asked),
        "peak_bytes": found.peer_peak,
    }


def _limit_figures(chosen: Sequence[Arm], asked: Sequence[Asked], found: Measured) -> dict[str, Any]:
    limit = found.limit
    assert limit.prefills is not None
    least, best = limit.per_pair(len(asked), len(chosen)), limit.row[limit.rows]
    return {
        "s_per_config_item": least.wall,
        "cpu_s_per_config_item": least.cpu,
        "prefill_s": limit.prefills.wall / len(asked),
        "row_s": best.wall,
        "rows": limit.rows,
        "tokens_per_s": max(one.fed for one in asked) / best.wall,
        "row_s_by_rows": {str(rows): spent.wall for rows, spent in sorted(limit.row.items())},
    }


def _agreement(
    chosen: Sequence[Arm], asked: Sequence[Asked], pairs: Sequence[tuple[int, int]], found: Measured
) -> dict[str, Any]:
    """Differences of NLL in nats per answer token, ours less theirs."""
    full = [
        found.rows[BASELINE.id, one.item.id].nll - theirs["nll"]
        for one, theirs in zip(asked, found.peer_full, strict=True)
    ]
    by_method: dict[str, list[tuple[float, float, bool]]] = {}
    for (c, i), theirs in zip(pairs, found.peer, strict=True):
        row = found.rows[chosen[c].config.id, asked[i].item.id]
        alike = theirs["kept"] == [chosen[c].kept(len(asked[i].context))]
        by_method.setdefault(chosen[c].method.name, []).append((row.nll, theirs["nll"], alike))
    known = {arm.method.name: arm.method for arm in chosen}
    return {
        "uncompressed_nll_max_abs_diff": max(abs(x) for x in full),
        "uncompressed_nll": statistics.fmean(found.rows[BASELINE.id, one.item.id].nll for one in asked),
        "methods": [
            {"method": name, "same": known[name].same, "difference": known[name].difference, **_compared(scores)}
            for name, scores in by_method.items()
        ],
    }


def _compared(scores: Sequence[tuple[float, float, bool]]) -> dict[str, Any]:
    apart = [ours - theirs for ours, theirs, _ in scores]
    return {
        "pairs": len(scores),
        "kept_equal": all(alike for *_, alike in scores),
        "kvlab_nll": statistics.fmean(ours for ours, *_ in scores),
        "kvpress_nll": statistics.fmean(theirs for _, theirs, _ in scores),
        "mean_diff": statistics.fmean(apart),
        "standard_error": statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None,
        "max_abs_diff": max(abs(x) for x in apart),
    }


def _targets(request: Request, items: int, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is asked for. Times have targets at the sizes of SPEEDUPS only."""
    sized = (request.configs, request.answer_tokens) in SPEEDUPS
    targets = [{"name": "kvlab prefills = items", "value": figures["kvlab"]["prefills"], "limit": items}]
    targets[0]["ok"] = targets[0]["value"] == items

    def add(name: str, value: float, limit: float, ok: bool) -> None:
        targets.append({"name": name, "value": value, "limit": limit, "ok": ok})

    if sized:
        ratio = figures["limit_ratio"]
        add("limit_ratio, at most", ratio, LIMIT_RATIO, ratio <= LIMIT_RATIO)
        if figures["speedup"] is not None:
            least = SPEEDUPS[request.configs, request.answer_tokens]
            add("speedup, at least", figures["speedup"], least, figures["speedup"] >= least)
    if (agreement := figures["agreement"]) is not None:
        apart = agreement["uncompressed_nll_max_abs_diff"]
        add("uncompressed, max |NLL difference|", apart, UNCOMPRESSED, apart <= UNCOMPRESSED)
        for method in agreement["methods"]:
            if method["same"]:
                apart = abs(method["mean_diff"])
                add(f"{method['method']}, |mean NLL difference|", apart, SAME_METHOD, apart <= SAME_METHOD)
    return targets


def _notes(peer: bool) -> list[str]:
    notes = [
        "kvlab's time covers prefill, observing for every scorer, compression, forcing and scoring, and the row of the "
        "uncompressed cache, which is no config; the limit covers prefills and forcing only.",
        "The last token of an answer predicts nothing and is fed by no side.",
    ]
    if not peer:
        return [*notes, "Without --peer-python only kvlab and the limit are measured."]
    return [
        *notes,
        "kvpress is timed on a sample of pairs: it prefills anew for each, so its cost is linear in their number; "
        "`prefills` is what all pairs would take.",
        "Each pair over there is a fresh cache, a new press around one prefill without the head, and one forward over "
        "question and answer at the positions after the context.",
        "kvpress is asked for the ratio at which it keeps as many tokens as kvlab does, sinks and window included.",
        "peak_bytes is the most resident memory of each side's process at work, weights and libraries included.",
    ]
