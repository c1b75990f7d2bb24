import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multinomial

from kvlab.stats import critical_z, pass_rate, tango_z, unconditional_p

Z95 = 1.6448536269514722


def every_table(n):
    pairs = np.array([(b, c) for b in range(n + 1) for c in range(n + 1 - b)])
    return pairs[:, 0], pairs[:, 1]


def tail(region, n, discordance, diff):
    b, c = every_table(n)
    losses, gains = (discordance - diff) / 2, (discordance + diff) / 2
    rates = [losses, gains, max(0.0, 1 - losses - gains)]
    return multinomial.pmf(np.stack([b, c, n - b - c], axis=1), n, rates)[region].sum()


@pytest.mark.parametrize(
    ("b", "c", "n", "diff"), [(1, 2, 20, -0.1), (3, 4, 30, -0.15), (0, 0, 25, -0.1), (2, 6, 15, 0.1), (5, 9, 22, 0.0)]
)
def test_the_p_value_is_the_largest_over_all_discordances(b, c, n, diff):
    """Against the sum over all tables, on a grid of its own."""
    z = tango_z(b, c, n, diff)
    region = tango_z(*every_table(n), n, diff) >= z - 1e-9
    largest = max(tail(region, n, d, diff) for d in np.linspace(abs(diff), 1, 400))
    assert unconditional_p(z, n, diff) == pytest.approx(largest, rel=2e-3)
    assert unconditional_p(z, n, diff) >= largest - 1e-5


def test_published_p_values():
    # Tango (1998), Statistics in Medicine 17:891-908, contact lenses: 44 pairs, one discordant, margin .1, Z = 1.709.
    z = tango_z(1, 0, 44, -0.1)
    assert round(z, 3) == 1.709
    # The normal tail of it is .044; the exact one is larger, as Hsueh, Liu and Chen (2001) find in general.
    assert unconditional_p(z, 44, -0.1) == pytest.approx(0.0571, abs=5e-5)
    # Complete response before and after consolidation (Cavo et al. 2012): R, contingencytables 1.0,
    # McNemar_exact_unconditional_test_paired_2x2, two-sided P = 0.034053, maximised over a 99.99 % interval only.
    assert 2 * unconditional_p(tango_z(6, 16, 161, 0.0), 161, 0.0) == pytest.approx(0.034053, abs=2e-4)


@pytest.mark.parametrize(("n", "margin"), [(25, 0.10), (52, 0.05), (88, 0.03), (133, 0.02)])
def test_what_the_normal_quantile_gets_wrong_is_right_here(n, margin):
    """At the least n at which the score statistic of no flip exceeds 1.645, a config that loses exactly the margin
    passes by it in (1 - margin)^n = 7 % of runs. The exact test does not let it pass."""
    assert tango_z(0, 0, n, -margin) > Z95 > tango_z(1, 0, n, -margin)
    assert 0.068 < (1 - margin) ** n < 0.072
    assert unconditional_p(tango_z(0, 0, n, -margin), n, -margin) == pytest.approx((1 - margin) ** n, rel=1e-6)
    assert critical_z(n, margin) > tango_z(0, 0, n, -margin)
    assert pass_rate(n, margin, margin, -margin) <= 0.05


@pytest.mark.parametrize(("n", "margin"), [(29, 0.1), (59, 0.05), (64, 0.05), (88, 0.05), (99, 0.03), (200, 0.1)])
def test_the_error_never_exceeds_five_per_cent_and_is_not_wasted(n, margin):
    """Summed over all tables: at any discordance. By the normal quantile all of these exceed it somewhere."""
    b, c = every_table(n)
    z = tango_z(b, c, n, -margin)
    grid = np.concatenate([np.linspace(margin, 3 * margin, 60), np.linspace(3 * margin, 1, 60)])
    exact = [tail(z >= critical_z(n, margin) - 1e-9, n, d, -margin) for d in grid]
    normal = [tail(z > Z95, n, d, -margin) for d in grid]
    assert max(normal) > 0.0505
    assert 0.04 < max(exact) <= 0.05 + 1e-9


@given(st.integers(2, 120), st.sampled_from([0.02, 0.05, 0.1, 0.3]), st.data())
def test_critical_value_and_p_value_agree(n, margin, data):
    b = data.draw(st.integers(0, n))
    c = data.draw(st.integers(0, n - b))
    z = tango_z(b, c, n, -margin)
    critical = critical_z(n, margin)
    passes = unconditional_p(z, n, -margin) <= 0.05 and z >= Z95
    if abs(z - critical) > 1e-6:
        assert passes == (z >= critical)


@pytest.mark.parametrize(("discordance", "diff"), [(0.1, 0.0), (0.2, -0.05), (0.05, 0.02), (0.05, -0.05)])
def test_pass_rate_by_simulation(discordance, diff):
    n, margin, runs = 99, 0.05, 40_000
    rng = np.random.default_rng(5)
    losses, gains = (discordance - diff) / 2, (discordance + diff) / 2
    draws = rng.multinomial(n, [losses, gains, 1 - discordance], size=runs)
    found = (tango_z(draws[:, 0], draws[:, 1], n, -margin) >= critical_z(n, margin) - 1e-9).mean()
    expected = pass_rate(n, margin, discordance, diff)
    assert found == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / runs))


def test_a_lossless_config_always_passes_from_the_planned_number_on():
    assert pass_rate(59, 0.05, 0.0) == pytest.approx(1.0)
    assert pass_rate(58, 0.05, 0.0) == 0.0


def test_edges():
    assert unconditional_p(-math.inf, 5, -0.1) == 1.0
    assert unconditional_p(math.inf, 5, -0.1) == 0.0
    assert 0 < unconditional_p(tango_z(0, 1, 1, -0.1), 1, -0.1) <= 1  # n = 1
    assert unconditional_p(tango_z(0, 5, 5, -0.1), 5, -0.1) == pytest.approx(0.45**5)  # all gains
    assert unconditional_p(tango_z(5, 0, 5, -0.1), 5, -0.1) == pytest.approx(1.0)  # all losses
    assert critical_z(2, 0.05) == math.inf or pass_rate(2, 0.05, 0.05, -0.05) <= 0.05
    assert pass_rate(1, 0.05, 0.5) == 0.0
    for n, diff in [(0, -0.1), (5, -1.0), (5, 1.0)]:
        with pytest.raises(ValueError, match=f"n={n}, diff={diff}"):
            unconditional_p(0.0, n, diff)
    with pytest.raises(ValueError, match="not a number"):
        unconditional_p(math.nan, 5, -0.1)
    with pytest.raises(ValueError, match="at least"):
        pass_rate(50, 0.05, 0.01, -0.05)
