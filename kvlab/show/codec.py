"""A codec: what it stores of a page, and how many bits that is an element."""

from collections.abc import Mapping
from typing import Any

from kvlab.show.config import value
from kvlab.show.page import head, para, table
from kvlab.show.words import columns


def text(d: Mapping[str, Any]) -> str:
    return "\n".join([f"{d['kind']} codec {d['label']}: {_fields(d)}", *columns([_HEADER, *_rows(d)])])


def html(d: Mapping[str, Any]) -> str:
    return head(f"{d['kind']} codec", d["label"]) + para(_fields(d), "soft") + table(_HEADER, _rows(d))


_HEADER = ["head dim", "stream", "bytes a token and head", "bits a value"]


def _fields(d: Mapping[str, Any]) -> str:
    own = ", ".join(f"{name} {value(v)}" for name, v in d["fields"].items()) or "no settings"
    return f"{own}; {d['block_tokens']} token{'s' if d['block_tokens'] > 1 else ''} encoded together"


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for case in d["sizes"]:
        if case["refused"]:
            rows.append([str(case["head_dim"]), case["refused"], "", ""])
            continue
        rows += [
            [str(case["head_dim"]), name, f"{count:g}", f"{count * 8 / case['head_dim']:.3f}"]
            for name, count in case["streams"].items()
        ]
        if len(case["streams"]) > 1:
            total = sum(case["streams"].values())
            rows.append([str(case["head_dim"]), "all", f"{total:g}", f"{total * 8 / case['head_dim']:.3f}"])
    return rows
