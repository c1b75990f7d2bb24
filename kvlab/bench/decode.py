"""Decode: milliseconds per token and bytes of caches side by side, in one process, on the same weights and tokens.

Contenders take turns, so that whatever else the machine does falls on all of them. Each starts from the same K and V:
a real prompt, repeated up to the context, since what a step costs does not depend on what the tokens say.
"""

import gc
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from kvlab.attach import Plan, attach, cache_kwarg, make_plan, shape_of
from kvlab.bench.text import columns
from kvlab.cache import KVCache
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.layer import ModelShape
from kvlab.policies import AttentionMass, Fraction, TopK
from kvlab.runs import write_whole
from kvlab.snapshot import Snapshot, take

SCHEMA = "kvlab.bench.decode/1"
# Tokens of real prefill; longer contexts repeat them.
PREFILL = 1024
# One page: every turn encodes, and evicts, as often as any other.
STEPS = 16
TURNS = 5

# One scale and zero for each head of a token: the whole head dim, as large a group as transformers' caches take.
_INT4, _INT8 = Affine(bits=4, group=0), Affine(bits=8, group=0)
_WHOLE_HEAD = "one scale and zero for each head of a token; kvlab's usual integers have them for 32 channels"
CONFIGS: dict[str, KVConfig] = {
    "raw": KVConfig(raw_dtype="float16"),
    "fp8_e4m3": KVConfig(key=Fp8(), value=Fp8(), raw_dtype="float16"),
    "int8": KVConfig(key=_INT8, value=_INT8, raw_dtype="float16"),
    "int4": KVConfig(key=_INT4, value=_INT4, raw_dtype="float16"),
    "int4_evict50": KVConfig(key=_INT4, value=_INT4, scorer=AttentionMass(), budget=Fraction(0.5), raw_dtype="float16"),
    "int4_sparse25": KVConfig(key=_INT4, value=_INT4, reader=TopK(fraction=0.25), raw_dtype="float16"),
}
# transformers' own 4-bit caches: backend, the module it needs and how that is installed.
PEERS: dict[str, tuple[str, str, str]] = {
    "hf_quanto4": ("quanto", "optimum", "optimum-quanto"),
    "hf_hqq4": ("hqq", "hqq", "hqq"),
}
NAMES = ("dynamic", *PEERS, *CONFIGS)
TARGET_CONTEXT = 4096


@dataclass(slots=True)
class Contender:
    """One cache at one context, and the milliseconds per token of each of its turns."""

    name: str
    cache: Cache
    config: KVConfig | None
    bytes: int
    turns: list[float] = field(default_factory=list)


def run(
    say: Callable[[str], None],
    model: PreTrainedModel,
    ids: Sequence[int],
    contexts: Sequence[int] = (TARGET_CONTEXT,),
    turns: int = TURNS,
    names: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """The whole document. `ids` are the tokens of the prompt and of what is decoded."""
    plan, shape = make_plan(model), shape_of(model)
    say(f"prefill of {min(PREFILL, max(contexts))} tokens")
    with attach(model, plan=plan) as kv:
        prompt = take(model, kv, [_cycled(ids, min(PREFILL, max(contexts)))], [AttentionMass()])[0]
    rows: list[dict[str, Any]] = []
    for context in contexts:
        rows += _measure(say, model, plan, shape, _stretched(prompt, context), ids, turns, names)
        gc.collect()
    targets = _targets(rows)
    return {
        "schema": SCHEMA,
        "model": model.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "turns": turns,
        "tokens_per_turn": STEPS,
        "prefilled_tokens": prompt.tokens,
        "rows": rows,
        "fits": _fits(rows),
        "targets": targets,
        "ok": all(t["ok"] for t in targets),
    }


def _cycled(ids: Sequence[int], count: int) -> list[int]:
    return [ids[i % len(ids)] for i in range(count)]


def _stretched(prompt: Snapshot, context: int) -> Snapshot:
    """The prompt's K, V and attention mass, cut or repeated to `context` tokens."""

    def to_length(x: Tensor) -> Tensor:
        repeats = -(-context // x.shape[1])
        return x.repeat(1, repeats, *[1] * (x.ndim - 2))[:, :context].contiguous()

    masses = {s: {i: to_length(m) for i, m in by_layer.items()} for s, by_layer in prompt.masses.items()}
    return Snapshot(context, [to_length(k) for k in prompt.keys], [to_length(v) for v in prompt.values], masses)


# -- one context -----------------------------------------------------------------------------------------------------


def _measure(
    say: Callable[[str], None],
    model: PreTrainedModel,
    plan: Plan,
    shape: ModelShape,
    prompt: Snapshot,
    ids: Sequence[int],
    turns: int,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Rows of every contender at this context, in the order of `names`."""
    contenders, notes = [], {}
    for name in names:
        note = _missing(name)
        if note is None:
            contenders.append(_prepared(model, plan, name, prompt))
        else:
            notes[name] = note
    feed = torch.tensor(_cycled(ids, STEPS * (turns + 1))).view(turns + 1, STEPS, 1, 1)
    for contender in contenders:
        _turn(model, plan, contender, feed[0, :2])  # compiles, allocates, warms caches; not counted
    for turn in range(turns):
        first = turn % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            contender.turns.append(_turn(model, plan, contender, feed[turn + 1]))
        say(f"{prompt.tokens} tokens, turn {turn + 1} of {turns}")
    measured = {c.name: _row(c, shape, prompt.tokens) for c in contenders}
    absent = {n: _absent(n, prompt.tokens, note) for n, note in notes.items()}
    return [(measured | absent)[name] for name in names]


def _missing(name: str) -> str | None:
    """Why a contender cannot run here, or None."""
    if name not in PEERS:
        return None
    _, module, package = PEERS[name]
    return f"needs {package}, which is not installed" if importlib.util.find_spec(module) is None else None


def _prepared(model: PreTrainedModel, plan: Plan, name: str, prompt: Snapshot) -> Contender:
    """A cache that has taken in the prompt."""
    text = model.config.get_text_config(decoder=True)
    if name in CONFIGS:
        with attach(model, CONFIGS[name], plan=plan) as kv:
            cache: Cache = prompt.fork(CONFIGS[name], kv)
        assert isinstance(cache, KVCache)
        cache.fit()
        return Contender(name, cache, CONFIGS[name], cache.nbytes)
    peer = PEERS.get(name)
    axis = {"quanto": {"axis_key": 0, "axis_value": 0}, "hqq": {"axis_key": 1, "axis_value": 1}}
    cache = (
        DynamicCache(config=text) if peer is None else QuantizedCache(peer[0], text, nbits=4, **axis[peer[0]])  # type: ignore[arg-type]
    )
    for i, (k, v) in enumerate(zip(prompt.keys, prompt.values, strict=True)):
        cache.update(k[None], v[None], i)
    return Contender(name, cache, None, _held_bytes(cache))


def _held_bytes(cache: Cache) -> int:
    """Bytes of every tensor a cache of transformers holds, wrapped ones by what they wrap."""
    kept = ("keys", "values", "_quantized_keys", "_quantized_values")
    found = [x for layer in cache.layers for name in kept for x in _tensors(getattr(layer, name, None))]
    return sum(x.numel() * x.element_size() for x in found)


def _tensors(x: Any) -> list[Tensor]:
    if hasattr(x, "__tensor_flatten__"):
        return [t for name in x.__tensor_flatten__()[0] for t in _tensors(getattr(x, name))]
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        return [t for part in x.values() for t in _tensors(part)]
    return [t for part in x for t in _tensors(part)] if isinstance(x, (list, tuple)) else []


@torch.no_grad()
def _turn(model: PreTrainedModel, plan: Plan, contender: Contender, feed: Tensor) -> float:
    """Milliseconds per token. Attaching is not counted; caches of transformers run on the model's own attention."""
    if contender.config is None:
        return _timed(model, contender.cache, feed)
    with attach(model, contender.config, plan=plan):
        return _timed(model, contender.cache, feed)


def _timed(model: PreTrainedModel, cache: Cache, feed: Tensor) -> float:
    start = time.perf_counter()
    for ids in feed:
        model(input_ids=ids, use_cache=True, **{cache_kwarg(): cache})
    return (time.perf_counter() - start) * 1e3 / len(feed)


# -- figures ---------------------------------------------------------------------------------------------------------


def _row(contender: Contender, shape: ModelShape, context: int) -> dict[str, Any]:
    config = contender.config
    read = contender.bytes if config is None else config.read_bytes(shape, context)
    own = contender.cache.implementation if isinstance(contender.cache, KVCache) else "transformers"
    return {
        "name": contender.name,
        "context": context,
        "ms_per_token": statistics.median(contender.turns),
        "ms_least": min(contender.turns),
        "ms_most": max(contender.turns),
        "bytes": contender.bytes,
        "bytes_16bit": shape.raw_bytes(context),
        "read_bytes": read,
        "implementation": own,
        "label": None if config is None else config.label,
        "config_id": None if config is None else config.id,
        "note": _WHOLE_HEAD if config is not None and config.key in (_INT4, _INT8) else None,
    }


def _absent(name: str, context: int, note: str) -> dict[str, Any]:
    fields = ("ms_per_token", "ms_least", "ms_most", "bytes", "bytes_16bit", "read_bytes", "implementation")
    more = dict.fromkeys((*fields, "label", "config_id"))
    return {"name": name, "context": context, **more, "note": note}


def _fits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Least squares of time over context for every contender measured at three contexts or more.

    `gb_per_s` is the slope of bytes read over the slope of time: how fast the added bytes are served.
    """
    fits = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [r for r in rows if r["name"] == name and r["ms_per_token"] is not None]
        if len({r["context"] for r in own}) < 3:
            continue
        x, ms, read = (np.array([r[n] for r in own], float) for n in ("context", "ms_per_token", "read_bytes"))
        (slope, base), (bytes_per, _) = np.polyfit(x, ms, 1), np.polyfit(x, read, 1)
        left = ms - (slope * x + base)
        spread = float(((ms - ms.mean()) ** 2).sum())
        fits.append(
            {
                "name": name,
                "ms_at_zero": float(base),
                "us_per_context_token": float(slope) * 1e3,
                "read_bytes_per_context_token": float(bytes_per),
                "gb_per_s": float(bytes_per / slope / 1e6) if slope > 0 else None,
                "r_squared": 1.0 - float((left**2).sum()) / spread if spread else None,
            }
        )
    return fits


def _targets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is asked for at TARGET_CONTEXT tokens, of the contenders that ran."""
    at = {r["name"]: r for r in rows if r["context"] == TARGET_CONTEXT and r["ms_per_token"] is not None}
    targets = []

    def add(name: str, over: str, field: str, limit: float) -> None:
        if name in at and over in at:
            against = "bytes_16bit" if field == "bytes" else field
            value = at[name][field] / at[over][against]
            targets.append(
                {"name": f"{name} / {over}", "of": field, "value": value, "limit": limit, "ok": value <= limit}
            )

    add("int4", "dynamic", "ms_per_token", 1.1)
    for peer in PEERS:
        add("int4", peer, "ms_per_token", 0.5)
    add("int4_evict50", "dynamic", "ms_per_token", 1.0)
    add("int4_sparse25", "dynamic", "ms_per_token", 1.0)
    add("int4", "dynamic", "bytes", 0.3)
    return targets


def table(document: Mapping[str, Any]) -> str:
    """For a terminal."""
    header = ["cache", "tokens", "ms per token", "least", "most", "bytes", "of 16 bit", "by"]
    lines = []
    for r in document["rows"]:
        if r["ms_per_token"] is None:
            lines.append([r["name"], f"{r['context']:,}", "-", "-", "-", "-", "-", r["note"]])
            continue
        times = [f"{r[name]:.1f}" for name in ("ms_per_token", "ms_least", "ms_most")]
        share = f"{100 * r['bytes'] / r['bytes_16bit']:.1f} %"
        lines.append([r["name"], f"{r['context']:,}", *times, f"{r['bytes']:,}", share, r["implementation"]])
    rest = [
        f"{t['name']}, {t['of']}: {t['value']:.3f} (at most {t['limit']}), ok: {t['ok']}" for t in document["targets"]
    ]
    rest += [
        f"{f['name']}: {f['us_per_context_token']:.2f} us more for each token held, "
        f"{f['read_bytes_per_context_token']:,.0f} bytes more read"
        for f in document["fits"]
    ]
    return "\n".join([*columns([header, *lines]), *rest, f"ok: {document['ok']}"])


def write(document: Mapping[str, Any], folder: Path) -> None:
    """decode.json and the figure, each whole or not at all."""
    from kvlab.report.figures.decoding import decode_times

    write_whole(folder / "decode.json", json.dumps(document, indent=1, allow_nan=False).encode())
    if any(r["ms_per_token"] is not None for r in document["rows"]):
        drawing = decode_times(document)
        write_whole(folder / "decode.png", drawing.png())
        write_whole(folder / "decode.svg", drawing.svg())
