"""Where kvlab keeps what it can make again. Nothing is created here."""

import os
from pathlib import Path


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: the argument, else $KVLAB_CACHE, else ~/.cache/kvlab. Nothing is created."""
    chosen = cache_dir or os.environ.get("KVLAB_CACHE") or Path.home() / ".cache" / "kvlab"
    return Path(chosen).expanduser()
