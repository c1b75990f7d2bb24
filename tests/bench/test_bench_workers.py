"""`bench workers`: its document, at a size that takes no time. Nothing here looks at how long anything took."""

import json

import pytest

from kvlab.bench import scaling
from kvlab.bench.__main__ import main
from kvlab.bench.postgres import NoServerError


def test_the_document_counts_what_was_done(capsys) -> None:
    code = main(["workers", "--storages", "journal", "--counts", "1,3,6", "--seconds", "0.01", "--each", "2", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["ok"] else 1)
    assert document["schema"] == "kvlab.bench.workers/1"
    assert [(r["storage"], r["workers"], r["trials"]) for r in document["rows"]] == [
        ("journal", 1, 2),
        ("journal", 3, 6),
        ("journal", 6, 12),
    ]
    for row in document["rows"]:
        assert row["complete"] == row["distinct"] == row["trials"]
        assert row["speedup"] == pytest.approx(row["workers"] * row["efficiency"], rel=0.02)
    assert document["needed"] == {"workers": 64, "trial_s": 10.0, "trials_per_s": 6.4}
    (capacity,) = document["capacity"]
    assert capacity["trials_per_s"] > 0
    assert "64 workers with trials of 10 s need 6.4" in scaling.table(document)


def _document(**changes) -> dict:
    row = {"workers": 64, "trials": 192, "complete": 192, "distinct": 192, "wall_s": 32.0, "efficiency": 0.94}
    capacity = {"storage": "journal", "processes": 4, "trials_per_s": 100.0}
    return {"rows": [row | changes], "capacity": [capacity | changes]}


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"complete": 191}, False),
        ({"distinct": 191}, False),
        ({"efficiency": 0.79}, False),
        ({"trials_per_s": 6.3}, False),
    ],
)
def test_it_holds_only_if_nothing_was_lost_and_it_was_near_linear(changes, ok) -> None:
    document = _document(**changes)
    assert scaling.holds(document["rows"], document["capacity"], 64) is ok


def test_without_a_server_the_rest_is_measured_and_said(monkeypatch, capsys) -> None:
    def none(**_: object) -> None:
        raise NoServerError("PostgreSQL is not installed: on Debian, apt-get install postgresql")

    monkeypatch.setattr(scaling, "Server", none)
    document = scaling.run(lambda line: None, ("postgresql",), (1,), 0.0, 1)
    assert document["rows"] == []
    assert document["ok"] is False
    assert document["notes"] == [
        "postgresql was left out: PostgreSQL is not installed: on Debian, apt-get install postgresql"
    ]


def test_an_unknown_storage_and_too_many_workers_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["workers", "--storages", "sqlite"])
    assert "unknown storage 'sqlite': journal, postgresql" in capsys.readouterr().err
    assert main(["workers", "--storages", "journal", "--counts", "400", "--seconds", "0"]) == 2
    assert "must lie between 1 and 399" in capsys.readouterr().err
