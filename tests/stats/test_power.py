import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from kvlab.stats import (
    MARGINS,
    forgiving_items,
    least_items,
    n_needed,
    pass_rate,
    planned_margin,
    tango_interval,
    tango_z,
    unconditional_p,
)


@pytest.mark.parametrize(
    ("discordance", "expected"),
    [(0.02, (425, 225, 107)), (0.05, (837, 400, 167)), (0.10, (1578, 717, 274)), (0.20, (3104, 1386, 507))],
)
def test_sample_sizes(discordance, expected):
    assert tuple(n_needed(m, discordance) for m in (0.02, 0.03, 0.05)) == expected
    # At a discordance far above the margin it is the plain formula, (1.645 + 0.842)^2 discordance / margin^2.
    plain = (norm.ppf(0.95) + norm.ppf(0.80)) ** 2 * discordance / 0.02**2
    assert expected[0] >= plain
    assert discordance < 0.2 or expected[0] == pytest.approx(plain, rel=0.01)


def test_sample_size_edges():
    assert n_needed(0.05, 0.0) == 59
    assert n_needed(0.05, 1e-4) == 59  # the formula says 54, at which not even a lossless config passes
    assert n_needed(0.05, 0.10, diff=-0.05) is None
    assert n_needed(0.05, 0.10, diff=-0.02) > n_needed(0.05, 0.10)
    assert n_needed(0.05, 0.10, power=0.9) > n_needed(0.05, 0.10) > n_needed(0.05, 0.10, alpha=0.1)
    for bad in (0.0, 1.0, -0.1, float("nan"), 5):
        with pytest.raises(ValueError, match="margin"):
            n_needed(bad, 0.1)
    with pytest.raises(ValueError, match="discordance"):
        n_needed(0.05, 1.5)


@pytest.mark.parametrize(
    ("margin", "discordance", "diff"),
    [(0.05, 0.05, 0.0), (0.05, 0.10, 0.0), (0.10, 0.20, 0.0), (0.03, 0.02, 0.0), (0.02, 0.02, 0.0), (0.05, 0.1, -0.02)],
)
def test_the_number_asked_for_is_enough(margin, discordance, diff):
    """The exact power there is the promised one, also where flips are rarer than the margin."""
    needed = n_needed(margin, discordance, diff)
    assert needed is not None
    assert 0.79 < pass_rate(needed, margin, discordance, diff) < 0.86


@pytest.mark.parametrize(("margin", "least"), [(0.10, 29), (0.05, 59), (0.03, 99), (0.02, 149)])
def test_fewest_items_that_show_anything(margin, least):
    assert least_items(margin) == least
    assert (1 - margin) ** least <= 0.05 < (1 - margin) ** (least - 1)
    assert unconditional_p(tango_z(0, 0, least, -margin), least, -margin) <= 0.05
    assert unconditional_p(tango_z(0, 0, least - 1, -margin), least - 1, -margin) > 0.05
    assert least_items(margin, alpha=0.01) > least


@pytest.mark.parametrize(("margin", "least"), [(0.10, 46), (0.05, 93), (0.03, 157), (0.02, 236)])
def test_fewest_items_that_forgive_one_lost_answer(margin, least):
    assert forgiving_items(margin) == least
    assert tango_interval(1, 0, least)[0] > -margin
    assert unconditional_p(tango_z(1, 0, least, -margin), least, -margin) <= 0.05
    assert unconditional_p(tango_z(1, 0, least - 1, -margin), least - 1, -margin) > 0.05
    assert forgiving_items(margin, alpha=0.01) > least


@given(st.integers(29, 600))
def test_the_planned_margin_is_the_smallest_a_lossless_config_passes(n):
    passing = [m for m in MARGINS if unconditional_p(tango_z(0, 0, n, -m), n, -m) <= 0.05]
    assert planned_margin(n) == min(passing)


def test_planned_margin_thresholds():
    assert [planned_margin(n) for n in (29, 58, 59, 98, 99, 148, 149)] == [0.10, 0.10, 0.05, 0.05, 0.03, 0.03, 0.02]
    for n in (28, 1, 0):
        with pytest.raises(ValueError, match=r"margin of 10 points needs 29 items"):
            planned_margin(n)
