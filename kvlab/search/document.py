"""The result document of a search, schema kvlab.search/1: plain data that prints, saves and reports."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab import stats
from kvlab.book import ScoreBook
from kvlab.config import KVConfig
from kvlab.confirm import ROLE as CONFIRM
from kvlab.confirm import Verdicts, family_scores
from kvlab.evals.item import EvalSet
from kvlab.evals.summary import by_task
from kvlab.layer import ModelShape
from kvlab.models import Loaded
from kvlab.policies import Dense
from kvlab.runs import Run
from kvlab.search.race import ROLE as SEARCH
from kvlab.search.race import Race, Racer, Trial
from kvlab.search.sizes import human
from kvlab.search.workload import Workload
from kvlab.subject import BASELINE, Timing

SCHEMA = "kvlab.search/1"


class Describer:
    """Turns configs of one model, workload and budget into plain data."""

    def __init__(self, shape: ModelShape, workload: Workload, budget: int, book: ScoreBook) -> None:
        self.shape, self.workload, self.budget, self.book = shape, workload, budget, book

    def size(self, config: KVConfig) -> int:
        return self.workload.bytes(config, self.shape)

    def config(self, config: KVConfig) -> dict[str, Any]:
        """Identity and bytes at the workload; what one step of all conversations reads, where a reader is sparse."""
        size = self.size(config)
        # Said only of a reader that leaves something out: every other one reads what it stores.
        sparse = not isinstance(config.reader, Dense)
        read = config.read_bytes(self.shape, self.workload.context) * self.workload.concurrency if sparse else None
        return {
            "config_id": config.id,
            "label": self.label(config),
            "workload_bytes": size,
            "feasible": size <= self.budget,
            **({} if read is None else {"read_bytes": read}),
            "workload_effective_bits": round(config.effective_bits(self.shape, self.workload.context), 4),
            "sessions": self.workload.sessions(config, self.shape, self.budget),
            "longest_context": self.workload.longest(config, self.shape, self.budget),
        }

    def streams(self, config: KVConfig) -> dict[str, int]:
        """`workload_bytes` by what they store."""
        by_stream = config.bytes_by_stream(self.shape, self.workload.context)
        return {name: count * self.workload.concurrency for name, count in by_stream.items()}

    def label(self, config: KVConfig) -> str:
        """As the config says it; where formats differ by layer, their mean size and a name that no other mix has."""
        if not config.overrides:
            return config.label
        bits = config.effective_bits(self.shape, self.workload.context)
        return " + ".join([f"mixed {bits:.2f} bit {config.id[:4]}", *config.label.split(" + ")[1:]])

    def measured(self, config: KVConfig, role: str, items: EvalSet) -> dict[str, Any]:
        """Mean bytes over the contexts that were evaluated, as predicted and as measured."""
        rows = [self.book.get(role, config, i) for i in items.items]
        tokens = sum(r.context_tokens for r in rows)
        total = sum(r.measured_bytes for r in rows)
        return {
            "context_used": round(tokens / len(rows)),
            "predicted_bytes": round(sum(r.predicted_bytes for r in rows) / len(rows)),
            "measured_bytes": round(total / len(rows)),
            "bytes_per_token": round(total / tokens, 2),
            "effective_bits": round(16 * total / sum(r.raw16_bytes for r in rows), 4),
        }

    def searched(self, config: KVConfig, items: EvalSet) -> dict[str, Any]:
        """Search scores of each family: optimistic, never a result."""
        rows = [(i, self.book.rows.get((SEARCH, config.id, i.id))) for i in items.items]
        out: dict[str, Any] = {}
        for family in items.families:
            mine = [(i, r) for i, r in rows if i.family == family and r is not None]
            if mine:
                extra = [r.nll - self.book.get(SEARCH, BASELINE, i).nll for i, r in mine]
                score = float(np.mean([r.score for _, r in mine]))
                out[family] = {"n": len(mine), "score": score, "dnll": float(np.mean(extra))}
        return out

    def judged(self, config: KVConfig, judgement: stats.Judgement, items: EvalSet) -> dict[str, Any]:
        """A confirmed config: identity, bytes, families and verdict."""
        return {
            **self.config(config),
            "config": config.to_dict(),
            "toml": config.to_toml(),
            **self.measured(config, CONFIRM, items),
            "streams": self.streams(config),
            "families": {name: f.to_dict() for name, f in judgement.families.items()},
            "tasks": by_task(self.book.get(CONFIRM, config, item) for item in items.items),
            "verdict": judgement.verdict,
        }


def model(loaded: Loaded, shape: ModelShape, compressed: Sequence[int]) -> dict[str, Any]:
    return {
        "name": loaded.name,
        "revision": loaded.revision,
        "weights_sha256": loaded.weights_sha256,
        "dtype": loaded.dtype,
        "layers": loaded.layers,
        "compressed_layers": len(compressed),
        "kv_heads": loaded.kv_heads,
        "head_dim": loaded.head_dim,
        "trained_context": loaded.trained_context,
        "raw_bytes_per_token": shape.raw_bytes(1),
        "shape": shape.to_dict(),
    }


def notes(loaded: Loaded, workload: Workload, raw_bytes: int, budget: int, context_used: int | None) -> list[str]:
    """What a reader must know before believing the table."""
    out = []
    if loaded.trained_context and workload.context > loaded.trained_context:
        out.append(
            f"the workload asks for {workload.context} tokens; {loaded.name} was trained for {loaded.trained_context}: "
            "bytes are right, answers at that length are not promised by any cache"
        )
    if raw_bytes <= budget:
        out.append("the budget does not bind: the uncompressed 16-bit cache fits it")
    if context_used is not None and context_used < workload.context:
        out.append(
            f"accuracy was measured at about {context_used} tokens of context, bytes are for {workload.context}: "
            "raw sinks and the recent window weigh more in short contexts, so compare effective bits of both"
        )
    return out


def held_elsewhere(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """References that were confirmed to hold but do not fit the budget: what the budget costs."""
    return [
        f"{row['label']} {row['verdict']} on the same items, but needs {human(row['workload_bytes'])}"
        for row in rows
        if row.get("verdict") in ("HOLDS", "RISES") and not row["feasible"]
    ]


def anchors(
    describe: Describer, named: Mapping[str, KVConfig], items: EvalSet, verdicts: Verdicts | None, fresh: EvalSet
) -> list[dict[str, Any]]:
    """Reference points, feasible or not; those that were confirmed carry their verdict."""
    out = []
    for name, config in named.items():
        row = {"name": name, **describe.config(config), "search": describe.searched(config, items)}
        if config.id in describe.book.failures:
            row["reason"] = describe.book.failures[config.id]
        else:
            row |= describe.measured(config, SEARCH, items)
        judgement = verdicts.judged.get(config.id) if verdicts else None
        if judgement is not None:
            row |= {k: v for k, v in describe.judged(config, judgement, fresh).items() if k in ("families", "verdict")}
        out.append(row)
    return out


def trials(describe: Describer, race: Race, racer: Racer, anchor_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Every trial in the order asked, with its state and, where it failed, the reason."""
    ids = set(anchor_ids)
    return [_trial(describe, t, racer, ids) for t in race.trials]


def _trial(describe: Describer, trial: Trial, racer: Racer, anchor_ids: set[str]) -> dict[str, Any]:
    # A config may also fail after the race, on more items or on those of the confirmation.
    reason = describe.book.failures.get(trial.config.id, "") if trial.config is not None else ""
    state, value = ("failed", None) if reason else (trial.state, trial.value)
    base = {"number": trial.number, "state": state, "value": value, "items": trial.items}
    base |= {"reason": reason} if reason else {}
    base |= {"stopped_by": trial.stopped_by} if trial.stopped_by else {}
    if trial.config is None:
        return base | {"config_id": None, "label": "nothing of this scheme fits", "feasible": False, "search": {}}
    return (
        base
        | describe.config(trial.config)
        | {"anchor": trial.config.id in anchor_ids, "search": describe.searched(trial.config, racer.items)}
    )


def front(describe: Describer, race: Race, racer: Racer, anchors: Mapping[str, KVConfig]) -> list[dict[str, Any]]:
    """What fits, has seen every item and is beaten in bytes and search score by nothing that did: smallest first.

    `value` is the score that the race goes by, `dnll` the mean over families of the extra nats per answer token; both
    are of search items, so optimistic.
    """
    tried = {c: t.config for c, t in race.feasible().items() if t.config is not None}
    points = []
    for config in {**tried, **{c.id: c for c in anchors.values()}}.values():
        row = describe.config(config)
        if row["feasible"] and config.id not in describe.book.failures and racer.complete(config):
            search = describe.searched(config, racer.items)
            dnll = float(np.mean([f["dnll"] for f in search.values()]))
            about = {"value": racer.value(config), "dnll": dnll, "anchor": config.id not in tried, "search": search}
            points.append(row | about)
    out: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (p["workload_bytes"], p["value"])):
        if not out or point["value"] < out[-1]["value"]:
            out.append(point)
    return out


def before_after(
    describe: Describer, items: EvalSet, winner: KVConfig, raw: KVConfig, timings: Sequence[Timing]
) -> dict[str, Any]:
    """The uncompressed cache beside the chosen one: bytes, speed, accuracy."""
    out = {}
    for name, config, timing in (("before", BASELINE, timings[0]), ("after", winner, timings[1])):
        rows = [(i, describe.book.get(CONFIRM, config, i)) for i in items.items]
        counted = raw if config is BASELINE else config
        used = round(sum(r.context_tokens for _, r in rows) / len(rows))
        if config is BASELINE:
            # The baseline is exact in the model's own dtype; its bytes are shown as 16 bit holds them.
            held = {"bytes_per_token": float(describe.shape.raw_bytes(1)), "effective_bits": 16.0}
        else:
            held = {k: describe.measured(config, CONFIRM, items)[k] for k in ("bytes_per_token", "effective_bits")}
        out[name] = {
            "config_id": config.id,
            "label": describe.label(config) if config is not BASELINE else "raw (16 bit)",
            "kv_bytes_workload": describe.size(counted),
            **held,
            "context_used": used,
            "ttft_ms": round(timing.ttft_s * 1e3, 2),
            "latency_ms_mean": round(timing.latency_s * 1e3, 2),
            "tokens_per_s": round(timing.tokens_per_s, 2),
            "timed_prompt_tokens": timing.prompt_tokens,
            "families": family_scores([(i, r.score) for i, r in rows]),
        }
    return out


def controls(control: KVConfig, verdicts: Verdicts | None) -> dict[str, Any]:
    """The A/A control and the config known to be bad, as a confirmation found them."""
    families = verdicts.positive if verdicts else {}
    return {
        "aa": verdicts.aa if verdicts else None,
        "positive": {"config_id": control.id, "label": control.label, "families": families},
    }


def counters(book: ScoreBook) -> dict[str, int]:
    """What the run has spent, earlier parts of a resumed run included."""
    return {
        "items": len({item for _, _, item in book.rows}),
        "prefills": book.prefills,
        "configs_scored": len({config for _, config, _ in book.rows}),
        "item_scores": len(book.rows),
        "remembered": book.remembered,
        "corrupt_snapshots": book.corrupt_snapshots,
    }


def ledger(run: Run, fresh: EvalSet, configs: list[str], verdict: str) -> list[dict[str, Any]]:
    """Every look at this confirmation set under the same root, this one last."""
    path = run.path.parent / "ledger.jsonl"
    entry = {
        "run": run.path.name,
        "items_sha256": fresh.sha256,
        "n": len(fresh),
        "configs": configs,
        "verdict": verdict,
    }
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    earlier = [x for x in lines if x["items_sha256"] == entry["items_sha256"] and x["run"] != entry["run"]]
    if not any(x["run"] == entry["run"] for x in lines):
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    looks = [*earlier, entry]
    return [x | {"look": n} for n, x in enumerate(looks, start=1)]
