"""Models: load one from wherever it is, and check that it works. See `load` and `sanity`."""

from kvlab.folders import cache_root
from kvlab.models.baseline import BrokenBaseline, perplexity, sanity
from kvlab.models.errors import (
    ModelError,
    NoSpaceError,
    NotCausalLMError,
    NotFetchedError,
    UnknownModelError,
    WrongHashError,
)
from kvlab.models.gguf_cache import ALIASES, Alias
from kvlab.models.loading import Loaded, load

__all__ = [
    "ALIASES",
    "Alias",
    "BrokenBaseline",
    "Loaded",
    "ModelError",
    "NoSpaceError",
    "NotCausalLMError",
    "NotFetchedError",
    "UnknownModelError",
    "WrongHashError",
    "cache_root",
    "load",
    "perplexity",
    "sanity",
]
