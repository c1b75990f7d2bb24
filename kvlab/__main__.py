"""`python -m kvlab COMMAND`: one door to every command line. Imports the one that was asked for, nothing before.

Exit codes are those of the command; 2 for an unknown one.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def _search(rest: Sequence[str]) -> int:
    from kvlab.search.__main__ import main

    return main(list(rest))


def _sweep(rest: Sequence[str]) -> int:
    from kvlab.sweep.__main__ import main

    return main(rest)


def _report(rest: Sequence[str]) -> int:
    from kvlab.report.__main__ import main

    return main(rest)


def _bench(rest: Sequence[str]) -> int:
    from kvlab.bench.__main__ import main

    return main(rest)


def _worker(rest: Sequence[str]) -> int:
    from kvlab.worker import main

    return main(list(rest))


def _study(rest: Sequence[str]) -> int:
    from kvlab.study.__main__ import main

    return main(rest)


def _sandbox(rest: Sequence[str]) -> int:
    from kvlab.sandbox.__main__ import main

    return main(rest)


def _ls(rest: Sequence[str]) -> int:
    import argparse

    p = argparse.ArgumentParser(prog="python -m kvlab ls", description="List the runs under a folder, newest last.")
    p.add_argument("root", type=Path, nargs="?", default=Path("runs"), help="folder of run folders (default: runs)")
    p.add_argument("--json", action="store_true", help="print one JSON list")
    args = p.parse_args(rest)
    if not args.root.is_dir():
        print(f"error: no folder {args.root}: name the one that --out named", file=sys.stderr)
        return 2
    from kvlab.runs import listing

    try:
        found = listing(args.root)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(found.to_json(orient="records"))
    elif found.empty:
        print(f"no runs under {args.root}", file=sys.stderr)
    else:
        print(found.fillna("-").to_string(index=False))
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "search": (_search, "find the compression that fits a memory budget, and judge it"),
    "sweep": (_sweep, "judge named caches, or search for the best one, through a notebook"),
    "report": (_report, "show a run: tables, figure, one HTML page"),
    "bench": (_bench, "check and time the engine: identity, bytes, decode, kernels"),
    "worker": (_worker, "help with a search that other processes work on"),
    "study": (_study, "look after what many workers share: ls, status, repair, serve"),
    "sandbox": (_sandbox, "check that generated code can be run safely here"),
    "ls": (_ls, "list runs with their state and verdict"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand over to a command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        from kvlab import __version__

        print(f"kvlab {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, 1, cutoff=0.0)[0]
        print(f"error: unknown command {words[0]!r}; nearest is {near!r}\n\n{_help()}", file=sys.stderr)
        return 2
    return COMMANDS[words[0]][0](words[1:])


def _help() -> str:
    lines = [f"  {name:<8} {line}" for name, (_, line) in COMMANDS.items()]
    head = "usage: python -m kvlab COMMAND [...]\n\nHow far can a model's KV cache be compressed before accuracy stops?"
    return "\n".join([head, "", *lines, "", "Each command has --help. python -m kvlab.COMMAND is the same."])


if __name__ == "__main__":
    sys.exit(main())
