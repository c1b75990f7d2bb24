"""What a run found: verdict, budget, and for every judged config its bytes and paired differences with intervals.

Flags stand where a number is easily read for more than it is: few items, or an interval with 0 in it.
"""

from collections.abc import Mapping
from typing import Any

from kvlab.show.page import Html, folded, head, mark, para, table
from kvlab.show.words import columns, cut, line, number, size

SMALL_N = 100
_MOST = 24
_TONES = {"baseline": "", "HOLDS": "good", "RISES": "good", "WORSE": "bad", "NOTHING FITS": "bad"}


def text(d: Mapping[str, Any]) -> str:
    lines = [f"{d['word']}  {line(d['sentence'], 300)}", *(line(x, 300) for x in d["about"])]
    lines += [f"PARTIAL: the run is {d['partial']}. Nothing here is final."] if d["partial"] else []
    lines += ["", *columns([header(d), *([str(c) for c in row] for row in rows(d))], "")] if d["configs"] else []
    lines += ["", *(f"! {flag}" for flag in flags(d))] if flags(d) else []
    return "\n".join([*lines, *(f"note: {line(note, 300)}" for note in d["notes"][:8]), f"run: {d['run']}"])


def html(d: Mapping[str, Any]) -> str:
    word = mark(d["word"], _TONES.get(d["word"], "open"))
    partial = para(f"PARTIAL: the run is {d['partial']}. Nothing here is final.", "bad") if d["partial"] else ""
    notes = "".join(para(cut(str(note), 600)) for note in d["notes"][:8])
    toned = [[*row[:-1], Html(mark(row[-1], _TONES.get(row[-1], "open")))] for row in rows(d)]
    return "".join(
        [
            head("result", line(d["run"]), line(d["model"], 60)),
            partial,
            f"<div>{word} {mark(line(d['sentence'], 600))}</div>",
            *(para(line(x, 600), "soft") for x in d["about"]),
            table(header(d), toned),
            "".join(f"<div>{mark('⚑', 'bad')} {mark(flag)}</div>" for flag in flags(d)),
            folded("Notes", notes),
        ]
    )


def header(d: Mapping[str, Any]) -> list[str]:
    sized = ["at workload", *(["read a step"] if _sparse(d) else []), "fits"] if _sized(d) else []
    n = _one_n(d)
    return ["config", *sized, "bits", *(f"{f}, n={n}" if n else f for f in d["families"]), "verdict"]


def _sparse(d: Mapping[str, Any]) -> bool:
    """Whether any config reads less than it stores."""
    return any(c.get("read") is not None for c in d["configs"])


def _one_n(d: Mapping[str, Any]) -> int | None:
    """The number of items where it is the same everywhere, and so needs to be said once only."""
    ns = {p.get("n") for c in [d["baseline"], *d["configs"]] for p in c["families"].values()}
    return ns.pop() if len(ns) == 1 else None


def _sized(d: Mapping[str, Any]) -> bool:
    """Whether bytes at a workload are known: item rows alone know bits a value only."""
    return any(c["bytes"] is not None for c in d["configs"])


def rows(d: Mapping[str, Any]) -> list[list[str]]:
    """Largest first, the baseline on top; scores and intervals as text, differences in points."""
    sized, base, out = _sized(d), d["baseline"], []
    if base["families"]:
        scores = [_score(base["families"].get(f), _one_n(d)) for f in d["families"]]
        out.append([*_known(base, "", sized, _sparse(d)), *scores, "baseline"])
    for c in d["configs"][:_MOST]:
        cells = [_difference(c["families"].get(f), _one_n(d)) for f in d["families"]]
        out.append([*_known(c, c["fits"], sized, _sparse(d)), *cells, str(c["verdict"])])
    more = len(d["configs"]) - _MOST
    return [*out, [f"... {more} more", *[""] * (len(header(d)) - 1)]] if more > 0 else out


def _known(entry: Mapping[str, Any], fits: str, sized: bool, sparse: bool) -> list[str]:
    read = [size(entry.get("read") or entry["bytes"])] if sparse else []
    sizes = [size(entry["bytes"]), *read, fits] if sized else []
    return [line(entry["label"], 32), *sizes, number(entry["bits"], ".2f")]


def flags(d: Mapping[str, Any]) -> list[str]:
    """What a reader would else take for more than it is, one line a reason."""
    pairs = [(c["label"], f, p) for c in d["configs"] for f, p in c["families"].items()]
    ns = sorted({p["n"] for _, _, p in pairs if p.get("n")})
    out = []
    if ns and ns[0] < SMALL_N:
        out.append(f"small n: {ns[0]} items a family, differences below several points are not seen (under {SMALL_N})")
    covers = [f"{line(label, 30)} on {family}" for label, family, p in pairs if _covers_zero(p)]
    if covers:
        shown = ", ".join(covers[:6]) + (f" and {len(covers) - 6} more" if len(covers) > 6 else "")
        out.append(f"interval covers 0, neither loss nor gain is shown: {shown}")
    return out


def _covers_zero(pair: Mapping[str, Any]) -> bool:
    low, high = pair.get("low"), pair.get("high")
    return low is not None and high is not None and low <= 0 <= high


def _score(found: Mapping[str, Any] | None, one_n: int | None) -> str:
    if not found:
        return "–"
    known = found.get("low") is not None and found.get("high") is not None
    reach = f" [{100 * found['low']:.1f}, {100 * found['high']:.1f}]" if known else ""
    return f"{100 * found['score']:.1f}{reach}{_n(found, one_n)}"


def _n(found: Mapping[str, Any], one_n: int | None) -> str:
    return "" if one_n else f" n={found.get('n', '?')}"


def _difference(pair: Mapping[str, Any] | None, one_n: int | None) -> str:
    if not pair:
        return "–"
    if pair.get("diff") is None:
        return f"{pair.get('verdict', '–')}{_n(pair, one_n)}"
    known = pair.get("low") is not None and pair.get("high") is not None
    reach = f" [{100 * pair['low']:+.1f}, {100 * pair['high']:+.1f}]" if known else ""
    flag = " ⚑" if _covers_zero(pair) else ""
    return f"{100 * pair['diff']:+.1f}{reach}{_n(pair, one_n)}{flag}"
