"""`python -m kvlab.sweep NAME`: run a sweep notebook, keep it and an HTML copy in the run folder, print the verdicts.

stdout holds the result only; progress goes to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvlab.sweep.catalog import SWEEPS
from kvlab.sweep.places import default_root, notebook_of

_LINES = "\n".join(f"  {name:<11} {sweep.what}" for name, sweep in SWEEPS.items())
_EPILOG = f"""sweeps:
{_LINES}

examples:
  python -m kvlab.sweep fp8
  python -m kvlab.sweep fp8 -p formats fp8_e4m3,int8 -p items 128 --out results
  python -m kvlab.sweep eviction -p formats int8 -p scorers h2o,snapkv -p keep 90%,75%
  python -m kvlab.sweep sweet_spot -p budget_gb 4 -p minutes 20
  papermill --help-notebook sweeps/fp8_sweep.ipynb          every parameter with its default

exit codes: 0 judged; 1 failed; 2 bad request; 3 nothing fits the budget; 4 judged, but some configs could not be;
130 interrupted and saved.
The same command again goes on with an unfinished run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sweep; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        notebook = notebook_of(args.sweep)
    except (ValueError, FileNotFoundError) as error:
        return _fail(str(error), 2)
    # Heavy from here on: torch, papermill.
    from kvlab.search.settings import UsageError, writable
    from kvlab.sweep.settings import config_of

    given = dict(args.parameters)
    if args.out is not None:
        if "out" in given:
            return _fail(f"--out {args.out} and -p out {given['out']} both name the folder: leave one out", 2)
        given["out"] = str(args.out)
    try:
        config = config_of(args.sweep, given)
        root = Path(config.out).expanduser().absolute() if config.out else default_root()
        writable(root)
    except UsageError as error:
        return _fail(str(error), 2)
    from kvlab.sweep.execution import execute

    typed = config.to_params()
    params = {name: typed[name] for name in given} | {"out": str(root)}
    try:
        outcome = execute(notebook, params, root, html=args.html)
    except KeyboardInterrupt:
        return _fail("interrupted before anything ran", 130)
    if outcome.run is None:
        hint = "; run the same command again to go on" if outcome.code != 2 else ""
        return _fail(f"{outcome.why}. The notebook so far: {outcome.notebook}{hint}", outcome.code)
    if args.json:
        print(json.dumps(dict(outcome.run.result), allow_nan=False))
    else:
        from kvlab.report import terminal

        terminal.show(outcome.run.result, sys.stdout)
    made = [outcome.notebook, *([outcome.html] if outcome.html else []), outcome.run.path / "report.html"]
    print(f"wrote {', '.join(map(str, made))}", file=sys.stderr)
    return outcome.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.sweep",
        description="Run a sweep notebook: named caches judged on fresh items, or the search for the best one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweep", metavar="NAME", help="which sweep, see below")
    parser.add_argument(
        "-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set a parameter"
    )
    parser.add_argument("--out", type=Path, help="folder for run folders (default: runs/ of the checkout)")
    parser.add_argument(
        "--html", action=argparse.BooleanOptionalAction, default=True, help="also write the notebook as one HTML page"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document instead of tables")
    return parser


def _fail(message: str, code: int) -> int:
    print(f"error: {message}" if code != 130 else message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
