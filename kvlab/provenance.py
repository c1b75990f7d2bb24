"""Where a run came from: code, machine, versions, command line. What cannot be known is null, never a crash.

Fields that only the caller knows (model, items, dtype, seeds) are listed here as null and filled by it. Knows nothing
of run folders, and records no secret: values under secret-looking keys and credentials inside addresses are masked.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numba",
    "datasets",
    "optuna",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "seaborn",
)
CALLER_KNOWS = (
    "model", "tokenizer_sha256", "evalset", "prompt_template_sha256", "dtype", "attention", "deterministic", "tf32",
    "threads", "seeds", "device", "notebook",
)  # fmt: skip
MASK = "[redacted]"
_SECRET_WORDS = {"secret", "password", "passwd", "apikey", "credential", "credentials", "authorization", "token"}
_PLAIN_TOKENS = {"bos", "eos", "pad", "unk", "mask", "stop", "sep", "cls"}  # text pieces of a vocabulary, no secrets
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")


def provenance(extra: Mapping[str, Any] = {}) -> dict:
    """All fields in a fixed order; `extra` fills or adds. Reads git, /proc and nvidia-smi where they exist."""
    record = {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": redacted_argv(sys.argv),
        "git": _git(Path(__file__).parent),
        "kvlab": _version("kvlab"),
        "python": sys.version.split()[0],
        "os": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "packages_sha256": _packages_sha256(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "ram_bytes": _ram_bytes(),
        "gpus": _gpus(),
        **dict.fromkeys(CALLER_KNOWS),
    }
    return {**record, **redacted(dict(extra))}


def redacted(value: Any) -> Any:
    """The same structure with secrets masked: text under keys that name an api key, token, secret or password, and
    user:password parts of addresses. Numbers are no secrets, so `max_new_tokens` and `bytes_per_token` stay."""
    if isinstance(value, Mapping):
        return {k: MASK if _is_secret(k) and _is_text(v) else redacted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(v) for v in value]
    return _CREDENTIALS.sub(f"{MASK}@", value) if isinstance(value, str) else value


def redacted_argv(argv: Sequence[str]) -> list[str]:
    """A command line with the values of secret-looking options masked, in `--key value` and `--key=value` form."""
    clean: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            clean.append(MASK)
        elif equals and _is_secret(name):
            clean.append(f"{name}={MASK}")
        else:
            clean.append(redacted(word))
        hide_next = not equals and word.startswith("-") and _is_secret(word)
    return clean


def _is_secret(key: str) -> bool:
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())
    if not words or (words[-1] == "token" and set(words) & _PLAIN_TOKENS):
        return False
    return bool(set(words) & _SECRET_WORDS) or "api_key" in "_".join(words) or "access_key" in "_".join(words)


def _is_text(value: Any) -> bool:
    """Text, or a list of it; empty text hides nothing."""
    if isinstance(value, list | tuple):
        return any(_is_text(v) for v in value)
    return isinstance(value, str) and value != ""


def _git(folder: Path) -> dict | None:
    """Commit of the checkout that holds this package, not of the current folder; null when it is not tracked there."""
    if _output(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None
    diff = _output(["git", "-C", str(folder), "diff", "HEAD"])
    return {
        "sha": (_output(["git", "-C", str(folder), "rev-parse", "HEAD"]) or "").strip() or None,
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
    }


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages_sha256() -> str:
    pins = sorted({f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()})
    return hashlib.sha256("\n".join(pins).encode()).hexdigest()


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or None


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # names a platform may lack
        return None


def _gpus() -> list[dict] | None:
    """Name, driver and memory of each NVIDIA card; null without the tool, asked without loading torch."""
    text = _output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if text is None:
        return None
    return [dict(zip(("name", "driver", "memory"), line.split(", "), strict=False)) for line in text.splitlines()]
