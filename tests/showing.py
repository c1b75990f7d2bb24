"""One of every object that shows itself, small and large, for tests of how they look and for a page of all of them."""

import math
import random
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_model, token_ids

from kvlab.attach import attach
from kvlab.cache import KVCache, cache_kwarg
from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet, Item
from kvlab.evals.subject import ItemScore
from kvlab.policies import AttentionMass, Fraction
from kvlab.runs import Run
from kvlab.study.board import Board, create
from kvlab.study.storages import open_storage
from kvlab.study.unit import Outcome, Work

HOSTILE = '<script>alert("x")</script> & \x1b[31m\u202e" onload="x'
FAMILIES = ("retrieval", "math", "code")


def filled(config: KVConfig, name: str = "llama3", *, rows: int = 1, prompt: int = 100, steps: int = 3) -> KVCache:
    """A cache of a tiny model after a prompt and a few steps."""
    model = tiny_model(name, torch.float32)
    with attach(model, config) as kv, torch.no_grad():
        cache = kv.cache()
        model(token_ids(rows, prompt), **{cache_kwarg(): cache})
        for step in range(steps):
            model(token_ids(rows, 1, seed=step), **{cache_kwarg(): cache})
    return cache


EVICTING = KVConfig(
    key=Affine(bits=4, axis="channel", group=16),
    value=Affine(bits=4),
    scorer=AttentionMass(),
    budget=Fraction(0.5),
    recent_tokens=16,
    raw_dtype="bfloat16",
)
MIXED = KVConfig(
    key=Affine(bits=8),
    value=Affine(bits=4),
    overrides=tuple((i, Affine(bits=2 + i % 3 + (i % 3 == 1)), Fp8()) for i in range(0, 60, 2)),
)


def item(n: int = 0, family: str = "retrieval", text: str = "") -> Item:
    return Item(
        id=f"passkey/confirm/0/{n}",
        task="passkey",
        family=family,
        context=f"The grass is green. {text}" * 40 + f"The pass key is {n}. " + "The sky is blue. " * 80,
        question="\nWhat is the pass key? The pass key is",
        answers=(f" {n}", f" number {n}"),
        cluster=f"c{n % 7}{text[:20]}",
    )


def score(n: int = 0, config: str = "ab" * 6, hit: bool = True, **more: Any) -> ItemScore:
    return ItemScore(
        **{
            "config_id": config, "item_id": f"passkey/confirm/0/{n}", "task": "passkey",
            "family": FAMILIES[n % 3], "cluster": "c", "split": "confirm", "mode": "forked", "form": "greedy",
            "score": float(hit), "exact": float(hit), "token_accuracy": float(hit), "nll": 0.25, "kl": 0.003,
            "top1": 0.98, "prediction": " 1234", "context_tokens": 1024, "answer_tokens": 3, "measured_bytes": 600_000,
            "predicted_bytes": 600_000, "raw16_bytes": 2_400_000, "seconds": 0.1, **more,
        }
    )  # fmt: skip


def pair(n: int, diff: float, half: float, verdict: str) -> dict[str, Any]:
    return {"n": n, "base": 0.6, "score": 0.6 + diff, "diff": diff, "low": diff - half, "high": diff + half,
            "margin": 0.05, "b": 1, "c": 1, "p": 0.5, "n_needed": None, "verdict": verdict}  # fmt: skip


def result(label: str = "int8", configs: int = 3, n: int = 64) -> dict[str, Any]:
    """A sweep's document with `configs` formats, the last one over the budget."""
    words = ("HOLDS", "WORSE", "INCONCLUSIVE")
    rows = [
        {
            "config_id": f"{i:012x}",
            "label": label if not i else f"{label} {i}",
            "workload_bytes": 6_500_000_000 - 10**9 * i if i < 5 else 10**9,
            "workload_effective_bits": 8.5 - i / 8,
            "effective_bits": 8.5,
            "bytes_per_token": 10.0,
            "families": {f: pair(n, (-0.01, -0.2, 0.03)[i % 3], 0.05, words[i % 3]) for f in FAMILIES},
            "verdict": words[i % 3],
        }
        for i in range(configs)
    ]
    base = {f: {"n": n, "score": 0.6, "low": 0.48, "high": 0.71} for f in FAMILIES}
    return {
        "schema": "kvlab.sweep/1",
        "model": {"name": "tiny", "layers": 2, "raw_bytes_per_token": 512},
        "workload": {"context": 131072, "concurrency": 8},
        "budget_bytes": 6_000_000_000,
        "raw_workload_bytes": 12_000_000_000,
        "baseline": {"config_id": "ff" * 6, "label": "uncompressed", "effective_bits": 16.0, "families": base},
        "configs": rows,
        "verdict": "HOLDS",
        "winner": rows[0]["config_id"],
        "margin": {"value_points": 5.0, "n": n, "rule": "smallest that can be passed"},
        "controls": {
            "aa": {"n": 3 * n, "flips": 0},
            "positive": {"config_id": "ee" * 6, "label": "int2", "families": {f: {"failed": True, "n": n, "diff": -0.5,
             "low": -0.6, "high": -0.4} for f in FAMILIES}},
        },
        "notes": ["accuracy was measured at 1,024 tokens of context"],
        "seed": 0,
    }  # fmt: skip


def run(root: Path, *, rows: int = 30, document: Mapping[str, Any] | None = None, state: str = "done") -> Run:
    """A run folder with item rows and, if given, a result."""
    made = Run.create(root, "sweep", {"schema": "kvlab.sweep/1", "model": "tiny", "seed": 0})
    records = []
    for n in range(rows):
        for config, label, full in (
            ("ff" * 6, "uncompressed", True),
            ("ab" * 6, "int8", False),
            ("cd" * 6, "int4", False),
        ):
            bits = {"uncompressed": 16, "int8": 8.5, "int4": 4.5}[label]
            loss = {"uncompressed": 0.0, "int8": 0.002, "int4": 0.2}[label] * random.Random(n).random()
            row = score(n, config, hit=n % 3 > 0, nll=0.5 + loss, kl=None if full else loss, top1=None if full else 0.9,
                        measured_bytes=round(2_400_000 * bits / 16))  # fmt: skip
            records.append({**_fields(row), "role": "confirm", "label": label, "scored_in": None})
    made.append(records)
    if document is not None:
        made.write_json("result.json", {**document, "run": str(made.path)})
    if state != "running":
        made.set_status(state)
    return made


def _fields(row: ItemScore) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def board(path: Path, trials: int = 12, name: str = "tiny-study") -> Board:
    """A study in a journal: some trials done, one failed, one twice, the rest waiting."""
    storage = open_storage(f"journal:{path}")
    create(storage, name, {"objective": "simulated"})
    made = Board(storage, name)
    kinds = ("raw", "int8", "int4", "int2")
    made.post(
        Work(key=f"k{i}", body={"n": i}, params={"key": (kinds[i % 4], kinds)}, violation=float(i - 4))
        for i in range(trials)
    )
    for i in range(trials - 3):
        unit = made.claim()
        assert unit is not None
        if i == 2:
            made.fail(unit.trial_id, "error", f"ValueError: {HOSTILE}")
        else:
            n = unit.body["n"]
            made.finish(unit, Outcome(1.0 / (1 + n) + 0.01 * (n % 3), float(n - 4)))
    waiting = made.claim()
    assert waiting is not None
    made.fail(waiting.trial_id, "duplicate", "the same as trial 0")
    return made


def examples(root: Path) -> dict[str, Any]:
    """Every kind, with names that try to be markup where a name can."""
    return {
        "cache": filled(EVICTING),
        "cache mixed": filled(KVConfig(key=Fp8(), value=Affine(bits=4, hadamard=True), recent_tokens=16)),
        "cache sliding": filled(KVConfig(key=Affine(bits=8), value=Affine(bits=8)), "gemma3", rows=2),
        "cache empty": empty(),
        "config": EVICTING,
        "config default": KVConfig(),
        "config mixed": MIXED,
        "codec": Affine(bits=4),
        "codec raw": Raw(),
        "item": item(7, text=HOSTILE),
        "items": EvalSet(HOSTILE, 1, tuple(item(n, FAMILIES[n % 3]) for n in range(9))),
        "score": score(1, prediction=HOSTILE, nll=0.25),
        "score decoded": score(2, hit=False, form="generate", nll=math.nan, outcome="wrong", extracted=True),
        "run": run(root / "done", document=result(HOSTILE)),
        "run failed": run(root / "failed", state="failed"),
        "study": board(root / "study.log"),
    }


def empty() -> KVCache:
    """A cache that has not seen a token."""
    model = tiny_model("llama1", torch.float32)
    with attach(model, EVICTING) as kv:
        return kv.cache()


class Page(HTMLParser):
    """Tags opened and closed, attributes, and text; `faults` says what is not well formed."""

    VOID = frozenset({"br", "img", "hr", "meta", "link", "input", "path"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            self.faults.append(f"<{tag}> has an attribute twice: {names}")
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> closes {self.open[-1:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data
