"""Budgets as people write them, sizes as they are read back, workloads and run sizes from measured speed."""

import dataclasses
import math

import pytest
import torch

from kvlab import stats
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.evals.sampling import GREEDY, Sampling
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import Fraction
from kvlab.search.settings import Request, UsageError, names
from kvlab.search.sizes import human, parse_budget
from kvlab.search.sizing import Sizes, Speed, fit, with_wishes
from kvlab.search.workload import Workload

GOOD = {
    "6": 6 * 10**9,
    "6GB": 6 * 10**9,
    "6gb": 6 * 10**9,
    "6GiB": 6 * 2**30,
    "6 GiB": 6 * 2**30,
    " 6gib ": 6 * 2**30,
    "800MB": 800 * 10**6,
    "800MiB": 800 * 2**20,
    "1.5": 15 * 10**8,
    ".5GB": 5 * 10**8,
    "1e1": 10**10,
    "1e-3GB": 10**6,
    "+2kB": 2000,
    "2KiB": 2048,
    "1TB": 10**12,
    "512B": 512,
}
BAD = {
    "": "number of GB",
    "   ": "number of GB",
    "potatoes": "number of GB",
    "6 potatoes": "number of GB",
    "6 GB please": "number of GB",
    "6GBs": "number of GB",
    "6,5": "number of GB",
    "1.2.3": "number of GB",
    ".": "number of GB",
    "GB": "number of GB",
    "0x10": "number of GB",
    "nan": "number of GB",
    "inf": "number of GB",
    "-inf": "number of GB",
    "None": "number of GB",
    "0": "positive",
    "0GiB": "positive",
    "-1": "positive",
    "-6GiB": "positive",
    "0.1B": "positive",
    "1e400": "positive",
}


@pytest.mark.parametrize("text", GOOD)
def test_a_budget_reads_as_people_write_it(text) -> None:
    found = parse_budget(text)
    assert found == GOOD[text]
    assert type(found) is int


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused_with_the_value_and_what_would_do(text) -> None:
    with pytest.raises(ValueError, match=BAD[text]) as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value)


def test_sizes_read_back_in_decimal_units() -> None:
    assert [human(x) for x in (24.16e9, 6e9, 663_040, 1e6, 999)] == ["24.2 GB", "6 GB", "663 kB", "1 MB", "999 B"]


# -- the workload ------------------------------------------------------------------------------------------------------

SHAPE = ModelShape((LayerShape(3, 64, 64),) * 30, torch.float32)
RAW = KVConfig(raw_dtype="float16")


def test_the_default_workload_of_the_default_model_needs_24_gb_uncompressed() -> None:
    assert SHAPE.raw_bytes(1) == 23040
    exact = 23040 * 131072 * 8
    assert exact == 24_159_191_040
    assert exact <= Workload(131072, 8).bytes(RAW, SHAPE) <= exact + 8 * 16 * 23040  # and less than a page of slack


@pytest.mark.parametrize("config", [RAW, KVConfig(key=Affine(bits=4), value=Affine(bits=2), budget=Fraction(0.3))])
def test_the_longest_context_is_the_last_one_that_fits(config) -> None:
    work, budget = Workload(1000, 3), 10**8
    longest = work.longest(config, SHAPE, budget)
    assert config.predicted_bytes(SHAPE, longest) * 3 <= budget < config.predicted_bytes(SHAPE, longest + 1) * 3
    assert work.sessions(config, SHAPE, budget) == budget // config.predicted_bytes(SHAPE, 1000)
    assert work.longest(config, SHAPE, 1) == 0


@pytest.mark.parametrize(("context", "concurrency", "name"), [(0, 1, "context"), (-5, 1, "context"), (1, 0, "concur")])
def test_an_empty_workload_is_refused(context, concurrency, name) -> None:
    with pytest.raises(ValueError, match=f"{name}.* at least 1, got"):
        Workload(context, concurrency)


# -- the request -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"context": 0}, "--context must be at least 1, got 0"),
        ({"concurrency": -2}, "--concurrency must be at least 1, got -2"),
        ({"trials": 0}, "--trials must be at least 1, got 0"),
        ({"items": 1}, "--items must be at least 2, got 1"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"minutes": 0.0}, "--minutes must be a positive number, got 0.0"),
        ({"minutes": math.nan}, "--minutes must be a positive number, got nan"),
        ({"minutes": math.inf}, "--minutes must be a positive number, got inf"),
        ({"mode": "maps"}, "did you mean 'map'"),
        ({"layers": "no"}, "--layers: unknown layers 'no'"),
        ({"families": ()}, "--families needs at least one"),
        ({"families": ("maths",)}, "did you mean 'math'"),
        ({"families": ("math", "math")}, "twice"),
        ({"samples": 4, "temperature": 0.8}, "nothing is generated: add --generate"),
        ({"temperature": 0.8}, "nothing is generated: add --generate"),
        ({"generate": True, "items": 9, "samples": 4}, "--samples, --temperature: 4 samples at temperature 0"),
        ({"generate": True, "items": 9, "temperature": 99.0}, "temperature must lie between 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(wrong, says) -> None:
    with pytest.raises(UsageError) as caught:
        Request(budget_bytes=1, **wrong)
    assert says in str(caught.value)


def test_how_answers_are_drawn_goes_by_the_request() -> None:
    request = Request(budget_bytes=1, generate=True, items=9, samples=4, temperature=0.8, seed=3)
    assert request.sampling == Sampling(temperature=0.8, samples=4, seed=3)
    assert Request(budget_bytes=1).sampling == GREEDY


def test_a_request_survives_json_and_names_its_differences() -> None:
    request = Request(budget_bytes=5, families=("code", "math"), trials=3)
    assert Request.from_dict(request.to_dict()) == request
    assert request.differences({"budget_bytes": 5, "trials": 3, "families": ("code", "math")}) == []
    assert request.differences({"trials": 4, "seed": 0}) == ["trials: this run has 3, asked for 4"]
    assert names(" math, code,") == ("math", "code")


# -- sizes from speed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [Speed(0.01, 0.001), Speed(0.9, 0.05), Speed(2.0, 0.2)])
@pytest.mark.parametrize("minutes", [6, 20])
def test_planned_time_is_about_the_minutes_where_the_least_run_allows(speed, minutes) -> None:
    sizes = fit(minutes, speed, 3, 5)
    least = Sizes(8, 8, 29).seconds(speed, 3, 5)
    assert sizes.seconds(speed, 3, 5) <= 1.35 * max(60 * minutes, least)
    assert sizes.confirm_items >= 29
    assert sizes.trials >= 8


def _rows(items: int, depth: int) -> int:
    """Thirty layers, keys and values, three families."""
    return 30 * 2 * depth * 3 * items


@pytest.mark.parametrize(
    ("row_s", "items", "formats"),
    [(0.01, 2, 4), (0.037, 2, 4), (0.057, 2, 2), (0.08, 2, 1), (0.12, 2, 1), (0.2, 1, 1), (0.4, 0, 0)],
)
def test_layers_are_told_apart_as_well_as_a_share_of_the_time_allows(row_s, items, formats) -> None:
    speed = Speed(0.4, row_s)
    sizes = fit(6, speed, 3, 5, layer_rows=_rows)
    assert (sizes.layer_items, sizes.layer_formats) == (items, formats)
    assert _rows(items, formats) * row_s <= 0.15 * 360
    plain = fit(6, speed, 3, 5)
    assert plain.layer_items == 0
    # What is spent on layers is taken from the other stages.
    rest = [s.seconds(speed, 3, 5) for s in (sizes, plain)]
    assert rest[0] <= rest[1] + 1 or sizes.confirm_items == plain.confirm_items == 29
    assert sizes.confirm_items <= plain.confirm_items
    assert sizes.seconds(speed, 3, 5, layer_rows=_rows) == pytest.approx(rest[0] + _rows(items, formats) * row_s)


def test_layers_that_are_known_cost_nothing_and_are_not_measured_on_more() -> None:
    slow, quick = Speed(1.0, 0.3), Speed(0.1, 0.001)

    def known(items: int, depth: int) -> int:
        return 0 if (items, depth) == (2, 1) else _rows(items, depth)

    for speed in (slow, quick):
        sizes = fit(6, speed, 3, 5, layer_rows=known)
        assert (sizes.layer_items, sizes.layer_formats) == (2, 1)
    plain = fit(6, slow, 3, 5)
    assert fit(6, slow, 3, 5, layer_rows=known) == dataclasses.replace(plain, layer_items=2, layer_formats=1)


def test_more_arms_and_longer_trials_leave_less_for_each() -> None:
    speed = Speed(0.4, 0.057)
    usual, front = fit(20, speed, 3, 5), fit(20, speed, 3, 5, arms=10, seen=0.75)
    assert front.confirm_items < usual.confirm_items
    assert front.trials < usual.trials


@pytest.mark.parametrize(
    ("affordable", "planned"),
    [
        (29, 29),
        (38, 38),
        (39, 46),
        (46, 46),
        (58, 58),
        (60, 60),
        (78, 93),
        (98, 98),
        (130, 130),
        (200, 236),
        (250, 250),
    ],
)
def test_a_fifth_more_items_are_planned_where_they_forgive_a_lost_answer(affordable, planned) -> None:
    # One family, one arm, nothing but the confirmation's share: as many items as that affords.
    sizes = fit((affordable + 0.5) / 60 / 0.38, Speed(0.5, 0.5), 1, 5, arms=1)
    assert sizes.confirm_items == planned
    if planned > affordable:
        for n, verdict in ((planned, "HOLDS"), (affordable, "INCONCLUSIVE")):
            base = tuple(float(i % 2 == 0) for i in range(n))
            lost_one = stats.Paired(tuple(map(str, range(n))), base, (0.0, *base[1:]))
            assert stats.judge_family(lost_one, stats.planned_margin(n), control_failed=True).verdict == verdict


def test_a_slow_machine_still_gets_enough_items_for_a_verdict() -> None:
    assert fit(0.1, Speed(10, 5), 3, 5) == Sizes(8, 8, 29)


def test_wishes_override_what_the_minutes_would_give() -> None:
    sizes = Sizes(search_items=32, trials=40, confirm_items=60)
    assert with_wishes(sizes, None, None) == sizes
    assert with_wishes(sizes, 3, None) == Sizes(32, 3, 60)
    assert with_wishes(sizes, 3, 10) == Sizes(5, 3, 10)
    assert with_wishes(sizes, None, 2) == Sizes(4, 40, 2)
    assert with_wishes(sizes, None, 200) == Sizes(32, 40, 200)


@pytest.mark.parametrize("ratio", [4.0, 3.3])
def test_four_bit_really_costs_five(ratio) -> None:
    """Scales and zeros count in the budget: 40 bytes per token, head and tensor, so 3.2 times smaller and not 4."""
    shape = ModelShape((LayerShape(2, 64, 64),) * 2, torch.float16)
    int4 = Affine(bits=4, group=32)
    config = KVConfig(key=int4, value=int4, sink_tokens=0, recent_tokens=0, page_tokens=1)
    raw = shape.raw_bytes(33)
    assert raw == 33_792
    assert config.predicted_bytes(shape, 33) == config.predicted_bytes(shape, 1, 32) == 10_560
    assert Workload(33, 1).bytes(config, shape) > raw / ratio
    assert Workload(33, 1).sessions(config, shape, int(raw / ratio)) == 0
    assert Workload(33, 1).sessions(config, shape, int(raw / 3.2)) == 1
    # Sixteen recent tokens kept whole count at full size.
    window = KVConfig(key=int4, value=int4, sink_tokens=0, recent_tokens=16, page_tokens=1)
    assert window.predicted_bytes(shape, 33) == 17 * 4 * 80 + 16 * 4 * 256
