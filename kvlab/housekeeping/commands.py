"""The command lines of housekeeping: ls, show, compare, gc. stdout holds the result; nothing heavy before parsing.

Exit codes: 0 done, 1 something could not be read or deleted, 2 no such run, wrong usage, or runs not to be compared.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.housekeeping.room import Plan, Thing
    from kvlab.runs import Run


def ls(rest: Sequence[str]) -> int:
    """List runs, newest last, or what is cached."""
    p = argparse.ArgumentParser(
        prog="python -m kvlab ls", description="List the runs under a folder, newest last, or what is cached."
    )
    p.add_argument("root", type=Path, nargs="?", default=Path("runs"), help="folder of run folders (default: runs)")
    kinds = "models, scores, centres and snapshots that are kept to be used again, longest unused first"
    p.add_argument("--caches", action="store_true", help=kinds)
    p.add_argument("--cache", type=Path, help="the cache folder (default: $KVLAB_CACHE, else ~/.cache/kvlab)")
    p.add_argument("--json", action="store_true", help="print one JSON list")
    args = p.parse_args(rest)
    if args.caches:
        return _ls_caches(args)
    if not args.root.is_dir():
        return _fail(f"no folder {args.root}: name the one that --out named", 2)
    from kvlab.runs import listing

    try:
        found = listing(args.root)
    except ValueError as error:
        return _fail(error, 1)
    if args.json:
        print(found.to_json(orient="records"))
    elif found.empty:
        print(f"no runs under {args.root}", file=sys.stderr)
    else:
        print(found.fillna("-").to_string(index=False))
    return 0


def _ls_caches(args: argparse.Namespace) -> int:
    from kvlab.folders import cache_root
    from kvlab.housekeeping.room import caches

    root = cache_root(args.cache)
    things = [thing for thing, _ in caches(root).staying]
    if args.json:
        print(json.dumps([_described(thing) for thing in things]))
        return 0
    _list(things)
    total = sum(thing.bytes for thing in things)
    print(f"{len(things)} things, {_size(total)}, in {root}", file=sys.stderr)
    return 0


def show(rest: Sequence[str]) -> int:
    """Say what a run is."""
    p = argparse.ArgumentParser(
        prog="python -m kvlab show",
        description="Say what a run is: settings, state, verdict, counters, files; or a config it scored. Reads only.",
    )
    _named(p, "RUN", 1)
    one = "print this config instead, as TOML that can be run again: an id, the beginning of one, or a label"
    p.add_argument("--config", metavar="NAME", help=one)
    p.add_argument("--json", action="store_true", help="print one JSON document (kvlab.show/1, or the config)")
    args = p.parse_args(rest)
    from kvlab.housekeeping import shown
    from kvlab.runs import Run, plain

    try:
        run = Run.open(args.run[0], root=args.root)
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    if args.config is not None:
        return _show_config(run, args)
    try:
        found = plain(shown.about(run), "show")
    except (OSError, ValueError, KeyError) as error:
        return _fail(error, 1)
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else shown.text(found))
    return 0


def _show_config(run: "Run", args: argparse.Namespace) -> int:
    from kvlab.recorded import named

    try:
        config = named(run, args.config)
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    print(f"{config.to_json()}\n" if args.json else f"# {config.label}, {config.id}\n{config.to_toml()}", end="")
    return 0


def compare(rest: Sequence[str]) -> int:
    """Paired differences of runs on the items they share."""
    p = argparse.ArgumentParser(
        prog="python -m kvlab compare",
        description="Compare runs on the items they share: paired differences with 90% intervals, flips, bytes. Reads "
        "only; python -m kvlab.report RUN RUN writes it as a page.",
    )
    _named(p, "RUN", "+")
    one = "a config of each run, by id, label or format name (default: each run's best, or the first judged)"
    p.add_argument("--config", action="append", default=[], metavar="NAME", help=f"{one}; give it once for each run")
    allowed = "compare runs of different machines, models, items, margins or workloads, and say so on top"
    p.add_argument("--allow-different", action="store_true", help=allowed)
    p.add_argument("--json", action="store_true", help="print one JSON document (kvlab.comparison/1)")
    args = p.parse_args(rest)
    if len(args.run) < 2:
        return _fail(f"a comparison needs at least two runs, got {len(args.run)}", 2)
    from kvlab.report import beside
    from kvlab.report.comparison import compare as compared
    from kvlab.runs import Run, plain

    try:
        runs = [Run.open(name, root=args.root) for name in args.run]
        found = compared(runs, allow_different=args.allow_different, configs=args.config)
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    if args.json:
        print(json.dumps(plain(found, "comparison"), indent=1, ensure_ascii=False))
    else:
        beside.show(found, sys.stdout)
    return 0 if all(about["state"] == "done" for about in found["runs"]) else 1


_GC = """examples:
  python -m kvlab gc                                what could go; deletes nothing
  python -m kvlab gc --delete --keep 3f9a           the same, deleted, but for one run
  python -m kvlab gc caches --limit 2GB --delete    the longest unused cached things, until 2 GB are left

A run that is being written is never deleted, nor one that another machine wrote last and may still write."""


def gc(rest: Sequence[str]) -> int:
    """Give room back, or say what could go."""
    p = argparse.ArgumentParser(
        prog="python -m kvlab gc",
        description="Give room back: runs that ended without a result, cached things unused for longest. Without "
        "--delete it only says what would go.",
        epilog=_GC,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("what", nargs="?", choices=("all", "runs", "caches"), default="all", help="(default: all)")
    p.add_argument("--delete", action="store_true", help="delete; without it nothing is")
    p.add_argument("--dry-run", action="store_true", help="only say what would go: what happens without --delete too")
    p.add_argument("--root", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    p.add_argument("--keep", action="append", default=[], metavar="RUN", help="a run to keep; may be given many times")
    p.add_argument("--older", type=float, default=7.0, metavar="DAYS", help="runs left alone for so long (default 7)")
    p.add_argument("--done", action="store_true", help="finished runs too")
    p.add_argument("--cache", type=Path, help="the cache folder (default: $KVLAB_CACHE, else ~/.cache/kvlab)")
    p.add_argument("--limit", default="10GB", metavar="SIZE", help="most that caches may take: 2GB, 512MiB (10GB)")
    p.add_argument("--unused", type=float, metavar="DAYS", help="cached things unused for so long go too")
    p.add_argument("--json", action="store_true", help="print one JSON document (kvlab.gc/1)")
    args = p.parse_args(rest)
    if args.delete and args.dry_run:
        return _fail("--delete and --dry-run exclude each other", 2)
    from kvlab.housekeeping.room import carry_out

    try:
        plan = _plan(args)
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    gone, left = carry_out(plan) if args.delete else (list(plan.going), [])
    if args.json:
        print(json.dumps(_gc_document(args, plan, gone, left), indent=1))
    else:
        _show_gc(args, plan, gone)
    for thing, why in left:
        print(f"not deleted: {thing.kind} {thing.name}: {why}", file=sys.stderr)
    return 1 if left else 0


def _plan(args: argparse.Namespace) -> "Plan":
    from kvlab.folders import cache_root
    from kvlab.housekeeping import room
    from kvlab.search.sizes import parse_budget

    if min(args.older, args.unused or 0.0) < 0:
        raise ValueError("--older and --unused are days, at least 0")
    plans = []
    if args.what != "caches" and args.root != Path("runs") and not args.root.is_dir():
        raise ValueError(f"no folder {args.root}: name the one that --out named")
    if args.what in ("all", "runs"):
        plans.append(room.runs(args.root, keep=args.keep, older_days=args.older, done=args.done))
    if args.what in ("all", "caches"):
        limit = parse_budget(args.limit)
        plans.append(room.caches(cache_root(args.cache), limit_bytes=limit, unused_days=args.unused))
    return room.Plan(tuple(t for p in plans for t in p.going), tuple(s for p in plans for s in p.staying))


def _gc_document(
    args: argparse.Namespace, plan: "Plan", gone: list["Thing"], left: list[tuple["Thing", str]]
) -> dict[str, Any]:
    return {
        "schema": "kvlab.gc/1",
        "deleted": args.delete,
        "bytes": sum(t.bytes for t in gone),
        "going": [_described(thing) for thing in gone],
        "staying": [{"kind": t.kind, "name": t.name, "bytes": t.bytes, "why": w} for t, w in [*plan.staying, *left]],
    }


def _described(thing: "Thing") -> dict[str, Any]:
    return {"kind": thing.kind, "name": thing.name, "bytes": thing.bytes, "unused_days": thing.unused_s / 86_400}


def _list(things: Sequence["Thing"]) -> None:
    for thing in things:
        state = f", {thing.why}" if thing.why else ""
        days = f"unused for {thing.unused_s / 86_400:.1f} days"
        print(f"{_size(thing.bytes):>22}  {thing.kind:<9} {thing.name}{state}, {days}")


def _size(count: int) -> str:
    from kvlab.report.document import size

    return size(count)


def _show_gc(args: argparse.Namespace, plan: "Plan", gone: list["Thing"]) -> None:
    _list(gone)
    for thing, why in plan.staying:
        if thing.kind == "run":
            print(f"keeps {thing.name}: {why}", file=sys.stderr)
    kept = sum(thing.bytes for thing, _ in plan.staying)
    total = _size(sum(thing.bytes for thing in gone))
    verb = "deleted" if args.delete else "would be deleted; add --delete to do it"
    print(f"{len(gone)} things, {total}, {verb}. {_size(kept)} stay.")


def _named(p: argparse.ArgumentParser, metavar: str, count: int | str) -> None:
    named = "path of a run folder, or a unique beginning of its name or hash"
    p.add_argument("run", metavar=metavar, nargs=count, help=named)
    p.add_argument("--root", type=Path, default=Path("runs"), help="where runs lie (default: runs)")


def _fail(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
