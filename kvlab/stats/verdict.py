"""From paired scores to one of five words.

HOLDS         the one-sided 5 % test rejects "the config loses `margin` or more", and low > -margin. The test is exact
              for right/wrong scores of unrelated items; the interval alone would err in up to 7 % of cases.
RISES         HOLDS, and one-sided exact McNemar p <= .025 after Holm over families, and the same again on a second,
              disjoint slice of items. Without a replication a rise is reported as HOLDS.
WORSE         the same the other way: "loses `margin` or less" is rejected at 5 %, and high < -margin.
INSENSITIVE   the items could not have shown a loss: the known-bad control did not fail on them, was not run, or the
              baseline lies outside BASELINE_RANGE. No other claim is made, in either direction.
INCONCLUSIVE  everything else, with the number of items that would decide it; always so with fewer than two items.

A loss that is clear (high < 0) but may be smaller than the margin is INCONCLUSIVE or HOLDS, with a note saying so.
Knows no model and no files; margins are decided by the caller before the scores exist (`planned_margin`).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from kvlab.stats.clustered import cluster_bootstrap, score_p, sign_flip_p
from kvlab.stats.intervals import wilson
from kvlab.stats.multiple import holm
from kvlab.stats.paired import mcnemar_p, tango_interval
from kvlab.stats.power import check_margin, n_needed

VERDICTS = ("HOLDS", "RISES", "WORSE", "INCONCLUSIVE", "INSENSITIVE")
BASELINE_RANGE = (0.20, 0.98)
ALPHA = 0.05
RISE_ALPHA = 0.025


@dataclass(frozen=True, slots=True)
class Paired:
    """Scores in [0, 1] of two arms on the same items, in the same order. Clusters name items that share a source."""

    ids: tuple[str, ...]
    base: tuple[float, ...]
    config: tuple[float, ...]
    clusters: tuple[Hashable, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.ids)
        if len(set(self.ids)) != n:
            twice = next(i for i in self.ids if self.ids.count(i) > 1)
            raise ValueError(f"each item counts once, got {twice!r} more than once: drop the repeat")
        if len(self.base) != n or len(self.config) != n or len(self.clusters) not in (0, n):
            raise ValueError(
                f"need one score per item and arm, got {n} ids, {len(self.base)} base, {len(self.config)} config, "
                f"{len(self.clusters)} clusters"
            )
        for item, *scores in zip(self.ids, self.base, self.config, strict=True):
            if not all(0.0 <= s <= 1.0 for s in scores):  # false for NaN too
                raise ValueError(f"scores must be finite and in [0, 1], item {item!r} has {scores}")

    @classmethod
    def join(
        cls, base: Mapping[str, float], config: Mapping[str, float], clusters: Mapping[str, Hashable] | None = None
    ) -> "Paired":
        """Pair two arms by item id. Raises ValueError when one arm lacks an item: dropping it would bias the pair."""
        lone = sorted(set(base) ^ set(config))
        if lone:
            raise ValueError(f"both arms must score the same items, {len(lone)} have one arm only, e.g. {lone[:3]}")
        ids = tuple(base)
        groups = tuple(clusters[i] for i in ids) if clusters is not None else ()
        return cls(ids, tuple(base.values()), tuple(config[i] for i in ids), groups)

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def diffs(self) -> np.ndarray:
        return np.asarray(self.config, dtype=np.float64) - np.asarray(self.base, dtype=np.float64)

    @property
    def b(self) -> int:
        """Items on which the config scores lower."""
        return int((self.diffs < 0).sum())

    @property
    def c(self) -> int:
        """Items on which the config scores higher."""
        return int((self.diffs > 0).sum())

    @property
    def independent(self) -> int:
        """Number of clusters, or of items when each is its own."""
        return len(set(self.clusters)) if self.clusters else self.n

    @property
    def tango_applies(self) -> bool:
        """Scores are right/wrong and no two items share a cluster."""
        return self.independent == self.n and all(s in (0.0, 1.0) for s in (*self.base, *self.config))


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyVerdict:
    """One family of one config. diff, low, high and margin are in score units (0.05 is 5 points); the interval is
    two-sided 90 %. p asks whether the arms differ (two-sided), p_superior whether the config is better and p_margin
    whether it loses less than the margin (one-sided); None where n = 0."""

    n: int
    base: float | None
    score: float | None
    diff: float | None
    low: float | None
    high: float | None
    margin: float
    b: int
    c: int
    p: float | None
    p_superior: float | None
    p_margin: float | None
    n_needed: int | None
    verdict: str
    method: str  # "tango" | "cluster-bootstrap" | "none"
    note: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Judgement:
    """All families of one config, and the word for the whole."""

    verdict: str
    families: dict[str, FamilyVerdict] = field(default_factory=dict)


def judge_family(
    paired: Paired, margin: float, *, control_failed: bool | None, resamples: int = 10_000, seed: int = 0
) -> FamilyVerdict:
    """Verdict of one family, never RISES: that needs all families and a replication (`judge`).

    control_failed says whether the known-bad config failed on these items; None means it was not run, which counts
    as no sensitivity shown. Right/wrong scores of unrelated items use Tango, anything else a cluster bootstrap.
    """
    check_margin(margin)
    if paired.n == 0:
        return FamilyVerdict(
            n=0, base=None, score=None, diff=None, low=None, high=None, margin=margin, b=0, c=0, p=None,
            p_superior=None, p_margin=None, n_needed=n_needed(margin, 0.0), verdict="INCONCLUSIVE", method="none",
            note="no items",
        )  # fmt: skip
    method, low, high = _interval(paired, resamples, seed)
    p, p_superior = _p_values(paired, method, resamples, seed)
    p_margin = _p_margin(paired, margin)
    base, diff = float(np.mean(paired.base)), float(np.mean(paired.diffs))
    verdict, note = _word(paired, base, low, high, margin, p_margin, control_failed)
    return FamilyVerdict(
        n=paired.n,
        base=base,
        score=float(np.mean(paired.config)),
        diff=diff,
        low=low,
        high=high,
        margin=margin,
        b=paired.b,
        c=paired.c,
        p=p,
        p_superior=p_superior,
        p_margin=p_margin,
        n_needed=_more_items(paired, margin, diff) if verdict == "INCONCLUSIVE" else None,
        verdict=verdict,
        method=method,
        note=note,
    )


def judge(
    families: Mapping[str, Paired],
    margin: float,
    *,
    control_failed: Mapping[str, bool | None],
    replication: Mapping[str, Paired] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Judgement:
    """Verdict of a config over its families (an intersection, so no correction of alpha for HOLDS).

    HOLDS needs every family; RISES needs every family to hold and at least one to rise. Otherwise the strongest
    obstacle names the whole: WORSE, then INSENSITIVE, then INCONCLUSIVE; nothing at all is INCONCLUSIVE.
    replication holds paired scores on fresh items; sharing an item with the first slice raises ValueError.
    """
    found = {
        name: judge_family(paired, margin, control_failed=control_failed.get(name), resamples=resamples, seed=seed)
        for name, paired in families.items()
    }
    rising = _superior({name: f for name, f in found.items() if f.n > 1}) & {
        name for name, f in found.items() if f.verdict == "HOLDS"
    }
    confirmed = _replicated(rising, families, replication or {}, margin, resamples, seed)
    for name in rising:
        if name in confirmed:
            found[name] = replace(found[name], verdict="RISES", note="superior on both slices")
        else:
            why = "not replicated" if name in (replication or {}) else "no replication was run"
            found[name] = replace(found[name], note=f"superior on this slice, {why}")
    return Judgement(_whole([f.verdict for f in found.values()]), found)


def control_failed(paired: Paired, margin: float, *, resamples: int = 10_000, seed: int = 0) -> bool:
    """Whether a known-bad config was caught: it does not pass non-inferiority and its interval lies below zero.

    The second half keeps a mere lack of items from passing for sensitivity.
    """
    if paired.n < 2:
        return False
    _, low, high = _interval(paired, resamples, seed)
    return not _passes(low, margin, _p_margin(paired, margin)) and high < 0


def score_interval(scores: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Wilson interval of one arm's mean score; None for no scores."""
    return wilson(float(np.sum(scores)), len(scores), level) if len(scores) else None


def _interval(paired: Paired, resamples: int, seed: int) -> tuple[str, float, float]:
    if paired.tango_applies:
        return "tango", *tango_interval(paired.b, paired.c, paired.n, 1 - 2 * ALPHA)
    if paired.independent < 2:
        return "none", -1.0, 1.0
    low, high = cluster_bootstrap(
        paired.diffs.tolist(), paired.clusters or None, level=1 - 2 * ALPHA, resamples=resamples, seed=seed
    )
    return "cluster-bootstrap", low, high


def _p_margin(paired: Paired, margin: float) -> float:
    """p-value of "the config loses `margin` or more"."""
    return score_p(paired.diffs, -margin, paired.clusters or None) if paired.independent > 1 else 1.0


def _passes(low: float, margin: float, p_margin: float) -> bool:
    return low > -margin and p_margin <= ALPHA


def _p_values(paired: Paired, method: str, resamples: int, seed: int) -> tuple[float, float]:
    if method == "tango":
        return mcnemar_p(paired.b, paired.c), mcnemar_p(paired.b, paired.c, "greater")
    diffs, clusters = paired.diffs.tolist(), paired.clusters or None
    two = sign_flip_p(diffs, clusters, resamples=resamples, seed=seed)
    flips = sign_flip_p(diffs, clusters, alternative="greater", resamples=resamples, seed=seed)
    # Many small gains and a rare large loss may well balance, yet look like gains only where the loss was not drawn.
    return two, max(flips, score_p(paired.diffs, 0.0, clusters)) if paired.independent > 1 else flips


def _word(
    paired: Paired, base: float, low: float, high: float, margin: float, p_margin: float, failed: bool | None
) -> tuple[str, str]:
    if paired.independent < 2:
        return "INCONCLUSIVE", "one item says nothing about others" if paired.n == 1 else "all items share one source"
    if failed is None:
        return "INSENSITIVE", "the known-bad control was not run"
    if not failed:
        return "INSENSITIVE", "the known-bad control did not fail on these items"
    if not BASELINE_RANGE[0] <= base <= BASELINE_RANGE[1]:
        return "INSENSITIVE", f"the baseline scores {base:.3f}, outside {BASELINE_RANGE[0]} to {BASELINE_RANGE[1]}"
    if high < -margin and score_p(-paired.diffs, margin, paired.clusters or None) <= ALPHA:
        return "WORSE", ""
    clear_loss = "measurably below the baseline" if high < 0 else ""
    if _passes(low, margin, p_margin):
        return "HOLDS", clear_loss and f"{clear_loss}, by less than the margin"
    if low > -margin:
        return "INCONCLUSIVE", f"the interval excludes a loss of the margin, the test does not (p = {p_margin:.3f})"
    return "INCONCLUSIVE", clear_loss and f"{clear_loss}, perhaps by less than the margin"


def _more_items(paired: Paired, margin: float, diff: float) -> int | None:
    """Items that would decide, if the observed loss (never an observed gain) and discordance are the true ones.
    Clustered items count as if a cluster added no more than one."""
    needed = n_needed(margin, float(np.mean(paired.diffs**2)), min(diff, 0.0))
    if needed is None:
        return None
    return max(paired.n + 1, -(-needed * paired.n // paired.independent))


def _superior(found: Mapping[str, FamilyVerdict]) -> set[str]:
    adjusted = holm({name: f.p_superior for name, f in found.items() if f.p_superior is not None})
    return {name for name, p in adjusted.items() if p <= RISE_ALPHA}


def _replicated(
    rising: set[str],
    first: Mapping[str, Paired],
    second: Mapping[str, Paired],
    margin: float,
    resamples: int,
    seed: int,
) -> set[str]:
    """Families whose rise repeats on fresh items: passes the margin again, and superior again (Holm over those)."""
    for name in second:
        shared = set(first[name].ids) & set(second[name].ids) if name in first else set()
        if shared:
            raise ValueError(
                f"a replication needs fresh items, {len(shared)} of {name} were used before: {min(shared)!r}"
            )
    again = {
        name: judge_family(second[name], margin, control_failed=True, resamples=resamples, seed=seed)
        for name in sorted(rising & set(second))
    }
    return _superior({n: f for n, f in again.items() if f.n > 1}) & {
        n for n, f in again.items() if f.verdict == "HOLDS"
    }


def _whole(verdicts: Sequence[str]) -> str:
    for obstacle in ("WORSE", "INSENSITIVE", "INCONCLUSIVE"):
        if obstacle in verdicts:
            return obstacle
    if not verdicts:
        return "INCONCLUSIVE"
    return "RISES" if "RISES" in verdicts else "HOLDS"
