import copy
import itertools
import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.report import alt, caption, pareto
from kvlab.report.figures import front, png, side_by_side, svg

GIB = 2**30


def points(ax, marker):
    return [
        tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == marker and len(line.get_xdata()) == 1
    ]


def test_drawn_intervals_are_the_recorded_ones(search, drawn):
    figure = drawn
    families = ["retrieval", "math", "code"]
    assert [ax.get_title(loc="left").split(" ")[0] for ax in figure.axes[:3]] == families
    for ax, family in zip(figure.axes[:3], families, strict=True):
        drawn = sorted(
            tuple(segment[:, 1]) for bars in ax.containers for segment in bars.lines[2][0].get_segments()
        )  # fmt: skip
        expected = sorted(
            (100 * e["families"][family]["low"], 100 * e["families"][family]["high"]) for e in search["finalists"]
        )
        assert len(drawn) == 3
        for bar, (low, high) in zip(drawn, expected, strict=True):
            assert bar == pytest.approx((low, high))
        low, high = ax.get_ylim()
        assert low < expected[0][0]
        assert high > max(h for _, h in expected)


def test_units_budget_margin_and_baseline_are_drawn(drawn):
    figure = drawn
    top, bottom = figure.axes[0], figure.axes[3]
    assert top.get_ylabel() == "score difference, points"
    assert bottom.get_ylabel() == "delta NLL, nats per answer token"
    assert bottom.get_xlabel() == "KV cache at the workload, GiB (log2)"
    assert top.get_xscale() == "log"
    level = [
        line.get_ydata()[0] for line in top.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2
    ]
    assert sorted(level) == [-3.0, 0.0]
    upright = [line.get_xdata()[0] for line in top.lines if line.get_linestyle() == ":"]
    assert upright == [pytest.approx(6e9 / GIB)]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "K4V2 g32: HOLDS" in names
    assert {"budget 5.59 GiB", "margin -3 points", "over budget"} <= set(names)


def test_over_budget_points_are_grey_crosses_and_off_the_front(search, drawn):
    figure = drawn
    top, bottom = figure.axes[0], figure.axes[3]
    assert points(top, "X") == [(pytest.approx(22.5), 0)]
    over = [t for t in search["trials"] if t["workload_bytes"] > 6e9]
    assert len(points(bottom, "X")) == len(over) == 5
    colors = {line.get_color() for line in bottom.lines if line.get_marker() == "X"}
    assert colors == {"#8a9099"}
    step = next(line for line in bottom.lines if line.get_drawstyle() == "steps-post")
    assert max(step.get_xdata()) <= 6e9 / GIB


def test_points_that_are_not_finite_are_left_out(search):
    odd = copy.deepcopy(search)
    odd["trials"][6]["search"]["math"]["dnll"] = math.nan
    odd["trials"][7]["search"]["math"]["dnll"] = math.inf
    odd["trials"][8]["workload_bytes"] = None
    ax = pareto(odd).axes[4]
    assert sum(line.get_marker() not in ("None", "") for line in ax.lines) == len(odd["trials"]) - 3
    assert all(math.isfinite(limit) for limit in (*ax.get_ylim(), *ax.get_xlim()))


def test_one_item_gives_no_bar(sweep):
    single = copy.deepcopy(sweep)
    for entry in single["configs"]:
        for found in entry["families"].values():
            found["n"] = 1
    figure = pareto(single)
    assert not figure.axes[0].containers
    assert "One item gives no interval" in caption(single)


def test_a_sweep_has_one_row_and_no_budget(sweep):
    figure = pareto(sweep)
    assert len(figure.axes) == 3
    assert not points(figure.axes[0], "X")
    assert points(figure.axes[0], "s")[-1][1] <= 0
    xs = sorted(x for m in "osD" for x, _ in points(figure.axes[0], m))
    assert all(b / a > 1.02 for a, b in itertools.pairwise(xs))  # equal sizes are set apart


def test_names_do_not_cover_each_other(drawn):
    figure = drawn
    figure.draw_without_rendering()
    for ax in figure.axes[3:]:
        boxes = [text.get_window_extent() for text in ax.texts]
        assert len(boxes) >= 5
        assert not [1 for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_words_for_the_figure(search):
    assert "n = 128 a family" in caption(search)
    assert "90% intervals" in caption(search)
    assert "Seed 0." in caption(search)
    assert "K4V2 g32: 5.66 GB (5.27 GiB); retrieval +0.0 points" in alt(search)


def test_files_are_the_same_each_time_and_raise_no_warning(search, drawn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pareto(search)
        first = png(drawn)
        assert first == png(again)
        drawing = svg(drawn)
    assert drawing == svg(again)
    assert b"<dc:date>" not in drawing
    assert first[:8] == b"\x89PNG\r\n\x1a\n"


def test_nothing_to_draw(sweep):
    with pytest.raises(ValueError, match="nothing to draw"):
        pareto(sweep | {"configs": [], "baseline": {}})


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=30))
def test_nothing_beats_the_front(cloud):
    best = front(cloud)
    assert all(any(x <= px and y <= py for x, y in best) for px, py in cloud)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(best))


def test_equal_sizes_are_centred_on_their_place():
    assert side_by_side({"a": 100, "b": 200}) == {"a": 1.0, "b": 1.0}
    shifted = side_by_side({"a": 100, "b": 100, "c": 100, "d": 300})
    assert shifted["b"] == shifted["d"] == 1.0
    assert shifted["a"] * shifted["c"] == pytest.approx(1.0)
