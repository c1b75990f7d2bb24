"""Confirmation on scores by formula: margin, fixed sequence, controls, and no rise without a replication."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import standin
import torch
from standin import StandIn, index, items

from kvlab import confirm, stats
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.confirm import Margin, family_scores, in_sequence, judge_arms, replicate, seems_to_rise
from kvlab.evals.item import EvalSet, Item
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import Fraction
from kvlab.subject import BASELINE

SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
CONTROL = KVConfig(key=Affine(bits=2), value=Affine(bits=2), budget=Fraction(0.25))
LOSSLESS = KVConfig(key=Fp8(), value=Fp8())
LOSSY = KVConfig(key=Affine(bits=3), value=Affine(bits=3))
OTHER = KVConfig(key=Affine(bits=4), value=Affine(bits=4))
N = 60
FRESH = items("confirm", N)
# The baseline is right on the first three fifths.
RIGHT = 36


def _right(config: KVConfig, item: Item, first: int = 0, beyond: int = RIGHT) -> float:
    """Right on items first .. beyond - 1 of each family."""
    return float(first <= index(item) < beyond)


def _score(**ranges: tuple[int, int]) -> Callable[[KVConfig, Item], float]:
    """By config: which items are right. The control is wrong on everything unless said otherwise."""
    named = {"control": CONTROL, "lossless": LOSSLESS, "lossy": LOSSY, "other": OTHER, "baseline": BASELINE}
    known = {named[name].id: span for name, span in {"control": (0, 0), **ranges}.items()}
    return lambda config, item: _right(config, item, *known.get(config.id, (0, RIGHT)))


def _nll(config: KVConfig, item: Item) -> float:
    return 1.0


def judged(
    root: Any,
    arms: Sequence[KVConfig],
    score: Callable[[KVConfig, Item], float],
    *,
    nll: Callable[[KVConfig, Item], float] = _nll,
    fresh: EvalSet = FRESH,
) -> tuple[confirm.Verdicts, Any]:
    book = standin.book(root, StandIn(SHAPE, nll, score))
    return judge_arms(book, fresh, arms, CONTROL, Margin.planned(N)), book


# -- the margin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "points"), [(29, 10), (58, 10), (59, 5), (98, 5), (99, 3), (148, 3), (149, 2), (256, 2), (1000, 2)]
)
def test_the_margin_is_the_smallest_a_lossless_config_can_pass(n, points) -> None:
    margin = Margin.planned(n)
    assert margin.value == points / 100
    assert margin.rule == f"the smallest of 2, 3, 5, 10 points a lossless config can pass at n={n} per family"
    assert margin.to_dict() == {"value_points": points, "n": n, "rule": margin.rule}
    # Passing means that no flip at all ends in HOLDS, and that the next smaller margin would not.
    lossless = stats.Paired(tuple(map(str, range(n))), *[(1.0, 0.0) * (n // 2) + (1.0,) * (n % 2)] * 2)
    assert stats.judge_family(lossless, margin.value, control_failed=True).verdict == "HOLDS"
    smaller = {0.10: 0.05, 0.05: 0.03, 0.03: 0.02}.get(margin.value)
    if smaller:
        assert stats.judge_family(lossless, smaller, control_failed=True).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("n", [2, 10, 28])
def test_too_few_items_keep_the_widest_margin_and_say_what_is_missing(n) -> None:
    margin = Margin.planned(n)
    assert margin.value == 0.10
    assert f"n={n} cannot decide" in margin.rule
    assert "29 items" in margin.rule


# -- verdicts and controls ---------------------------------------------------------------------------------------------


def test_a_lossless_config_holds_and_a_lossy_one_is_worse(tmp_path) -> None:
    verdicts, book = judged(tmp_path, [LOSSLESS, LOSSY], _score(lossy=(0, 12)))
    assert verdicts.judged[LOSSLESS.id].verdict == "HOLDS"
    assert verdicts.judged[LOSSY.id].verdict == "WORSE"
    found = verdicts.judged[LOSSY.id].families["math"]
    assert (found.n, found.b, found.c, found.margin) == (60, 24, 0, 0.05)
    assert found.base == pytest.approx(0.6)
    assert found.score == pytest.approx(0.2)
    assert found.diff == pytest.approx(-0.4)
    low, high = stats.tango_interval(24, 0, 60, 0.90)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert set(verdicts.judged) == {LOSSLESS.id, LOSSY.id}
    assert book.subject.most_asked == 2  # the baseline and its repeat
    assert book.prefills == len(FRESH)


def test_one_bad_family_is_enough(tmp_path) -> None:
    def score(config: KVConfig, item: Item) -> float:
        lost = config == LOSSY and item.family == "code"
        return _right(config, item, 0, 0 if config == CONTROL or lost else RIGHT)

    verdicts, _ = judged(tmp_path, [LOSSY], score)
    judgement = verdicts.judged[LOSSY.id]
    assert judgement.verdict == "WORSE"
    assert {f: v.verdict for f, v in judgement.families.items()} == {
        "retrieval": "HOLDS",
        "math": "HOLDS",
        "code": "WORSE",
    }


def test_controls_report_what_they_saw(tmp_path) -> None:
    verdicts, _ = judged(tmp_path, [LOSSLESS], _score())
    assert verdicts.aa == {"n": 180, "flips": 0, "share": 0.0, "dnll": 0.0}
    for row in verdicts.positive.values():
        assert row["failed"] is True
        assert (row["n"], row["base"], row["score"], row["diff"]) == (60, 0.6, 0.0, -0.6)
        assert row["high"] < 0
    for row in verdicts.baseline.values():
        assert (row["n"], row["score"]) == (60, 0.6)
        low, high = stats.wilson(36, 60)
        assert (row["low"], row["high"]) == (low, high)


def test_a_control_that_is_not_caught_makes_the_family_insensitive(tmp_path) -> None:
    def score(config: KVConfig, item: Item) -> float:
        return _right(config, item, 0, 0 if config == CONTROL and item.family != "math" else RIGHT)

    verdicts, _ = judged(tmp_path, [LOSSLESS, LOSSY], score)
    assert {f: bool(r["failed"]) for f, r in verdicts.positive.items()} == {
        "retrieval": True,
        "math": False,
        "code": True,
    }
    judgement = verdicts.judged[LOSSLESS.id]
    assert judgement.verdict == "INSENSITIVE"
    assert "control did not fail" in judgement.families["math"].note
    assert judgement.families["code"].verdict == "HOLDS"


@pytest.mark.parametrize(("beyond", "verdict"), [(0, "INSENSITIVE"), (60, "INSENSITIVE")])
def test_a_baseline_on_the_floor_or_ceiling_decides_nothing(tmp_path, beyond, verdict) -> None:
    span = (0, beyond)
    verdicts, _ = judged(tmp_path, [LOSSLESS], _score(baseline=span, lossless=span))
    assert verdicts.judged[LOSSLESS.id].verdict == verdict


def test_a_flaky_baseline_shows_as_flips(tmp_path) -> None:
    asked: dict[str, int] = {}

    def score(config: KVConfig, item: Item) -> float:
        if config == BASELINE:
            asked[item.id] = asked.get(item.id, 0) + 1
            if asked[item.id] == 2 and index(item) in (3, 50):
                return 1 - _right(config, item)
        return _score()(config, item)

    verdicts, _ = judged(tmp_path, [LOSSLESS], score)
    assert verdicts.aa == {"n": 180, "flips": 6, "share": 6 / 180, "dnll": 0.0}


def test_the_repeat_is_scored_while_the_snapshots_are_still_there(tmp_path) -> None:
    """Baseline and repeat of an item come close together, so that no item is prefilled twice."""
    _, book = judged(tmp_path, [LOSSLESS], _score())
    order = [n for n, (c, _) in enumerate(book.subject.asked) if c == BASELINE.id]
    place: dict[str, list[int]] = {}
    for n in order:
        place.setdefault(book.subject.asked[n][1], []).append(n)
    assert all(len(at) == 2 and at[1] - at[0] < 24 * 4 for at in place.values())


def test_arms_that_are_controls_or_repeats_are_scored_once(tmp_path) -> None:
    verdicts, book = judged(tmp_path, [LOSSLESS, CONTROL, LOSSLESS, BASELINE], _score())
    assert book.subject.most_asked == 2
    assert verdicts.judged[CONTROL.id].verdict == "WORSE"
    assert verdicts.judged[BASELINE.id].verdict == "HOLDS"
    assert len(verdicts.judged) == 3


def test_an_arm_that_fails_is_not_judged_and_stops_no_other(tmp_path) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        return float("nan") if config == LOSSY and index(item) == 31 else 1.0

    verdicts, book = judged(tmp_path, [LOSSY, LOSSLESS], _score(), nll=nll)
    assert set(verdicts.judged) == {LOSSLESS.id}
    assert verdicts.judged[LOSSLESS.id].verdict == "HOLDS"
    assert "nan" in book.failures[LOSSY.id]


@pytest.mark.parametrize("broken", [BASELINE, CONTROL], ids=["baseline", "control"])
def test_without_its_controls_nothing_is_judged(tmp_path, broken) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        return float("nan") if config == broken else 1.0

    with pytest.raises(RuntimeError, match=r"nothing can be judged.*nan"):
        judged(tmp_path, [LOSSLESS], _score(), nll=nll)


def test_items_that_share_a_source_are_not_counted_as_independent(tmp_path) -> None:
    """Sixty items of three sources cannot show what sixty sources can."""
    few = tuple(dataclasses.replace(i, cluster=f"{i.family}{index(i) % 3}") for i in FRESH.items)

    def score(config: KVConfig, item: Item) -> float:
        lost = config == LOSSY and index(item) in (0, 3, 6)  # one source
        return 0.0 if lost else _score()(config, item)

    verdicts, _ = judged(tmp_path, [LOSSY], score, fresh=EvalSet("few", 1, few))
    alone, _ = judged(tmp_path / "alone", [LOSSY], score)
    assert verdicts.judged[LOSSY.id].families["math"].method == "cluster-bootstrap"
    assert alone.judged[LOSSY.id].families["math"].method == "tango"


# -- one claim after another -------------------------------------------------------------------------------------------


def _words(order: list[KVConfig], verdicts: confirm.Verdicts) -> list[str]:
    found = in_sequence(order, verdicts)
    return [found[c.id].verdict if c.id in found else "-" for c in order]


def test_claims_stop_after_the_first_that_does_not_pass(tmp_path) -> None:
    arms = [LOSSLESS, LOSSY, OTHER]
    verdicts, _ = judged(tmp_path, arms, _score(lossy=(0, 12)))
    assert verdicts.judged[OTHER.id].verdict == "HOLDS"
    assert _words(arms, verdicts) == ["HOLDS", "WORSE", "INCONCLUSIVE"]
    assert _words([LOSSLESS, OTHER, LOSSY], verdicts) == ["HOLDS", "HOLDS", "WORSE"]
    assert _words([LOSSY, LOSSLESS, OTHER], verdicts) == ["WORSE", "INCONCLUSIVE", "INCONCLUSIVE"]
    stopped = in_sequence(arms, verdicts)[OTHER.id]
    plain = verdicts.judged[OTHER.id]
    for name, family in stopped.families.items():
        assert "not tested" in family.note
        assert (family.diff, family.low, family.high, family.b) == (
            plain.families[name].diff,
            plain.families[name].low,
            plain.families[name].high,
            plain.families[name].b,
        )


def test_a_later_config_that_is_worse_stays_worse(tmp_path) -> None:
    """No claim is taken back: only passes need the sequence."""
    verdicts, _ = judged(tmp_path, [LOSSY, OTHER], _score(lossy=(0, 12), other=(0, 5)))
    assert _words([LOSSY, OTHER], verdicts) == ["WORSE", "WORSE"]


def test_a_config_that_could_not_be_scored_stops_the_sequence(tmp_path) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        return float("nan") if config == LOSSY else 1.0

    verdicts, _ = judged(tmp_path, [LOSSY, OTHER], _score(), nll=nll)
    assert _words([LOSSY, OTHER], verdicts) == ["-", "INCONCLUSIVE"]


# -- rises -------------------------------------------------------------------------------------------------------------

SECOND = items("replicate", N)


def _rise(on_second: int) -> Callable[[KVConfig, Item], float]:
    """LOSSLESS is right on 12 more items than the baseline at first, and on `on_second` more on the second slice."""

    def score(config: KVConfig, item: Item) -> float:
        more = (12 if item.split == "confirm" else on_second) if config == LOSSLESS else 0
        return _right(config, item, 0, 0 if config == CONTROL else RIGHT + more)

    return score


@pytest.mark.parametrize(("on_second", "verdict"), [(12, "RISES"), (0, "HOLDS"), (-30, "HOLDS")])
def test_a_rise_is_claimed_only_after_it_repeats_on_fresh_items(tmp_path, on_second, verdict) -> None:
    verdicts, book = judged(tmp_path, [LOSSLESS], _rise(on_second))
    first = verdicts.judged[LOSSLESS.id]
    assert first.verdict == "HOLDS"
    assert seems_to_rise(first)
    assert all("no replication was run" in f.note for f in first.families.values())
    second = replicate(book, FRESH, SECOND, LOSSLESS, verdicts)
    assert second.verdict == verdict
    assert all(("both slices" if verdict == "RISES" else "not replicated") in f.note for f in second.families.values())
    assert {role for role, _, _ in book.rows} == {"confirm", "aa", "replicate"}
    assert not seems_to_rise(second) or verdict == "HOLDS"


def test_only_configs_that_seem_to_rise_get_a_second_slice(tmp_path) -> None:
    made = []

    def second() -> EvalSet:
        made.append(1)
        return SECOND

    arms = [LOSSY, LOSSLESS, OTHER]
    rises = _rise(12)
    verdicts, book = judged(tmp_path, arms, lambda c, i: rises(LOSSLESS if c == OTHER else c, i))
    after = confirm.replicate_rises(book, FRESH, second, arms, verdicts)
    assert [after.judged[c.id].verdict for c in arms] == ["HOLDS", "RISES", "RISES"]
    assert {c for role, c, _ in book.rows if role == "replicate"} == {BASELINE.id, LOSSLESS.id, OTHER.id}
    assert made == [1]  # one slice for both
    flat, book = judged(tmp_path / "flat", [LOSSLESS], _score())
    assert confirm.replicate_rises(book, FRESH, second, [LOSSLESS], flat) == flat
    assert made == [1]  # nothing to make where nothing seems to rise


def test_what_only_holds_does_not_seem_to_rise(tmp_path) -> None:
    verdicts, _ = judged(tmp_path, [LOSSLESS, LOSSY], _score(lossy=(0, 40)))
    assert not seems_to_rise(verdicts.judged[LOSSLESS.id])
    assert not seems_to_rise(verdicts.judged[LOSSY.id])  # four more of sixty is luck


def test_a_replication_on_used_items_is_refused(tmp_path) -> None:
    verdicts, book = judged(tmp_path, [LOSSLESS], _rise(12))
    with pytest.raises(ValueError, match="fresh items"):
        replicate(book, FRESH, FRESH, LOSSLESS, verdicts)


# -- means -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "low", "high"), [([0.0] * 25, 0.0, 0.133), ([1.0] * 25, 0.867, 1.0), ([1, 1, 1, 0], 0.301, 0.954)]
)
def test_intervals_at_the_boundary_are_not_empty(scores, low, high) -> None:
    pairs = [(i, s) for i, s in zip(items("confirm", len(scores), ("math",)).items, scores, strict=True)]
    found = family_scores(pairs)
    assert found["math"]["n"] == len(scores)
    assert found["math"]["low"] == pytest.approx(low, abs=6e-4)
    assert found["math"]["high"] == pytest.approx(high, abs=6e-4)


def test_one_item_has_an_interval_and_no_verdict(tmp_path) -> None:
    one = items("confirm", 1)
    verdicts, _ = judged(tmp_path, [LOSSLESS], _score(), fresh=one)
    assert verdicts.judged[LOSSLESS.id].verdict == "INCONCLUSIVE"
    assert family_scores([(one.items[0], 1.0)])[one.items[0].family]["low"] == pytest.approx(0.2065, abs=1e-4)


def test_three_flips_in_fifty_are_neither_loss_nor_gain(tmp_path) -> None:
    def score(config: KVConfig, item: Item) -> float:
        flipped = config == LOSSY and index(item) in (1, 2, 40)  # two lost, one gained
        right = _score()(config, item)
        return 1 - right if flipped else right

    fifty = items("confirm", 50)
    verdicts, _ = judged(tmp_path, [LOSSY], score, fresh=fifty)
    for family in verdicts.judged[LOSSY.id].families.values():
        assert (family.n, family.b, family.c) == (50, 2, 1)
        assert family.verdict == "INCONCLUSIVE"
        assert family.p == 1.0
        assert family.n_needed is not None
        assert family.n_needed > 50
