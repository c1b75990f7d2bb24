"""Rows of a run scored again: `python -m kvlab reproduce RUN`. The config on record, the item made anew, the same
weights; beside it what the run says.

Exit codes: 0 every row came out again; 1 one did not; 2 no such run or row, other weights or items, wrong usage;
130 interrupted.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.evals.subject import ItemScore
    from kvlab.models import Loaded
    from kvlab.runs import Run

SCHEMA = "kvlab.reproduce/1"
# Nats may differ by the company a row had in a forward and by the machine; what is counted or read may not.
TOLERANCE = 1e-3
_NATS = ("nll", "kl")
_EXACT = ("score", "exact", "token_accuracy", "prediction", "context_tokens", "answer_tokens", "measured_bytes",
          "predicted_bytes", "raw16_bytes", "extracted", "outcome", "right")  # fmt: skip
_EXAMPLES = """examples:
  python -m kvlab reproduce 3f9a                       8 rows at random
  python -m kvlab reproduce 3f9a --rows 40 --seed 1
  python -m kvlab reproduce 3f9a --config int8 --item code/confirm/0/17"""


class UnlikeError(ValueError):
    """What is here now is not what the run used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """A row as recorded and as it came out now. `different` names what may not differ and does."""

    row: Mapping[str, Any]
    found: "ItemScore"
    different: tuple[str, ...]

    @property
    def apart(self) -> float:
        """Nats between the two, the larger of NLL and KL; 0 where neither has any."""
        pairs = ((self.row[name], getattr(self.found, name)) for name in _NATS)
        return max((abs(then - now) for then, now in pairs if _known(then) and _known(now)), default=0.0)


def chosen(
    rows: Sequence[Mapping[str, Any]], *, count: int, seed: int, config: str | None = None, item: str | None = None
) -> list[Mapping[str, Any]]:
    """`count` rows at random, or fewer where there are no more, of one config id and one item where these are named.

    What other runs scored is left out. Raises ValueError where nothing is left.
    """
    import random

    own = [r for r in rows if not isinstance(r.get("scored_in"), str)]
    own = [r for r in own if config in (None, r["config_id"]) and item in (None, r["item_id"])]
    if not own:
        asked = " and ".join(f"{k} {v}" for k, v in (("config", config), ("item", item)) if v is not None)
        raise ValueError(f"no row of this run has {asked}" if asked else "this run has scored no row itself")
    return random.Random(seed).sample(own, min(count, len(own)))


def again(
    run: "Run", rows: Sequence[Mapping[str, Any]], *, allow_code_exec: bool = False, tolerance: float = TOLERANCE
) -> Iterator[Again]:
    """Score rows of a run once more, item by item.

    Raises UnlikeError where weights are others now, or where code would have to be run and may not be; ValueError where
    items are.
    """
    from kvlab import models
    from kvlab.answering import scoring
    from kvlab.evals.sampling import Sampling
    from kvlab.recorded import items_of, recorded
    from kvlab.subject import LocalSubject

    request, configs = run.config["request"], recorded(run)
    missing = sorted({r["config_id"] for r in rows} - configs.keys())
    if missing:
        raise UnlikeError(f"{run.path.name} keeps no config {missing[0]}: it was made before runs kept them")
    if any(isinstance(r.get("outcome"), str) for r in rows) and not allow_code_exec:
        raise UnlikeError("some of these answers were run as code: pass --allow-code-exec to run them again, sandboxed")
    loaded = models.load(request["model"])
    _refuse_unlike(run, loaded)
    items = items_of(run, {r["split"] for r in rows}, lambda text: len(loaded.tokenizer.encode(text)))
    wanted: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["item_id"] not in items:
            raise UnlikeError(f"item {row['item_id']} is not among those that {request['sets']} give now")
        wanted.setdefault(row["item_id"], []).append(row)
    needed = {r["config_id"]: configs[r["config_id"]] for r in rows}
    subject = LocalSubject(loaded, scorers=[c.scorer for c in needed.values() if c.budget.evicts])
    drawn = Sampling(temperature=request["temperature"], samples=request["samples"], seed=request["seed"])
    with scoring(
        subject, generate=request["generate"], allow_code_exec=allow_code_exec and request["generate"], sampling=drawn
    ) as scores:
        for item_id, own in wanted.items():
            asked = list(dict.fromkeys(r["config_id"] for r in own))
            made = scores.score([items[item_id]], [needed[c] for c in asked], persist=False)
            found = dict(zip(asked, made, strict=True))
            for row in own:
                now = found[row["config_id"]]
                yield Again(row, now, tuple(_different(row, now, tolerance)))


def _refuse_unlike(run: "Run", loaded: "Loaded") -> None:
    then = run.config["identity"]
    for what, now in (("weights_sha256", loaded.weights_sha256), ("dtype", loaded.dtype)):
        if then[what] != now:
            raise UnlikeError(f"{run.path.name} used {what} {then[what]}, {loaded.name} has {now} here")


def _different(row: Mapping[str, Any], now: "ItemScore", tolerance: float) -> Iterator[str]:
    for name in _EXACT:
        then = row.get(name)
        if (then if _known(then) or isinstance(then, str) else None) != getattr(now, name):
            yield name
    for name in _NATS:
        then, found = row[name], getattr(now, name)
        if _known(then) != _known(found) or (_known(then) and abs(then - found) > tolerance):
            yield name


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, score again, say what came out; returns the exit code."""
    args = _parser().parse_args(argv)
    if args.rows < 1 or args.tolerance < 0:
        return _fail(f"--rows must be at least 1 and --tolerance at least 0, got {args.rows} and {args.tolerance:g}")
    # Heavy from here on: torch, transformers.
    from kvlab.models import ModelError
    from kvlab.progress import Progress
    from kvlab.recorded import named
    from kvlab.runs import Run
    from kvlab.sandbox.refused import SandboxUnavailable

    made: list[Again] = []
    progress = None
    try:
        run = Run.open(args.run, root=args.root)
        config = named(run, args.config).id if args.config else None
        rows = [{str(k): v for k, v in r.items()} for r in run.rows().to_dict("records")]
        rows = chosen(rows, count=args.rows, seed=args.seed, config=config, item=args.item)
        progress = Progress(len(rows), quiet=args.quiet)
        progress.at("scoring again")
        for one in again(run, rows, allow_code_exec=args.allow_code_exec, tolerance=args.tolerance):
            made.append(one)
            progress.add()
        progress.finish()
    except (OSError, ValueError, ModelError, SandboxUnavailable) as error:
        return _fail(error)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    finally:
        if progress is not None:
            progress.close()
    print(json.dumps(_document(run, made), allow_nan=False) if args.json else _text(made))
    return 1 if any(one.different for one in made) else 0


def _document(run: "Run", made: Sequence[Again]) -> dict[str, Any]:
    from kvlab.runs import plain

    rows = [
        {
            **{name: one.row[name] for name in ("role", "config_id", "label", "item_id")},
            "then": {name: one.row.get(name) for name in (*_EXACT, *_NATS)},
            "now": {name: getattr(one.found, name) for name in (*_EXACT, *_NATS)},
            "different": list(one.different),
        }
        for one in made
    ]
    ok = not any(one.different for one in made)
    apart = max(one.apart for one in made)
    return plain({"schema": SCHEMA, "run": run.path.name, "rows": rows, "nats_apart": apart, "ok": ok}, "reproduce")


def _text(made: Sequence[Again]) -> str:
    from kvlab.show.words import columns

    lines = [["config", "item", "score", "nats per token", "bytes", "the same"]]
    for one in made:
        score, nll, held = ((one.row[k], getattr(one.found, k)) for k in ("score", "nll", "measured_bytes"))
        lines.append(
            [
                str(one.row["label"]),
                str(one.row["item_id"]),
                f"{score[0]:g} / {score[1]:g}",
                f"{nll[0]:.6f} / {nll[1]:.6f}",
                f"{held[0]:,} / {held[1]:,}",
                f"no: {', '.join(one.different)}" if one.different else "yes",
            ]
        )
    same = sum(not one.different for one in made)
    apart = max(one.apart for one in made)
    end = f"{same} of {len(made)} rows came out again; nats apart by {apart:.1g} at most. Then / now."
    return "\n".join([*columns(lines), end])


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m kvlab reproduce",
        description="Score rows of a run again: same config, same item, same weights; say what differs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", metavar="RUN", help="path of a run folder, or a unique beginning of its name or hash")
    p.add_argument("--root", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    p.add_argument("--rows", type=int, default=8, help="how many, drawn at random (default 8)")
    p.add_argument("--seed", type=int, default=0, help="of that draw (default 0)")
    p.add_argument("--config", metavar="NAME", help="rows of one config: an id, the beginning of one, or a label")
    p.add_argument("--item", metavar="ID", help="rows of one item")
    nats = f"nats by which a row may differ (default {TOLERANCE:g}); score, answer and bytes may not"
    p.add_argument("--tolerance", type=float, default=TOLERANCE, help=nats)
    p.add_argument("--allow-code-exec", action="store_true", help="run generated code again, sandboxed")
    p.add_argument("--json", action="store_true", help=f"print one JSON document ({SCHEMA})")
    p.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return p


def _fail(error: object) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
