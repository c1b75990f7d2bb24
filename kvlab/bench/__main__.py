"""`python -m kvlab.bench identity|bytes|decode|kernels|search|stats|workers [--json]`: one JSON document or a table on
stdout, progress on stderr.

Exit codes: 0 when everything holds, 1 when something does not, 2 for bad usage or a model that cannot be used.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvlab.bench", description="Checks of the engine, as figures.")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{identity,bytes,decode,kernels,search,stats,workers}"
    )
    identity = commands.add_parser("identity", help="a raw, unlimited cache equals the model's own")
    identity.add_argument("--model", default="smollm2-135m", help="alias, hub id, folder or .gguf file")
    identity.add_argument("--tokens", type=_positive, default=64, help="greedy tokens per row")
    identity.add_argument("--tiny-only", action="store_true", help="leave --model out, compare tiny random models only")
    held = commands.add_parser("bytes", help="predicted, held and allocated bytes of composed configs")
    kernels = commands.add_parser("kernels", help="Triton kernels: compiled ahead of time, or checked and timed")
    _add_kernels(kernels)
    decode = commands.add_parser("decode", help="milliseconds per token and bytes, beside transformers' own caches")
    _add_decode(decode)
    search = commands.add_parser("search", help="seconds to score many configs, beside kvpress and the model's limit")
    _add_search(search)
    workers = commands.add_parser("workers", help="what many workers ask of a storage, by a simulated study")
    _add_workers(workers)
    rates = commands.add_parser("stats", help="how often the verdict's rules are wrong, by simulation; needs no model")
    rates.add_argument("--studies", type=_positive, default=200, help="simulated searches of each kind (200)")
    rates.add_argument("--seed", type=_natural, default=0, help="of every simulation (0)")
    for command in (identity, held, decode, kernels, search, workers, rates):
        command.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    return parser


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--aot", action="store_true", help="compile every variant; needs no GPU")
    what.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="check against the references, then time; on the CPU every path once in triton's interpreter, untimed",
    )
    parser.add_argument("--targets", type=_targets, help="with --aot: such as sm_80,sm_90,sm_100,gfx942")
    parser.add_argument("--only", type=_pattern, default="", help="regular expression over names")
    parser.add_argument("--out", type=Path, help="with --device: folder for kernels.json, written after every case")
    parser.add_argument("--minutes", type=_minutes, default=8.0, help="with --device: end within this time (8)")
    parser.add_argument("--tune", action="store_true", help="with --device: try launch options instead of the table")
    parser.add_argument("--seed", type=int, help="with --device: of the random data; drawn anew if left out")
    parser.set_defaults(error=parser.error)


def _add_decode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id, folder or .gguf file")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--context", type=_positive, help="tokens in the cache when timing starts (4096)")
    lengths.add_argument("--contexts", type=_contexts, help="several, such as 512,1024,2048,4096,8192")
    parser.add_argument("--turns", type=_positive, default=5, help="turns of every cache; the median counts (5)")
    parser.add_argument("--only", type=_pattern, default="", help="regular expression over names")
    parser.add_argument("--threads", type=_positive, help="torch's threads; its own choice if left out")
    parser.add_argument("--out", type=Path, help="folder for decode.json and the figure, decode.png and decode.svg")


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id, folder or .gguf file")
    parser.add_argument("--peer-python", type=Path, help="interpreter with kvpress; without it kvlab and limit only")
    parser.add_argument("--configs", type=_positive, default=16, help="configs both sides can express (16)")
    parser.add_argument("--answer-tokens", type=_positive, default=8, help="tokens forced of each answer (8)")
    parser.add_argument("--items", type=_positive, default=8, help="contexts, each with a question of its own (8)")
    parser.add_argument("--context", type=_positive, default=400, help="most tokens of a context (400)")
    parser.add_argument("--pairs", type=_positive, default=16, help="pairs of config and item timed on kvpress (16)")
    parser.add_argument("--repeats", type=_positive, default=3, help="turns of every side; the least counts (3)")
    parser.add_argument("--threads", type=_positive, default=1, help="torch's threads on every side (1)")
    parser.add_argument("--seed", type=_natural, default=0, help="of the items (0)")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--storages", type=_storages, help="journal, postgresql or both: a server is started for it")
    parser.add_argument("--counts", type=_contexts, help="how many workers, such as 1,4,16,64")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a trial sleeps (10)")
    parser.add_argument("--each", type=_positive, default=3, help="trials for each worker (3)")


def _storages(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ("journal", "postgresql"):
            raise argparse.ArgumentTypeError(f"unknown storage {name!r}: journal, postgresql")
    return names


def _contexts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _targets(text: str) -> tuple[str, ...]:
    from kvlab.bench.aot import TARGETS

    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in TARGETS:
            near = difflib.get_close_matches(name, TARGETS, 1) or list(TARGETS)
            raise argparse.ArgumentTypeError(
                f"unknown target {name!r}, did you mean {near[0]!r}? one of {list(TARGETS)}"
            )
    return names


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"no regular expression: {error}") from error
    return text


def _minutes(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 600:
        raise argparse.ArgumentTypeError(f"must lie between 1 and 600 minutes, got {value}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one bench; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "kernels":
        return _kernels(options)
    if options.command == "decode":
        return _decode(options)
    if options.command == "search":
        return _search(options)
    if options.command == "workers":
        return _workers(options)
    if options.command == "stats":
        return _stats(options)
    # Here, so that --help needs neither torch nor transformers.
    import torch

    from kvlab.attach import UnsupportedModelError
    from kvlab.bench import bytes as held
    from kvlab.bench import identity
    from kvlab.models import ModelError

    # Single steps of small models: a second thread waits more than it works, and on a busy machine it waits for long.
    torch.set_num_threads(1)
    try:
        if options.command == "bytes":
            document = held.run(_say)
        else:
            document = identity.run(_say, None if options.tiny_only else options.model, options.tokens)
    except (ModelError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        print(_identity_table(document) if options.command == "identity" else _bytes_table(document))
    return 0 if document["ok"] else 1


def _kernels(options: argparse.Namespace) -> int:
    """The kernels command. Neither torch nor triton is imported here: all work is done in child processes."""
    from kvlab.bench import aot
    from kvlab.bench.kernels import document as measured
    from kvlab.bench.kernels import run as bench

    if options.aot and (options.out or options.tune or options.seed is not None):
        options.error("--out, --tune and --seed belong to --device")
    if options.targets and not options.aot:
        options.error("--targets belongs to --aot")
    try:
        if options.aot:
            document = aot.run(_say, options.targets or aot.DEFAULT_TARGETS, options.only)
            table = aot.table(document)
        else:
            request = (options.device, options.out, options.minutes, options.only, options.tune, options.seed)
            document = bench.run(bench.Request(*request), _say)
            table = measured.table(document)
    except (aot.AotError, bench.KernelBenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(document, indent=1, allow_nan=False), flush=True)
    # The table is wanted even beside JSON: it is what one reads at the end of a log.
    print(table, file=sys.stderr if options.json else sys.stdout)
    return 0 if document["ok"] else 1


def _decode(options: argparse.Namespace) -> int:
    import torch

    from kvlab.attach import UnsupportedModelError
    from kvlab.bench import decode
    from kvlab.evals.bundled import sentences
    from kvlab.models import ModelError, load

    names = [name for name in decode.NAMES if re.search(options.only, name)]
    if not names:
        print(f"error: --only {options.only!r} matches none of {list(decode.NAMES)}", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        loaded = load(options.model)
        ids = loaded.tokenizer("\n".join(sentences())).input_ids
        contexts = options.contexts or (options.context or decode.TARGET_CONTEXT,)
        document = decode.run(_say, loaded.model, ids, contexts, options.turns, names) | {"model": loaded.name}
        if options.out:
            decode.write(document, options.out)
    except (ModelError, UnsupportedModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = decode.table(document)
    print(json.dumps(document, indent=1, allow_nan=False) if options.json else table, flush=True)
    if options.json:
        print(table, file=sys.stderr)
    return 0 if document["ok"] else 1


def _search(options: argparse.Namespace) -> int:
    import torch

    from kvlab.attach import UnsupportedModelError
    from kvlab.bench.search import run as bench
    from kvlab.bench.search.peer import PeerError
    from kvlab.bench.search.text import table
    from kvlab.models import ModelError, load

    torch.set_num_threads(options.threads)
    request = bench.Request(
        peer_python=options.peer_python,
        configs=options.configs,
        answer_tokens=options.answer_tokens,
        items=options.items,
        context_tokens=options.context,
        pairs=options.pairs,
        repeats=options.repeats,
        seed=options.seed,
    )
    try:
        document = bench.run(_say, load(options.model, device="cpu"), request)
    except (ModelError, UnsupportedModelError, PeerError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document, indent=1, allow_nan=False) if options.json else table(document), flush=True)
    if options.json:
        print(table(document), file=sys.stderr)
    return 0 if document["ok"] else 1


def _workers(options: argparse.Namespace) -> int:
    from kvlab.bench import scaling

    chosen = (options.storages or scaling.STORAGES, options.counts or scaling.COUNTS, options.seconds, options.each)
    try:
        document = scaling.run(_say, *chosen)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document, indent=1, allow_nan=False) if options.json else scaling.table(document), flush=True)
    return 0 if document["ok"] else 1


def _stats(options: argparse.Namespace) -> int:
    from kvlab.bench import stats

    document = stats.run(_say, options.studies, options.seed)
    table = stats.table(document)
    print(json.dumps(document, indent=1, allow_nan=False) if options.json else table, flush=True)
    return 0 if document["ok"] else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their content, integers with their thousands apart."""
    from kvlab.bench.text import columns

    return "\n".join(columns([header, *([f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows)]))


def _identity_table(document: dict[str, Any]) -> str:
    rows = [(r["name"], r["mode"], f"{r['max_abs_logit_diff']:.1e}") for r in document["architectures"]]
    lines = [_table(("architecture", "mode", "max |logit difference|"), rows)]
    if (default := document["default_model"]) is not None:
        lines.append(f"{default['name']}: {default['tokens_equal']} of {default['tokens']} greedy tokens equal")
    return "\n".join([*lines, f"ok: {document['ok']}"])


def _bytes_table(document: dict[str, Any]) -> str:
    names = ("predicted_bytes", "measured_bytes", "storage_bytes", "slack_bytes", "raw16_bytes")
    rows = [
        (f"{r['model']} {r['config']}", f"{r['prompt']}+{r['decoded']}", *(r[n] for n in names))
        for r in document["rows"]
    ]
    lines = [_table(("config", "tokens", *(n.removesuffix("_bytes") for n in names)), rows)]
    lines += [f"{c['name']}: {c['measured']:,} (expected {c['expected']:,}), ok: {c['ok']}" for c in document["checks"]]
    return "\n".join([*lines, f"ok: {document['ok']}"])


if __name__ == "__main__":
    sys.exit(main())
