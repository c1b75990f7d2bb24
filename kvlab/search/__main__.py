"""Command line of the search. Parses and checks before anything heavy is imported; stdout holds the result only."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.evals import sets
from kvlab.evals.sets import PUBLIC, SUITES
from kvlab.search.settings import LAYERS, MODES, Request, UsageError, budget, names, writable

if TYPE_CHECKING:
    from kvlab.runs import Run

EPILOG = """\
examples:
  python -m kvlab.search --budget-gb 6
  python -m kvlab.search --budget-gb 6GiB --context 32768 --concurrency 16 --minutes 20 --json
  python -m kvlab.search --budget-gb 24 --mode smallest
  python -m kvlab.search --resume auto

exit codes: 0 judged; 1 failed; 2 bad request; 3 nothing fits the budget; 4 judged, but some trials failed;
130 interrupted and saved."""
DEFAULTS = {f: getattr(Request(budget_bytes=1), f) for f in Request.__dataclass_fields__ if f != "budget_bytes"}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m kvlab.search",
        description="Find the KV-cache compression that fits a memory budget and judge whether accuracy holds.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--budget-gb", metavar="SIZE", help="memory for K and V of the whole workload: 6 (GB), 6GiB, 800MB")
    p.add_argument(
        "--mode",
        metavar="|".join(MODES),
        help="the best score within the budget (default), the best of every size up to it, or the smallest that holds",
    )
    p.add_argument(
        "--layers",
        metavar="|".join(LAYERS),
        help="auto (default): formats may differ by layer, as measured once for a model; uniform: they may not",
    )
    model = p.add_argument_group("model and workload")
    model.add_argument("--model", help=f"alias, hub id, folder or .gguf file (default {DEFAULTS['model']})")
    model.add_argument("--context", type=int, help=f"tokens per conversation (default {DEFAULTS['context']})")
    model.add_argument("--concurrency", type=int, help=f"conversations at once (default {DEFAULTS['concurrency']})")
    size = p.add_argument_group("how much to run")
    size.add_argument("--families", metavar="A,B", help="task families (default: all that the sets have)")
    size.add_argument(
        "--sets", metavar="A,B", help=f"suites and sets: {', '.join((*SUITES, *PUBLIC))}, gsm8k=FILE, mine.toml"
    )
    size.add_argument("--minutes", type=float, help=f"planned time, sizes everything (default {DEFAULTS['minutes']:g})")
    size.add_argument("--trials", type=int, help="configs to try, instead of what fits the minutes")
    size.add_argument("--items", type=int, help="confirmation items per family, instead of what fits the minutes")
    size.add_argument("--generate", action="store_true", default=None, help="judge decoded answers, not forced ones")
    size.add_argument(
        "--allow-code-exec", action="store_true", default=None, help="with --generate: run generated code, sandboxed"
    )
    size.add_argument("--samples", type=int, help="with --generate: answers drawn of each item (default 1), for pass@k")
    size.add_argument("--temperature", type=float, help="with --generate: 0 (default) takes the likeliest token")
    size.add_argument("--seed", type=int, help=f"seed of items and sampler (default {DEFAULTS['seed']})")
    out = p.add_argument_group("output")
    out.add_argument("--out", type=Path, default=Path("runs"), help="folder for run folders (default runs)")
    out.add_argument("--resume", metavar="RUN", help="go on with a run: its folder, a unique beginning, or auto")
    out.add_argument("--dry-run", action="store_true", help="show the plan, bytes and time; run nothing")
    out.add_argument("--storage", metavar="URL", help="let python -m kvlab.worker help: journal:FILE, postgresql://...")
    out.add_argument("--study", help="with --storage: what to call the study (default: as the run)")
    out.add_argument("--no-memo", action="store_true", help="score again what earlier runs of this model scored")
    out.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    out.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run a search; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        given = _given(args)
        writable(args.out)
        if args.study and not args.storage:
            raise UsageError(f"--study {args.study} names a study of a --storage: say which, such as journal:study.log")
        if not args.resume and "budget_bytes" not in given:
            raise UsageError("--budget-gb is needed: how much memory K and V may take, such as 6 or 6GiB")
        request = None if args.resume else Request(**given)
    except UsageError as error:
        return _usage(error)
    return _run(args, given, request)


def _usage(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The request fields that were on the command line."""
    plain = (
        "model",
        "context",
        "concurrency",
        "minutes",
        "trials",
        "items",
        "seed",
        "generate",
        "allow_code_exec",
        "samples",
        "temperature",
        "mode",
        "layers",
    )
    given = {n: getattr(args, n) for n in plain if getattr(args, n) is not None}
    if args.sets is not None:
        given["sets"] = names(args.sets)
        try:
            given["families"] = sets.families_of(given["sets"])
        except ValueError as error:
            raise UsageError(f"--sets: {error}") from None
    if args.families is not None:
        given["families"] = names(args.families)
    if args.budget_gb is not None:
        given["budget_bytes"] = budget(args.budget_gb)
    return given


def _run(args: argparse.Namespace, given: dict[str, Any], request: Request | None) -> int:
    # Heavy from here on: torch, transformers, optuna.
    from kvlab.attach import UnsupportedModelError
    from kvlab.book import Interrupted, UnscorableError
    from kvlab.models import BrokenBaseline, ModelError
    from kvlab.runs import BusyError, Run
    from kvlab.sandbox.refused import SandboxUnavailable
    from kvlab.search import engine, sharing
    from kvlab.study.storages import StorageError, open_storage

    run: Run | None = None
    try:
        storage = open_storage(args.storage) if args.storage else None
        if request is None:
            run = resumed = _resumed(args, given)
            request = Request.from_dict(resumed.config["request"])
        if storage and request.generate:
            raise UsageError("--generate decodes in one process: leave --storage out, workers only force answers")
        session = engine.open_session(request)
        if args.no_memo:
            session.memo = None
        if args.dry_run:
            _show_plan(engine.dry_run(session), args.json)
            return 0
        if run is None:
            run = engine.start(session, args.out)
        else:
            engine.check_resumable(session, run)
        print(f"run: {run.path}\n{engine.forecast(run)}", file=sys.stderr)
        share = sharing.start(session, run, storage, args.study) if storage else None
        if share:
            print(f"study: {share.board.name}; others join with: {share.invitation}", file=sys.stderr)
        result = engine.execute(session, run, quiet=args.quiet, share=share and share.subject)
        if share:
            share.board.seal()
    except (UsageError, StorageError, ModelError, UnsupportedModelError, FileNotFoundError, BusyError) as error:
        return _usage(error)
    except SandboxUnavailable as error:
        return _usage(error)
    except (Interrupted, KeyboardInterrupt):
        where = f"; go on with: python -m kvlab.search --resume {run.path}" if run is not None else ""
        print(f"interrupted{', saved' + where if where else ''}", file=sys.stderr)
        return 130
    except (BrokenBaseline, UnscorableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _show(run, result, args.json)
    if any(t["state"] == "failed" for t in result["trials"]):
        return 4
    return 0 if result["finalists"] else 3


def _resumed(args: argparse.Namespace, given: dict[str, Any]) -> "Run":
    """The run to go on with; refuses explicit flags that contradict it."""
    from kvlab.runs import Run, listing

    if args.resume == "auto":
        runs = listing(args.out)
        open_runs = [n for n, s in zip(runs["name"], runs["state"], strict=True) if s != "done" and "-search-" in n]
        if not open_runs:
            raise UsageError(f"--resume auto: no unfinished search under {args.out}; start one with --budget-gb")
        run = Run.open(args.out / open_runs[-1])
    else:
        try:
            run = Run.open(args.resume, root=args.out)
        except ValueError as error:
            raise UsageError(f"--resume: {error}") from None
    if run.config.get("schema") != "kvlab.search/1":
        raise UsageError(f"{run.path.name} is not a search; resume works on runs of python -m kvlab.search")
    different = Request.from_dict(run.config["request"]).differences(given)
    if different:
        raise UsageError(f"--resume {run.path.name} contradicts the run: {'; '.join(different)}. Leave these flags out")
    return run


def _show_plan(plan: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(plan, allow_nan=False))
        return
    from kvlab.search.sizes import human

    load = plan["workload"]
    print(f"{plan['model']['name']}, {load['context']} tokens x {load['concurrency']}, cache {plan['mode']}")
    print(f"budget {human(plan['budget_bytes'])}; uncompressed 16 bit needs {human(plan['raw_workload_bytes'])}")
    for name, row in plan["anchors"].items():
        fits = "fits" if row["feasible"] else "over"
        print(f"  {name:<8} {human(row['workload_bytes']):>9}  {fits}  {row['label']}")
    s, m = plan["sizes"], plan["margin"]
    if s["layer_items"]:
        print(
            f"tell layers apart on {s['layer_items']} items per family, {s['layer_formats']} formats of K and V: ",
            end="",
        )
        print(f"{plan['layer_rows']} scores not known yet")
    print(f"search {s['trials']} trials on up to {s['search_items']} items per family, then confirm on ", end="")
    print(f"{s['confirm_items']} fresh ones; margin {m['value_points']:g} points: {m['rule']}")
    print(f"about {plan['estimated_s']} s")
    for note in plan["notes"]:
        print(f"note: {note}")


def _show(run: Any, result: dict[str, Any], as_json: bool) -> None:
    from kvlab.report import terminal
    from kvlab.report.files import write

    paths = write(run)
    if as_json:
        print(json.dumps(json.loads((run.path / "result.json").read_text()), allow_nan=False))
    else:
        terminal.show(result, sys.stdout)
    print(f"report: {paths['html']}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
