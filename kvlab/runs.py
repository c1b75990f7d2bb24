"""Run folders: one folder holds everything needed to reproduce a run and to read it again.

    <root>/<utc>-<slug>-<hash8>/
        config.json provenance.json status.json        written together, before any work
        items/part-*.parquet                           item rows; a part is whole or absent
        result.json summary.parquet sweet_spot.toml report.html figures/ log.txt

The hash covers every field of the config, at full precision. Every write is a temporary file renamed into place, so a
killed process leaves whole files only. Refuses to know what the rows, the config or the result mean.
"""

import contextlib
import difflib
import hashlib
import json
import math
import os
import re
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvlab.provenance import provenance, redacted

STATES = ("running", "done", "failed", "interrupted", "partial")
_NAME = re.compile(r"(\d{8}T\d{9}Z)-(.+)-([0-9a-f]{8})")


class BusyError(RuntimeError):
    """Another process writes this run, or did when it died on another machine."""


class Run:
    """One run folder. Make one with `create`, read one with `open`; every write refuses a second live writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict = _parse(path / "config.json")
        self.hash8 = config_hash(self.config)[:8]
        self._held = False

    @classmethod
    def create(cls, root: Path, slug: str, config: dict, *, extra_provenance: Mapping = {}) -> "Run":
        """Make `<utc>-<slug>-<hash8>` under root, with config, provenance and status already in it.

        Secrets are redacted from the config and take no part in the hash. Raises OSError naming the root when it
        cannot be written, ValueError for a config that JSON cannot hold exactly (NaN, sets, non-text keys).
        """
        short = re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-")[:40].strip("-")
        if not short:
            raise ValueError(f"slug must hold a letter or digit to name a folder, got {slug!r}")
        clean = redacted(plain(config, "config", refuse_nan=True))
        digest = config_hash(clean)
        root, path = Path(root), None
        try:
            path = _claim(root, short, digest[:8])
            (path / "items").mkdir()
            (path / "figures").mkdir()
            write_whole(path / "config.json", _dump(clean))
            write_whole(path / "provenance.json", _dump(plain(provenance(extra_provenance), "provenance")))
            write_whole(path / "status.json", _dump(_status("running", {}, None)))
            final = path.with_name(path.name[1 : -len(".tmp")])
            path.rename(final)
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            why = error.strerror or str(error)
            raise OSError(
                error.errno or 0, f"cannot create a run under {root}: {why}. Choose a folder that can be written"
            ) from error
        return cls(final)

    @classmethod
    def open(cls, path: str | Path, *, root: Path = Path("runs")) -> "Run":
        """Open by path, by unique beginning of the folder name, or by unique beginning (4+) of the hash, under root.

        Raises FileNotFoundError with the nearest name, ValueError for an ambiguous one or an edited config.
        """
        run = cls(_resolve(path, Path(root)))
        named = _NAME.fullmatch(run.path.name)
        if named and named[3] != run.hash8:
            raise ValueError(
                f"config.json of {run.path.name} hashes to {run.hash8}: it was edited after the run. Restore it"
            )
        return run

    def __repr__(self) -> str:
        return f"Run({self.path.name}, {self.status['state']})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.report.shown import run_document
        from kvlab.show import bundle

        return bundle("run", run_document(self))

    @property
    def status(self) -> dict:
        """state, created, updated, pid, host, cpu_s, peak_rss_bytes of the last writer, and what was passed along."""
        return self.read_json("status.json")

    def set_status(self, state: str, **info: Any) -> None:
        """Record a state of STATES; earlier info stays unless overwritten."""
        if state not in STATES:
            raise ValueError(_nearest("state", state, STATES))
        with self.lock():
            write_whole(self.path / "status.json", _dump(_status(state, plain(info, "status"), self.status)))

    def is_complete(self) -> bool:
        """Whether the run said it was done."""
        return self.status["state"] == "done"

    def state(self) -> str:
        """The recorded state, except that a running run whose process is gone reads "interrupted"."""
        recorded = self.status["state"]
        return "interrupted" if recorded == "running" and not self._alive() else recorded

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store rows as one parquet part: after this returns they survive a kill; before, none of them exists."""
        if not rows:
            return
        table = pa.Table.from_pylist([{str(k): _scalar(v) for k, v in row.items()} for row in rows], _schema(rows))
        with self.lock():
            last = max((int(p.stem.split("-")[1]) for p in self._parts()), default=-1)
            _replace(self.path / "items" / f"part-{last + 1:06d}.parquet", lambda f: pq.write_table(table, f))

    def rows(self) -> pd.DataFrame:
        """All rows in the order appended; a column that some parts lack is null there. Empty frame when none."""
        tables = []
        for part in self._parts():
            try:
                tables.append(pq.read_table(part))
            except pa.ArrowInvalid as error:
                raise ValueError(f"{part} is not readable parquet ({error}). Remove that part to go on") from error
        if not tables:
            return pd.DataFrame()
        try:
            return pa.concat_tables(tables, promote_options="permissive").to_pandas()
        except pa.ArrowTypeError as error:
            raise ValueError(f"parts of {self.path / 'items'} disagree on a column's type: {error}") from error

    def write_json(self, name: str, obj: Any) -> Path:
        """Write a JSON document into the folder; numbers that are not finite become null."""
        return self.write_bytes(name, _dump(plain(obj, name)))

    def read_json(self, name: str) -> Any:
        return _parse(self._inside(name))

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file into the folder, whole or not at all."""
        return self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Write a file into the folder, whole or not at all."""
        target = self._inside(name)
        with self.lock():
            target.parent.mkdir(exist_ok=True)
            write_whole(target, data)
        return target

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run as its only writer; without it each write holds the run for itself.

        Raises BusyError naming the other writer when there is one. The kernel drops the lock of a process that
        dies, so its run can be taken over at once on the same machine. A writer that died on another machine cannot
        be told from a live one and must be cleared by hand.
        """
        if self._held:
            yield
            return
        guard, note = self._guard(), self.path / "writer.json"
        try:
            # A reader asking for the state holds the guard for an instant; only a writer holds it for a second.
            guard.acquire(timeout=1, poll_interval=0.02)
        except filelock.Timeout:
            raise BusyError(f"{self.path.name} is being written by {_who(note)}. Wait for it or stop it") from None
        try:
            other = _read_note(note)
            if other and other["host"] != socket.gethostname():
                raise BusyError(
                    f"{self.path.name} was last written by {_who(note)}. If that process is gone, delete {note}"
                )
            write_whole(note, _dump({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}))
            self._held = True
            yield
        finally:
            if self._held:
                note.unlink(missing_ok=True)
            self._held = False
            guard.release()

    def _guard(self) -> filelock.FileLock:
        # Not per thread: rows may be appended from a worker thread of the process that holds the run.
        return filelock.FileLock(self.path / ".lock", timeout=0, thread_local=False)

    def _alive(self) -> bool:
        """Whether some process, this one included, holds the run now."""
        if self._held:
            return True
        guard = self._guard()
        try:
            guard.acquire()
        except filelock.Timeout:
            return True
        guard.release()
        note = _read_note(self.path / "writer.json")
        return bool(note) and note["host"] != socket.gethostname()

    def _parts(self) -> list[Path]:
        return sorted((self.path / "items").glob("part-*.parquet"))

    def _inside(self, name: str) -> Path:
        target = (self.path / name).resolve()
        if not target.is_relative_to(self.path.resolve()):
            raise ValueError(f"a run writes and reads inside its folder only, got {name!r}")
        return target


def config_hash(config: Mapping) -> str:
    """sha256 of the canonical JSON of a config: keys sorted, floats at full precision, secrets left out.

    0.125 and 0.12 differ, and so do 1 and 1.0. Put in the config whatever decides the result, such as model revision,
    item set hash and the versions that matter.
    """
    clean = redacted(plain(config, "config", refuse_nan=True))
    return hashlib.sha256(
        json.dumps(clean, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def find(root: Path, digest: str) -> list[Path]:
    """Folders under root whose config has this hash (64 hex digits, or at least the first 8), newest first."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", digest):
        raise ValueError(f"a config hash is 8 to 64 lowercase hex digits, got {digest!r}")
    names = [p for p in _folders(Path(root)) if p.name.endswith(f"-{digest[:8]}")]
    return [p for p in reversed(names) if config_hash(json.loads((p / "config.json").read_text())).startswith(digest)]


def listing(root: Path = Path("runs")) -> pd.DataFrame:
    """One line per run, newest last: name, created, slug, hash8, state, parts, verdict (null before a result)."""
    lines = []
    for path in _folders(Path(root)):
        run, named = Run(path), _NAME.fullmatch(path.name)
        result = run.read_json("result.json") if (path / "result.json").exists() else {}
        lines.append(
            {
                "name": path.name,
                "created": run.status["created"],
                "slug": named[2] if named else None,
                "hash8": run.hash8,
                "state": run.state(),
                "parts": len(run._parts()),
                "verdict": result.get("verdict"),
            }
        )
    return pd.DataFrame(lines, columns=["name", "created", "slug", "hash8", "state", "parts", "verdict"])


def _claim(root: Path, slug: str, hash8: str) -> Path:
    """A fresh hidden folder that becomes the run by one rename, under a name no other run has."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")[:-3] + "Z"
        name = f"{stamp}-{slug}-{hash8}"
        path = root / f".{name}.tmp"
        try:
            path.mkdir()
        except FileExistsError:
            time.sleep(0.001)
            continue
        if not (root / name).exists():
            return path
        shutil.rmtree(path)
        time.sleep(0.001)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if not p.name.startswith(".") and (p / "config.json").exists())


def _resolve(path: str | Path, root: Path) -> Path:
    if (Path(path) / "config.json").exists():
        return Path(path).resolve()
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder but not a run: it holds no config.json")
    text, folders = str(path), _folders(root)
    by_hash = re.fullmatch(r"[0-9a-f]{4,8}", text) is not None
    found = [p for p in folders if p.name.startswith(text) or (by_hash and p.name[-8:].startswith(text))]
    if len(found) == 1:
        return found[0].resolve()
    if found:
        raise ValueError(f"{text!r} begins {len(found)} runs: {', '.join(p.name for p in found[:5])}. Give more of it")
    near = difflib.get_close_matches(Path(text).name, [p.name for p in folders], 1, cutoff=0.0)
    hint = f"nearest is {near[0]}" if near else f"{root} holds no runs"
    raise FileNotFoundError(f"no run {text!r}; {hint}")


def _status(state: str, info: Mapping, before: Mapping | None) -> dict:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Kilobytes on Linux, bytes on macOS.
    peak = used.ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)
    own = {
        "state": state,
        "created": before["created"] if before else _now(),
        "updated": _now(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "cpu_s": round(used.ru_utime + used.ru_stime, 3),
        "peak_rss_bytes": peak,
    }
    return {**(before or {}), **info, **own}


def _schema(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Every key of every row in order of appearance; pyarrow alone would read the first row's keys only."""
    names = list(dict.fromkeys(str(k) for row in rows for k in row))
    columns = {n: [_scalar(row.get(n)) for row in rows] for n in names}
    return pa.schema([(n, pa.array(values).type) for n, values in columns.items()])


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def plain(obj: Any, where: str, *, refuse_nan: bool = False) -> Any:
    """The same value in JSON types only. Raises ValueError naming the place of anything JSON cannot hold."""
    obj = _scalar(obj)
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        if math.isfinite(obj):
            return obj
        if refuse_nan:
            raise ValueError(f"{where} is {obj}: a parameter must be a finite number")
        return None
    if isinstance(obj, Path):
        return str(obj)
    if isinstance(obj, Mapping):
        odd = [k for k in obj if not isinstance(k, str)]
        if odd:
            raise ValueError(f"{where} has key {odd[0]!r}: keys must be text to survive JSON")
        return {k: plain(v, f"{where}.{k}", refuse_nan=refuse_nan) for k, v in obj.items()}
    if isinstance(obj, list | tuple):
        return [plain(v, f"{where}[{i}]", refuse_nan=refuse_nan) for i, v in enumerate(obj)]
    raise ValueError(f"{where} is a {type(obj).__name__}: JSON holds text, numbers, lists and mappings only")


def _dump(obj: Any) -> bytes:
    return (json.dumps(obj, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader or a crash sees the old one or the new one, never a part."""
    _replace(path, lambda handle: handle.write(data))


def _replace(path: Path, fill: Callable[[Any], object]) -> None:
    """Fill a temporary file beside `path`, force it to disk, and rename it into place."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as handle:
            fill(handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not readable JSON ({error}). Restore it or leave this run out") from error


def _read_note(note: Path) -> dict:
    return json.loads(note.read_text()) if note.exists() else {}


def _who(note: Path) -> str:
    other = _read_note(note)
    return f"process {other['pid']} on {other['host']} since {other['since']}" if other else "another process"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _nearest(kind: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
    return f"unknown {kind} {name!r}; nearest is {near[0]!r}, all are {', '.join(known)}"
