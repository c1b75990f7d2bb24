"""`python -m kvlab.report RUN [RUN ...]`: print the report of a run, or of runs beside each other, and write it as one
HTML page and as Markdown.

Exit codes: 0 shown and right; 1 not complete, not readable, or a figure that its rows do not give; 2 no such run, wrong
usage, or runs that must not be compared.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.piping import while_read

if TYPE_CHECKING:
    from kvlab.report.check import Checked
    from kvlab.runs import Run

_EXAMPLES = """examples:
  python -m kvlab.report 20261129T1934                     the run whose name begins so, under runs/
  python -m kvlab.report runs/<name> --json | jq .verdict  the same as one JSON document
  python -m kvlab.report 3f9a 81c2 --out compared          two runs beside each other, on the items they share
  python -m kvlab.report 3f9a --check                      recompute every printed figure from the item rows
  papermill sweeps/fp8_sweep.ipynb </dev/null | python -m kvlab.report

An unfinished run is shown labelled PARTIAL or FAILED, with exit code 1 (0 with --partial)."""

_MOST = 20  # wrong figures named one by one


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, print, write; returns the exit code."""
    args = _parser().parse_args(argv)
    if not args.run:
        return _piped(args)
    # After parsing: pandas and matplotlib take a second that --help should not.
    from kvlab.runs import Run

    try:
        runs = [Run.open(name, root=args.root) for name in args.run]
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    if args.check:
        return _check(runs, args)
    return _one(runs[0], args) if len(runs) == 1 else _several(runs, args)


def _one(run: "Run", args: argparse.Namespace) -> int:
    from kvlab.report import document, terminal
    from kvlab.report.files import write

    try:
        result = document.load(run, partial=True)
        files = write(run, out=args.out, partial=True)
    except (document.IncompleteError, ValueError, OSError) as error:
        return _fail(error, 1)
    if args.json:
        print(json.dumps(_document(run, result, files), indent=1, allow_nan=False, ensure_ascii=False))
    elif args.md:
        print(files["md"].read_text(encoding="utf-8"), end="")
    else:
        terminal.show(result, sys.stdout)
    print(f"wrote {', '.join(str(path) for path in files.values())}", file=sys.stderr)
    return _unfinished([result], args)


def _several(runs: list["Run"], args: argparse.Namespace) -> int:
    from kvlab.report import beside, comparison, document

    try:
        found = comparison.compare(runs, allow_different=args.allow_different)
    except comparison.UnlikeError as error:
        return _fail(error, 2)
    except (document.IncompleteError, ValueError, OSError) as error:
        return _fail(error, 1)
    out = args.out or _beside(runs, args.root)
    try:
        files = beside.write(runs, found, out)
    except OSError as error:
        return _fail(error, 1)
    if args.json:
        print(json.dumps({**found, "files": {k: str(v) for k, v in files.items()}}, indent=1, allow_nan=False))
    elif args.md:
        print(files["md"].read_text(encoding="utf-8"), end="")
    else:
        beside.show(found, sys.stdout)
    print(f"wrote {', '.join(str(path) for path in files.values())}", file=sys.stderr)
    return _unfinished([document.load(run, partial=True) for run in runs], args)


def _unfinished(results: Sequence[dict], args: argparse.Namespace) -> int:
    """1 and a word on stderr where a run is not done, unless that was asked for."""
    states = [str(r["partial"]) for r in results if r.get("partial")]
    if not states:
        return 0
    print(f"not complete: {', '.join(states)}. Resume the run for a result", file=sys.stderr)
    return 0 if args.partial else 1


def _check(runs: list["Run"], args: argparse.Namespace) -> int:
    """Every run; then, of several, the page that compares them, where there is one."""
    from kvlab.report.check import check, check_comparison

    # A program stands on top: sizes at the workload follow from configs, which reports know nothing of.
    from kvlab.search.recount import sizes

    single = args.out if len(runs) == 1 else None
    codes = [_told(run.path.name, lambda run=run: check(run, single, sizes=sizes)) for run in runs]
    if len(runs) > 1:
        out = args.out or _beside(runs, args.root)
        if args.out or (out / "report.html").exists():
            codes.append(_told(out.name, lambda: check_comparison(runs, out)))
        else:
            print(f"no page compares these runs in {out}: nothing to hold against them", file=sys.stderr)
    return max(codes)


def _told(name: str, checked: Callable[[], "Checked"]) -> int:
    """Say what was found, wrong figures first."""
    from kvlab.report.check import sentence
    from kvlab.report.document import IncompleteError

    try:
        found = checked()
    except (IncompleteError, ValueError, KeyError, OSError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        return _fail(ValueError(f"{name} cannot be checked: {why}"), 1)
    for figure in found.wrong[:_MOST]:
        print(f"{name}: {sentence(figure)}")
    if len(found.wrong) > _MOST:
        print(f"{name}: and {len(found.wrong) - _MOST} more")
    if found.code:
        print(f"{name}: {found.code}")
    right = found.figures - len(found.wrong)
    print(f"{name}: {right} of {found.figures} figures are what the rows give")
    return 1 if found.wrong else 0


def _beside(runs: list["Run"], root: Path) -> Path:
    """Where the comparison of these runs lies unless told otherwise."""
    return root / f"comparison-{'-'.join(run.hash8 for run in runs)}"


def _piped(args: argparse.Namespace) -> int:
    """An executed notebook on stdin."""
    if sys.stdin is None or sys.stdin.isatty():
        return _fail(ValueError("name a RUN, or pipe an executed notebook in; --help shows how"), 2)
    from kvlab.report import terminal
    from kvlab.report.notebook import FailedNotebookError, result_of

    try:
        result = result_of(sys.stdin.read())
    except FailedNotebookError as error:
        return _fail(error, 1)
    except ValueError as error:
        return _fail(error, 2)
    if args.json:
        print(json.dumps(result, allow_nan=False, ensure_ascii=False))
    else:
        terminal.show(result, sys.stdout)
    return 0


def _document(run: "Run", result: dict, files: dict[str, Path]) -> dict:
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
        description="Show a run, or several beside each other: verdict, tables, figures, one HTML page.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = "path of a run folder, or a unique beginning of its name or hash; none reads a notebook from stdin"
    parser.add_argument("run", metavar="RUN", nargs="*", help=named)
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    where = "folder for page, Markdown and figures (default: the run folder, or comparison-... under --root)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=where)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    form.add_argument("--md", action="store_true", help="print the Markdown on stdout")
    form.add_argument("--check", action="store_true", help="recompute every printed figure from the item rows")
    parser.add_argument("--partial", action="store_true", help="an unfinished run is what I want: exit code 0")
    allowed = "compare runs of different machines, models, items, margins or workloads, and say so on top"
    parser.add_argument("--allow-different", action="store_true", help=allowed)
    return parser


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(while_read(main))
