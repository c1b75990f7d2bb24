import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.proportion import proportion_confint

from kvlab.stats import macro, pooled, sample_error, wilson


@given(
    st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.9, 0.95])
)
def test_wilson_agrees_with_statsmodels(case, level):
    k, n = case
    expected = proportion_confint(k, n, alpha=1 - level, method="wilson")
    assert wilson(k, n, level) == pytest.approx(expected, abs=1e-12)


def test_wilson_says_something_at_the_boundary():
    assert wilson(0, 25) == (0.0, pytest.approx(0.133, abs=5e-4))
    assert wilson(25, 25) == (pytest.approx(0.867, abs=5e-4), 1.0)
    low, high = wilson(1, 1)
    assert 0 < low < 0.21
    assert high == 1.0
    for k, n in [(0, 0), (3, 2), (-1, 5)]:
        with pytest.raises(ValueError, match=f"got {k} of {n}"):
            wilson(k, n)


def test_sample_error():
    assert sample_error([1, 1, 1, 0]) == pytest.approx(0.25)
    assert sample_error([1]) is None
    assert sample_error([]) is None
    assert sample_error([0] * 25) is None  # never zero: use the interval
    assert sample_error([0.2, 0.4, 0.9]) == pytest.approx(scipy_stats.sem([0.2, 0.4, 0.9]))
    with pytest.raises(ValueError, match="nan"):
        sample_error([0.5, float("nan")])


def test_macro_and_pooled_keep_their_own_error():
    groups = {"small": [1] * 5 + [0] * 5, "large": [1] * 900 + [0] * 100}
    by_task, by_item = macro(groups), pooled(groups)
    assert (by_task.kind, round(by_task.mean, 3), round(by_task.error, 4), by_task.n) == ("macro", 0.700, 0.0835, 1010)
    assert (by_item.kind, round(by_item.mean, 3), round(by_item.error, 4), by_item.n) == ("pooled", 0.896, 0.0096, 1010)
    assert macro({"a": [1], "b": [0, 1]}).error is None
    with pytest.raises(ValueError, match="'empty'"):
        macro({"full": [1, 0], "empty": []})


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe (1998), Statistics in Medicine 17:857-872, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.floats(0, n), st.just(n))))
def test_wilson_of_fractional_scores_contains_the_mean_and_mirrors(case):
    total, n = case
    low, high = wilson(total, n)
    assert 0 <= low <= total / n + 1e-12
    assert total / n - 1e-12 <= high <= 1
    mirrored = wilson(n - total, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)
