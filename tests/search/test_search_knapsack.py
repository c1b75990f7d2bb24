"""The knapsack against exhaustive search and an integer programme."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from kvlab.search.knapsack import Allocation, Front, Option


def _layers(seed: int, layers: int, options: int, coarse: bool = False) -> list[list[Option]]:
    rng = random.Random(seed)
    sizes = [[rng.randint(1, 9) if coarse else rng.randint(1, 10_000) for _ in range(options)] for _ in range(layers)]
    return [[Option(b, rng.choice([0.0, rng.random(), 0.5])) for b in row] for row in sizes]


def _brute(layers: list[list[Option]], budget: int) -> float | None:
    within = [c for c in itertools.product(*layers) if sum(o.bytes for o in c) <= budget]
    return min((sum(o.damage for o in c) for c in within), default=None)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("coarse", [False, True])
def test_every_budget_gets_what_exhaustive_search_finds(seed, coarse) -> None:
    layers = _layers(seed, layers=4, options=4, coarse=coarse)
    front = Front(layers)
    most = sum(max(o.bytes for o in row) for row in layers)
    for budget in {0, most, most + 1, *random.Random(seed).choices(range(most + 1), k=40)}:
        found, expected = front.best(budget), _brute(layers, budget)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert found.damage == pytest.approx(expected, abs=1e-12)
        assert found.bytes <= budget
        taken = [row[n] for row, n in zip(layers, found.chosen, strict=True)]
        assert found.bytes == sum(o.bytes for o in taken)
        assert found.damage == pytest.approx(sum(o.damage for o in taken), abs=1e-12)


def _milp(layers: list[list[Option]], budget: int) -> float:
    """The same question to HiGHS: one binary per layer and option."""
    flat = [o for row in layers for o in row]
    one_each = np.zeros((len(layers), len(flat)))
    for n, row in enumerate(layers):
        start = sum(len(r) for r in layers[:n])
        one_each[n, start : start + len(row)] = 1
    found = milp(
        [o.damage for o in flat],
        constraints=[
            LinearConstraint(one_each, 1, 1),  # type: ignore[arg-type]
            LinearConstraint(np.array([[o.bytes for o in flat]]), -np.inf, budget),  # type: ignore[arg-type]
        ],
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),  # type: ignore[arg-type]
        options={"mip_rel_gap": 0},
    )
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize("share", [0.15, 0.4, 0.7])
def test_thirty_layers_of_sixteen_options_agree_with_an_integer_programme(share) -> None:
    """As wide as a real model: damages span five decades, sizes are those of 2 to 8 bits."""
    rng = random.Random(5)
    layers = [
        [
            Option(64 * (k + v), scale * (4.0**-k + 0.1 * 4.0**-v))
            for scale in [10 ** rng.uniform(-3, 2)]
            for k in (2, 3, 4, 8)
            for v in (2, 3, 4, 8)
        ]
        for _ in range(30)
    ]
    low, high = 30 * 64 * 4, 30 * 64 * 16
    budget = int(low + share * (high - low))
    found = Front(layers).best(budget)
    assert found is not None
    assert found.damage == pytest.approx(_milp(layers, budget), rel=1e-6)


def test_the_front_rises_in_bytes_and_falls_in_damage() -> None:
    front = Front(_layers(3, layers=6, options=5))
    found = front.all()
    assert len(found) == len(front) > 5
    assert [a.bytes for a in found] == sorted({a.bytes for a in found})
    assert [a.damage for a in found] == sorted({a.damage for a in found}, reverse=True)
    assert front.smallest() == found[0]
    assert [front.best(a.bytes) for a in found] == found
    assert front.best(found[0].bytes - 1) is None


def test_layers_alike_need_few_states() -> None:
    """Without dropping what is beaten there would be 16 ** 60 of them."""
    options = [Option(k + v, 2.0**-k + 2.0**-v) for k in (2, 3, 4, 8) for v in (2, 3, 4, 8)]
    assert len(Front([options] * 60)) <= 60 * 12 + 1


def test_an_option_that_is_worse_and_larger_is_never_taken_and_ties_go_to_the_first() -> None:
    assert Front([[Option(5, 0.3), Option(4, 0.1)]]).all() == [Allocation(4, 0.1, (1,))]
    assert Front([[Option(4, 0.1), Option(4, 0.1)]]).all() == [Allocation(4, 0.1, (0,))]


@pytest.mark.parametrize("damage", [math.nan, math.inf, -0.1])
def test_a_damage_that_was_not_measured_is_refused(damage) -> None:
    with pytest.raises(ValueError, match="finite and at least 0"):
        Option(1, damage)


@pytest.mark.parametrize("size", [1.5, -1, True])
def test_bytes_are_counted_in_integers(size) -> None:
    with pytest.raises(ValueError, match="an integer of at least 0"):
        Option(size, 0.0)


@pytest.mark.parametrize("layers", [[], [[]], [[Option(1, 0.0)], []]])
def test_a_layer_without_options_is_refused(layers) -> None:
    with pytest.raises(ValueError, match="every layer needs at least one option"):
        Front(layers)
