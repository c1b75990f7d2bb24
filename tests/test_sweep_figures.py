"""Figures of a sweep draw what the document says: intervals read back from what was drawn, in the order asked."""

import warnings

import pytest
from matplotlib.lines import Line2D

from kvlab.sweep import figures
from kvlab.sweep.figures import curves, losses

FAMILIES = ("retrieval", "math", "code")


def family(diff, n=30, verdict="HOLDS"):
    return {"n": n, "diff": diff, "low": diff - 0.05, "high": diff + 0.04, "margin": 0.1, "verdict": verdict}


def likelihood(dnll, n=30):
    return {"n": n, "dnll": dnll, "low": dnll - 0.011 if n > 1 else None, "high": dnll + 0.013 if n > 1 else None}


def entry(name, gigabytes, axes, dnll, verdict="HOLDS", n=30):
    return {
        "config_id": name, "label": name, "format": name, "axes": axes, "verdict": verdict,
        "workload_bytes": gigabytes * 10**9, "workload_effective_bits": 16 * gigabytes / 24, "read_bytes": 10**9,
        "families": {f: family(-dnll, n, verdict) for f in FAMILIES},
        "likelihood": {f: likelihood(dnll, n) for f in FAMILIES},
    }  # fmt: skip


def document(*entries):
    base = {f: {"n": 30, "score": 0.9, "low": 0.8, "high": 0.95} for f in FAMILIES}
    return {
        "schema": "kvlab.sweep/1",
        "configs": list(entries),
        "baseline": {"config_id": "base", "label": "raw", "families": base},
        "budget_bytes": 20 * 10**9,
    }


@pytest.fixture
def evicted():
    made = [
        entry(f"{s} {k} {scope}", 24 * k, {"keep": k, "scorer": s, "scope": scope}, 0.1 * (1 - k) + 0.02 * n, "WORSE")
        for n, s in enumerate(("window", "h2o"))
        for k in (0.75, 0.5, 0.25)
        for scope in ("head", "layer")
    ]
    return document(entry("raw", 24, {"keep": 1.0}, 0.0), *made)


def spans(ax):
    """Ends of the intervals drawn in a panel, across and up."""
    lines = [line for line in ax.lines if line.get_marker() in ("None", None, "") and len(line.get_xdata()) == 2]
    across = [tuple(line.get_xdata()) for line in lines if line.get_ydata()[0] == line.get_ydata()[1]]
    up = [tuple(line.get_ydata()) for line in lines if line.get_xdata()[0] == line.get_xdata()[1]]
    return across, up


def test_every_config_has_its_interval_on_its_own_line(evicted):
    figure = losses(evicted)
    order = sorted(evicted["configs"], key=lambda e: -e["workload_bytes"])
    for ax, name in zip(figure.axes, FAMILIES, strict=True):
        across, _ = spans(ax)
        right = [(e["likelihood"][name]["low"], e["likelihood"][name]["high"]) for e in order]
        assert [s for s in across if s in right] == right
        assert ax.get_title(loc="left") == f"{name} (full cache 0.90)"
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == [f"{e['format']}  {e['workload_effective_bits']:.2f} bit" for e in order]
    top, bottom = figure.axes[0].get_ylim()[::-1]
    assert top < 0 < len(order) - 1 < bottom


def test_one_item_draws_no_bar():
    found = losses(document(entry("one", 12, {"keep": 1.0}, 0.2, n=1)))
    across, _ = spans(found.axes[0])
    assert (0.2 - 0.011, 0.2 + 0.013) not in across
    assert len(across) == 0


def test_curves_join_one_scorer_and_scope_each_and_draw_both_intervals(evicted):
    figure = curves(evicted, "keep", "scorer", "scope")
    panels = figure.axes
    assert len(panels) == 6
    for ax in panels[:3]:
        joined = [line for line in ax.lines if len(line.get_xdata()) == 3]
        assert len(joined) == 4
        for line in joined:
            assert list(line.get_xdata()) == sorted(line.get_xdata())
    _, up = spans(panels[0])
    right = {
        (e["likelihood"]["retrieval"]["low"], e["likelihood"]["retrieval"]["high"]) for e in evicted["configs"][1:]
    }
    assert set(up) >= right
    _, up = spans(panels[3])
    points = {tuple(100 * e["families"]["retrieval"][k] for k in ("low", "high")) for e in evicted["configs"][1:]}
    assert set(up) >= points
    margins = [line for line in panels[3].lines if list(line.get_ydata()) == [-10.0, -10.0]]
    assert len(margins) == 1
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert words == ["scorer window", "scorer h2o", "scope head", "scope layer", "margin -10 points"]


def test_points_of_one_share_stand_beside_each_other(evicted):
    (ax, *_) = curves(evicted, "keep", "scorer", "scope").axes
    marks = [line for line in ax.lines if isinstance(line, Line2D) and len(line.get_xdata()) == 1]
    at_half = sorted(line.get_xdata()[0] for line in marks if 0.45 < line.get_xdata()[0] < 0.55)
    assert len(at_half) == len(set(at_half)) == 4


@pytest.mark.parametrize(("x", "hue", "style"), [("keeps", "scorer", "scope"), ("keep", "bound", "chunk")])
def test_an_axis_that_no_config_stands_on_is_refused(evicted, x, hue, style):
    with pytest.raises(ValueError, match="no config stands on"):
        curves(evicted, x, hue, style)


def test_without_forced_answers_there_is_nothing_to_draw():
    decoded = entry("raw", 24, {"keep": 1.0}, 0.0) | {"likelihood": {}}
    with pytest.raises(ValueError, match="no likelihoods"):
        losses(document(decoded))


def test_nothing_drawn_is_on_its_way_out(evicted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (losses(evicted), curves(evicted, "keep", "scorer", "scope")):
            figure.draw_without_rendering()


def test_every_verdict_has_a_colour_and_a_marker_of_its_own():
    from kvlab.stats import VERDICTS

    assert set(figures._WORDS) == set(VERDICTS)
    assert len({marker for _, marker in figures._WORDS.values()}) == len(VERDICTS)
