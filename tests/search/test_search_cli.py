"""`python -m kvlab.search` as a person runs it: what it prints, what it leaves behind, how it ends."""

import json
import re
import resource
import subprocess
import sys
from typing import Any

import pytest

from kvlab.config import KVConfig
from kvlab.runs import Run
from kvlab.search import engine
from kvlab.search.__main__ import main
from kvlab.subject import LocalSubject

WORK = ["--context", "4096", "--concurrency", "1"]
BUDGET = 900_000  # as in conftest.py
LIMIT = 900
ROW = ["role", "config_id", "item_id"]


# -- a run that finishes -----------------------------------------------------------------------------------------------


def test_stdout_is_one_json_document_of_the_schema(finished) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    assert finished.out.count("\n") == 1
    result = json.loads(finished.out, parse_constant=refuse)
    assert result == json.loads((finished.run.path / "result.json").read_text(), parse_constant=refuse)
    assert result["schema"] == "kvlab.search/1"
    assert set(result) >= {
        *("schema", "model", "workload", "budget_bytes", "raw_workload_bytes", "binding", "notes", "baseline"),
        *("anchors", "trials", "finalists", "verdict", "winner", "margin", "controls", "before_after", "ledger"),
        *("counters", "wall_s", "run", "seed", "versions"),
    }
    assert set(result["model"]) >= {
        *("name", "revision", "weights_sha256", "dtype", "layers", "kv_heads", "head_dim", "trained_context"),
    }
    assert result["workload"] == {"context": 4096, "concurrency": 1}
    assert (result["budget_bytes"], result["seed"]) == (BUDGET, 3)
    assert result["run"] == str(finished.run.path)
    assert result["wall_s"] > 0


def test_judged_configs_carry_everything_that_is_promised(finished) -> None:
    result = finished.result
    assert 1 <= len(result["finalists"]) <= 3
    for f in result["finalists"]:
        assert set(f) >= {
            *("config_id", "label", "config", "toml", "workload_bytes", "predicted_bytes", "measured_bytes"),
            *("effective_bits", "bytes_per_token", "sessions", "families", "verdict"),
        }
        config = KVConfig.from_toml(f["toml"])
        assert config.id == f["config_id"]
        assert KVConfig.from_dict(f["config"]) == config
        assert f["predicted_bytes"] == f["measured_bytes"] > 0
        assert f["workload_bytes"] <= BUDGET
        assert set(f["families"]) == {"retrieval", "math", "code"}
        for row in f["families"].values():
            assert set(row) >= {"n", "base", "score", "diff", "low", "high", "margin", "verdict"}
            assert row["n"] == 4
            assert row["margin"] == 0.10  # four items cannot decide anything smaller
            assert row["verdict"] == "INSENSITIVE"  # a random model knows no answer
    assert result["verdict"] == "INSENSITIVE"
    assert result["winner"] is None
    assert result["margin"]["value_points"] == 10
    assert "cannot decide" in result["margin"]["rule"]


def test_the_uncompressed_cache_is_shown_as_over_the_budget(finished) -> None:
    result = finished.result
    anchors = {a["name"]: a for a in result["anchors"]}
    assert list(anchors) == ["raw", "fp8", "int8", "int4", "window"]
    assert anchors["raw"]["workload_bytes"] == result["raw_workload_bytes"] > BUDGET
    assert result["binding"] is True
    assert [n for n, a in anchors.items() if not a["feasible"]] == ["raw", "fp8", "int8"]
    assert all(a["effective_bits"] > 0 and a["search"] for a in anchors.values())
    assert anchors["int8"]["verdict"] == "INSENSITIVE"  # confirmed as well


def test_prefills_equal_distinct_items(finished) -> None:
    counters, rows = finished.result["counters"], finished.run.rows()
    assert counters["prefills"] == counters["items"] == rows.item_id.nunique() == 3 * (4 + 4)
    assert counters["configs_scored"] == rows.config_id.nunique() > 10
    assert counters["item_scores"] == len(rows)
    assert counters["corrupt_snapshots"] == 0
    assert not rows.duplicated(ROW).any()
    assert (rows.measured_bytes == rows.predicted_bytes).all()
    assert set(rows.role) == {"layers", "search", "confirm", "aa"}
    assert counters["remembered"] == 0  # the first run of this model
    again = finished.result["controls"]["aa"]
    assert (again["n"], again["flips"], again["share"]) == (12, 0, 0.0)
    assert 0 <= again["dnll"] < 1e-4


def test_the_run_folder_is_complete_and_keeps_no_snapshots(finished) -> None:
    run = finished.run
    assert run.is_complete()
    names = {p.name for p in run.path.iterdir()}
    assert names >= {"config.json", "provenance.json", "status.json", "items", "result.json", "report.html", "figures"}
    assert "sweet_spot.toml" not in names  # nothing held
    assert "snapshots" not in names
    assert (run.path / "figures" / "pareto.png").stat().st_size > 1000
    provenance = run.read_json("provenance.json")
    assert provenance["seeds"] == {"items": 3, "sampler": 3}
    assert provenance["evalset"]["search"] != provenance["evalset"]["confirm"]


def test_progress_goes_to_stderr(finished) -> None:
    lines = finished.err.splitlines()
    assert lines[0] == f"run: {finished.run.path}"
    assert re.match(r"planned: about \d+\.\d minutes", lines[1])
    assert lines[-1] == f"report: {finished.run.path / 'report.html'}"
    assert "Traceback" not in finished.err
    assert "Warning" not in finished.err


@pytest.mark.parametrize(
    ("seconds", "words"), [(450, "7.5 minutes"), (1320, "22.0 minutes, not 6: a prefill takes 2.5 s")]
)
def test_a_plan_that_overruns_says_so_before_it_begins(tmp_path, seconds, words) -> None:
    made = {"speed": {"prefill_s": 2.5, "row_s": 0.25}, "estimated_s": seconds}
    run = Run.create(tmp_path, "search", {"request": {"minutes": 6.0}}, extra_provenance=made)
    said = engine.forecast(run)
    assert said.startswith(f"planned: about {words}")
    assert ("--items and --trials ask for less" in said) == (seconds > 450)


# -- other ends --------------------------------------------------------------------------------------------------------


def _in_process(capsys: Any, *flags: str) -> tuple[int, dict[str, Any], str]:
    code = main(["--json", "--quiet", *flags])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


SMALL = ["--families", "math", "--items", "2", "--trials", "3", *WORK]


def test_dry_run_shows_the_plan_and_writes_no_run(tiny, place, capsys) -> None:
    flags = ["--model", str(tiny), "--budget-gb", "900kB", *WORK, "--items", "30", "--trials", "7", "--dry-run"]
    code, plan, err = _in_process(capsys, *flags)
    assert code == 0
    assert err == ""
    assert plan["schema"] == "kvlab.search.plan/1"
    assert plan["sizes"] == {"search_items": 15, "trials": 7, "confirm_items": 30} | {
        "layer_items": 2,
        "layer_formats": 4,
    }
    assert plan["layer_rows"] == 2 * 8 * 2 * 3  # layers, formats of K and V, items, families
    assert plan["margin"]["value_points"] == 10
    assert plan["estimated_s"] > 0
    assert {n: a["feasible"] for n, a in plan["anchors"].items()} == {
        "raw": False,
        "fp8": False,
        "int8": False,
        "int4": True,
        "window": True,
    }
    # The mean of the model's keys belongs to its weights and lies in their cache; nothing is written of a run.
    assert {p.parent for p in place.rglob("*") if p.is_file()} <= {place / "cache" / "centres"}
    assert not (place / "runs").exists()

    assert main(flags) == 0  # for people
    text = capsys.readouterr().out
    assert "budget 900 kB; uncompressed 16 bit needs 2.1 MB" in text
    assert "tell layers apart on 2 items per family, 4 formats of K and V: 96 scores not known yet" in text
    assert "search 7 trials on up to 15 items per family, then confirm on 30 fresh ones; margin 10 points" in text
    assert not (place / "runs").exists()


def test_the_same_search_again_scores_only_what_must_be_real(tiny, place, capsys) -> None:
    flags = ["--model", str(tiny), "--budget-gb", "900kB", *SMALL]
    _, first, _ = _in_process(capsys, *flags)
    code, second, _ = _in_process(capsys, *flags)
    assert code == 0
    aa = 2  # the baseline once more on every confirmation item
    assert first["counters"]["remembered"] == 0
    # The earlier winner, where there is one, starts the second race; nothing held here.
    assert second["counters"]["remembered"] == second["counters"]["item_scores"] - aa
    assert [(f["config_id"], f["families"]) for f in second["finalists"]] == [
        (f["config_id"], f["families"]) for f in first["finalists"]
    ]
    assert second["sensitivity"] == first["sensitivity"]
    runs = [Run.open(second["run"]), Run.open(first["run"])]
    rows = runs[0].rows()
    assert set(rows[rows.role != "aa"].scored_in) == {runs[1].path.name}
    assert rows[rows.role == "aa"].scored_in.isna().all()
    _, third, _ = _in_process(capsys, *flags, "--no-memo")
    assert third["counters"]["remembered"] == 0


@pytest.mark.parametrize("mode", ["map", "smallest"])
def test_other_modes_run_on_a_model(tiny, place, capsys, mode) -> None:
    flags = ["--model", str(tiny), "--budget-gb", "1MB", "--mode", mode, "--families", "math", *WORK]
    code, result, _ = _in_process(capsys, *flags, "--items", "2", "--trials", "14")
    assert code == 0
    assert result["goal"] == mode
    assert result["front"]
    assert all(f["workload_bytes"] <= 10**6 for f in (*result["front"], *result["finalists"]))
    assert any(t["label"].startswith("mixed ") for t in result["trials"])
    assert result["sensitivity"]["kl"]["K"]
    sizes = [f["workload_bytes"] for f in result["finalists"]]
    assert sizes == sorted(set(sizes), reverse=True)
    assert result["verdict"] == "INSENSITIVE"  # a random model knows no answer


def test_a_budget_that_nothing_fits_exits_3_with_the_nearest_misses(tiny, place, capsys) -> None:
    code, result, _ = _in_process(capsys, "--model", str(tiny), "--budget-gb", "2kB", *SMALL)
    assert code == 3
    assert result["finalists"] == []
    assert result["winner"] is None
    sizes = [m["workload_bytes"] for m in result["nearest_misses"]]
    assert len(sizes) == 3
    assert sizes == sorted(sizes)
    assert sizes[0] > 2000
    (folder,) = (place / "runs").glob("*-search-*")
    assert not (folder / "sweet_spot.toml").exists()
    assert Run.open(folder).is_complete()
    assert "NOTHING FITS" in (folder / "report.html").read_text()
    assert result["counters"]["prefills"] == result["counters"]["items"]


def test_a_trial_that_fails_exits_4_and_names_it(tiny, place, capsys, monkeypatch) -> None:
    scored = LocalSubject._row

    def row(self: Any, job: Any, *rest: Any) -> Any:
        if job.config.key.kind == "fp8" and job.config.budget.evicts:
            raise MemoryError("cannot allocate")
        return scored(self, job, *rest)

    monkeypatch.setattr(LocalSubject, "_row", row)
    code, result, _ = _in_process(capsys, "--model", str(tiny), "--budget-gb", "900kB", *SMALL)
    assert code == 4
    assert [t["state"] for t in result["trials"]].count("failed") == 1
    failed = next(t for t in result["trials"] if t["state"] == "failed")
    assert failed["reason"] == "MemoryError: cannot allocate"
    assert failed["label"].startswith("fp8_e4m3 + snapkv")
    assert result["finalists"]
    assert list(result["baseline"]["families"]) == ["math"]
    assert result["counters"]["prefills"] == result["counters"]["items"] == 4 + 2


def test_a_budget_that_does_not_bind_says_so(tiny, place, capsys) -> None:
    code, result, _ = _in_process(capsys, "--model", str(tiny), "--budget-gb", "1", *SMALL)
    assert code == 0
    assert result["binding"] is False
    assert any("does not bind" in note for note in result["notes"])
    assert [a["name"] for a in result["anchors"]] == ["raw", "fp8", "int8", "int4"]


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvlab.search", "--help"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"torch", "transformers", "optuna", "numpy", "pandas", "matplotlib"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    for word in ("--budget-gb", "--resume", "--dry-run", "exit codes", "examples"):
        assert word in done.stdout
