import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from kvlab.stats import fixed_sequence, holm


@settings(max_examples=25, deadline=None)  # statsmodels takes a tenth of a second
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_agrees_with_statsmodels(p_values):
    named = {f"f{i}": p for i, p in enumerate(p_values)}
    expected = multipletests(p_values, method="holm")[1]
    assert list(holm(named)) == list(named)
    assert list(holm(named).values()) == pytest.approx(expected.tolist(), abs=1e-12)


def test_holm_refuses_what_is_no_p_value():
    assert holm({}) == {}
    with pytest.raises(ValueError, match="'math'"):
        holm({"math": 1.2})


def test_a_pass_after_a_failure_is_no_claim():
    assert fixed_sequence([True, True, False, True]) == (True, True, False, False)
    assert fixed_sequence([]) == ()


def test_holm_by_hand():
    """The smallest of four is multiplied by 4, the next by 3, and none may fall below one before it."""
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.02, "b": 0.02, "c": 0.02}) == pytest.approx({"a": 0.06, "b": 0.06, "c": 0.06})
