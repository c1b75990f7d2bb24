"""The TOML and JSON people already write: `[kv_cache]` and `[server]` beside the native `[kv_config]`, both ways.

What a word means is written out in DTYPES; nothing is guessed, and a word that means nothing here is an error. Knows
configs and bytes, no model, no server and no search.
"""

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.kernels.chunks import Bound
from kvlab.layer import ModelShape
from kvlab.policies import Dense, Reader, Threshold, TopK, WindowAttention

# A workload table says where a config was found; it changes nothing here and is left alone.
TABLES = ("kv_config", "kv_cache", "server", "workload")
CACHE_KEYS = ("dtype", "compression_ratio", "eviction_threshold", "sparse_top_k", "max_context_length")
SERVER_KEYS = ("base_url", "api_key", "model_id")
DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2")
# Words of the same files that steer conversations on a server, of which this version has none.
SESSION_KEYS = (
    "max_session_idle_seconds",
    "max_tokens_per_session",
    "evict_low_priority_first",
    "policy",
    "guard",
    "accounting",
    "lru",
    "h2o",
    "streamingllm",
    "multi_queue",
)
GROUP = 32


class Secret:
    """A value that no repr, str, JSON, pickle or log shows; `reveal` is the only way to it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __copy__(self) -> "Secret":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Secret":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a secret is not written to files: pass it by environment or read it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where an endpoint is and what to ask it for."""

    base_url: str | None = None
    model_id: str | None = None
    api_key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a file asks for. `compression_ratio` is a demand, met by `config` only once `check` has passed."""

    config: KVConfig = field(default_factory=KVConfig)
    server: ServerSettings | None = None
    max_context_length: int | None = None
    compression_ratio: float | None = None

    def check(self, shape: ModelShape, context: int | None = None) -> None:
        """Raise ValueError when the config does not fit the model or its bytes do not meet the demanded ratio.

        The ratio is that of a 16-bit cache of `context` tokens (default `max_context_length`) to what this config
        really holds then: scales, positions, raw sinks and recent tokens included.
        """
        self.config.check(shape)
        limit = self.max_context_length
        if context is not None and (type(context) is not int or context < 1):
            raise ValueError(f"context must be a number of tokens of at least 1, got {context!r}")
        if context is not None and limit is not None and context > limit:
            raise ValueError(f"a context of {context} tokens exceeds max_context_length {limit}")
        if self.compression_ratio is None:
            return
        tokens = context or limit
        if tokens is None:
            raise ValueError("compression_ratio is checked at a context: give max_context_length, or pass context")
        reached = ratio(self.config, shape, tokens)
        if reached < self.compression_ratio:
            raise ValueError(self._unreached(reached, shape, tokens))

    def _unreached(self, reached: float, shape: ModelShape, tokens: int) -> str:
        """What would do instead: the mildest dtype that meets the demand, and the most any reaches."""
        threshold = self.config.budget.quantile if isinstance(self.config.budget, Threshold) else 0.0
        by_dtype = {d: ratio(build(d, threshold, shape, _share(self.config)), shape, tokens) for d in DTYPES}
        best = max(by_dtype, key=lambda d: by_dtype[d])
        enough = [d for d in DTYPES if by_dtype[d] >= self.compression_ratio]  # type: ignore[operator]
        hint = f"dtype {enough[0]!r} reaches {_down(by_dtype[enough[0]])}, and t" if enough else "T"
        also = "" if threshold or enough else "; an eviction_threshold reaches more"
        return (
            f"compression_ratio {self.compression_ratio:g} is not met at {tokens} tokens: {self.config.label} reaches "
            f"{_down(reached)}. {hint}he most is {_down(by_dtype[best])} with dtype {best!r}{also}"
        )


def ratio(config: KVConfig, shape: ModelShape, tokens: int) -> float:
    """Bytes of a 16-bit cache of `tokens` tokens over those of `config`; above 1 is smaller."""
    return shape.raw_bytes(tokens) / config.predicted_bytes(shape, tokens)


def _down(value: float) -> str:
    """Two decimals, rounded down: a ratio shown as reached must be reached."""
    return f"{math.floor(value * 100) / 100:.2f}"


def codecs(dtype: str, shape: ModelShape | None = None) -> tuple[Codec, Codec, int]:
    """K codec, V codec and page size that a `dtype` word stands for.

    int8 has one symmetric scale per token and head. int4 has groups of 32 with scale and zero, or the whole head where
    32 does not divide it. int2 has keys by channel and values by token (KIVI, arXiv 2402.02750), values clipped.
    """
    even = shape is None or all(s.key_dim % GROUP == 0 and s.value_dim % GROUP == 0 for s in shape.layers)
    group = GROUP if even else 0
    codec: Codec
    if dtype == "auto":
        return Raw(), Raw(), 16
    if dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        codec = Fp8("e5m2" if dtype == "fp8_e5m2" else "e4m3")
        return codec, codec, 16
    if dtype == "int8":
        codec = Affine(bits=8, group=0, mode="symmetric")
        return codec, codec, 16
    if dtype == "int4":
        codec = Affine(bits=4, group=group)
        return codec, codec, 16
    if dtype == "int2":
        return Affine(bits=2, axis="channel", group=GROUP), Affine(bits=2, group=group, clip=0.72), GROUP
    raise ValueError(f"dtype must be one of {list(DTYPES)}, got {dtype!r}{_nearest(str(dtype), DTYPES)}")


def build(
    dtype: str = "auto",
    eviction_threshold: float = 0.0,
    shape: ModelShape | None = None,
    sparse_top_k: float | None = None,
) -> KVConfig:
    """The config that `[kv_cache]` words stand for.

    `eviction_threshold` is a quantile: that share of the tokens leaving the recent window is evicted, those that the
    last 32 queries attended to least (SnapKV's score, which does not favour old tokens); 0 evicts nothing.
    `sparse_top_k` is what each query reads of the pages that are stored: an integer is that many, a float a share.
    """
    key, value, page = codecs(dtype, shape)
    config = KVConfig(key=key, value=value, page_tokens=page, reader=_reader(sparse_top_k, key, page))
    if not eviction_threshold:
        return config
    return replace(config, scorer=WindowAttention(), budget=Threshold(eviction_threshold))


def _reader(sparse_top_k: float | None, key: Codec, page: int) -> Reader:
    """Whole pages; per-channel keys already say in their scales what range a page has."""
    if sparse_top_k is None:
        return Dense()
    bound: Bound = "codec" if key.block_tokens > 1 else "minmax"
    if isinstance(sparse_top_k, int):
        return TopK(count=sparse_top_k, chunk=page, bound=bound)
    return TopK(fraction=sparse_top_k, chunk=page, bound=bound)


def _share(config: KVConfig) -> float | None:
    """What `sparse_top_k` says of a config's reader."""
    reader = config.reader
    return None if not isinstance(reader, TopK) else reader.count or reader.fraction


def read(source: str | Path, shape: ModelShape | None = None, context: int | None = None) -> Settings:
    """Settings of a TOML or JSON file (a Path) or text (a str). With `shape`, demands are checked; see `check`.

    Raises ValueError for an unknown key, naming the nearest, a wrong type, NaN, and a demand that is not met.
    """
    tables = _parse(source)
    _refuse_unknown(tables, TABLES, "the document")
    cache = _table(tables, "kv_cache", CACHE_KEYS)
    server = _table(tables, "server", SERVER_KEYS)
    if "kv_config" in tables and ({"dtype", "eviction_threshold", "sparse_top_k"} & cache.keys()):
        raise ValueError(
            "[kv_config] and [kv_cache] both say how to store and read: keep dtype, eviction_threshold and "
            "sparse_top_k in one"
        )
    native = KVConfig.from_dict(tables["kv_config"]) if "kv_config" in tables else None
    settings = Settings(
        config=native or build(_dtype(cache), _threshold(cache), shape, _top_k(cache)),
        server=_server(server) if "server" in tables else None,
        max_context_length=_integer(cache, "max_context_length"),
        compression_ratio=_demand(cache),
    )
    if shape is not None:
        settings.check(shape, context)
    return settings


def write(config: KVConfig, shape: ModelShape | None = None) -> str:
    """`config` as a `[kv_cache]` table, which `read` takes back to an equal config.

    Raises ValueError naming what these words cannot say; `KVConfig.to_toml` can say everything.
    """
    threshold = config.budget.quantile if isinstance(config.budget, Threshold) else 0.0
    share = _share(config)
    candidates = {d: build(d, threshold, shape, share) for d in DTYPES if d != "fp8"}
    for dtype, candidate in candidates.items():
        if candidate == config:
            words: dict[str, Any] = {"dtype": dtype} | ({"eviction_threshold": threshold} if threshold else {})
            words |= {} if share is None else {"sparse_top_k": share}
            return tomli_w.dumps({"kv_cache": words})
    differing = [_differences(config, candidate) for candidate in candidates.values()]
    unsaid = min(differing, key=len)
    raise ValueError(f"[kv_cache] has no words for {', '.join(unsaid)}: write it as [kv_config] with to_toml()")


def _differences(config: KVConfig, other: KVConfig) -> list[str]:
    names = [f.name for f in fields(KVConfig) if getattr(config, f.name) != getattr(other, f.name)]
    return [f"{name}={getattr(config, name)!r}" for name in names]


def _parse(source: str | Path) -> dict[str, Any]:
    if isinstance(source, Path):
        text = source.read_text(encoding="utf-8")
    elif "\n" not in source and source.endswith((".toml", ".json")):
        raise ValueError(f"a str is read as text, got {source!r}: pass pathlib.Path to read a file")
    else:
        text = source
    # The parsers' own errors carry the whole text along, and with it what is secret.
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text, parse_constant=_no_constant)
        return tomllib.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not valid TOML: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value: give a finite number")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)
    return f": the nearest is {near[0]!r}" if near else ""


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            why = " (it steers a server's sessions, of which there are none here)" if key in SESSION_KEYS else ""
            raise ValueError(f"unknown key {key!r} in {where}{why}{_nearest(key, known)}; known are {list(known)}")


def _table(tables: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, Mapping):
        raise ValueError(f"[{name}] must be a table, got {type(table).__name__}")
    _refuse_unknown(table, known, f"[{name}]")
    return table


def _dtype(cache: Mapping[str, Any]) -> str:
    dtype = cache.get("dtype", "auto")
    if not isinstance(dtype, str):
        raise ValueError(f"dtype must be one of {list(DTYPES)}, got {dtype!r}")
    return dtype


def _integer(table: Mapping[str, Any], name: str) -> int | None:
    value = table.get(name)
    if name in table and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def _number(table: Mapping[str, Any], name: str) -> float | None:
    value = table.get(name)
    if name in table and (isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return None if value is None else float(value)


def _threshold(cache: Mapping[str, Any]) -> float:
    value = _number(cache, "eviction_threshold") or 0.0
    if not 0 <= value < 1:
        raise ValueError(f"eviction_threshold is a quantile in [0, 1), got {value!r}: 0.5 evicts half")
    return value


def _top_k(cache: Mapping[str, Any]) -> float | None:
    """An integer as it is, pages to read; any other number as the share of them."""
    value = _number(cache, "sparse_top_k")
    if value is None:
        return None
    if type(cache["sparse_top_k"]) is int:
        return _integer(cache, "sparse_top_k")
    if not 0 < value <= 1:
        raise ValueError(
            f"sparse_top_k is a share in (0, 1] or a whole number of pages, got {value!r}: 0.25 reads a quarter"
        )
    return value


def _demand(cache: Mapping[str, Any]) -> float | None:
    value = _number(cache, "compression_ratio")
    if value is not None and value < 1:
        raise ValueError(f"compression_ratio must be at least 1, got {value!r}: 4.0 asks for a quarter of 16-bit bytes")
    return value


def _server(table: Mapping[str, Any]) -> ServerSettings:
    for name in SERVER_KEYS:
        # Never the value: it may be the key.
        if name in table and (not isinstance(table[name], str) or not table[name]):
            raise ValueError(f"{name} in [server] must be text that is not empty, got {type(table[name]).__name__}")
    url, key = table.get("base_url"), table.get("api_key")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError("base_url in [server] must start with http:// or https://")
    return ServerSettings(base_url=url, model_id=table.get("model_id"), api_key=None if key is None else Secret(key))
