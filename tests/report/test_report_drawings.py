"""Every figure: what is drawn is what is recorded, and it has its table, caption and words."""

import copy
import math
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from kvlab.report.figures import (
    budget_curve,
    bytes_by_stream,
    caption,
    decode_times,
    family_panels,
    flips_matrix,
    layer_map,
    memory_of_decode,
    memory_of_process,
    memory_of_rows,
    memory_over_time,
    of_run,
)
from kvlab.report.figures.budgets import curve_table, held_steps
from kvlab.report.figures.ink import MARKERS, style, unit_of
from kvlab.stats import wilson

SENSITIVITY = {
    "items_per_family": 2,
    "items_sha256": "ab",
    "unit": "nats",
    "layers": [0, 1, 2],
    "measured": [True, False, True],
    "formats": {"K": ["int8", "int4", "int2"], "V": ["int8", "int4", "int2"]},
    "kl": {"K": [[0.001, 0.01, 0.1], [0.002, 0.02, 0.2], [0.003, 0.03, 0.9]], "V": [[0.0, 0.01, 0.1]] * 3},
}
STREAMS = [("K", 600), ("V", 300), ("scales", 50), ("raw window", 50), ("positions", 0)]
DECODE = {
    "model": "smollm2-135m", "dtype": "float32", "threads": 2, "turns": 5,
    "rows": [
        {"name": name, "context": context, "ms_per_token": ms, "ms_least": ms - 1, "ms_most": ms + 2,
         "bytes": share * context, "bytes_16bit": 100 * context}
        for name, share, per in (("dynamic", 100, 0.01), ("int4", 30, 0.02))
        for context, ms in ((1024, 20 + 1024 * per), (4096, 20 + 4096 * per))
    ] + [{"name": "hf_hqq4", "context": 1024, "ms_per_token": None, "bytes": None, "note": "not installed"}],
}  # fmt: skip


def streams():
    names = ("int4 g32", "fp8")
    return pd.DataFrame(
        [{"cache": c, "stream": s, "bytes": b * (1 + n)} for n, c in enumerate(names) for s, b in STREAMS]
    )


def rows():
    return pd.DataFrame(
        [
            {"config_id": c, "item_id": f"i{t}{k}", "context_tokens": t, "measured_bytes": t * b, "raw16_bytes": t * 64}
            for c, b in (("raw", 64), ("a", 20), ("b", 30))
            for t in (128, 512)
            for k in range(2)
        ]
    )


def made(search):
    """One drawing of every kind."""
    return {
        "families": family_panels(search),
        "flips": flips_matrix(search),
        "budget": budget_curve(search),
        "streams": bytes_by_stream(streams(), raw_bytes=3000),
        "layers": layer_map(SENSITIVITY),
        "decode": decode_times(DECODE),
        "memory": memory_of_rows(rows(), {"a": "int4", "b": "int8"}),
        "grown": memory_of_decode(DECODE),
    }


@pytest.fixture(scope="module")
def all_drawn(search):
    return made(search)


def segments(ax):
    return [segment for bars in ax.containers for segment in bars.lines[2][0].get_segments()]


@pytest.mark.parametrize("name", ["families", "flips", "budget", "streams", "layers", "decode", "memory", "grown"])
def test_every_figure_has_table_words_and_files_without_a_warning(all_drawn, name):
    drawing = all_drawn[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture, dark, drawn = drawing.png(), drawing.png(dark=True), drawing.svg()
    assert picture[:8] == dark[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture != dark
    assert drawn.startswith(b"<?xml")
    assert len(drawing.table) > 1
    assert len(drawing.caption) > 30
    assert len(drawing.alt) > 40
    data, about = drawing._repr_mimebundle_()
    assert about["image/png"]["alt"] == drawing.alt
    assert data["image/png"] == picture


def test_the_same_figure_gives_the_same_files(search, all_drawn):
    again = flips_matrix(search)
    assert (again.png(), again.svg()) == (all_drawn["flips"].png(), all_drawn["flips"].svg())


def test_figures_run_where_deprecations_are_errors():
    names = ["budgets", "decoding", "flips", "growth", "multiples", "parts", "sensitivity", "tradeoff"]
    code = f"import seaborn, {', '.join(f'kvlab.report.figures.{name}' for name in names)}"
    strict = [sys.executable, "-W", "error::DeprecationWarning", "-c", code]
    done = subprocess.run(strict, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_panels_draw_the_recorded_intervals(search, all_drawn):
    figure = all_drawn["families"].figure()
    for ax, family in zip(figure.axes, ("retrieval", "math", "code"), strict=True):
        drawn = sorted(tuple(s[:, 0]) for s in segments(ax))
        pairs = [e["families"][family] for e in search["finalists"]]
        assert drawn == [pytest.approx(ends) for ends in sorted((100 * p["low"], 100 * p["high"]) for p in pairs)]
        assert ax.get_title(loc="left") == f"{family}, n = 128"
        dashed = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"]
        assert dashed == [-3.0]
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["K3V2 g64 rot", "K4V2 g64", "K4V2 g32"]  # the largest on top


@pytest.mark.parametrize("make", [family_panels, budget_curve])
def test_one_item_gives_no_bar_and_says_so(search, make):
    single = copy.deepcopy(search)
    for entry in single["finalists"]:
        for pair in entry["families"].values():
            pair |= {"n": 1, "score": 1.0}
    drawing = make(single)
    assert not [s for ax in drawing.figure().axes for s in segments(ax)]
    assert "One item gives no interval: none is drawn." in drawing.caption


def test_what_exceeds_the_budget_is_drawn_apart(search):
    tight = search | {"budget_bytes": 5_400_000_000}  # of three, one is larger
    for make in (family_panels, budget_curve):
        for ax in make(tight).figure().axes:
            crosses = [line for line in ax.lines if line.get_marker() == "X"]
            assert [line.get_color() for line in crosses] == ["#8a9099"]


def test_flips_show_both_counts(search, all_drawn):
    ax = all_drawn["flips"].figure().axes[0]
    pairs = [e["families"][f] for e in search["finalists"] for f in ("retrieval", "math", "code")]
    assert [text.get_text() for text in ax.texts] == [f"lost {p['b']}\ngained {p['c']}" for p in pairs]
    framed = [patch for patch in ax.patches if patch.get_linewidth() == 2]
    assert len(framed) == sum(p["p"] <= 0.05 for p in pairs)
    table = all_drawn["flips"].table
    assert table["b"].tolist() == [p["b"] for p in pairs]
    with pytest.raises(ValueError, match="nothing to draw"):
        flips_matrix(search | {"finalists": []})


def test_the_budget_curve_joins_what_holds(search):
    frame = curve_table(search)
    assert frame["workload_bytes"].is_monotonic_increasing
    code = frame[(frame["family"] == "code") & (frame["config"] == "K4V2 g32")].iloc[0]
    assert (code["low"], code["high"]) == wilson(code["score"] * 128, 128)
    made_up = pd.DataFrame(
        {
            "family": ["code"] * 4,
            "workload_bytes": [1, 2, 3, 4],
            "score": [0.5, 0.9, 0.7, 0.8],
            "holds": [True, False, True, True],
        }
    )
    assert held_steps(made_up, "code") == [(1.0, 0.5), (3.0, 0.7), (4.0, 0.8)]  # 0.9 was not shown to hold
    assert held_steps(made_up, "math") == []
    drawing = budget_curve(search)
    ax = drawing.figure().axes[0]
    drawn = sorted(tuple(s[:, 1]) for s in segments(ax))
    own = frame[frame["family"] == "retrieval"]
    assert drawn == [pytest.approx(ends) for ends in sorted(zip(own["low"], own["high"], strict=True))]
    assert ax.get_xscale() == "log"
    assert drawing.figure().axes[1].get_xlabel() == "KV cache at the workload, GB (log2)"
    assert "The least that holds is K4V2 g32" in drawing.alt


def test_stacked_bars_add_up(all_drawn):
    drawing = all_drawn["streams"]
    ax = drawing.figure().axes[0]
    scale, _ = unit_of([3000])
    widths = [patch.get_width() * scale for patch in ax.patches]
    assert sum(widths) == pytest.approx(1000 + 2000)
    assert len(widths) == 8  # what takes nothing is left out
    assert drawing.table.groupby("cache")["share"].sum().tolist() == [pytest.approx(1), pytest.approx(1)]
    assert len({(p.get_facecolor(), p.get_hatch()) for p in ax.patches}) == 4
    assert "int4 g32: 1.00 kB, K 60.0%" in drawing.alt
    with pytest.raises(ValueError, match="got \\['cache'\\]"):
        bytes_by_stream(pd.DataFrame({"cache": ["a"]}))


def test_the_layer_map_holds_every_number(all_drawn):
    drawing = all_drawn["layers"]
    figure = drawing.figure()
    keys = figure.axes[0].images[0].get_array()
    assert np.allclose(keys, SENSITIVITY["kl"]["K"])
    assert figure.axes[1].images[0].get_array().min() == pytest.approx(1e-7)  # a zero has no logarithm
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["int8", "int4 *", "int2"]
    assert len(drawing.table) == 18
    assert "keys of layer 2 as int2: 0.9 nats" in drawing.alt
    assert "asterisk" in drawing.caption
    with pytest.raises(ValueError, match="did not tell layers apart"):
        layer_map({})


def test_decode_lines_and_their_extremes(all_drawn):
    drawing = all_drawn["decode"]
    ax = drawing.figure().axes[0]
    lines = {tuple(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) == 2}
    assert lines == {(20 + 1024 * p, 20 + 4096 * p) for p in (0.01, 0.02)}
    drawn = [tuple(s[:, 1]) for c in ax.collections for s in c.get_segments()]
    assert len(drawn) == 4
    assert all(high - low == pytest.approx(3) for low, high in drawn)
    assert "n = 5 turns" in drawing.caption
    assert "4,096 tokens: dynamic 61.0; int4 101.9" in drawing.alt
    with pytest.raises(ValueError, match="nothing to draw"):
        decode_times(DECODE | {"rows": DECODE["rows"][-1:]})


def test_memory_has_log_bytes_and_the_raw_cache(all_drawn):
    drawing = all_drawn["memory"]
    ax = drawing.figure().axes[0]
    assert ax.get_yscale() == "log"
    assert "(log2)" in ax.get_ylabel()
    frame = drawing.table
    assert set(frame["cache"]) == {"16 bit, computed", "int4", "int8"}
    assert frame[(frame["cache"] == "int4") & (frame["tokens"] == 512)]["bytes"].tolist() == [512 * 20]
    assert "n = 4 items" in drawing.caption
    noted = pd.DataFrame({"cache": ["a"] * 2, "seconds": [0.0, 1.5], "bytes": [10, 4000]})
    over = memory_over_time(noted, budget_bytes=5e3)
    assert over.title == "Memory over time"
    dotted = [line for line in over.figure().axes[0].lines if line.get_linestyle() == ":"]
    assert [line.get_ydata()[0] * unit_of([5e3])[0] for line in dotted] == [5e3]
    with pytest.raises(ValueError, match="need rows of cache, bytes"):
        memory_over_time(pd.DataFrame({"cache": []}))


def test_memory_of_a_run_is_the_most_of_every_moment(search):
    noted = pd.DataFrame(
        {
            "elapsed_s": [1.0, 2.0, 2.0, 400.0],
            "host_bytes": [10 << 20, 30 << 20, 20 << 20, 5 << 20],
            "device_bytes": None,
        }
    )
    drawing = memory_of_process(noted)
    assert drawing.title == "Memory over time"
    assert drawing.table.to_dict("records") == [
        {"memory": "host, resident", "seconds": at, "bytes": size << 20}
        for at, size in ((1.0, 10), (2.0, 30), (400.0, 5))
    ]
    (line,) = drawing.figure().axes[0].lines
    assert list(line.get_xdata()) == [1.0, 2.0, 400.0]
    assert "host, resident 5.24 MB" in drawing.alt
    both = memory_of_process(noted.assign(device_bytes=[None, 7.0, 9.0, None]))
    assert both.table[both.table["memory"] == "GPU, in tensors"][["seconds", "bytes"]].to_numpy().tolist() == [
        [2.0, 9.0]
    ]
    many = pd.DataFrame({"elapsed_s": range(10_000), "host_bytes": range(1, 10_001), "device_bytes": None})
    assert len(memory_of_process(many).table) == 200
    assert memory_of_process(many).table["bytes"].iloc[-1] == 10_000
    for empty in (rows(), noted.assign(elapsed_s=None), noted.head(0)):
        with pytest.raises(ValueError, match="nothing to draw: these rows note no time"):
            memory_of_process(empty)
    assert list(of_run(search, noted.assign(config_id="other")))[-1] == "process"


def test_what_does_not_fit_is_counted_in_words(search):
    over = [e for e in search["finalists"] if e["workload_bytes"] > search["budget_bytes"]]
    searched = {e["config_id"]: e for e in [*search["anchors"], *search["trials"]]}
    apart = sum(e["workload_bytes"] > search["budget_bytes"] for e in searched.values() if e.get("workload_bytes"))
    counted = sum(bool(e.get("workload_bytes")) for e in searched.values())
    said = f"{len(over)} of {len(search['finalists'])} confirmed and {apart} of {counted} searched."
    assert apart > 0
    assert f"Grey crosses exceed the budget of 6.00 GB (5.59 GiB): {said}" in caption(search)
    assert "Grey crosses" not in caption(search | {"budget_bytes": None})


def test_a_run_has_the_figures_it_has_numbers_for(search, sweep):
    assert list(of_run(search)) == ["pareto", "families", "flips", "budget"]
    with_more = search | {"sensitivity": SENSITIVITY}
    with_more["finalists"] = [e | {"streams": {"K": e["workload_bytes"]}} for e in search["finalists"]]
    found = of_run(with_more, rows().replace({"a": search["finalists"][0]["config_id"]}))
    assert list(found) == ["pareto", "families", "flips", "budget", "streams", "layers", "memory"]
    assert list(of_run(sweep | {"configs": []})) == ["pareto"]


def test_markers_tell_apart_what_a_hue_does_not():
    looks = [style(n) for n in range(16)]
    assert len(set(looks)) == 16
    assert {marker for _, marker in looks} == set(MARKERS)
    assert unit_of([3 * 2**30])[1] == "GiB"
    assert unit_of([])[1] == "KiB"
    assert math.isclose(unit_of([5 * 2**20])[0], 2**20)
