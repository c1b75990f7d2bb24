"""A compressed cache: where its bytes are, how they compare with 16 bit, which tokens it kept, what fits a budget."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.show.drawing import COLOURS, MOST_BARS, bars, shares, swatch
from kvlab.show.page import Html, esc, folded, head, para, table
from kvlab.show.words import columns, number, ranges, share, size

# The same stream has the same colour in every cache.
_STREAMS = (
    "K", "V", "scales", "raw window", "positions", "other layers", "raw sinks", "attention mass", "chunk summaries",
    "page slack", "query sums",
)  # fmt: skip
_COLOUR = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(_STREAMS)}
_FORMS = {
    "packed": "packed: attention reads the stored bytes",
    "dense": "dense: stored bytes are decoded for each forward",
    "empty": "empty: no token yet",
}


def text(d: Mapping[str, Any]) -> str:
    lines = [
        f"KV cache {d['label']} ({d['config_id']}), {_FORMS[d['form']]}",
        f"  {_tokens(d)}; {_shape(d)}",
        f"  {_sizes(d)}",
        *columns(_streams(d), "    "),
    ]
    lines += [f"  {_slack(d)}"] if d["preallocated_bytes"] else []
    lines += [f"  kept: {_kept(d)}", f"  {_sessions(d)}"] if d["nbytes"] else []
    return "\n".join(lines)


def html(d: Mapping[str, Any]) -> str:
    name, _, meaning = _FORMS[d["form"]].partition(": ")
    body = [
        head("KV cache", d["label"], name, d["implementation"] if d["form"] == "packed" else "", d["config_id"]),
        para(f"{_tokens(d)}; {_shape(d)}; {meaning}", "soft"),
        para(_sizes(d)),
    ]
    if not d["nbytes"]:
        return "".join(body)
    some = d["kept"]["share"] < 1
    header, *rows = _streams(d)
    marked = [[Html(swatch(_COLOUR[row[0]]) + esc(row[0])), *row[1:]] for row in rows[:-1]]
    body += [
        table(header, [*marked, rows[-1]]),
        para(_slack(d), "soft") if d["preallocated_bytes"] else "",
        folded(f"Bytes by layer ({_layers(d)})", _bars(d), shown=True),
        folded(f"Tokens kept: {_kept(d)}", _map(d), shown=True) if some else para(f"kept: {_kept(d)}"),
        para(_sessions(d)),
    ]
    return "".join(body)


def _tokens(d: Mapping[str, Any]) -> str:
    several = f" in {d['rows']} sequences" if d["rows"] > 1 else ""
    return f"{d['tokens']:,} tokens seen{several}"


def _shape(d: Mapping[str, Any]) -> str:
    stock = d["layers"] - d["compressed_layers"]
    beside = f" ({stock} of them keep transformers' own cache)" if stock else ""
    heads = f", {d['kv_heads']} KV heads x {d['head_dim']}" if d["kv_heads"] else ""
    kept_as = f"; raw tokens in {d['dtype']} on {d['device']}" if d["dtype"] else ""
    return f"{d['layers']} layers{beside}{heads}{kept_as}"


def _sizes(d: Mapping[str, Any]) -> str:
    if not d["nbytes"]:
        return "0 bytes"
    return (
        f"{d['nbytes']:,} bytes ({size(d['nbytes'])}): {number(d['effective_bits'], '.2f')} bits a value, "
        f"16 bit would take {size(d['raw16_bytes'])}, {number(d['ratio'], '.2f')} times as much"
    )


def _streams(d: Mapping[str, Any]) -> list[list[str]]:
    held = [[name, f"{count:,}", share(count, d["nbytes"])] for name, count in d["streams"].items()]
    return [["stream", "bytes", "share"], *held, ["all", f"{d['nbytes']:,}", share(d["nbytes"], d["nbytes"])]]


def _slack(d: Mapping[str, Any]) -> str:
    return f"besides {size(d['preallocated_bytes'])} of room made beforehand, which fit() gives back"


def _kept(d: Mapping[str, Any]) -> str:
    kept = d["kept"]
    return "every token" if kept["share"] >= 1 else f"{100 * kept['share']:.1f} % of tokens, by layer and head"


def _sessions(d: Mapping[str, Any]) -> str:
    fits = ", ".join(f"{s['sessions']:,} in {s['budget_bytes'] / 1e9:g} GB" for s in d["sessions"])
    return f"sequences of this length that fit: {fits}"


def _layers(d: Mapping[str, Any]) -> str:
    n = len(d["per_layer"])
    each = -(-n // MOST_BARS)
    return f"{n} layers" if each == 1 else f"{n} layers, the mean of {each} a bar"


def _bars(d: Mapping[str, Any]) -> str:
    parts = {name: [layer["bytes"].get(name, 0) for layer in d["per_layer"]] for name in d["streams"]}
    totals = [sum(layer["bytes"].values()) for layer in d["per_layer"]]
    words = f"Stacked bars of bytes by layer, from {size(min(totals))} to {size(max(totals))} a layer"
    return bars(parts, _COLOUR, words) + para(
        f"layer 0 to {len(totals) - 1}, left to right; {size(min(totals))} to {size(max(totals))} a layer", "soft"
    )


def _map(d: Mapping[str, Any]) -> str:
    bins: Sequence[Sequence[float]] = d["kept"]["bins"]
    means = [sum(row[i] for row in bins) / len(bins) for i in range(len(bins[0]))]
    parts = [f"{100 * sum(part) / len(part):.0f} %" for part in _thirds(means)]
    words = f"Map of tokens kept, layers by positions: {', '.join(parts)} of the first, middle and last third"
    layers = f"layer{'s' if len(bins) > 1 else ''} {ranges(d['kept']['layers'])}"
    which = "of the first sequence, " if d["rows"] > 1 else ""
    return shares(bins, words) + para(
        f"{which}position 0 to {d['kept']['tokens'] - 1:,}, left to right; {layers}, top to bottom; "
        "the fuller the more heads kept it",
        "soft",
    )


def _thirds(values: Sequence[float]) -> list[Sequence[float]]:
    n = len(values)
    return [part for i in range(3) if (part := values[i * n // 3 : (i + 1) * n // 3])]
