"""How often the rules of kvlab.stats are wrong, by simulation of scores whose truth is known.

The rules are not imitated: every distinct outcome that is drawn goes through the verdict code itself, once. Where a
rule has a condition that is cheap to look at and must be met (a p-value at most alpha), only the draws that meet it are
judged in full. numpy and scipy only; no model, no search.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import norm

from kvlab import stats
from kvlab.stats import verdict

Say = Callable[[str], None]
# How many independent sequences, tables and bootstrap samples; chosen so that all of it takes about a minute.
_TABLES, _ARMS, _RESAMPLED, _SEQUENCES = 20_000, 20_000, 600, 4000
_RESAMPLES = 600
_MOST_ITEMS = 512  # beyond, sums over all tables take their time
CLAIMS = "claims at the margin"
# n, margin, discordance. The planned numbers of items and some that the normal quantile fails at.
AT_MARGIN = (
    (29, 0.10, 0.10), (29, 0.10, 0.25), (59, 0.05, 0.05), (59, 0.05, 0.15), (64, 0.05, 0.10), (88, 0.05, 0.05),
    (99, 0.03, 0.03), (99, 0.03, 0.10), (149, 0.02, 0.02), (149, 0.02, 0.06), (200, 0.10, 0.10), (256, 0.02, 0.10),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One figure that must not exceed `nominal` by more than three times the error of its simulation.

    `simulations` is 0 where the rate is a sum over all outcomes and has no such error.
    """

    group: str
    name: str
    nominal: float
    rate: float
    simulations: int
    seed: int

    @property
    def mc_error(self) -> float:
        """Standard error of the rate where the nominal one is true."""
        if self.simulations == 0:
            return 0.0
        return math.sqrt(self.nominal * (1 - self.nominal) / self.simulations)

    @property
    def ok(self) -> bool:
        # A sum over all tables is rounded, too.
        return self.rate <= self.nominal + 3 * self.mc_error + 1e-9


def rates(seed: int, say: Say) -> list[Rate]:
    """Every rate of single rules."""
    out: list[Rate] = []
    for name, part in PARTS.items():
        say(f"simulating {name}")
        out += part(seed)
    return out


def points(margin: float) -> str:
    return f"{margin * 100:.0f} points"


# -- claims about right and wrong answers ------------------------------------------------------------------------------


class Judge:
    """The verdict on a table of n independent items with b losses and c gains, each table judged once."""

    def __init__(self, n: int, margin: float) -> None:
        self.n, self.margin = n, margin
        self._known: dict[tuple[int, int], stats.FamilyVerdict] = {}

    def __call__(self, b: int, c: int) -> stats.FamilyVerdict:
        if (b, c) not in self._known:
            paired = table(self.n, b, c)
            self._known[(b, c)] = stats.judge_family(paired, self.margin, control_failed=True)
        return self._known[(b, c)]

    def all(self, tables: np.ndarray, what: Callable[[stats.FamilyVerdict], float]) -> np.ndarray:
        """`what` of the verdict of every table; tables are (..., 2) of b and c."""
        distinct, back = np.unique(tables.reshape(-1, 2), axis=0, return_inverse=True)
        found = np.array([what(self(int(b), int(c))) for b, c in distinct])
        return found[back.ravel()].reshape(tables.shape[:-1])


def table(n: int, b: int, c: int, first: int = 0) -> stats.Paired:
    """Paired scores with b losses and c gains, the baseline right on about 60 % and within what is sensitive."""
    right = min(max(round(0.6 * n), b), n - c)
    base = [1.0] * right + [0.0] * (n - right)
    config = [0.0] * b + [1.0] * (right - b) + [1.0] * c + [0.0] * (n - right - c)
    return stats.Paired(tuple(f"i{first + i}" for i in range(n)), tuple(base), tuple(config))


def draw(rng: np.random.Generator, n: int, discordance: float, diff: float, shape: tuple[int, ...]) -> np.ndarray:
    """Tables of b and c, of shape (*shape, 2)."""
    losses, gains = (discordance - diff) / 2, (discordance + diff) / 2
    return rng.multinomial(n, [losses, gains, max(0.0, 1 - discordance)], size=shape)[..., :2]


def _margin_claims(seed: int) -> list[Rate]:
    """HOLDS and WORSE of a config that loses exactly the margin."""
    out = []
    for n, margin, discordance in AT_MARGIN:
        judge = Judge(n, margin)
        tables = draw(_rng(seed, 1, n, margin, discordance), n, discordance, -margin, (_TABLES,))
        what = f"n={n}, {points(margin)}, {discordance * 100:.0f} % discordant"
        for word in ("HOLDS", "WORSE"):
            said = judge.all(tables, lambda f, word=word: f.verdict == word).mean()
            out.append(_rate(CLAIMS, f"{word} at the margin, {what}", 0.05, said, _TABLES, seed))
    return out


def _worst_case(seed: int) -> list[Rate]:
    """The largest error of HOLDS over all discordances, summed over all tables: no simulation."""
    out = []
    for n, margin in dict.fromkeys((n, margin) for n, margin, _ in AT_MARGIN):
        critical = stats.critical_z(n, margin, verdict.ALPHA)
        largest = stats.unconditional_p(critical, n, -margin) if math.isfinite(critical) else 0.0
        name = f"HOLDS at the margin, worst discordance, n={n}, {points(margin)}"
        out.append(_rate(CLAIMS, name, 0.05, largest, 0, seed))
    return out


def _families(seed: int) -> list[Rate]:
    """Three finalists in a fixed sequence, and a rise among three families: corrections for asking often."""
    n, margin, discordance = 99, 0.03, 0.06
    judge, rng = Judge(n, margin), _rng(seed, 2)
    losing = draw(rng, n, discordance, -margin, (_ARMS, 3))
    holds = judge.all(losing, lambda f: f.verdict == "HOLDS").astype(bool)
    claimed = [any(stats.fixed_sequence(row)) for row in holds.tolist()]
    equal = judge.all(draw(rng, n, 0.01, 0.0, (_ARMS,)), lambda f: f.verdict == "HOLDS").astype(bool)
    after = [any(stats.fixed_sequence(row)[1:]) for row in np.column_stack([equal, holds[:, :2]]).tolist()]
    group, what = "many questions", f"n={n}, {points(margin)}"
    return [
        _rate(group, f"any HOLDS among 3 finalists at the margin, {what}", 0.05, np.mean(claimed), _ARMS, seed),
        _rate(group, f"any HOLDS among 2 at the margin, after an equal one, {what}", 0.05, np.mean(after), _ARMS, seed),
        *_rises(seed, n, 0.10),  # wide enough that families hold, as a rise needs
    ]


def _rises(seed: int, n: int, margin: float) -> list[Rate]:
    rng = _rng(seed, 3)
    out = []
    for discordance in (0.05, 0.20):
        first, second = (draw(rng, n, discordance, 0.0, (_ARMS, 3)) for _ in range(2))
        judge = Judge(n, margin)
        p = judge.all(first, lambda f: f.p_superior if f.p_superior is not None else 1.0)
        # A family rises only if its p-value, times at least one, is small enough; the rest need not be judged.
        seeming = np.flatnonzero((p <= verdict.RISE_ALPHA).any(axis=1))
        superior, rises = 0, 0
        for i in seeming:
            names = {f"f{k}": tuple(map(int, first[i, k])) for k in range(3)}
            found = stats.holm({name: float(p[i, k]) for k, name in enumerate(names)})
            superior += min(found.values()) <= verdict.RISE_ALPHA
            again = {f"f{k}": table(n, *map(int, second[i, k]), first=n) for k in range(3)}
            judged = stats.judge(
                {name: table(n, *bc) for name, bc in names.items()},
                margin,
                control_failed=dict.fromkeys(names, True),
                replication=again,
            )
            rises += judged.verdict == "RISES"
        what = f"3 equal families, n={n}, {points(margin)}, {discordance * 100:.0f} % discordant"
        group = "rises"
        out.append(_rate(group, f"superior on one slice, {what}", 0.025, superior / _ARMS, _ARMS, seed))
        out.append(_rate(group, f"RISES, {what}", 0.025, rises / _ARMS, _ARMS, seed))
    return out


# -- claims about fractional and clustered scores ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """How differences come about: k clusters, and `draw(rng, mean)` gives differences and their clusters."""

    name: str
    clusters: int
    draw: Callable[[np.random.Generator, float], tuple[np.ndarray, np.ndarray | None]]


def clustered(clusters: int, size: int, alike: float, discordance: float) -> Sample:
    """Right and wrong items, `size` to a cluster, whose flips are `alike` within it (an intraclass correlation)."""

    def draw_one(rng: np.random.Generator, mean: float) -> tuple[np.ndarray, np.ndarray]:
        overall = np.array([(discordance - mean) / 2, (discordance + mean) / 2, 1 - discordance])
        own = rng.gamma(np.maximum(overall * (1 - alike) / alike, 1e-9), size=(clusters, 3))
        counts = rng.multinomial(size, own / own.sum(axis=1, keepdims=True))
        kinds = np.tile([-1.0, 1.0, 0.0], clusters)
        return np.repeat(kinds, counts.ravel()), np.repeat(np.arange(clusters), size)

    return Sample(f"{clusters} clusters of {size}, {discordance * 100:.0f} % discordant", clusters, draw_one)


def fractional(items: int, losing: float, spread: float) -> Sample:
    """Single items whose differences have any size; a share `losing` loses up to half of everything at once."""

    def draw_one(rng: np.random.Generator, mean: float) -> tuple[np.ndarray, None]:
        rare = np.where(rng.random(items) < losing, -0.5 * rng.random(items), 0.0)
        small = spread * rng.uniform(-1, 1, items)
        return np.clip(rare + losing * 0.25 + small + mean, -1, 1), None

    return Sample(f"{items} fractional items, {losing * 100:.0f} % lose much", items, draw_one)


SAMPLES = (
    (clustered(59, 4, 0.3, 0.15), 0.05),
    (clustered(99, 3, 0.5, 0.12), 0.05),
    (clustered(29, 5, 0.5, 0.30), 0.10),
    (fractional(99, 0.20, 0.2), 0.03),
    (fractional(149, 0.05, 0.1), 0.02),
)


def _fractions(seed: int) -> list[Rate]:
    """HOLDS at the margin and coverage, where scores are fractional or share sources."""
    out = []
    for sample, margin in SAMPLES:
        rng = _rng(seed, 4, margin, *(ord(x) for x in sample.name))
        holds = missed = 0
        for _ in range(_RESAMPLED):
            diffs, clusters = sample.draw(rng, -margin)
            names = None if clusters is None else clusters.tolist()
            low, high = stats.cluster_bootstrap(
                diffs.tolist(), names, resamples=_RESAMPLES, seed=int(rng.integers(2**31))
            )
            missed += not low <= -margin <= high
            # HOLDS needs the interval above -margin and p <= alpha: asked of the verdict only where both may be.
            if stats.score_p(diffs, -margin, names) <= verdict.ALPHA:
                holds += judge_differences(diffs, names, margin) == "HOLDS"
        what = f"{sample.name}, {points(margin)}"
        out.append(_rate(CLAIMS, f"HOLDS at the margin, {what}", 0.05, holds / _RESAMPLED, _RESAMPLED, seed))
        kind = "BCa" if clusters is None else "BCa by clusters"
        out.append(_rate("intervals", f"{kind} 90 % misses, {what}", 0.10, missed / _RESAMPLED, _RESAMPLED, seed))
    return out


def judge_differences(diffs: np.ndarray, clusters: Sequence[int] | None, margin: float) -> str:
    """The verdict on differences, given to two arms so that scores stay in [0, 1] and the baseline sensitive."""
    base = np.clip(np.where(diffs < 0, -diffs, 1 - diffs), 0, 1)
    base = np.where(diffs == 0, 0.5, base)
    ids = tuple(map(str, range(len(diffs))))
    names = () if clusters is None else tuple(clusters)
    paired = stats.Paired(ids, tuple(base.tolist()), tuple(np.clip(base + diffs, 0, 1).tolist()), names)
    return stats.judge_family(paired, margin, control_failed=True, resamples=_RESAMPLES).verdict


# -- one arm, and looking all the time ---------------------------------------------------------------------------------


def _one_arm(seed: int) -> list[Rate]:
    """Wilson, averaged over accuracies of baselines that are sensitive; at single ones it moves around its level."""
    out = []
    for n in (29, 59, 149):
        rng = _rng(seed, 5, n)
        truth = rng.uniform(*stats.BASELINE_RANGE, _TABLES)
        counts = rng.binomial(n, truth)
        ends = np.array([stats.wilson(k, n) for k in range(n + 1)])[counts]
        missed = ((truth < ends[:, 0]) | (truth > ends[:, 1])).mean()
        out.append(_rate("intervals", f"Wilson 95 % misses, n={n}, any accuracy", 0.05, missed, _TABLES, seed))
    return out


def _scores(seed: int) -> list[Rate]:
    """Tango's interval, averaged over differences up to 10 points and discordances up to 40 %. Where only losses or
    only gains exist it falls short: see `shortfalls`."""
    out = []
    for n in (29, 59, 149):
        rng = _rng(seed, 7, n)
        diff = rng.uniform(-0.10, 0.10, _ARMS // 4)
        discordance = rng.uniform(np.abs(diff), 0.40)
        losses, gains = (discordance - diff) / 2, (discordance + diff) / 2
        tables = rng.multinomial(n, np.column_stack([losses, gains, 1 - discordance]))[:, :2]
        distinct, back = np.unique(tables, axis=0, return_inverse=True)
        ends = np.array([stats.tango_interval(int(b), int(c), n) for b, c in distinct])[back.ravel()]
        missed = ((diff < ends[:, 0]) | (diff > ends[:, 1])).mean()
        name = f"Tango 90 % misses, n={n}, any difference and discordance"
        out.append(_rate("intervals", name, 0.10, missed, len(diff), seed))
    return out


def _peeking(seed: int) -> list[Rate]:
    """A bet on a config that loses exactly the margin, looked at after every one of 600 items."""
    out = []
    for margin, discordance in ((0.05, 0.05), (0.05, 0.20), (0.03, 0.10), (0.10, 0.30)):
        rng = _rng(seed, 6, margin, discordance)
        u = rng.random((_SEQUENCES, 600))
        losses = (discordance + margin) / 2
        diffs = np.where(u < losses, -1.0, np.where(u < discordance, 1.0, 0.0))
        what = f"{points(margin)}, {discordance * 100:.0f} % discordant, looked at after each of 600"
        sides: tuple[tuple[str, Literal["greater", "less"]], ...] = (("accepted", "greater"), ("rejected", "less"))
        for word, side in sides:
            crossed = (stats.anytime_p(stats.betting_wealth(diffs, -margin, side))[:, -1] <= 0.05).mean()
            out.append(_rate("any time", f"{word} at the margin, {what}", 0.05, crossed, _SEQUENCES, seed))
    return out


def _rng(seed: int, *what: float) -> np.random.Generator:
    return np.random.default_rng([seed, *(round(x * 1000) for x in what)])


def _rate(group: str, name: str, nominal: float, rate: float | np.floating, simulations: int, seed: int) -> Rate:
    return Rate(group=group, name=name, nominal=nominal, rate=float(rate), simulations=simulations, seed=seed)


def shortfalls() -> list[dict[str, float | int]]:
    """Where a score statistic held against 1.645 lets too much pass, and what the exact test makes of it: the largest
    error over all discordances, in both. Sums over all tables."""
    out: list[dict[str, float | int]] = []
    for n, margin in ((25, 0.10), (52, 0.05), (88, 0.03), (133, 0.02), (29, 0.10), (59, 0.05), (88, 0.05), (200, 0.10)):
        normal = stats.unconditional_p(float(norm.ppf(0.95)), n, -margin)
        critical = stats.critical_z(n, margin)
        row = {"n": n, "margin": margin, "score_test": normal, "critical_z": critical}
        out.append(row | {"exact_test": stats.unconditional_p(critical, n, -margin)})
    return out


def powers() -> list[dict[str, float | int | str]]:
    """How often a config that is truly equal is said to hold, at the numbers of items that a margin is planned for and
    at those of `n_needed`: in one family, and in three that are independent. Sums over all tables."""
    out: list[dict[str, float | int | str]] = []
    for margin in reversed(stats.MARGINS):
        for discordance in (0.0, 0.01, 0.02, 0.05, 0.10):
            needed = stats.n_needed(margin, discordance) or 0
            for rule, n in (("planned", stats.least_items(margin)), ("n_needed", needed)):
                rate = stats.pass_rate(n, margin, discordance) if n <= _MOST_ITEMS else None
                if rate is not None:
                    row = {"n": n, "margin": margin, "discordance": discordance, "rule": rule}
                    out.append(row | {"one_family": rate, "three_families": rate**3})
    return out


PARTS: dict[str, Callable[[int], list[Rate]]] = {
    CLAIMS: _margin_claims,
    "the worst discordance": _worst_case,
    "many questions": _families,
    "fractional and clustered scores": _fractions,
    "intervals of one arm": _one_arm,
    "intervals of a difference": _scores,
    "looking all the time": _peeking,
}
