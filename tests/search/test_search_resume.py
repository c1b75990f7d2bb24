"""A search that is killed, damaged, interrupted and resumed ends where an undisturbed one does."""

import signal
from typing import Any

import pandas as pd
import pytest

ROW = ["role", "config_id", "item_id"]


def test_a_kill_loses_what_was_not_stored_and_no_more(disturbed) -> None:
    assert disturbed.killed["code"] == -signal.SIGKILL
    assert disturbed.killed["status"]["state"] == "running"  # what the process said last
    assert disturbed.killed["state"] == "interrupted"  # what is known now
    assert 0 < disturbed.killed_rows < disturbed.interrupted_rows < len(disturbed.run.rows())


def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(disturbed) -> None:
    told = disturbed.interrupted
    assert told["code"] == 130
    assert told["out"] == ""
    assert told["status"]["state"] == "interrupted"
    assert f"python -m kvlab.search --resume {disturbed.run.path}" in told["err"].splitlines()[-1]
    assert "Traceback" not in told["err"]


def test_no_item_is_scored_twice(disturbed, finished) -> None:
    rows = disturbed.run.rows()
    assert not rows.duplicated(ROW).any()
    assert set(map(tuple, rows[ROW].values)) == set(map(tuple, finished.run.rows()[ROW].values))


def test_a_resumed_run_ends_where_an_undisturbed_one_does(disturbed, finished) -> None:
    ours, theirs = disturbed.result, finished.result
    assert disturbed.run.is_complete()

    def front(result: dict[str, Any]) -> list[Any]:
        return [(f["config_id"], f["workload_bytes"], f["verdict"]) for f in result["finalists"]]

    assert front(ours) == front(theirs)
    assert (ours["verdict"], ours["winner"], ours["margin"]) == (theirs["verdict"], theirs["winner"], theirs["margin"])
    for a, b in zip(ours["finalists"], theirs["finalists"], strict=True):
        assert a["families"] == b["families"]
        assert a["measured_bytes"] == b["measured_bytes"]
    for a, b in zip(ours["trials"], theirs["trials"], strict=True):
        same = ("number", "config_id", "state", "items", "feasible", "workload_bytes")
        assert [a[k] for k in same] == [b[k] for k in same]
        # Scores of float32 differ in the last digits with the company a row is computed in.
        assert a["value"] == pytest.approx(b["value"], rel=1e-4, abs=1e-5)
    assert ours["counters"]["items"] == theirs["counters"]["items"]
    assert ours["counters"]["item_scores"] == theirs["counters"]["item_scores"]
    pair = [r.rows().set_index(ROW).sort_index() for r in (disturbed.run, finished.run)]
    pd.testing.assert_series_equal(pair[0].nll, pair[1].nll, rtol=1e-4)
    pd.testing.assert_series_equal(pair[0].score, pair[1].score)


def test_damaged_snapshots_are_made_again_and_nothing_else_is(disturbed) -> None:
    counters = disturbed.result["counters"]
    assert 3 <= counters["corrupt_snapshots"] <= 12
    assert counters["prefills"] == counters["items"] + counters["corrupt_snapshots"]
    assert disturbed.interrupted["status"]["corrupt_snapshots"] >= 3
