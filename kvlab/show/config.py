"""A KVConfig: what differs from the defaults first, then its id and TOML to copy."""

from collections.abc import Mapping
from typing import Any

from kvlab.show.page import folded, head, para, pre, table
from kvlab.show.words import columns, cut, ranges

_MOST_TOML, _MOST_ROWS = 4000, 16


def text(d: Mapping[str, Any]) -> str:
    return "\n".join([f"KVConfig {d['label']} ({d['id']})", *columns(_rows(d))])


def html(d: Mapping[str, Any]) -> str:
    toml = d["toml"]
    if len(toml) > _MOST_TOML:
        start = toml[:_MOST_TOML].rpartition("\n")[0]
        toml = f"{start}\n# ... print(config.to_toml()) has all {len(toml):,} characters"
    rest = [[name, value(v)] for name, v in d["config"].items() if name not in d["changed"]]
    return "".join(
        [
            head("KVConfig", d["label"], d["id"]),
            table(("", ""), _rows(d), wrap=True) if d["changed"] else para("all defaults: nothing is compressed"),
            folded("At their defaults", table(("", ""), rest, wrap=True)),
            folded("TOML", pre(toml)),
        ]
    )


def _rows(d: Mapping[str, Any]) -> list[list[str]]:
    rows = [[name, value(v)] for name, v in d["changed"].items() if name != "overrides"]
    layers: dict[str, list[int]] = {}
    for layer, key, val in d["changed"].get("overrides", ()):
        layers.setdefault(f"K {value(key)}; V {value(val)}", []).append(layer)
    rows += [[f"layers {cut(ranges(which), 40)}", codecs] for codecs, which in list(layers.items())[:_MOST_ROWS]]
    if len(layers) > _MOST_ROWS:
        rows.append(["...", f"{len(layers) - _MOST_ROWS} more pairs of formats by layer"])
    return rows or [["all defaults", "nothing is compressed"]]


def value(part: Any) -> str:
    """A field as one line: a method by its kind and what it is set to."""
    if isinstance(part, Mapping):
        own = ", ".join(f"{k} {value(v)}" for k, v in part.items() if k != "kind")
        kind = str(part.get("kind", ""))
        return f"{kind}({own})" if kind and own else own or kind
    if isinstance(part, list | tuple):
        return cut(" ".join(value(p) for p in part) or "none", 120)
    return cut(str(part), 120)
