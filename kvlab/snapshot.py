"""Snapshot: the uncompressed prefill of one prompt, made once, from which any number of configs fork their caches.

It keeps K and V after RoPE and, for every scorer it was made for, the attention mass that scorer would have seen. A
fork stores them exactly as a prefill under that config does. SnapshotStore keeps snapshots in memory and on disk, by
content.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from kvlab.attach import Attachment, cache_kwarg
from kvlab.attending import AttentionCall
from kvlab.cache import Handle, KVCache, KVLayer
from kvlab.centre import joined
from kvlab.config import KVConfig
from kvlab.evicting import Known
from kvlab.kernels.prompt import attend_prompt, prompt_mass
from kvlab.kernels.rope import Rotary
from kvlab.layer import LayerConfig, LayerShape
from kvlab.policies import Scorer
from kvlab.policies.expected_attention import query_sums
from kvlab.room import available
from kvlab.row import Row
from kvlab.selecting import all_read
from kvlab.settling import settle

SCHEMA = 2
# Tokens of one prefill on a CPU: enough to use the weights well, and past it what layers hand on no longer fits its
# caches. Four prompts of 400 tokens took 12 % longer together than one after the other.
MOST_AT_ONCE = 512


@dataclass(slots=True)
class Snapshot:
    """K and V of one prompt, [N, T, D] for each layer; a layer that slides a window holds what transformers keeps.

    `masses` are [N, T] for each layer, by scorer. `references` may hold log-probabilities under the full cache at the
    positions of an answer, [A, V], by question: several questions share one snapshot.
    """

    tokens: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    masses: dict[Scorer, dict[int, Tensor]] = field(default_factory=dict)
    references: dict[str, Tensor] = field(default_factory=dict)
    # What forks have taken of it, by how their tokens leave the window: not kept on disk.
    _known: dict[Hashable, Known] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        scores = [x for known in self._known.values() for x in known.values()]
        return sum(x.numel() * x.element_size() for x in [*self.tensors().values(), *scores])

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, as it is written to disk."""
        named = {f"k.{i}": x for i, x in enumerate(self.keys)} | {f"v.{i}": x for i, x in enumerate(self.values)}
        for n, by_layer in enumerate(self.masses.values()):
            named |= {f"mass.{n}.{i}": x for i, x in by_layer.items()}
        return named | {f"reference.{name}": x for name, x in self.references.items()}

    def fork(self, config: KVConfig, attachment: Attachment) -> KVCache:
        """A cache of `config` that has seen this prompt, sharing nothing with the snapshot.

        Raises ValueError when the config's scorer was not observed while the snapshot was made.
        """
        cache = attachment.cache(config)
        if config.budget.evicts and config.scorer.stateful and config.scorer not in self.masses:
            known = [s.label for s in self.masses] or ["none"]
            raise ValueError(f"this snapshot did not observe {config.scorer.label}: it was made for {known}")
        alike: dict[Any, list[int]] = {}
        for i, layer in enumerate(cache.layers):
            k, v = self.keys[i], self.values[i]
            layer.lazy_initialization(k[None], v[None])  # type: ignore[union-attr]
            if isinstance(layer, KVLayer):
                apart = i if layer.config.key.per_head or layer.config.value.per_head else None
                turned_by = None if layer.centre is None else id(layer.centre.rotary), id(layer.rotary)
                alike.setdefault((layer.config, layer.shape, (apart, turned_by)), []).append(i)
            else:
                layer.keys, layer.values = k[None].clone(), v[None].clone()  # type: ignore[union-attr]
                layer.cumulative_length = self.tokens  # type: ignore[union-attr]
        for (layer_config, shape, _), indices in alike.items():
            self._commit([cache.layers[i] for i in indices], layer_config, shape, indices)  # type: ignore[misc]
        return cache

    def _commit(self, layers: list[KVLayer], config: LayerConfig, shape: LayerShape, indices: list[int]) -> None:
        """Store layers of one kind at once, as the heads of one long row, then deal the heads out again."""
        first = layers[0].rows[0]
        centre = joined([layer.centre for layer in layers])
        row = Row(config, first.table.pool, shape.kv_heads * len(layers), first.raw, centre, layers[0].rotary)
        observed = config.tracks_mass or config.tracks_queries
        mass = _joined([self.masses[config.scorer][i] for i in indices]) if observed else None
        row.group = shape.kv_heads
        row.known = self._known.setdefault((tuple(indices), first.raw, config.scope == "model"), {})
        row.commit(_joined([self.keys[i] for i in indices]), _joined([self.values[i] for i in indices]), mass)
        if config.scope == "model":
            settle([row])
        for layer, part in zip(layers, row.split(len(layers)), strict=True):
            layer.rows, layer.seen = [part], self.tokens


def _joined(heads: list[Tensor]) -> Tensor:
    """Heads of several layers side by side; no copy where they already lie so."""
    base = heads[0]._base
    if base is not None and base.shape == (len(heads), *heads[0].shape) and all(h._base is base for h in heads):
        return base.flatten(0, 1)
    return torch.cat(heads)


def _stacked(layers: list[Tensor]) -> list[Tensor]:
    """Layers as views of one tensor where their shapes agree."""
    alike = len({x.shape for x in layers}) == 1
    return list(torch.stack(layers).unbind()) if alike else layers


class _RecordingLayer(CacheLayerMixin):
    """Attends like the model itself and keeps K, V and attention mass of every row's own tokens."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, lengths: Sequence[int], scorers: Sequence[Scorer], rotary: Rotary | None) -> None:
        super().__init__()
        self.rotary = rotary
        self.lengths, self.scorers = lengths, [s for s in scorers if s.stateful]
        self.kept: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key_states, value_states = key_states.view_as(key_states), value_states.view_as(value_states)
        Handle(self, key_states, value_states).publish(kwargs.get("kwargs"))  # type: ignore[arg-type]
        return key_states, value_states

    @property
    def rows(self) -> list[Any]:
        return []

    def attend(self, call: AttentionCall) -> Tensor:
        q, k, v, scale, softcap, sink_logits = call.q, call.k, call.v, call.scale, call.softcap, call.sink_logits
        out = torch.stack([attend_prompt(q[b], k[b], v[b], scale, softcap, sink_logits) for b in range(q.shape[0])])
        for b, length in enumerate(self.lengths):
            q_b, k_b = q[b][:, :length], k[b][:, :length]
            masses = [self._observed(s, q_b, k_b, scale, softcap, sink_logits) for s in self.scorers]
            self.kept.append((k_b, v[b][:, :length], masses))
        return out

    def _observed(
        self, scorer: Scorer, q: Tensor, k: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None
    ) -> Tensor:
        """What a row under `scorer` would have observed of this prompt."""
        heads, length, _ = k.shape
        if scorer.reads_queries:
            assert self.rotary is not None, "take gives one to every layer when a scorer reads queries"
            return query_sums(q, 0, scale, self.rotary, heads)
        if scorer.reads_selection:
            return all_read(heads, length, length - 1, k.device)
        return prompt_mass(q, k, scale, scorer.query_weights(length).to(q.device), softcap, sink_logits)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


@torch.no_grad()
def take(
    model: PreTrainedModel, attachment: Attachment, prompts: Sequence[Sequence[int]], scorers: Iterable[Scorer] = ()
) -> list[Snapshot]:
    """Prefill `prompts` (token ids), many in one forward, and keep a snapshot of each.

    Prompts of different length are padded on the right, where causality hides the padding. Models with sliding layers
    take one prompt at a time, and so do CPUs where prompts are long. Raises ValueError for an empty prompt.
    """
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError(f"every prompt needs at least one token, got lengths {[len(p) for p in prompts]}")
    scorers = list(dict.fromkeys(s for s in scorers if s.stateful))
    lengths = [len(p) for p in prompts]
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    rotaries = attachment.rotaries if any(s.reads_queries for s in scorers) else [None] * len(layers)
    layers = [
        _RecordingLayer(lengths, scorers, rotary) if type(x) is DynamicLayer else x
        for x, rotary in zip(layers, rotaries, strict=True)
    ]
    alone = any(not isinstance(x, _RecordingLayer) for x in layers)
    most = MOST_AT_ONCE if model.device.type == "cpu" else max(lengths) * len(lengths)
    parts = list(_together(lengths, 1 if alone else most))
    if len(parts) > 1:
        return [s for part in parts for s in take(model, attachment, prompts[part], scorers)]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for b, prompt in enumerate(prompts):
        ids[b, : lengths[b]] = torch.tensor(prompt)
    cache = Cache(layers=layers)
    # The body without its head: a prefill needs no logits.
    model.base_model(input_ids=ids.to(model.device), use_cache=True, **{cache_kwarg(): cache})
    return [_snapshot_of(layers, b, lengths[b], scorers) for b in range(len(prompts))]


def _together(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of prompts that one forward takes: `most` tokens, padding included, or a single prompt."""
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or max(lengths[start : end + 1]) * (end + 1 - start) > most:
            yield slice(start, end)
            start = end


def _snapshot_of(layers: Sequence[Any], row: int, tokens: int, scorers: Sequence[Scorer]) -> Snapshot:
    keys, values = [], []
    masses: dict[Scorer, dict[int, Tensor]] = {s: {} for s in scorers}
    for i, layer in enumerate(layers):
        if isinstance(layer, _RecordingLayer):
            k, v, mass = layer.kept[row]
            for scorer, m in zip(scorers, mass, strict=True):
                masses[scorer][i] = m
        else:
            k, v = layer.keys[row].clone(), layer.values[row].clone()
        keys.append(k)
        values.append(v)
    return Snapshot(tokens, _stacked(keys), _stacked(values), masses)


class SnapshotStore:
    """Snapshots by content: in memory up to `memory_bytes`, on disk (if `folder` is given) up to `disk_bytes`.

    In memory they never take more than half of what would be free without them, which `room` counts on their device.
    `identity` is what K and V depend on besides the tokens: weights hash, dtype, device kind, library versions. A file
    that does not verify is dropped and counted in `corrupt`; the caller then makes the snapshot again.
    """

    def __init__(
        self,
        identity: str,
        folder: Path | None = None,
        memory_bytes: int = 4 << 30,
        disk_bytes: int = 8 << 30,
        room: Callable[[torch.device], int] = available,
    ) -> None:
        self.identity, self.folder = identity, folder
        self.memory_bytes, self.disk_bytes, self._room = memory_bytes, disk_bytes, room
        self.corrupt = 0
        self._memory: OrderedDict[str, Snapshot] = OrderedDict()
        if folder is not None:
            self.keep_in(folder)

    def keep_in(self, folder: Path) -> None:
        """Keep snapshots on disk too: those in memory, and all from now on."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for key, snapshot in self._memory.items():
            self._write(key, snapshot)

    def discard(self) -> None:
        """Delete what was kept on disk; nothing will be asked for again."""
        if self.folder is not None:
            shutil.rmtree(self.folder)
            self.folder = None

    def key(self, token_ids: Sequence[int], scorers: Iterable[Scorer] = ()) -> str:
        """Content address of a prompt's snapshot."""
        body = [SCHEMA, self.identity, list(token_ids), sorted(repr(s) for s in scorers if s.stateful)]
        return hashlib.sha256(json.dumps(body).encode()).hexdigest()

    def get(self, key: str, scorers: Iterable[Scorer] = ()) -> Snapshot | None:
        """The snapshot, verified, or None when it has to be made."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        snapshot = self._read(key, [s for s in scorers if s.stateful])
        if snapshot is not None:
            self._remember(key, snapshot)
        return snapshot

    def put(self, key: str, snapshot: Snapshot, *, on_disk: bool = True) -> None:
        """Keep a snapshot, on disk too where there is a folder; the least recently used ones make room."""
        self._remember(key, snapshot)
        if on_disk:
            self._write(key, snapshot)

    def _write(self, key: str, snapshot: Snapshot) -> None:
        if self.folder is None:
            return
        meta = {"key": key, "tokens": str(snapshot.tokens), "scorers": json.dumps([repr(s) for s in snapshot.masses])}
        data = safetensors.torch.save({n: x.contiguous().cpu() for n, x in snapshot.tensors().items()}, meta)
        replace(self.folder / f"{key}.safetensors", data)
        replace(self.folder / f"{key}.sha256", hashlib.sha256(data).hexdigest().encode())
        self._trim()

    def _remember(self, key: str, snapshot: Snapshot) -> None:
        self._memory[key] = snapshot
        self._memory.move_to_end(key)
        held = sum(s.nbytes for s in self._memory.values())
        most = min(self.memory_bytes, (self._room(snapshot.keys[0].device) + held) // 2)
        while len(self._memory) > 1 and held > most:
            held -= self._memory.popitem(last=False)[1].nbytes

    def _read(self, key: str, scorers: list[Scorer]) -> Snapshot | None:
        if self.folder is None or not (path := self.folder / f"{key}.safetensors").exists():
            return None
        stamp = path.with_suffix(".sha256")
        try:
            if not stamp.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != stamp.read_text():
                raise ValueError("checksum differs")
            with safe_open(path, framework="pt") as file:
                meta = file.metadata()
                named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if meta["key"] != key:
                raise ValueError("another prompt's snapshot")
        except (SafetensorError, ValueError, OSError):
            self.corrupt += 1
            path.unlink(missing_ok=True)
            stamp.unlink(missing_ok=True)
            return None
        os.utime(path)
        layers = sum(name.startswith("k.") for name in named)
        by_name = {repr(s): s for s in scorers}
        masses = {
            by_name[name]: {i: named[f"mass.{n}.{i}"] for i in range(layers) if f"mass.{n}.{i}" in named}
            for n, name in enumerate(json.loads(meta["scorers"]))
            if name in by_name
        }
        keys, values = (_stacked([named[f"{x}.{i}"] for i in range(layers)]) for x in "kv")
        references = {n.partition(".")[2]: x for n, x in named.items() if n.startswith("reference.")}
        return Snapshot(int(meta["tokens"]), keys, values, masses, references)

    def _trim(self) -> None:
        assert self.folder is not None
        files = sorted(self.folder.glob("*.safetensors"), key=lambda p: p.stat().st_mtime)
        total = sum(p.stat().st_size for p in files)
        for path in files[:-1]:
            if total <= self.disk_bytes:
                return
            total -= path.stat().st_size
            path.unlink()
            path.with_suffix(".sha256").unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temp:
        temp.write(data)
    os.replace(temp.name, path)
