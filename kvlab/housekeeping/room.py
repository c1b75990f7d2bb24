"""What could go to give room back: runs that ended without a result, and cached things that are made again when needed.

A plan first, then its execution. A run that is being written, on whatever machine, is never in a plan; neither is what
was asked to be kept, nor anything in the cache folder that kvlab did not put there.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from kvlab.runs import BusyError, Run, listing

# Kinds of cached things; each is made again from what it is named by.
CACHED = ("models", "scores", "centres", "snapshots")
UNFINISHED = ("interrupted", "failed", "partial")
_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """Something that takes room. `unused_s` is the time since it was last written or read, `why` the reason to go."""

    kind: str  # "run", or one of CACHED
    name: str
    paths: tuple[Path, ...]
    bytes: int
    unused_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes and what stays, and why it stays where that was not obvious."""

    going: tuple[Thing, ...]
    staying: tuple[tuple[Thing, str], ...]

    @property
    def bytes(self) -> int:
        return sum(thing.bytes for thing in self.going)


def runs(root: Path, *, keep: Sequence[str] = (), older_days: float = 7.0, done: bool = False) -> Plan:
    """Runs under `root` that ended without a result and were left alone for so many days; with `done` all that ended.

    `keep` names runs as `Run.open` takes them. Raises FileNotFoundError or ValueError for a name that is no run: a
    slip in it must not cost the run that was meant.
    """
    kept = {Run.open(name, root=root).path for name in keep}
    going, staying = [], []
    for name in listing(root)["name"]:
        path = root / name
        if path.is_symlink():
            continue  # what it points to lies elsewhere, and is not ours to judge
        run = Run(path)
        thing = _thing("run", name, (path,), run.state())
        why = _why_kept(run, thing, kept, older_days, done)
        if why:
            staying.append((thing, why))
        else:
            going.append(thing)
    return Plan(tuple(going), tuple(staying))


def _why_kept(run: Run, thing: Thing, kept: set[Path], older_days: float, done: bool) -> str:
    if run.path.resolve() in kept:
        return "asked to be kept"
    if thing.why == "running":
        return "being written"
    if thing.why == "done" and not done:
        return "has a result"
    if thing.unused_s < older_days * _DAY:
        return f"younger than {older_days:g} days"
    return ""


def caches(root: Path, *, limit_bytes: int | None = None, unused_days: float | None = None) -> Plan:
    """Cached things unused for so many days, then the longest unused until the rest fits `limit_bytes`."""
    found = sorted(_cached(root), key=lambda thing: -thing.unused_s)
    total, going, staying = sum(thing.bytes for thing in found), [], []
    for thing in found:
        old = unused_days is not None and thing.unused_s >= unused_days * _DAY
        over = limit_bytes is not None and total > limit_bytes
        if not (old or over):
            staying.append((thing, "fits"))
            continue
        if _in_use(thing):
            staying.append((thing, "being made"))
            continue
        total -= thing.bytes
        going.append(thing)
    return Plan(tuple(going), tuple(staying))


def carry_out(plan: Plan) -> tuple[list[Thing], list[tuple[Thing, str]]]:
    """Delete what a plan names; what went, and what stayed because it had come into use or could not be deleted."""
    gone: list[Thing] = []
    left: list[tuple[Thing, str]] = []
    for thing in plan.going:
        try:
            _delete_run(thing) if thing.kind == "run" else _delete(thing)
        except (BusyError, OSError) as error:
            left.append((thing, str(error)))
        else:
            gone.append(thing)
    return gone, left


def _delete_run(thing: Thing) -> None:
    """Under the run's own lock, and out of sight in one step: a writer that comes now finds no run."""
    (path,) = thing.paths
    run, hidden = Run(path), path.with_name(f".{path.name}.gone")
    if run.state() == "running":
        raise BusyError(f"{path.name} is being written now")
    with run.lock():
        path.rename(hidden)
    shutil.rmtree(hidden)


def _delete(thing: Thing) -> None:
    for path in thing.paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _cached(root: Path) -> Iterator[Thing]:
    for kind in CACHED:
        folder = root / kind
        held: dict[str, list[Path]] = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if not path.name.startswith("."):
                # A snapshot and its hash are two files of one name.
                held.setdefault(path.name if path.is_dir() else path.stem, []).append(path)
        yield from (_thing(kind, name, tuple(paths)) for name, paths in held.items())


def _in_use(thing: Thing) -> bool:
    """Whether some process is converting this model now."""
    lock = thing.paths[0].with_name(f".{thing.paths[0].name}.lock")
    if thing.kind != "models" or not lock.exists():
        return False
    try:
        with filelock.FileLock(lock, timeout=0):
            return False
    except filelock.Timeout:
        return True


def _thing(kind: str, name: str, paths: tuple[Path, ...], why: str = "") -> Thing:
    size, used = 0, 0.0
    for path in paths:
        for file in [path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else [])]:
            with contextlib.suppress(FileNotFoundError):  # a writer may rename its files meanwhile
                stat = file.lstat()
                size += stat.st_size if file.is_file() else 0
                used = max(used, _used(kind, file, stat))
    return Thing(kind=kind, name=name, paths=paths, bytes=size, unused_s=max(0.0, time.time() - used), why=why)


def _used(kind: str, file: Path, stat: os.stat_result) -> float:
    """When something was last of use: a run when it was written, a cached thing when it was read too.

    Whoever asks whether a run is held touches its lock, so that says nothing; neither does its folder.
    """
    if kind == "run":
        return stat.st_mtime if file.is_file() and not file.name.startswith(".") else 0.0
    return max(stat.st_mtime, stat.st_atime if file.is_file() else 0.0)
