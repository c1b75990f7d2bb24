"""show and compare: what they print, and that they only read."""

import json
import subprocess
import sys

import pytest

from kvlab.__main__ import main
from kvlab.codecs import Affine
from kvlab.config import KVConfig
from kvlab.recorded import record
from kvlab.runs import Run


@pytest.fixture
def run(tmp_path):
    run = Run.create(
        tmp_path,
        "search",
        {"request": {"model": "m", "items": 8}, "margin": {"value_points": 5.0, "n": 59}},
        extra_provenance={"model": {"name": "smollm2-135m", "dtype": "float32", "layers": 30}},
    )
    run.append([{"role": "search", "config_id": "c", "item_id": "i", "score": 1.0}] * 3)
    return run


def files(path):
    return {p.relative_to(path): p.stat().st_mtime_ns for p in path.rglob("*") if p.name != ".lock"}


def test_a_run_is_shown_whatever_became_of_it(run, tmp_path, capsys):
    before = files(run.path)
    assert main(["show", run.hash8, "--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == run.path.name
    assert lines[1].startswith("state      interrupted, ")
    assert "settings   model m, items 8" in lines
    assert "margin     5.0 points, n = 59 a family" in lines
    assert "counters   rows 3" in lines
    assert "model      name smollm2-135m, dtype float32, layers 30" in lines
    assert any(line.endswith("items/part-000000.parquet") for line in lines)
    assert files(run.path) == before  # it only reads


def test_a_finished_run_shows_its_verdict(run, tmp_path, capsys):
    result = {
        "schema": "kvlab.sweep/1", "verdict": "WORSE", "configs": [], "baseline": {}, "counters": {"items": 9},
        "margin": {"value_points": 3.0, "n": 99},
    }  # fmt: skip
    run.write_json("result.json", result)
    run.set_status("done", wall_s=12.5)
    assert main(["show", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["state"], found["verdict"]) == ("kvlab.show/1", "done", "WORSE")
    assert (found["counters"], found["wall_s"], found["margin"]["n"]) == ({"items": 9}, 12.5, 99)
    assert found["files"]["result.json"] > 10
    assert main(["show", "nothing", "--root", str(tmp_path)]) == 2


def test_a_config_of_a_run_is_shown_so_that_it_can_be_run_again(run, capsys):
    config = KVConfig(key=Affine(bits=4), value=Affine(bits=2))
    record(run, {config.id: config})
    assert main(["show", str(run.path), "--config", config.id[:6]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {config.label}, {config.id}\n")
    assert KVConfig.from_toml(printed) == config
    assert main(["show", str(run.path), "--config", config.label, "--json"]) == 0
    assert KVConfig.from_json(capsys.readouterr().out) == config
    assert main(["show", str(run.path), "--config", "int9"]) == 2
    assert f"scored no config 'int9'; nearest is '{config.label}'" in capsys.readouterr().err


def test_compare_needs_two_runs_that_are_alike(run, tmp_path, capsys):
    other = Run.create(tmp_path, "search", {"request": {"model": "m", "items": 9}})
    other.append([{"role": "search", "config_id": "c", "item_id": "i", "score": 1.0}])
    assert main(["compare", str(run.path)]) == 2
    assert "at least two runs" in capsys.readouterr().err
    assert main(["compare", str(run.path), str(other.path)]) == 2
    assert "model: smollm2-135m" in capsys.readouterr().err


def test_housekeeping_loads_no_model_library(tmp_path):
    for argv in (["gc", "--root", str(tmp_path), "--cache", str(tmp_path)], ["ls", str(tmp_path)]):
        code = f"""
import sys
from kvlab.__main__ import main
assert main({argv!r}) == 0
print(sorted({{'torch', 'transformers', 'optuna', 'matplotlib'}} & set(sys.modules)))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
