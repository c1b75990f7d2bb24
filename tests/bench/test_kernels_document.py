"""Figures of the kernel bench: no speed-up beside a failed check, and each one from the right pair of times."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvlab.bench.kernels import cases, document
from kvlab.bench.kernels.cases import PAIRS, Case, Shape, selected, target_of

SHAPE = Shape(8, 4096)


def row(
    kernel: str, pair: str, us: float | None, shape: Shape = SHAPE, variant: str = "", ok: bool = True, **more
) -> dict:
    times = None if us is None else {"p10": us - 1, "p50": us, "p90": us + 1, "replays": 100}
    check = {"error": 1e-4 if ok else 0.5, "tolerance": 1e-3, "reference": "float64", "ok": ok}
    result = {"check": check, "bytes": 4_000_000, "impl": "triton", "times": times} | more
    return document.row_of(Case(kernel, pair, shape, variant), result)


def figures(rows: list[dict], checks: Sequence[dict] = (), copy: float | None = 4000.0) -> dict[str, dict[str, Any]]:
    return {r["case"]: r for r in document.with_figures(rows, checks, copy)}


def table_of_four() -> list[dict]:
    return [
        row("sdpa", "", 1000.0, SHAPE._replace(P=16)),
        row("decode", "raw", 1100.0),
        row("decode", "int4", 400.0),
        row("sparse", "int4", 80.0, variant="1/8"),
    ]


def test_figures_are_the_ratios_they_say() -> None:
    found = figures(table_of_four())
    raw, int4, sparse = (found[r["case"]] for r in table_of_four()[1:])
    assert raw["gb_s"] == pytest.approx(4e6 / 1100e-6 / 1e9)
    assert int4["copy_share"] == pytest.approx(10.0 / 4000)
    assert int4["x_sdpa"] == pytest.approx(2.5)
    assert int4["x_own_bf16"] == pytest.approx(2.75)
    assert int4["x_dense"] is None
    assert (sparse["x_sdpa"], sparse["x_dense"]) == (pytest.approx(12.5), pytest.approx(5.0))
    assert (raw["target_share"], int4["target_share"], sparse["target_share"]) == (0.85, 0.65, None)


def test_no_figure_stands_next_to_a_failed_check() -> None:
    rows = table_of_four()
    rows[2] = row("decode", "int4", 400.0, ok=False)
    found = figures(rows)
    broken, sparse = found[rows[2]["case"]], found[rows[3]["case"]]
    assert all(broken[name] is None for name in ("gb_s", "copy_share", "x_sdpa", "x_own_bf16"))
    assert sparse["x_dense"] is None
    assert sparse["x_sdpa"] == pytest.approx(12.5)


@pytest.mark.parametrize("small", [{"ok": False}, {"error": "ValueError: no"}], ids=str)
def test_a_failed_small_check_takes_the_speed_ups_of_its_kernel_and_format(small) -> None:
    check = row("decode", "int4", None, Shape(2, 33), **small)
    found = figures(table_of_four(), [check])
    names = [r["case"] for r in table_of_four()]
    assert found[names[2]]["x_sdpa"] is None
    assert found[names[3]]["x_dense"] is None
    assert found[names[1]]["x_sdpa"] == pytest.approx(1000 / 1100)


def test_a_wrong_peer_gives_no_speed_up() -> None:
    rows = table_of_four()
    rows[0] = row("sdpa", "", 1000.0, ok=False)
    assert all(r["x_sdpa"] is None for r in figures(rows).values())


def test_another_size_is_no_peer() -> None:
    rows = [
        row("sdpa", "", 1000.0, Shape(8, 8192)),
        row("decode", "int4", 400.0),
        row("decode", "raw", 9.0, Shape(1, 4096)),
    ]
    assert figures(rows)[rows[1]["case"]]["x_sdpa"] is None
    assert figures(rows)[rows[1]["case"]]["x_own_bf16"] is None


def test_the_quickest_of_our_own_16_bit_rows_counts_and_a_sparse_row_is_held_to_its_own_pages() -> None:
    wide = SHAPE._replace(P=64)
    rows = [*table_of_four(), row("decode", "raw", 900.0, wide), row("decode", "int4", 300.0, wide)]
    found = figures(rows)
    assert found[rows[2]["case"]]["x_own_bf16"] == pytest.approx(900 / 400)
    assert found[rows[3]["case"]]["x_dense"] == pytest.approx(5.0)


def test_what_was_not_timed_has_no_figures_and_no_problem() -> None:
    rows = [row("decode", "int4", None)]
    found = figures(rows, copy=None)[rows[0]["case"]]
    assert found["gb_s"] is None
    assert document.problems(rows) == []


def test_problems_name_the_case_and_the_error() -> None:
    rows = [row("decode", "int4", 1.0, ok=False), row("encode", "raw", 1.0) | {"error": "OutOfResources: shared"}]
    first, second = document.problems(rows)
    assert first == f"{rows[0]['case']}: off by 0.5 of 0.001 (float64)"
    assert second == f"{rows[1]['case']}: OutOfResources: shared"


def test_the_table_says_what_failed_and_what_was_not_run() -> None:
    rows = [*table_of_four()[:3], row("decode", "int2", 3.0, ok=False)]
    made = {
        "device": {"name": "A GPU", "torch": "2", "triton": "3", "copy_gb_s": 4000.0, "floor_us": 3.25},
        "checks": [],
        "rows": document.with_figures(rows, [], 4000.0),
        "tuning": [],
        "skipped": [{"case": "decode late", "reason": "out of time"}],
        "problems": document.problems(rows),
        "seconds": 12.0,
        "ok": False,
    }
    text = document.table(made)
    lines = text.splitlines()
    assert "copy 4000 GB/s" in lines[1]
    int2 = next(line for line in lines if line.startswith("decode int2"))
    assert int2.endswith("5e-01 FAIL       3.0") or "FAIL" in int2
    assert "2.75" not in int2
    assert any("2.50" in line and "2.75" in line and line.startswith("decode int4") for line in lines)
    assert "not run: decode late: out of time" in lines
    assert lines[-1] == "12 s, ok: False"


def tuning_row(us: float, label: str, in_use: bool, ok: bool = True) -> dict:
    return row("decode", "int4", us, ok=ok) | {"label": label, "in_use": in_use}


def test_the_best_options_are_those_that_were_right() -> None:
    rows = [tuning_row(100, "now", True), tuning_row(80, "good", False), tuning_row(10, "wrong", False, ok=False)]
    made = {
        "device": {},
        "checks": [],
        "rows": [],
        "tuning": rows,
        "skipped": [],
        "problems": [],
        "seconds": 1,
        "ok": True,
    }
    line = next(text for text in document.table(made).splitlines() if text.startswith("decode int4"))
    assert "good" in line
    assert "wrong" not in line
    assert line.endswith("25%")


def test_names_are_unique_and_json_keeps_the_cases() -> None:
    for device in ("cuda", "cpu"):
        every = [*cases.checks(device), *cases.timed(device), *cases.tuned(device)]
        assert len({case.name for case in every}) == len(set(every))
        assert json.loads(json.dumps([case.name for case in every])) == [case.name for case in every]
    assert {case.pair for case in cases.timed("cuda")} == {*PAIRS, ""}
    tiny, full = ({(c.kernel, c.pair, c.variant) for c in cases.timed(device)} for device in ("cpu", "cuda"))
    assert tiny == full


def test_the_grid_is_the_one_that_was_promised() -> None:
    sizes = {(c.shape.B, c.shape.L) for c in cases.timed("cuda") if c.kernel == "decode" and c.shape.D == 128}
    assert sizes == {(b, length) for b in (1, 8, 32) for length in (4096, 32768, 131072)}
    assert any((c.shape.N, c.shape.G, c.shape.D) == (3, 3, 64) for c in cases.timed("cuda") if c.kernel == "decode")


def test_rivals_come_along_when_cases_are_chosen() -> None:
    chosen = [case.name for case in selected(cases.timed("cuda"), "^decode int2 B1 L4k")]
    assert [name.split(" ")[0] for name in chosen] == ["sdpa", "decode", "decode"]
    assert chosen[1].startswith("decode raw B1 L4k")
    assert selected(cases.timed("cuda"), "^encode int4 ")[0].kernel == "encode"
    assert selected(cases.timed("cuda"), "nothing") == []


@pytest.mark.parametrize(
    ("pair", "target"), [("raw", 0.85), ("int8", 0.8), ("K8_V4", 0.8), ("K4ch_V3", 0.65), ("int2", 0.5)]
)
def test_targets_follow_the_widest_codes(pair, target) -> None:
    assert target_of(pair) == target


def test_a_channel_group_is_a_page() -> None:
    for case in cases.timed("cuda"):
        groups = [codec["group"] for codec in PAIRS.get(case.pair, ()) if codec.get("axis") == "channel"]
        assert all(group == case.shape.P for group in groups)
