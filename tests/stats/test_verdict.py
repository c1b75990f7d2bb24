import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.stats import (
    VERDICTS,
    Paired,
    control_failed,
    judge,
    judge_family,
    planned_margin,
    score_interval,
    tango_interval,
    tango_z,
    unconditional_p,
)


def paired(n, b=0, c=0, accuracy=0.6, prefix="i"):
    """n items: the first b lost, the next c gained, the rest equal, with the given baseline accuracy."""
    right = round(accuracy * n)
    base = [1.0] * b + [0.0] * c + [1.0] * max(0, right - b)
    base = (base + [0.0] * n)[:n]
    config = [0.0] * b + [1.0] * c + base[b + c :]
    return Paired(tuple(f"{prefix}{i}" for i in range(n)), tuple(base), tuple(config))


CAUGHT = {"retrieval": True, "math": True, "code": True}


@pytest.mark.parametrize("n", [29, 64, 128, 400])
def test_a_lossless_config_holds_at_the_planned_margin(n):
    margin = planned_margin(n)
    result = judge({f: paired(n, prefix=f) for f in CAUGHT}, margin, control_failed=CAUGHT)
    assert result.verdict == "HOLDS"
    for family in result.families.values():
        assert (family.verdict, family.diff, family.b, family.c, family.p, family.n_needed) == (
            "HOLDS",
            0,
            0,
            0,
            1.0,
            None,
        )
        assert family.low > -margin
        assert family.method == "tango"


def test_the_wording_example():
    family = judge_family(paired(512, b=6, c=17), 0.03, control_failed=True)
    assert family.diff == pytest.approx(0.0215, abs=5e-5)
    assert (family.low, family.high) == tango_interval(6, 17, 512)
    assert family.verdict == "HOLDS"
    assert family.score - family.base == pytest.approx(family.diff)


def test_the_interval_alone_is_not_enough():
    """At 52 items without a flip the interval ends above -5 points; a loss of 5 points shows no flip in 7 % of runs."""
    family = judge_family(paired(52), 0.05, control_failed=True)
    assert family.low > -0.05
    assert family.p_margin == pytest.approx(0.95**52)
    assert family.verdict == "INCONCLUSIVE"
    assert family.note == "the interval excludes a loss of the margin, the test does not (p = 0.069)"
    assert family.n_needed == 59
    assert judge_family(paired(59), 0.05, control_failed=True).verdict == "HOLDS"
    # The same the other way round: the interval shows a loss of more than ten points, the exact test does not.
    worse = judge_family(paired(40, b=8), 0.10, control_failed=True)
    assert worse.high < -0.10
    assert unconditional_p(tango_z(0, 8, 40, 0.10), 40, 0.10) == pytest.approx(0.0514, abs=5e-5)
    assert worse.verdict == "INCONCLUSIVE"
    assert worse.note == "measurably below the baseline, perhaps by less than the margin"
    assert judge_family(paired(40, b=9), 0.10, control_failed=True).verdict == "WORSE"


def test_rare_losses_behind_small_gains_are_no_rise():
    """29 fractional items, each .03 better: a sign flip is sure, but a rare loss of .6 may not have been drawn."""
    ids = tuple(map(str, range(29)))
    better = Paired(ids, (0.5,) * 29, (0.53,) * 29)
    again = Paired(tuple(f"f{i}" for i in ids), (0.5,) * 29, (0.53,) * 29)
    result = judge({"math": better}, 0.1, control_failed={"math": True}, replication={"math": again})
    assert result.verdict == "HOLDS"
    assert result.families["math"].p_superior == pytest.approx(0.97**29)
    assert result.families["math"].p < 0.001


def test_worse_needs_the_whole_interval_below_the_margin():
    assert judge_family(paired(200, b=60), 0.05, control_failed=True).verdict == "WORSE"
    near = judge_family(paired(200, b=18, c=2), 0.05, control_failed=True)
    assert near.high > -0.05
    assert near.high < 0
    assert near.verdict == "INCONCLUSIVE"
    assert near.n_needed is None  # a loss of 8 points will not turn into "less than 5" with more items
    assert near.note == "measurably below the baseline, perhaps by less than the margin"
    small = judge_family(paired(2000, b=40, c=10), 0.05, control_failed=True)
    assert small.verdict == "HOLDS"
    assert small.note == "measurably below the baseline, by less than the margin"


def test_three_flips_in_fifty_are_neither_loss_nor_win():
    for b, c in [(3, 0), (0, 3), (2, 1)]:
        again = {"math": paired(50, b, c, prefix="fresh")}
        result = judge({"math": paired(50, b, c)}, 0.05, control_failed={"math": True}, replication=again)
        assert result.verdict in ("INCONCLUSIVE", "HOLDS")
        assert result.families["math"].p >= 0.25


def test_inconclusive_names_the_items_that_would_decide():
    family = judge_family(paired(100, b=3, c=3), 0.03, control_failed=True)
    assert family.verdict == "INCONCLUSIVE"
    assert family.n_needed == 461  # rounded up from (1.645 * sqrt(.0709) + .842 * sqrt(.06))^2 / .03^2


@pytest.mark.parametrize(("n", "verdict"), [(0, "INCONCLUSIVE"), (1, "INCONCLUSIVE")])
def test_nothing_is_claimed_from_one_item_or_none(n, verdict):
    assert judge_family(paired(n), 0.9, control_failed=True).verdict == verdict
    assert judge_family(paired(n, c=n), 0.9, control_failed=True).verdict == verdict
    assert judge({"math": paired(n)}, 0.9, control_failed={"math": True}).verdict == verdict
    assert judge({}, 0.05, control_failed={}).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("failed", "accuracy", "note"),
    [(None, 0.6, "not run"), (False, 0.6, "did not fail"), (True, 0.1, "0.100"), (True, 1.0, "1.000")],
)
def test_insensitive_families_make_no_claim(failed, accuracy, note):
    for b in (0, 15):
        family = judge_family(paired(200, b=b, accuracy=accuracy), 0.05, control_failed=failed)
        assert family.verdict == "INSENSITIVE"
        assert note in family.note


def test_a_family_missing_from_the_controls_is_insensitive():
    assert judge({"math": paired(200)}, 0.05, control_failed={}).verdict == "INSENSITIVE"


@pytest.mark.parametrize(
    ("cases", "whole"),
    [
        ({"math": {"b": 60}, "code": {"b": 3, "c": 3}}, "WORSE"),
        ({"math": {"accuracy": 0.0}, "code": {"b": 60}}, "WORSE"),
        ({"math": {"accuracy": 0.0}, "code": {"b": 20, "c": 20}}, "INSENSITIVE"),
        ({"math": {}, "code": {"b": 20, "c": 20}}, "INCONCLUSIVE"),
        ({"math": {}, "code": {}}, "HOLDS"),
    ],
)
def test_the_strongest_obstacle_names_the_whole(cases, whole):
    families = {name: paired(200, **case) for name, case in cases.items()}
    assert judge(families, 0.05, control_failed=CAUGHT).verdict == whole


def test_a_rise_needs_a_replication():
    first = {"math": paired(200, b=1, c=14), "code": paired(200)}
    alone = judge(first, 0.05, control_failed=CAUGHT)
    assert alone.verdict == "HOLDS"
    assert alone.families["math"].note == "superior on this slice, no replication was run"
    again = {"math": paired(200, b=1, c=14, prefix="fresh"), "code": paired(200, prefix="fresh")}
    both = judge(first, 0.05, control_failed=CAUGHT, replication=again)
    assert (both.verdict, both.families["math"].verdict, both.families["code"].verdict) == ("RISES", "RISES", "HOLDS")
    flat = judge(first, 0.05, control_failed=CAUGHT, replication={"math": paired(200, b=2, c=3, prefix="fresh")})
    assert flat.verdict == "HOLDS"
    assert flat.families["math"].note == "superior on this slice, not replicated"
    with pytest.raises(ValueError, match="fresh items, 200 of math"):
        judge(first, 0.05, control_failed=CAUGHT, replication=first)


def test_a_rise_is_corrected_for_the_number_of_families():
    # One-sided exact McNemar of 1 against 8 is .0195: below .025 alone, above it after Holm over three families.
    fresh = {"math": paired(200, b=0, c=20, prefix="fresh")}
    one = judge({"math": paired(200, 1, 8)}, 0.05, control_failed=CAUGHT, replication=fresh)
    three = judge(
        {"math": paired(200, 1, 8), "code": paired(200), "retrieval": paired(200)},
        0.05, control_failed=CAUGHT, replication=fresh,
    )  # fmt: skip
    assert one.families["math"].p_superior == pytest.approx(0.01953, abs=1e-5)
    assert (one.verdict, three.verdict) == ("RISES", "HOLDS")
    # 1 against 7 is .035: not enough even alone.
    assert judge({"math": paired(200, 1, 7)}, 0.05, control_failed=CAUGHT, replication=fresh).verdict == "HOLDS"


def test_a_control_is_caught_only_by_a_loss():
    assert control_failed(paired(100, b=40), 0.05)
    assert not control_failed(paired(100), 0.05)
    assert not control_failed(paired(10), 0.05)  # too few items to pass is not the same as failing
    assert not control_failed(paired(0), 0.05)


def test_fractional_scores_use_the_bootstrap():
    rng = np.random.default_rng(1)
    base = rng.uniform(0.3, 0.9, 150)
    config = (base - rng.uniform(0, 0.01, 150)).clip(0, 1)
    ids = tuple(map(str, range(150)))
    family = judge_family(Paired(ids, tuple(base), tuple(config)), 0.03, control_failed=True)
    assert (family.verdict, family.method) == ("HOLDS", "cluster-bootstrap")
    assert family.low < family.diff < family.high
    lost = judge_family(Paired(ids, tuple(base), tuple(base * 0.5)), 0.03, control_failed=True)
    assert lost.verdict == "WORSE"
    assert lost.p < 0.001


def test_items_of_one_source_count_once():
    one = paired(200)
    grouped = Paired(one.ids, one.base, one.config, tuple(i // 10 for i in range(200)))
    family = judge_family(grouped, 0.05, control_failed=True)
    assert family.method == "cluster-bootstrap"
    assert family.verdict == "INCONCLUSIVE"  # twenty silent sources cannot support five points
    assert family.n_needed == 590  # 59 sources of ten
    same = Paired(one.ids, one.base, one.config, ("doc",) * 200)
    assert judge_family(same, 0.05, control_failed=True).verdict == "INCONCLUSIVE"


def test_pairs_are_made_by_item():
    pair = Paired.join({"a": 1.0, "b": 0.0}, {"b": 1.0, "a": 1.0}, {"a": "d1", "b": "d2"})
    assert (pair.b, pair.c, pair.clusters) == (0, 1, ("d1", "d2"))
    with pytest.raises(ValueError, match="'c'"):
        Paired.join({"a": 1.0}, {"a": 1.0, "c": 0.0})
    with pytest.raises(ValueError, match="'a' more than once"):
        Paired(("a", "a"), (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="item 'a'"):
        Paired(("a",), (float("nan"),), (1.0,))
    with pytest.raises(ValueError, match="item 'a'"):
        Paired(("a",), (1.5,), (1.0,))
    with pytest.raises(ValueError, match="one score per item"):
        Paired(("a",), (1.0,), ())
    with pytest.raises(ValueError, match="5 points"):
        judge_family(paired(50), 5, control_failed=True)


@given(st.integers(2, 300), st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.02, 0.03, 0.05, 0.1]))
def test_the_word_agrees_with_the_interval(n, b, c, margin):
    b, c = min(b, n), min(c, n - min(b, n))
    family = judge_family(paired(n, b, c), margin, control_failed=True)
    assert family.verdict in VERDICTS
    assert family.low <= family.diff + 1e-12
    assert family.diff <= family.high + 1e-12
    if family.verdict == "HOLDS":
        assert family.low >= -margin - 1e-9
    if family.verdict == "WORSE":
        assert family.high < -margin
    if family.n_needed is not None:
        assert family.n_needed > n
    assert set(family.to_dict()) >= {"n", "base", "score", "diff", "low", "high", "margin", "b", "c", "p", "n_needed"}


def test_one_arm():
    assert score_interval([]) is None
    assert score_interval([1.0] * 25)[0] == pytest.approx(0.867, abs=5e-4)
