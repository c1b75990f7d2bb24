"""`python -m kvlab.bench identity|bytes [--json]`: one JSON document or a table on stdout, progress on stderr.

Exit codes: 0 when everything holds, 1 when something does not, 2 for bad usage or a model that cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvlab.bench", description="Checks of the engine, as figures.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{identity,bytes}")
    identity = commands.add_parser("identity", help="a raw, unlimited cache equals the model's own")
    identity.add_argument("--model", default="smollm2-135m", help="alias, hub id, folder or .gguf file")
    identity.add_argument("--tokens", type=_positive, default=64, help="greedy tokens per row")
    identity.add_argument("--tiny-only", action="store_true", help="leave --model out, compare tiny random models only")
    held = commands.add_parser("bytes", help="predicted, held and allocated bytes of composed configs")
    for command in (identity, held):
        command.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one bench; returns the exit code."""
    options = _parser().parse_args(arguments)
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their content: the first to the left, numbers to the right."""
    cells = [list(header), *([f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )


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
