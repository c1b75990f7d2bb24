"""One question put to a model: what is prefilled, what is asked, what is right."""

from collections.abc import Mapping
from typing import Any

from kvlab.show.page import folded, head, pre, table
from kvlab.show.words import columns, line

_SHOWN = 2400  # characters of a long text in HTML, half of them its beginning and half its end


def document(fields: Mapping[str, Any]) -> dict[str, Any]:
    """An item's fields with long texts cut in the middle: a context may be a book."""
    return {"schema": "kvlab.item/1", **{k: shortened(v) if isinstance(v, str) else v for k, v in fields.items()}} | {
        "context_characters": len(fields["context"])
    }


def shortened(text: str, limit: int = _SHOWN) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - limit:,} characters ...]\n{text[-half:]}"


def text(d: Mapping[str, Any]) -> str:
    return "\n".join([f"Item {line(d['id'])} ({d['family']}, {d['form']})", *columns(_rows(d))])


def html(d: Mapping[str, Any]) -> str:
    return "".join(
        [
            head("item", line(d["id"]), d["family"], d["form"]),
            table(("", ""), _rows(d), wrap=True),
            folded(f"Context, {d['context_characters']:,} characters", pre(shortened(d["context"]))),
        ]
    )


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    context = d["context"]
    ends = line(context, 72) if len(context) <= 72 else f"{line(context[:40], 40)} ... {line(context[-30:], 30)}"
    rows = [
        ["context", f"{ends} ({d['context_characters']:,} characters)"],
        ["question", line(d["question"], 200)],
        ["answer", line(d["answers"][0], 200)],
    ]
    if len(d["answers"]) > 1:
        rows.append(["or", line(" | ".join(d["answers"][1:]), 200)])
    if d["choices"]:
        rows.append(["choices", line(" | ".join(d["choices"]), 200)])
    if d.get("references"):
        rows.append(["asked for", line(" | ".join(d["references"]), 200)])
    return [
        *rows,
        ["graded by", f"{d['metric']}, up to {d['max_new_tokens']} tokens; cluster {line(d['cluster'], 60)}"],
    ]
