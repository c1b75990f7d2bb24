"""Centres of a loaded model, measured once and kept on disk beside its converted weights.

The text is bundled, so the same weights always give the same centres. This file knows files and tokens; what a centre
is and how it is measured is for centring.py.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlab.centre import Centre
from kvlab.centring import SINK_TOKENS, Centres, Rotaries, bias_centres, find_rotaries, mean_centres
from kvlab.evals.bundled import bundled
from kvlab.models import Loaded
from kvlab.snapshot import replace

SCHEMA = 1
TEXT = "calibration_prose.txt"
TOKENS = 768


def calibrated(loaded: Loaded, centrings: Iterable[str], rotaries: Rotaries | None = None) -> dict[str, Centres]:
    """The centres of each of `centrings` ("bias", "mean"), for `attach(..., centres=...)`.

    "mean" is read from `loaded.cache_root` where it lies there and verifies, else measured on the bundled text and
    written there. Raises CentringError where the model's keys cannot be centred.
    """
    wanted = sorted(set(centrings) - {"none"})
    if not wanted:
        return {}
    rotaries = rotaries or find_rotaries(loaded.model)
    make = {"bias": lambda: bias_centres(loaded.model, rotaries), "mean": lambda: _mean(loaded, rotaries)}
    return {kind: make[kind]() for kind in wanted}


def facts(loaded: Loaded) -> dict[str, Any]:
    """What a measured mean depends on besides the weights, for a run's provenance."""
    tokens = len(_token_ids(loaded))
    return {"text": TEXT, "text_sha256": _text_hash(), "tokens": tokens, "left_out": SINK_TOKENS}


def _token_ids(loaded: Loaded) -> list[int]:
    return loaded.tokenizer.encode(bundled(TEXT).read_text(encoding="utf-8"))[:TOKENS]


def _text_hash() -> str:
    return hashlib.sha256(bundled(TEXT).read_bytes()).hexdigest()


def _mean(loaded: Loaded, rotaries: Rotaries) -> Centres:
    token_ids = _token_ids(loaded)
    body = [SCHEMA, "mean", loaded.weights_sha256, loaded.dtype, _text_hash(), token_ids, SINK_TOKENS]
    key = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    path = None if loaded.cache_root is None else loaded.cache_root / "centres" / f"{key}.safetensors"
    if path is not None and (held := _read(path, key, rotaries)) is not None:
        return held
    centres = mean_centres(loaded.model, token_ids, rotaries)
    if path is not None:
        _write(path, key, centres)
    return centres


def _hash(named: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(name.encode() + repr(tuple(named[name].shape)).encode() + named[name].numpy().tobytes())
    return digest.hexdigest()


def _write(path: Path, key: str, centres: Centres) -> None:
    named = {f"mu.{i}": c.mu.cpu().contiguous() for i, c in enumerate(centres) if c is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, safetensors.torch.save(named, {"key": key, "sha256": _hash(named)}))


def _read(path: Path, key: str, rotaries: Rotaries) -> Centres | None:
    """The centres of a file that is what was written, or None: then they are measured again."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError):
        return None
    expected = {f"mu.{i}" for i, rotary in enumerate(rotaries) if rotary is not None}
    if meta.get("key") != key or meta.get("sha256") != _hash(named) or set(named) != expected:
        return None
    return tuple(
        None if r is None else Centre(named[f"mu.{i}"].to(r.inv_freq.device), r) for i, r in enumerate(rotaries)
    )
