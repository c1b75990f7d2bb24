"""`python -m kvlab.bench stats`: how often the verdict's rules are wrong, one by one and in whole simulated searches.

Every row is a rate that must not exceed its nominal level by more than three simulation errors. What is no claim stands
beside the rows: power, and where a simpler rule would have fallen short.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.bench import rates as simulated
from kvlab.bench import studies as searches
from kvlab.bench.rates import Rate, Say, points
from kvlab.bench.text import columns

SCHEMA = "kvlab.bench.stats/1"
STUDIES = 200
CLAIMED = ("HOLDS", "RISES")


def run(say: Say, studies: int = STUDIES, seed: int = 0) -> dict[str, Any]:
    """All rates. `studies` is the number of simulated searches of each kind; single rules have numbers of their own."""
    rows = simulated.rates(seed, say)
    found: dict[str, list[searches.Outcome]] = {}
    for number, (name, world) in enumerate(searches.worlds().items()):
        found[name] = []
        for i in range(studies):
            if i % 50 == 0:
                say(f"searching, {world.name}: study {i + 1} of {studies}")
            found[name].append(searches.study(world, (seed, number, i)))
        searches.check_verdicts(found[name])
    rows += whole_searches(found, seed)
    say("summing power")
    return {
        "schema": SCHEMA,
        "rows": [as_row(r) for r in rows],
        "power": [*simulated.powers(), *_search_power(found)],
        "shortfalls": simulated.shortfalls(),
        "studies": studies,
        "seed": seed,
        "ok": all(r.ok for r in rows),
    }


def as_row(rate: Rate) -> dict[str, Any]:
    return {
        "name": rate.name,
        "nominal": rate.nominal,
        "rate": round(rate.rate, 6),
        "mc_error": round(rate.mc_error, 6),
        "group": rate.group,
        "simulations": rate.simulations,
        "seed": rate.seed,
        "ok": rate.ok,
    }


def whole_searches(found: dict[str, list[searches.Outcome]], seed: int) -> list[Rate]:
    """False claims of whole searches: any finalist of a study is enough."""
    worlds, bad = searches.worlds(), searches.is_planted

    def rate(world: str, what: str, nominal: float, wrong: Callable[[searches.Outcome], bool]) -> Rate:
        outcomes = found[world]
        said = sum(map(wrong, outcomes)) / len(outcomes)
        name = f"{what}: {worlds[world].name}"
        return Rate(group="whole searches", name=name, nominal=nominal, rate=said, simulations=len(outcomes), seed=seed)

    return [
        rate("equal", "any RISES", 0.025, lambda o: "RISES" in o.words),
        rate("equal", "any WORSE", 0.05, lambda o: "WORSE" in o.words),
        rate("equal", "any trial stopped for good", 0.05, lambda o: o.stopped > 0),
        rate("lossless", "any RISES", 0.0, lambda o: "RISES" in o.words),
        rate("lossless", "any WORSE", 0.0, lambda o: "WORSE" in o.words),
        rate("margin", "any HOLDS or RISES", 0.05, lambda o: any(w in CLAIMED for w in o.words)),
        rate("margin", "the int8 reference HOLDS", 0.05, lambda o: o.reference in CLAIMED),
        rate("planted", "a bad one HOLDS", 0.0, lambda o: any(w in CLAIMED and bad(c) for c, w in o.finalists)),
        rate("planted", "any RISES", 0.025, lambda o: "RISES" in o.words),
    ]


def _search_power(found: dict[str, list[searches.Outcome]]) -> list[dict[str, Any]]:
    """How often a study of configs that are truly equal finds one that holds."""
    return [
        {
            "search": searches.worlds()[name].name,
            "n": searches.worlds()[name].confirm_items,
            "margin": searches.margin(searches.worlds()[name]),
            "any_holds": sum(any(w in CLAIMED for w in o.words) for o in found[name]) / len(found[name]),
            "studies": len(found[name]),
        }
        for name in ("lossless", "equal")
    ]


def table(document: dict[str, Any]) -> str:
    """Rates by group, power, and what a normal approximation would have let pass."""
    lines: list[str] = []
    for group in dict.fromkeys(r["group"] for r in document["rows"]):
        rows = [_cells(r) for r in document["rows"] if r["group"] == group]
        lines += [*columns([(group, "nominal", "rate", "error", "simulations", ""), *rows]), ""]
    power = [_power_cells(p) for p in document["power"] if "one_family" in p]
    lines += [*columns([("HOLDS if truly equal", "items", "one family", "three"), *power]), ""]
    lines += [
        f"{p['search']}, {p['n']} items, {points(p['margin'])}: some finalist holds in {p['any_holds']:.3f} of studies"
        for p in document["power"]
        if "search" in p
    ]
    short = [
        (f"{points(s['margin'])}, n={s['n']}", f"{s['score_test']:.4f}", f"{s['exact_test']:.4f}", _critical(s))
        for s in document["shortfalls"]
    ]
    lines += ["", *columns([("largest error at the margin", "score > 1.645", "exact", "needs score"), *short]), ""]
    bad = [r["name"] for r in document["rows"] if not r["ok"]]
    return "\n".join([*lines, *(f"above its level: {name}" for name in bad), f"ok: {document['ok']}"])


def _cells(row: dict[str, Any]) -> Sequence[str]:
    error = f"{row['mc_error']:.4f}" if row["simulations"] else "-"
    many = f"{row['simulations']:,}" if row["simulations"] else "all outcomes"
    return (row["name"], f"{row['nominal']:.3f}", f"{row['rate']:.4f}", error, many, "" if row["ok"] else "FAILS")


def _power_cells(row: dict[str, Any]) -> Sequence[str]:
    what = f"{points(row['margin'])}, {row['discordance'] * 100:.0f} % discordant"
    items = f"{row['n']}{' (n_needed)' if row['rule'] == 'n_needed' else ''}"
    return (what, items, f"{row['one_family']:.3f}", f"{row['three_families']:.3f}")


def _critical(row: dict[str, Any]) -> str:
    return f"{row['critical_z']:.4f}" if math.isfinite(row["critical_z"]) else "nothing passes"
