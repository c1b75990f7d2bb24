"""`python -m kvlab.worker --study NAME --storage URL`: take part in a study from any number of machines.

Joins a study that `python -m kvlab.search --storage URL` started, or makes and joins a simulated one. Parses and checks
before anything heavy is imported; progress on stderr, one JSON line about what it did on stdout.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from kvlab.study.board import Board
    from kvlab.study.storages import Storage
    from kvlab.study.unit import Objective

EPILOG = """\
examples:
  python -m kvlab.search --budget-gb 6 --storage journal:study.log   starts a search and says what its study is called
  python -m kvlab.worker --study NAME --storage journal:study.log    joins it on the same machine
  python -m kvlab.worker --study NAME --storage postgresql://kvlab@host/kvlab    joins one across machines
  python -m kvlab.worker --study try --storage journal:try.log --simulate --trials 40
  python -m kvlab.worker --study NAME --storage URL --workers 64 --recipe slurm > workers.sbatch

exit codes: 0 the study is over, or nothing came for a long time; 2 refused, or the storage or model cannot be used;
130 stopped, work under way given back."""


class RefusedError(ValueError):
    """This process may not take part; the message says what differs and what would do."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m kvlab.worker",
        description="Work on a study beside any number of other processes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--study", required=True, help="name of the study, or a unique beginning of it")
    p.add_argument("--storage", required=True, metavar="URL", help="journal:FILE, postgresql://..., grpc://HOST:PORT")
    p.add_argument("--model", help="where the study's model lies on this machine, if not where the study says")
    p.add_argument("--threads", type=int, help="torch's threads, if not as many as the study says")
    p.add_argument("--lease", type=float, default=60.0, metavar="S", help="seconds until a silent worker is dead (60)")
    p.add_argument("--idle", type=float, default=30.0, metavar="MIN", help="leave when nothing came for so long (30)")
    p.add_argument("--quiet", action="store_true", help="no progress on stderr")
    own = p.add_argument_group("a simulated study, for trying out a storage")
    own.add_argument("--simulate", action="store_true", help="make the study if it does not exist")
    own.add_argument("--trials", type=int, default=40, help="distinct configs (40)")
    own.add_argument("--seconds", type=float, default=0.0, help="how long one takes (0)")
    own.add_argument("--seed", type=int, default=0, help="which configs (0)")
    launch = p.add_argument_group("launching many")
    launch.add_argument("--recipe", choices=("shell", "slurm", "k8s"), help="print how to start --workers of them")
    launch.add_argument("--workers", type=int, default=4, help="with --recipe: how many (4)")
    launch.add_argument("--gpu", action="store_true", help="with --recipe: one GPU each")
    launch.add_argument("--memory-gb", type=int, default=8, help="with --recipe: for each (8)")
    launch.add_argument("--minutes", type=int, default=240, help="with --recipe slurm, k8s: time limit (240)")
    launch.add_argument("--image", help="with --recipe k8s: container image that has kvlab")
    return p


def main(argv: list[str] | None = None) -> int:
    """Take part, or print a recipe; returns the exit code."""
    args = parser().parse_args(argv)
    from kvlab.study import recipes

    try:
        for name, least in (("lease", 0.2), ("idle", 0.0), ("workers", 1), ("memory_gb", 1), ("minutes", 1)):
            if getattr(args, name) < least:
                raise RefusedError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
        if args.recipe:
            print(recipes.render(args.recipe, _launch(args)), end="")
            return 0
        return _work(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("aborted; what was under way goes back when its lease has run out", file=sys.stderr)
        return 130


def _line(text: str, stream: TextIO) -> None:
    """One line in one write: many workers share a log, and unbuffered, as containers like it, `print` ends a line with
    a write of its own."""
    stream.write(f"{text}\n")
    stream.flush()


def _launch(args: argparse.Namespace) -> Any:
    from kvlab.study.recipes import Launch

    return Launch(
        study=args.study,
        storage=args.storage,
        workers=args.workers,
        gpu=args.gpu,
        memory_gb=args.memory_gb,
        minutes=args.minutes,
        image=args.image or "",
        model=args.model or "",
    )


def _work(args: argparse.Namespace) -> int:
    from kvlab.stopping import StopFlag
    from kvlab.study.loop import work
    from kvlab.study.storages import open_storage

    with StopFlag() as stop:
        storage = open_storage(args.storage)
        board = _joined(args, storage)
        spec = board.spec()
        kind = spec.get("objective")
        if kind not in OBJECTIVES:
            raise RefusedError(f"study {board.name!r} is about {kind!r}; this kvlab knows {', '.join(OBJECTIVES)}")
        objective = OBJECTIVES[kind](board, spec, args)

        def say(line: str) -> None:
            if not args.quiet:
                _line(f"{board.me}: {line}", sys.stderr)

        say(f"joined {board.name}")
        tally = work(board, objective, stop=stop, idle_s=60 * args.idle, say=say)
    done = {"study": board.name, "worker": board.me, "units": tally.units, "reaped": tally.reaped, "why": tally.why}
    _line(json.dumps(done), sys.stdout)
    return 130 if tally.why == "stopped" else 0


def _joined(args: argparse.Namespace, storage: "Storage") -> "Board":
    """The study's board; of a simulated one that does not exist, made and filled here."""
    from kvlab.study import board as boards
    from kvlab.study import simulated

    if not args.simulate:
        return boards.Board(storage, boards.find(storage, args.study), lease_s=args.lease)
    settings = simulated.Settings(trials=args.trials, seconds=args.seconds, seed=args.seed)
    name = f"{args.study}-{simulated.space_hash()}"
    made = boards.create(storage, name, settings.to_dict())
    board = boards.Board(storage, name, lease_s=args.lease)
    other, asked = board.spec(), settings.to_dict()
    different = [f"{k}: {other.get(k)} there, {v} asked" for k, v in asked.items() if other.get(k) != v]
    if different:
        raise RefusedError(f"study {name!r} exists and differs ({'; '.join(different)}). Choose another --study")
    if made or not board.filled():
        board.post(simulated.plan(name, settings))
        board.seal()
    return board


def _simulated(board: "Board", spec: Mapping[str, Any], args: argparse.Namespace) -> "Objective":
    from kvlab.study.simulated import Settings, Simulated

    return Simulated(Settings.from_dict(spec))


def _search(board: "Board", spec: Mapping[str, Any], args: argparse.Namespace) -> "Objective":
    # Heavy: torch, transformers, and the model itself.
    from kvlab.search import sharing

    return sharing.joined(board, spec, model=args.model, threads=args.threads)


OBJECTIVES: dict[str, Callable[["Board", Mapping[str, Any], argparse.Namespace], "Objective"]] = {
    "simulated": _simulated,
    "search": _search,
}

if __name__ == "__main__":
    sys.exit(main())
