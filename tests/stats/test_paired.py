import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from statsmodels.stats.contingency_tables import mcnemar

from kvlab.stats import mcnemar_p, tango_interval, tango_z

Z95 = 1.6448536269514722


@st.composite
def flips(draw):
    n = draw(st.integers(2, 400))
    b = draw(st.integers(0, n))
    return b, draw(st.integers(0, n - b)), n


@pytest.mark.parametrize(
    ("b", "c", "n", "level", "low", "high"),
    [
        # Airway hyper-responsiveness before and after transplantation (Fagerland, Lydersen and Laake 2014, table 8).
        (7, 1, 21, 0.95, -0.517, -0.026),
        # R, PropCIs 0.3-0: scoreci.mp(25, 28, 618, .90) and scoreci.mp(41, 48, 549, .90).
        (25, 28, 618, 0.90, -0.0148, 0.0247),
        (41, 48, 549, 0.90, -0.0157, 0.0414),
        # Complete response before and after consolidation, Cavo et al. 2012 (R, contingencytables 1.0,
        # Tango_asymptotic_score_CI_paired_2x2).
        (16, 6, 161, 0.95, -0.1240, -0.0054),
    ],
)
def test_published_intervals(b, c, n, level, low, high):
    digits = 3 if n == 21 else 4
    assert tango_interval(b, c, n, level) == pytest.approx((low, high), abs=0.5 * 10**-digits)


def test_the_statistic_equals_one_built_from_a_numerical_maximum_likelihood():
    """The closed form of the nuisance rate against a direct search of the constrained trinomial likelihood."""
    for b, c, n, diff in [
        (6, 17, 512, -0.03),
        (12, 3, 90, -0.05),
        (1, 0, 44, 0.02),
        (9, 9, 60, -0.10),
        (0, 4, 70, -0.05),
    ]:

        def loss(q, b=b, c=c, n=n, diff=diff):
            parts = ((b, q), (c, q + diff), (n - b - c, 1 - 2 * q - diff))
            return -sum(count * math.log(p) for count, p in parts if count)

        edge = 1e-12
        q = minimize_scalar(
            loss, bounds=(max(0, -diff) + edge, (1 - diff) / 2 - edge), method="bounded", options={"xatol": 1e-13}
        ).x
        z = (c - b - n * diff) / math.sqrt(n * (2 * q + diff * (1 - diff)))
        assert tango_z(b, c, n, diff) == pytest.approx(z, abs=1e-4)


@pytest.mark.parametrize(("n", "points"), [(50, 5.1), (100, 2.6), (200, 1.3)])
def test_no_flip_supports_only_so_much(n, points):
    low, high = tango_interval(0, 0, n)
    assert low == -(Z95**2) / (n + Z95**2) == -high
    assert round(-low * 100, 1) == points
    assert tango_z(0, 0, n, low) == pytest.approx(Z95)


def test_corners_have_their_closed_form():
    assert tango_interval(50, 0, 50) == (-1.0, pytest.approx(-(50 - Z95**2) / (50 + Z95**2)))
    assert tango_interval(0, 50, 50)[1] == 1.0
    almost = tango_interval(49, 0, 50)
    assert almost[0] < -0.98 < almost[1]
    assert tango_z(0, 0, 10, 0.0) == 0.0
    assert tango_z(0, 10, 10, 1.0) == 0.0


@given(flips())
def test_interval_contains_the_difference_and_its_ends_solve_the_equation(case):
    b, c, n = case
    low, high = tango_interval(b, c, n)
    assert -1 <= low <= (c - b) / n <= high <= 1
    if b < n and c < n:
        assert tango_z(b, c, n, low) == pytest.approx(Z95, abs=1e-5)
        assert tango_z(b, c, n, high) == pytest.approx(-Z95, abs=1e-5)


@given(flips())
def test_swapping_the_arms_mirrors_the_interval(case):
    b, c, n = case
    low, high = tango_interval(b, c, n)
    assert tango_interval(c, b, n) == pytest.approx((-high, -low), abs=1e-9)


@given(flips(), st.integers(2, 9))
def test_more_of_the_same_narrows_the_interval(case, times):
    b, c, n = case
    low, high = tango_interval(b, c, n)
    more_low, more_high = tango_interval(times * b, times * c, times * n)
    assert more_high - more_low < high - low


@given(flips(), st.integers(1, 200))
def test_silent_items_lift_the_lower_end_of_a_loss_or_tie(case, extra):
    n = case[2]
    b, c = max(case[:2]), min(case[:2])
    assert tango_interval(b, c, n + extra)[0] >= tango_interval(b, c, n)[0] - 1e-9


@given(flips(), st.floats(-0.99, 0.98), st.floats(0.001, 0.01))
def test_the_statistic_falls_as_the_hypothesis_rises(case, diff, step):
    b, c, n = case
    assert tango_z(b, c, n, diff) >= tango_z(b, c, n, diff + step) - 1e-9


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_agrees_with_statsmodels(b, c):
    expected = mcnemar([[3, b], [c, 5]], exact=True).pvalue if b + c else 1.0
    assert mcnemar_p(b, c) == pytest.approx(expected, abs=1e-12)


def test_mcnemar_known_values():
    # Fagerland, Lydersen and Laake (2013), BMC Medical Research Methodology 13:91, airway hyper-responsiveness, exact
    # conditional test: 0.070. Cavo et al. 2012 in R, contingencytables 1.0: 0.052479.
    assert mcnemar_p(7, 1) == pytest.approx(0.0703, abs=5e-5)
    assert mcnemar_p(6, 16) == pytest.approx(0.052479, abs=5e-7)
    assert mcnemar_p(10, 2) == pytest.approx(0.0386, abs=5e-5)
    assert mcnemar_p(10, 2, "less") == pytest.approx(0.0193, abs=5e-5)
    assert mcnemar_p(2, 10, "greater") == pytest.approx(0.0193, abs=5e-5)
    assert mcnemar_p(0, 0, "greater") == 1.0
    assert mcnemar_p(3, 0) == 0.25  # three flips one way are no evidence
    with pytest.raises(ValueError, match="'up'"):
        mcnemar_p(1, 2, "up")


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 0), (-1, 0, 5), (3, 3, 5)])
def test_impossible_counts(b, c, n):
    with pytest.raises(ValueError, match=f"b={b}, c={c}, n={n}"):
        tango_interval(b, c, n)
    with pytest.raises(ValueError, match="level"):
        tango_interval(1, 1, 5, level=95)
