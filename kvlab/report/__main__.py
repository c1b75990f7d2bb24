"""`python -m kvlab.report RUN`: print the report of a run and write its figure and HTML page.

Exit codes: 0 shown, 1 not complete or not readable, 2 no such run or wrong usage.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

_EXAMPLES = """examples:
  python -m kvlab.report 20261129T1934                     the run whose name begins so, under runs/
  python -m kvlab.report runs/<name> --json | jq .verdict  the same as one JSON document
  python -m kvlab.report 3f9a --partial --out look         by hash, unfinished, written elsewhere
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, print, write; returns the exit code."""
    args = _parser().parse_args(argv)
    # After parsing: pandas and matplotlib take a second that --help should not.
    from kvlab.report import document, terminal
    from kvlab.report.files import write
    from kvlab.runs import Run

    try:
        run = Run.open(args.run, root=args.root)
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    try:
        result = document.load(run, partial=args.partial)
        files = write(run, out=args.out, partial=args.partial)
    except (document.IncompleteError, ValueError, OSError) as error:
        return _fail(error, 1)
    if args.json:
        print(json.dumps(_document(run, result, files), indent=1, allow_nan=False, ensure_ascii=False))
    else:
        terminal.show(result, sys.stdout)
        print(f"wrote {', '.join(str(path) for path in files.values())}", file=sys.stderr)
    return 0


def _document(run, result: dict, files: dict[str, Path]) -> dict:
    from kvlab.report import document
    from kvlab.report.frames import tables
    from kvlab.runs import plain

    word, sentence = document.headline(result)
    chosen = document.best(result)
    return plain(
        {
            "schema": "kvlab.report/1",
            "run": run.path.name,
            "state": run.state(),
            "complete": not result.get("partial"),
            "verdict": word,
            "headline": sentence,
            "best": chosen["config_id"] if chosen else None,
            "budget": document.budget_line(result) if result["schema"] != "kvlab.rows/1" else None,
            "tables": {name: frame.to_dict("records") for name, frame in tables(result).items()},
            "notes": document.warnings(result),
            "files": files,
        },
        "report",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.report",
        description="Show a run: verdict, before and after, figure and HTML page.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or a unique beginning of its name or hash")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    parser.add_argument("--out", type=Path, help="write figures and page here instead of into the run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document (kvlab.report/1) on stdout")
    parser.add_argument("--partial", action="store_true", help="show an unfinished run, labelled PARTIAL")
    return parser


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
