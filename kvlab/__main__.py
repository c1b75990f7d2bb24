"""`python -m kvlab COMMAND`: one door to every command line. Imports the one that was asked for, nothing before.

Exit codes are those of the command; 2 for an unknown one.
"""

import difflib
import sys
from collections.abc import Callable, Sequence

from kvlab.piping import while_read


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
    from kvlab.housekeeping.commands import ls

    return ls(rest)


def _show(rest: Sequence[str]) -> int:
    from kvlab.housekeeping.commands import show

    return show(rest)


def _compare(rest: Sequence[str]) -> int:
    from kvlab.housekeeping.commands import compare

    return compare(rest)


def _reproduce(rest: Sequence[str]) -> int:
    from kvlab.reproduce import main

    return main(rest)


def _gc(rest: Sequence[str]) -> int:
    from kvlab.housekeeping.commands import gc

    return gc(rest)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "search": (_search, "find the compression that fits a memory budget, and judge it"),
    "sweep": (_sweep, "judge named caches, or search for the best one, through a notebook"),
    "report": (_report, "show a run or compare several: tables, figures, one HTML page"),
    "bench": (_bench, "check and time the engine: identity, bytes, decode, kernels"),
    "worker": (_worker, "help with a search that other processes work on"),
    "study": (_study, "look after what many workers share: ls, status, repair, serve"),
    "sandbox": (_sandbox, "check that generated code can be run safely here"),
    "ls": (_ls, "list runs with their state and verdict"),
    "show": (_show, "say what a run is: settings, verdict, counters, files"),
    "compare": (_compare, "compare runs on the items they share"),
    "reproduce": (_reproduce, "score rows of a run again, and say what differs"),
    "gc": (_gc, "give room back: unfinished runs, cached things unused for longest"),
}

# What only prints what lies there: long lists, which people pipe into others.
READ = {"ls", "show", "compare", "gc", "report"}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand over to a command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from kvlab import __version__

        print(f"kvlab {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, 1, cutoff=0.0)[0]
        print(f"error: unknown command {words[0]!r}; nearest is {near!r}\n\n{_help()}", file=sys.stderr)
        return 2
    command, _ = COMMANDS[words[0]]
    return while_read(lambda: command(words[1:])) if words[0] in READ else command(words[1:])


def _help() -> str:
    lines = [f"  {name:<9} {line}" for name, (_, line) in COMMANDS.items()]
    head = "usage: python -m kvlab COMMAND [...]\n\nHow far can a model's KV cache be compressed before accuracy stops?"
    foot = "Each command has --help. python -m kvlab.COMMAND is the same, but for ls, show, compare and gc."
    return "\n".join([head, "", *lines, "", foot])


if __name__ == "__main__":
    sys.exit(main())
