"""KVConfig: everything that decides what a KV cache stores. Frozen, hashable, canonical JSON and TOML, exact bytes.

It composes codecs and policies and predicts sizes. It knows no model beyond the integers of a ModelShape.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction as Ratio
from typing import Any, get_args

import tomli_w
import torch

from kvlab.codecs import CODECS, Affine, Codec, Raw
from kvlab.layer import Centring, LayerConfig, LayerShape, ModelShape, Occupancy
from kvlab.plain import build, normal, plain, refuse_unknown
from kvlab.policies import BUDGETS, READERS, SCORERS, Budget, Dense, Evicting, Reader, Recency, Scorer, TopK, Unlimited

RAW_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class _Remembers:
    """A slot that is no field: no part of equality, hash, JSON or copies."""

    __slots__ = ("_id",)
    _id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig(_Remembers):
    """One point of the accuracy-against-bytes plane.

    `overrides` are (layer, key codec, value codec), sorted by layer. `raw_dtype` is how sinks, recent tokens and the
    raw codec are kept: "auto" is the model's own dtype, so that nothing is lost; "float16" or "bfloat16" makes a
    float32 model's cache as large as it would be on an accelerator.
    """

    key: Codec = Raw()
    value: Codec = Raw()
    scorer: Scorer = Recency()
    budget: Budget = Unlimited()
    reader: Reader = Dense()
    centring: Centring = "none"
    sink_tokens: int = 4
    recent_tokens: int = 64
    page_tokens: int = 16
    overrides: tuple[tuple[int, Codec, Codec], ...] = ()
    raw_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("sink_tokens", 0), ("recent_tokens", 0), ("page_tokens", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.centring not in get_args(Centring):
            raise ValueError(f"centring must be one of {get_args(Centring)}, got {self.centring!r}")
        if self.raw_dtype not in ("auto", *RAW_DTYPES):
            raise ValueError(f"raw_dtype must be 'auto' or one of {tuple(RAW_DTYPES)}, got {self.raw_dtype!r}")
        for name, base in (
            ("key", Codec),
            ("value", Codec),
            ("scorer", Scorer),
            ("budget", Budget),
            ("reader", Reader),
        ):
            object.__setattr__(self, name, normal(getattr(self, name), base, name))
        object.__setattr__(self, "overrides", _normal_overrides(self.overrides))
        for _, key, value in [(-1, self.key, self.value), *self.overrides]:
            self._check_blocks(key, value)
            self._check_chunks(key, value)

    def _check_chunks(self, key: Codec, value: Codec) -> None:
        """A sparse reader's chunks are whole parts of a page, and no codec's block straddles two of them."""
        if not isinstance(self.reader, TopK):
            return
        chunk, page = self.reader.chunk, self.page_tokens
        if chunk > page or page % chunk:
            raise ValueError(
                f"a chunk must be a page or an equal part of one, got chunk {chunk} and page_tokens {page}: set "
                f"page_tokens to a multiple of {chunk}"
            )
        block = max(key.block_tokens, value.block_tokens)
        if chunk % block:
            raise ValueError(
                f"a chunk must hold whole channel groups, got chunk {chunk} and group {block}: set chunk={block}"
            )
        if self.reader.bound == "codec" and (not isinstance(key, Affine) or key.axis != "channel"):
            raise ValueError(
                "top-k bound 'codec' takes a chunk's range from the scales of per-channel keys, got key "
                f"{key.label}: use Affine(axis='channel', group={page}), or bound 'minmax'"
            )

    def _check_blocks(self, key: Codec, value: Codec) -> None:
        for codec in (key, value):
            if codec.block_tokens not in (1, self.page_tokens):
                raise ValueError(
                    f"a channel group must be one page, got group {codec.block_tokens} and page_tokens "
                    f"{self.page_tokens}: set page_tokens={codec.block_tokens}"
                )

    def at(self, layer: int, rank: int | None = None, of: int = 1) -> LayerConfig:
        """This config as one layer follows it, overrides applied.

        `rank` is the layer's place among the `of` that are compressed, by default its index: see `layers`.
        """
        key, value = next(((k, v) for i, k, v in self.overrides if i == layer), (self.key, self.value))
        reads_all = isinstance(self.reader, TopK) and (layer if rank is None else rank) < self.reader.dense_layers
        return LayerConfig(
            key=key,
            value=value,
            scorer=self.scorer,
            budget=self.budget,
            reader=Dense() if reads_all else self.reader,
            centring=self.centring,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            page_tokens=self.page_tokens,
            share=self.budget.share(rank or 0, of) if isinstance(self.budget, Evicting) else Ratio(1),
        )

    def layers(self, compressed: Iterable[int]) -> dict[int, LayerConfig]:
        """What each of the compressed layers follows, in their order; layers that follow the same share one object."""
        chosen = list(compressed)
        rules: dict[LayerConfig, LayerConfig] = {}
        found = {layer: self.at(layer, rank, len(chosen)) for rank, layer in enumerate(chosen)}
        return {layer: rules.setdefault(rule, rule) for layer, rule in found.items()}

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError when this config cannot run on such a model, naming the layer, the value and the rule."""
        compressed = shape.compressed
        for layer, _, _ in self.overrides:
            if layer not in compressed:
                raise ValueError(f"override for layer {layer}: the layers that can be compressed are {compressed}")
        if self.budget.evicts and self.scorer.reads_selection and not isinstance(self.reader, TopK):
            raise ValueError(
                f"scorer {self.scorer.kind!r} ranks chunks by when they were last selected, but a "
                f"{self.reader.kind!r} reader selects none: use reader TopK, or another scorer"
            )
        for i, layer in self.layers(compressed).items():
            s = shape.layers[i]
            for stream, codec, dim in (("K", layer.key, s.key_dim), ("V", layer.value, s.value_dim)):
                try:
                    codec.check(dim, s.kv_heads, self.page_tokens)
                except ValueError as error:
                    raise ValueError(f"layer {i}, {stream} as {codec.label}: {error}") from None
        self._check_pooled(shape)

    def _check_pooled(self, shape: ModelShape) -> None:
        """Layers that share one budget are stored as the heads of one long row: they must be alike in everything."""
        layers = self.layers(shape.compressed)
        first, *rest = layers
        if layers[first].scope != "model":
            return
        for stream, codec in (("K", self.key), ("V", self.value)):
            if codec.per_head:
                raise ValueError(
                    f"budget scope 'model' joins the heads of all layers, and {stream} as {codec.label} has settings "
                    "for each head of one layer: use scope 'layer', or one setting for all heads"
                )
        for i in rest:
            for what, ours, theirs in (
                ("heads", shape.layers[first], shape.layers[i]),
                ("settings", layers[first], layers[i]),
            ):
                if ours != theirs:
                    raise ValueError(
                        f"budget scope 'model' needs the same {what} in every compressed layer, got {ours} in layer "
                        f"{first} and {theirs} in layer {i}: use scope 'layer'"
                    )

    def raw(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of uncompressed tokens on a model of `model_dtype`."""
        return model_dtype if self.raw_dtype == "auto" else RAW_DTYPES[self.raw_dtype]

    def predicted_bytes(self, shape: ModelShape, prefill: int, decoded: int = 0) -> int:
        """Bytes one sequence holds after a forward of `prefill` tokens and `decoded` single steps.

        Equal to `KVCache.nbytes`; layers that keep a sliding window count what transformers keeps there.
        """
        return self._bytes(LayerConfig.nbytes, shape, prefill, decoded)

    def bytes_by_stream(self, shape: ModelShape, prefill: int, decoded: int = 0) -> dict[str, int]:
        """`predicted_bytes` by what they store: K, V, scales, positions, raw tokens; what takes nothing is left out."""
        found: dict[str, int] = {}

        def counted(layer: LayerConfig, s: LayerShape, raw: torch.dtype, held: Occupancy, layers: int) -> int:
            for name, count in layer.bytes_by_stream(s, raw, held, layers).items():
                found[name] = found.get(name, 0) + count
            return layer.nbytes(s, raw, held, layers)

        total = self._bytes(counted, shape, prefill, decoded)
        found["other layers"] = total - sum(found.values())
        return {name: count for name, count in found.items() if count}

    def read_bytes(self, shape: ModelShape, prefill: int, decoded: int = 0) -> int:
        """Bytes of the cache that the next decode step of one sequence reads then; a sparse reader's mean over steps.

        What is stored does not shrink by it: see `predicted_bytes` for that.
        """
        return self._bytes(LayerConfig.read_bytes, shape, prefill, decoded)

    def _bytes(
        self,
        counted: Callable[[LayerConfig, LayerShape, torch.dtype, Occupancy, int], int],
        shape: ModelShape,
        prefill: int,
        decoded: int,
    ) -> int:
        """Bytes of all layers, each as `counted`; sliding ones hold and read what transformers keeps."""
        total, raw = 0, self.raw(shape.dtype)
        for s in shape.layers:
            if s.window is not None:
                tokens = min(prefill + decoded, s.window - 1)
                total += tokens * s.kv_heads * (s.key_dim + s.value_dim) * shape.dtype.itemsize
        held_by_rule: dict[tuple[LayerConfig, int], Occupancy] = {}
        for layer, s, count in self._budgeted(shape):
            heads = s.kv_heads * count
            if (layer, heads) not in held_by_rule:
                held_by_rule[layer, heads] = layer.occupancy(prefill, decoded, heads)
            total += counted(layer, s, raw, held_by_rule[layer, heads], count)
        return total

    def _budgeted(self, shape: ModelShape) -> list[tuple[LayerConfig, LayerShape, int]]:
        """Compressed layers, and how many of them share a budget: each for itself, but in scope "model"."""
        layers = [(layer, shape.layers[i], 1) for i, layer in self.layers(shape.compressed).items()]
        return [(*layers[0][:2], len(layers))] if layers and layers[0][0].scope == "model" else layers

    def effective_bits(self, shape: ModelShape, tokens: int) -> float:
        """Stored bits per K or V element ever seen, everything included, for a prompt of `tokens`; 16 is raw."""
        if tokens < 1:
            raise ValueError(f"effective bits need tokens to share the bytes, got tokens={tokens}")
        return self.predicted_bytes(shape, tokens) * 8 / shape.raw_bytes(tokens, itemsize=1)

    @property
    def label(self) -> str:
        """Short name for tables, such as `int4 g32`, `K int8 V int4 g32` or `fp8_e4m3 + h2o 50%`."""
        name = self.key.label if self.key == self.value else f"K {self.key.label} V {self.value.label}"
        name = f"{name}*{len(self.overrides)}" if self.overrides else name
        parts = [f"{name} centred" if self.centring != "none" else name]
        if self.budget.evicts:
            parts.append(f"{self.scorer.label} {self.budget.label}")
        parts += [self.reader.label] if self.reader.label else []
        return " + ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, methods by `kind`."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def to_toml(self) -> str:
        """A `[kv_config]` table that `from_toml` reads back to an equal config."""
        return tomli_w.dumps({"kv_config": self.to_dict()})

    @property
    def id(self) -> str:
        """First 12 hex digits of sha256 of `to_json()`; stable across processes."""
        try:
            return self._id
        except AttributeError:
            # Every row of a search is looked up by it, a hundred thousand times: made once for each object.
            object.__setattr__(self, "_id", hashlib.sha256(self.to_json().encode()).hexdigest()[:12])
            return self._id

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        own = self.to_dict()
        changed = {f.name: own[f.name] for f in fields(self) if getattr(self, f.name) != f.default}
        document = {"schema": "kvlab.config/1", "id": self.id, "label": self.label, "changed": changed, "config": own}
        return bundle("config", document | {"toml": self.to_toml()})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "KVConfig":
        """Inverse of `to_dict`. Raises ValueError for an unknown key or kind, naming the nearest, and for NaN."""
        if not isinstance(data, Mapping):
            raise ValueError(f"kv_config must be a table, got {data!r}")
        refuse_unknown(data, {f.name for f in fields(cls)}, "kv_config")
        kwargs = dict(data)
        for name, registry in (
            ("key", CODECS),
            ("value", CODECS),
            ("scorer", SCORERS),
            ("budget", BUDGETS),
            ("reader", READERS),
        ):
            if name in kwargs:
                kwargs[name] = build(registry, kwargs[name], name)
        kwargs["overrides"] = tuple(
            (layer, build(CODECS, k, f"overrides[{layer}].key"), build(CODECS, v, f"overrides[{layer}].value"))
            for layer, k, v in _triples(kwargs.get("overrides", ()))
        )
        return cls(**kwargs)

    @classmethod
    def from_json(cls, text: str) -> "KVConfig":
        """Inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_toml(cls, text: str) -> "KVConfig":
        """Inverse of `to_toml`. Other tables, such as a workload beside the config, are left alone."""
        tables = tomllib.loads(text)
        if "kv_config" not in tables:
            raise ValueError(f"expected a [kv_config] table, got {sorted(tables) or 'an empty document'}")
        return cls.from_dict(tables["kv_config"])


def _triples(overrides: Any) -> list[tuple[Any, Any, Any]]:
    if not isinstance(overrides, (list, tuple)):
        raise ValueError(f"overrides must be a list of [layer, key, value], got {overrides!r}")
    for i, entry in enumerate(overrides):
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise ValueError(f"overrides[{i}] must be [layer, key, value], got {entry!r}")
        if type(entry[0]) is not int or entry[0] < 0:
            raise ValueError(f"overrides[{i}] must start with a layer, an integer of at least 0, got {entry[0]!r}")
    return [tuple(entry) for entry in overrides]


def _normal_overrides(overrides: Any) -> tuple[tuple[int, Codec, Codec], ...]:
    """Sorted by layer, each layer once, codecs checked."""
    triples = sorted(_triples(overrides), key=lambda o: o[0])
    layers = [layer for layer, _, _ in triples]
    if len(set(layers)) != len(layers):
        raise ValueError(f"overrides must name each layer once, got layers {layers}")
    return tuple(
        (layer, normal(k, Codec, f"overrides[{layer}].key"), normal(v, Codec, f"overrides[{layer}].value"))
        for layer, k, v in triples
    )
