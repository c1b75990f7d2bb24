"""One item under one config: its score, what stands behind it, and the bytes it was scored with."""

from collections.abc import Mapping
from typing import Any

from kvlab.show.page import head, mark, para, table
from kvlab.show.words import columns, line, number, size


def text(d: Mapping[str, Any]) -> str:
    return "\n".join(
        [f"ItemScore {number(d['score'])}: {line(d['item_id'])} under {d['config_id']}", *columns(_rows(d))]
    )


def html(d: Mapping[str, Any]) -> str:
    tone = "good" if d["score"] == 1 else "bad" if d["score"] == 0 else "open"
    return "".join(
        [
            head("score", line(d["item_id"]), d["family"], d["split"], d["mode"], d["form"]),
            f"<div>{mark(number(d['score']), tone)}</div>",
            table(("", ""), _rows(d), wrap=True),
            para("one item: a score without an interval says nothing about a config", "soft"),
        ]
    )


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    told = "as predicted" if d["measured_bytes"] == d["predicted_bytes"] else f"predicted {size(d['predicted_bytes'])}"
    bits = number(16 * d["measured_bytes"] / d["raw16_bytes"], ".2f") if d["raw16_bytes"] else "unknown"
    rows = [
        ["config", d["config_id"]],
        ["prediction", line(d["prediction"], 200) or "nothing"],
        ["exact", f"{number(d['exact'])}, token accuracy {number(d['token_accuracy'])} of {d['answer_tokens']} tokens"],
        ["NLL", f"{number(d['nll'])} nats a token"],
    ]
    if d["kl"] is not None:
        rows.append(["against the full cache", f"KL {number(d['kl'])} nats, top 1 agrees {number(d['top1'])}"])
    rows.append(
        ["cache", f"{size(d['measured_bytes'])}, {told}; {bits} bits a value at {d['context_tokens']:,} tokens"]
    )
    rows.append(["attended by", d["implementation"]])
    return [*rows, ["ended", d["outcome"]]] if d.get("outcome") else rows
