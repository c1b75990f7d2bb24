"""The flip floor in words."""

import pytest

from kvlab.report.repeat import flip_floor, reading


@pytest.mark.parametrize(
    ("again", "floor", "means"),
    [
        (
            {"n": 216, "flips": 0, "share": 0.0, "dnll": 2.94e-06},
            "baseline again in other batches, 0 of 216 answers flip, nats per token apart by 3e-06 at most",
            "ok, nats per token apart by 3e-06 at most",
        ),
        (
            {"n": 180, "flips": 6, "share": 6 / 180, "dnll": None},
            "baseline again in other batches, 6 of 180 answers flip (3.3%)",
            "no smaller difference counts (3.3%)",
        ),
        ({"n": 8, "flips": 0}, "baseline again in other batches, 0 of 8 answers flip", "ok"),
    ],
)
def test_words(again, floor, means) -> None:
    assert flip_floor(again) == floor
    assert reading(again) == means
