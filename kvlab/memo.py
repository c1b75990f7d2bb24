"""Scores kept across runs, by what they depend on: the same config on the same item of the same model is scored once.

A context is everything a score depends on besides config and item: weights, tokenizer, dtype, device kind, versions of
libraries and of the code that computes scores. Each context has a folder, each config a file of lines in it, each line
one item under the hash of its whole content. A line that does not verify is skipped, and its item scored again. Knows
no model and no run.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlab.evals.item import Item
from kvlab.evals.subject import ItemScore

SCHEMA = 1
LIMIT_BYTES = 1 << 30
# Parts of the package that never touch a score. Whatever is not named here counts, new files too.
APART = {
    *("__main__", "bench", "book", "channel", "confirm", "explore", "export", "folders", "housekeeping", "memo", "nb"),
    *("progress", "provenance", "report", "runs", "search", "serving", "stats", "stopping", "study", "sweep"),
    *("vocabulary", "worker"),
}


def code_version(package: Path | None = None) -> str:
    """Hash of every source file that a score may depend on."""
    root = package or Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.with_suffix("").parts[0] not in APART:
            digest.update(inside.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Memo:
    """Scores of one context. `facts` are what scores depend on; any difference in them is another context. Nothing is
    written before there is a score to keep.
    """

    def __init__(self, root: Path, facts: Mapping[str, Any], *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._facts = json.dumps({"schema": SCHEMA, **facts}, sort_keys=True, allow_nan=False)
        self.folder = root / hashlib.sha256(self._facts.encode()).hexdigest()[:24]
        self.damaged = 0
        self._limit_bytes = limit_bytes
        self._held: dict[str, dict[str, tuple[ItemScore, str]]] = {}

    def get(self, config_id: str, item: Item) -> tuple[ItemScore, str] | None:
        """The row of this config on an item of exactly this content, and the run that scored it; None if unknown."""
        if config_id not in self._held:
            self._held[config_id] = self._read(config_id)
        return self._held[config_id].get(key(item))

    def put(self, scored: Iterable[tuple[Item, ItemScore]], run: str) -> None:
        """Keep teacher-forced rows of a run. Several processes may: each appends whole lines."""
        by_config: dict[str, list[str]] = {}
        for item, row in scored:
            if row.mode != "forked":
                continue
            # A place in the memory only where the file is not to be read first.
            if (held := self._held.get(row.config_id)) is not None:
                if key(item) in held:
                    continue
                held[key(item)] = row, run
            body = json.dumps({"item": key(item), "run": run, "row": dataclasses.asdict(row)}, allow_nan=False)
            by_config.setdefault(row.config_id, []).append(f"{_check(body)} {body}\n")
        if by_config and not (self.folder / "facts.json").exists():
            self._begin()
        for config_id, lines in by_config.items():
            # A line that a kill cut short must not spoil the one after it.
            data = ("\n" + "".join(lines)).encode()
            place = os.open(self._path(config_id), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(place, data)
            finally:
                os.close(place)

    def _begin(self) -> None:
        """A folder of its own, which says what it is for; contexts unused for longest make room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "facts.json").write_text(self._facts + "\n", encoding="utf-8")
        _trim(self.folder, self._limit_bytes)

    def _path(self, config_id: str) -> Path:
        return self.folder / f"{config_id}.jsonl"

    def _read(self, config_id: str) -> dict[str, tuple[ItemScore, str]]:
        path, found = self._path(config_id), {}
        if not path.exists():
            return found
        os.utime(self.folder)
        for line in path.read_bytes().decode("utf-8", errors="replace").split("\n"):
            if not line:
                continue
            stamp, _, body = line.partition(" ")
            if stamp != _check(body):
                self.damaged += 1
                continue
            record = json.loads(body)
            row = ItemScore(**record["row"])
            if row.config_id == config_id:
                found[record["item"]] = row, record["run"]
        return found


def key(item: Item) -> str:
    """Hash of everything an item says: an id alone would outlive a change of its text."""
    body = json.dumps(dataclasses.asdict(item), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(body.encode()).hexdigest()[:24]


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _trim(own: Path, limit_bytes: int) -> None:
    """Drop other contexts, the longest unused first, until all fit the limit."""
    others = sorted((p for p in own.parent.iterdir() if p.is_dir() and p != own), key=lambda p: p.stat().st_mtime)
    total = sum(f.stat().st_size for f in own.parent.rglob("*") if f.is_file())
    for folder in others:
        if total <= limit_bytes:
            return
        total -= sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        shutil.rmtree(folder, ignore_errors=True)
