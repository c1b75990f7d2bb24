"""Which searched configs are judged: fronts, spreads and sequences of trials made by hand."""

import math

import pytest

from kvlab.config import KVConfig
from kvlab.search.choice import STEPS, TOLERANCE, dominators, finalists, front, sequence, spread
from kvlab.search.race import Race, Trial

CONFIGS = [KVConfig(sink_tokens=n) for n in range(40)]
NAMES = {c.id: n for n, c in enumerate(CONFIGS)}


def _race(*rows: tuple[float | None, int, str]) -> Race:
    """Value, items and state of config 0, 1, ..."""
    made = [
        Trial(number=n, config=CONFIGS[n], state=state, value=value, items=items)
        for n, (value, items, state) in enumerate(rows)
    ]
    return Race(tuple(made), (2, 4, 8))


def _sizes(*sizes: int) -> dict[str, int]:
    return {CONFIGS[n].id: size for n, size in enumerate(sizes)}


def _numbers(found: list[KVConfig] | list[Trial]) -> list[int]:
    configs = [f.config if isinstance(f, Trial) else f for f in found]
    return [NAMES[c.id] for c in configs if c is not None]


def test_the_front_holds_complete_feasible_finite_trials_only() -> None:
    race = _race(
        (0.9, 24, "scored"),
        (0.1, 12, "scored"),  # better, but not seen on everything
        (math.nan, 24, "scored"),
        (None, 24, "failed"),
        (0.05, 0, "infeasible"),
        (0.2, 24, "scored"),
        (0.3, 24, "scored"),  # larger than 5 and worse
    )
    assert _numbers(front(race, 24, _sizes(10, 5, 4, 3, 2, 20, 30))) == [5, 0]
    assert front(_race((None, 24, "failed")), 24, {}) == []


def test_of_equal_scores_the_smaller_and_of_equal_sizes_the_better() -> None:
    race = _race((0.1, 24, "scored"), (0.1, 24, "scored"), (0.2, 24, "scored"))
    assert _numbers(front(race, 24, _sizes(50, 40, 40))) == [1]
    assert _numbers(finalists(race, 24, _sizes(50, 40, 40))) == [1]


def _ladder(n: int, ratio: float = 0.8, loss: float = 0.1) -> tuple[Race, dict[str, int]]:
    """A front of n trials, each 20 % smaller and 0.1 worse."""
    rows: list[tuple[float | None, int, str]] = [(loss * k, 24, "scored") for k in range(n)]
    return _race(*rows), _sizes(*[int(1e6 * ratio**k) for k in range(n)])


def test_a_spread_keeps_both_ends_and_evens_out_the_logs() -> None:
    race, sizes = _ladder(9)
    found = front(race, 24, sizes)
    assert _numbers(spread(found, sizes, 3)) == [0, 4, 8]
    assert _numbers(spread(found, sizes, 5)) == [0, 2, 4, 6, 8]
    assert _numbers(spread(found, sizes, 1)) == [0]
    assert _numbers(spread(found[:2], sizes, 3)) == [0, 1]
    # Sizes in a heap at one end: still different ones, in order.
    crowded = _sizes(100, 99, 98, 97, 10)
    assert _numbers(spread(front(_ladder(5)[0], 24, crowded), crowded, 4)) == [0, 2, 3, 4]


def test_a_sequence_goes_from_large_to_small_and_stops_where_the_search_saw_a_loss() -> None:
    race, sizes = _ladder(12)
    found = sequence(front(race, 24, sizes), sizes)
    small = math.floor(TOLERANCE / 0.1)  # the last one within tolerance
    assert _numbers(found) == [*range(small + 1), small + 1]
    assert [sizes[c.id] for c in found] == sorted((sizes[c.id] for c in found), reverse=True)
    gentle, sizes = _ladder(12, loss=0.01)
    found = sequence(front(gentle, 24, sizes), sizes)
    assert len(found) == STEPS
    assert (_numbers(found)[0], _numbers(found)[-1]) == (0, 11)
    assert sequence([], {}) == []


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_finalists_start_with_the_best_score(limit) -> None:
    race, sizes = _ladder(5)
    assert _numbers(finalists(race, 24, sizes, limit)) == list(range(limit))


def test_a_finalist_that_is_hardly_smaller_is_passed_over() -> None:
    race, _ = _ladder(6)
    sizes = _sizes(1000, 990, 951, 950, 903, 902)
    assert _numbers(front(race, 24, sizes)) == [0, 1, 2, 3, 4, 5]
    assert _numbers(finalists(race, 24, sizes)) == [0, 3, 5]


def test_dominators_are_counted_in_both_coordinates() -> None:
    points = {"a": (1.0, 5.0), "b": (2.0, 2.0), "c": (3.0, 3.0), "d": (2.0, 2.0), "e": (9.0, 9.0)}
    assert dominators(points) == {"a": 0, "b": 0, "c": 2, "d": 0, "e": 4}
