"""What a model's scores depend on besides config and item: the facts under which a memo keeps them."""

import hashlib
import importlib.metadata
import json
from typing import Any

from kvlab.memo import Memo, code_version
from kvlab.models import Loaded
from kvlab.subject import LocalSubject

# Libraries that compute scores; absent ones too, since kernels then run another way.
_LIBRARIES = ("torch", "transformers", "tokenizers", "numba", "triton")


def memo_of(loaded: Loaded, subject: LocalSubject) -> Memo | None:
    """The scores kept for this model, or None where nothing derived from it is kept.

    The number of threads is not among the facts: it moves last digits as the company of a batch does, and the control
    that scores the baseline again is never taken from a memo.
    """
    if loaded.cache_root is None:
        return None
    facts = {
        "weights_sha256": loaded.weights_sha256,
        "tokenizer_sha256": tokenizer_hash(loaded.tokenizer),
        "dtype": loaded.dtype,
        "device": loaded.model.device.type,
        "mode": "forked",
        "cache": subject.plan.mode,
        "query_aware": subject.query_aware,
        "code": code_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }
    return Memo(loaded.cache_root / "scores", facts)


def tokenizer_hash(tokenizer: Any) -> str:
    """Of everything that turns text into tokens: the whole tokenizer where it is a fast one, else its vocabulary."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    text = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{text}\n{special}".encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
