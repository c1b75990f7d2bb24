"""`python -m kvlab study ls|status|repair|serve`: look after the studies of a storage.

Exit codes: 0 done; 2 refused, or the storage cannot be used; 3 the study is over and nothing of it is feasible.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.study.board import Board

EPILOG = """\
examples:
  python -m kvlab study ls --storage journal:study.log
  python -m kvlab study status NAME --storage journal:study.log --json
  python -m kvlab study repair NAME --storage postgresql://kvlab@host/kvlab
  python -m kvlab study serve --storage postgresql://kvlab@host/kvlab --port 13000"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m kvlab study",
        description="Look after studies that many workers share.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="{ls,status,repair,serve}")
    ls = commands.add_parser("ls", help="studies, and how many trials of each state")
    status = commands.add_parser("status", help="one study: who works on what, what failed and why, the best")
    repair = commands.add_parser("repair", help="give back trials whose worker is gone")
    serve = commands.add_parser("serve", help="a gRPC proxy before PostgreSQL, for hundreds of workers")
    for command in (status, repair):
        command.add_argument("study", help="name, or a unique beginning of it")
    for command in (ls, status, repair, serve):
        command.add_argument("--storage", required=True, metavar="URL", help="journal:FILE or postgresql://...")
    for command in (ls, status, repair):
        command.add_argument("--json", action="store_true", help="print one JSON document")
    repair.add_argument("--now", action="store_true", help="do not watch for a lease first: no worker is running")
    repair.add_argument("--failed", action="store_true", help="post failed trials once more, too")
    serve.add_argument("--host", default="localhost", help="address to listen at (localhost)")
    serve.add_argument("--port", type=int, default=13000, help="port to listen at (13000)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        return {"ls": _ls, "status": _status, "repair": _repair, "serve": _serve}[args.command](args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _board(args: argparse.Namespace) -> "Board":
    from kvlab.study.board import Board, find
    from kvlab.study.storages import open_storage

    storage = open_storage(args.storage)
    return Board(storage, find(storage, args.study))


def _ls(args: argparse.Namespace) -> int:
    from kvlab.study.storages import open_storage
    from kvlab.study.summary import listing

    rows = listing(open_storage(args.storage))
    if args.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        counted = ", ".join(f"{n} {state}" for state, n in row.items() if isinstance(n, int) and n)
        print(f"{row['study']}  {row['objective']}  {counted or 'nothing posted'}")
    if not rows:
        print("no studies", file=sys.stderr)
    return 0


def _status(args: argparse.Namespace) -> int:
    from kvlab.study.summary import summary

    found = summary(_board(args))
    print(json.dumps(found, allow_nan=False)) if args.json else _show(found)
    waiting = found["trials"]["waiting"] + found["trials"]["running"]
    return 3 if found["sealed"] and not waiting and found["nearest_miss"] else 0


def _show(found: dict[str, Any]) -> None:
    counted = ", ".join(f"{n} {state}" for state, n in found["trials"].items() if n)
    print(f"{found['study']} ({found['objective']}): {counted or 'nothing posted'}")
    for row in found["running"]:
        print(f"  trial {row['number']}: {row['owner']}, attempt {row['attempt']}, renewed {row['renewed']}")
    for row in found["failed"]:
        print(f"  trial {row['number']} failed ({row['kind']}): {row['said']} [{json.dumps(row['config'])[:200]}]")
    if best := found["best"]:
        print(f"best feasible: trial {best['number']}, {best['value']:g} [{json.dumps(best['config'])[:200]}]")
    elif miss := found["nearest_miss"]:
        print(f"no feasible setting; nearest is trial {miss['number']}, over by {miss['violation']:g}")


def _repair(args: argparse.Namespace) -> int:
    from kvlab.study.board import LEASE_S

    board = _board(args)
    board.look()
    given = board.reap(at_once=args.now)
    watch = board.longest_lease(LEASE_S)
    until = time.monotonic() + watch
    if board.running() and not args.now:
        print(f"watching {board.running()} running trials for {watch:.0f} s", file=sys.stderr)
    while board.running() and time.monotonic() <= until + 1:
        time.sleep(min(1.0, watch / 10))
        board.look()
        given += board.reap()
    again = board.again() if args.failed else []
    done = {"study": board.name, "given_back": sorted(set(given)), "posted_again": again, "running": board.running()}
    if args.json:
        print(json.dumps(done))
    else:
        print(f"{len(done['given_back'])} given back, {len(again)} posted again, {done['running']} at work")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from optuna.storages import run_grpc_proxy_server

    from kvlab.study.storages import served

    run_grpc_proxy_server(served(args.storage).cached, host=args.host, port=args.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
