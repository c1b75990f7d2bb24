"""Every notebook and sweep under nbmake: a pytest of its own, each in the notebook's own folder.

Skipped where nbmake is missing. Parameters are put in beforehand, as papermill does, since nbmake has none.
"""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tiny_folder import save_tiny

from kvlab.runs import Run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("nbmake") is None, reason="no nbmake: pip install nbmake")
TINY = {"items": 2, "families": "math"}
SEARCH = {"minutes": 0.05, "trials": 2}
SMALL = {
    "00_quickstart": {},
    "01_anatomy_of_a_codec": {"tokens": 160},
    "02_what_eviction_forgets": {},
    "03_sparse_reading": {"length": 150},
    "04_find_the_sweet_spot": {**TINY, **SEARCH, "budget_gb": 0.0018, "context": 4096, "concurrency": 1},
    "05_read_a_run": TINY,
    "fp8_sweep": {**TINY, "formats": "raw,int8"},
    "int4_sweep": {**TINY, "formats": "int8,int2_channel"},
    "eviction_sweep": {**TINY, "scorers": "window", "keep": "50%,25%"},
    "sparse_sweep": {**TINY, "read": "1,0.25"},
    "sweet_spot": {**TINY, **SEARCH, "budget_gb": "1GB", "memo": False},
}
WITH_RUNS = ("04", "05", "fp8", "int4", "eviction", "sparse", "sweet")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", layers=4)


def given(path: Path, model: Path, runs: Path) -> dict[str, object]:
    return {"model": str(model), **SMALL[path.stem], **({"out": str(runs)} if path.stem.startswith(WITH_RUNS) else {})}


def asked(runs: Path) -> set[str]:
    """What runs were asked and of what: a sweep's whole config; a search's without sizes, which follow the speed of the
    moment."""
    found = set()
    for run in map(Run, (path.parent for path in runs.glob("*/config.json"))):
        keys = ("schema", "request", "identity") if "search" in run.config["schema"] else run.config
        found.add(json.dumps({key: run.config[key] for key in keys}, sort_keys=True))
    return found


def test_all_pass_and_runs_are_those_of_papermill(model, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    paths = sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "sweeps").glob("*.ipynb")])
    assert {path.stem for path in paths} == set(SMALL)
    for path in paths:
        made = parameterize_notebook(load_notebook_node(str(path)), given(path, model, tmp_path / "made" / path.stem))
        copy = tmp_path / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        nbformat.write(made, copy)
    command = ["-m", "pytest", "-q", "--nbmake", "-n", "2", "-p", "no:cacheprovider", "notebooks", "sweeps"]
    run = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert f"{len(SMALL)} passed" in run.stdout
    monkeypatch.chdir(ROOT)

    def executed(path: Path) -> set[str]:
        runs, out = tmp_path / "papermill" / path.stem, tmp_path / f"{path.stem}.ipynb"
        papermill.execute_notebook(str(path), str(out), parameters=given(path, model, runs), progress_bar=False)
        return asked(runs)

    with_runs = [path for path in paths if path.stem.startswith(WITH_RUNS)]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(with_runs, pool.map(executed, with_runs), strict=True))
    assert found == {path: asked(tmp_path / "made" / path.stem) for path in with_runs}
    assert all(found.values())
