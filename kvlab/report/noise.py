"""Scores that fall where more bytes are spent: named, with whether noise alone may do that. Knows result documents."""

from collections.abc import Mapping

from kvlab.report import document as doc

_NOISE = ": within noise, the intervals overlap."
_MOST = 3


def bumps(result: Mapping) -> list[str]:
    """One sentence for each judged config that scores below a smaller one in some family.

    "Within noise" where the two 90 % intervals of the difference to the baseline overlap, "more than noise" where not.
    """
    baseline = (result.get("baseline") or {}).get("config_id")
    known = [e for e in doc.judged(result) if doc.finite(e.get("workload_bytes")) and e["config_id"] != baseline]
    lines = []
    for family in doc.families(result):
        seen: list[tuple[dict, dict]] = []
        for entry in sorted(known, key=lambda e: e["workload_bytes"]):
            pair = (entry.get("families") or {}).get(family) or {}
            if not doc.finite(pair.get("diff")):
                continue
            smaller = [(e, p) for e, p in seen if e["workload_bytes"] < entry["workload_bytes"]]
            best, its = max(smaller, key=lambda at: at[1]["diff"], default=(None, None))
            if best is not None and its is not None and its["diff"] > pair["diff"]:
                lines.append(_sentence(family, entry, pair, best, its))
            seen.append((entry, pair))
    return lines


def told(result: Mapping) -> list[str]:
    """The same for a reader: what is more than noise one by one, the rest counted where it is much."""
    lines = bumps(result)
    noise = [line for line in lines if line.endswith(_NOISE)]
    if len(noise) <= _MOST:
        return lines
    rest = [line for line in lines if line not in noise]
    return [
        *rest,
        f"{len(noise)} times a config scores below a smaller one: all within noise, their intervals overlap.",
    ]


def _sentence(family: str, entry: Mapping, pair: Mapping, best: Mapping, its: Mapping) -> str:
    gap = f"{100 * (its['diff'] - pair['diff']):.1f} points"
    what = f"{family}: {entry['label']} scores {gap} below the smaller {best['label']}"
    if not (_known(pair) and _known(its)):
        return f"{what}; one item gives no interval to tell noise by."
    if pair["high"] >= its["low"]:
        return f"{what}{_NOISE}"
    return f"{what}: more than noise, the intervals do not overlap."


def _known(pair: Mapping) -> bool:
    return (pair.get("n") or 0) > 1 and doc.finite(pair.get("low")) and doc.finite(pair.get("high"))
