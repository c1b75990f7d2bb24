"""Every sweep notebook runs: under papermill from the repository, and cell by cell from its own folder, to the same
config; a kernel killed halfway is a failure, and going on scores only what is missing.
"""

import atexit
import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell
from tiny_folder import save_tiny
from traitlets.config import Config

from kvlab.report.__main__ import main as report
from kvlab.runs import Run, listing
from kvlab.search import engine
from kvlab.search.settings import UsageError
from kvlab.subject import LocalSubject
from kvlab.sweep import SweepRun, run_search, run_sweep
from kvlab.sweep import __main__ as command
from kvlab.sweep.catalog import SWEEPS
from kvlab.sweep.execution import execute, shown
from kvlab.sweep.places import notebook_of
from kvlab.sweep.result import MIME
from kvlab.sweep.settings import SpotConfig, SweepConfig, config_of
from kvlab.sweep.spot import _unfinished

ROOT = notebook_of("fp8").parents[1]
# Enough of every axis to draw what the notebook draws.
SMALL = {
    "fp8": {"formats": "raw,int8"},
    "int4": {"formats": "int8,int4_centred_rotated,int2_channel"},
    "eviction": {"scorers": "window,h2o", "keep": "50%,25%"},
    "sparse": {"read": "1,0.25", "bounds": "minmax,mean"},
    "sweet_spot": {"budget_gb": "1GB", "minutes": 0.05, "trials": 2, "memo": False},
}


@pytest.fixture(autouse=True)
def _kernels_as_for_users(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    # A sparse reader leaves two layers alone.
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "model", layers=3))


@pytest.fixture(scope="module")
def given(tiny, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("runs"))
    return {name: {"model": tiny, "items": 2, "families": "math", "out": out, **more} for name, more in SMALL.items()}


@pytest.fixture(scope="module")
def executed(given, tmp_path_factory):
    """The notebook of a sweep as papermill leaves it, from the repository's root; each runs once. fp8 through its
    command."""
    folder, done = tmp_path_factory.mktemp("executed"), {}

    def run(name):
        if name == "fp8" and name not in done:
            done[name] = commanded(name, given[name])
        if name not in done:
            out = folder / f"{name}.ipynb"
            papermill.execute_notebook(
                str(notebook_of(name)),
                str(out),
                parameters=given[name],
                progress_bar=False,
                cwd=str(ROOT),
                config=Config({"KernelManager": {"transport_encryption": "required"}}),
            )
            done[name] = out
        return done[name]

    return run


def commanded(name, params):
    flags = [word for key, value in params.items() for word in ("-p", key, str(value))]
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as out:
        assert command.main([name, *flags, "--json"]) == 0
    return Path(json.loads(out.getvalue())["run"]) / "notebook.ipynb"


@contextlib.contextmanager
def a_shell():
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        yield shell
    finally:
        atexit.unregister(shell.atexit_operations)
        shell.atexit_operations()


def played(name, params, folder, monkeypatch):
    """What a notebook's last cell shows; its cells run here from `folder`, parameters injected as papermill does."""
    monkeypatch.chdir(folder)
    injected = "# Parameters\n" + "\n".join(f"{k} = {v!r}" for k, v in params.items())
    with a_shell() as shell:
        for cell in nbformat.read(notebook_of(name), as_version=4).cells:
            if cell.cell_type != "code":
                continue
            for source in (cell.source, injected) if cell.id == "parameters" else (cell.source,):
                shell.run_cell(source, store_history=True).raise_error()
        return shell.user_ns["run"]


def asked(run):
    """What a run was asked and of what; a search's sizes follow the speed of the moment."""
    config = Run.open(run.path).config
    return {k: v for k, v in config.items() if k in ("schema", "request", "identity")}


@pytest.mark.parametrize("name", SWEEPS)
def test_papermill_runs_it(name, executed):
    text = executed(name).read_text()
    read = nbformat.reads(text, as_version=4)
    found, why = shown(read)
    assert (why, found is not None) == ("", True)
    assert found.result["schema"] == ("kvlab.search/1" if SWEEPS[name].search else "kvlab.sweep/1")
    assert len(text) < 2_000_000
    cells = {c.id: c for c in read.cells}
    drawn = [o for c in cells.values() for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(drawn) == len({"figure", "losses", "curves"} & set(cells)) or (SWEEPS[name].search and len(drawn) == 1)
    assert all(len(output.metadata["image/png"]["alt"]) > 40 for output in drawn)
    assert "text/html" in cells["verdicts"].outputs[0].data
    assert json.loads(json.dumps(cells["result"].outputs[0].data[MIME])) == found.result
    assert not [o for c in read.cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert "widgets" not in read.metadata
    assert report([str(found.path), "--check"]) == 0
    # the figures it shows lie in the run folder too
    for figure in {"losses", "curves"} & set(cells):
        assert {p.suffix for p in (found.path / "figures").glob(f"{figure}.*")} == {".png", ".svg"}


def test_the_command_keeps_the_notebook_and_a_page_with_the_run(executed):
    notebook = executed("fp8")
    assert not list(notebook.parents[1].glob("*.ipynb"))
    page = notebook.with_suffix(".html").read_text()
    assert page.count("<img") == 1
    assert 'alt="Scatter plot' in page
    assert 'src="http' not in page
    assert "import(" not in page


def test_help_lists_every_sweep_without_loading_anything_heavy():
    code = "import sys; from kvlab.sweep.__main__ import _parser; print(_parser().format_help()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    *shown_help, modules = done.stdout.splitlines()
    for name, sweep in SWEEPS.items():
        assert f"  {name:<11} {sweep.what}" in shown_help
    assert not {"torch", "transformers", "papermill", "pandas", "numpy", "matplotlib", "IPython"} & set(modules.split())


@pytest.mark.parametrize("name", SWEEPS)
def test_from_its_own_folder_it_asks_the_same(name, executed, given, monkeypatch, capsys):
    run = played(name, given[name], notebook_of(name).parent, monkeypatch)
    first, _ = shown(nbformat.read(executed(name), as_version=4))
    assert first is not None
    assert run.path != first.path
    assert asked(run) == asked(first)
    if not SWEEPS[name].search:
        assert Run.open(run.path).hash8 == Run.open(first.path).hash8
        same = ("baseline", "margin", "verdict")
        assert {k: run.result[k] for k in same} == {k: first.result[k] for k in same}
        # Rows share batches as memory allows, and sums of floats follow their company: nats agree, all else is equal.
        for mine, theirs in zip(run.result["configs"], first.result["configs"], strict=True):
            assert {**mine, "likelihood": {}} == {**theirs, "likelihood": {}}
            for family, found in mine["likelihood"].items():
                assert found == pytest.approx(theirs["likelihood"][family], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_misspelt_parameter_is_refused_with_the_nearest(name, monkeypatch, capsys, tmp_path):
    with pytest.raises(UsageError, match="unknown parameter 'modle'; did you mean 'mode"):
        played(name, {"modle": "x"}, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_pipe_as_stdin_leaves_the_notebook_alone(name, tmp_path):
    path = tmp_path / "sweep.ipynb"
    path.write_bytes(notebook_of(name).read_bytes())
    before = path.read_bytes()
    command = [sys.executable, "-m", "papermill", str(path)]
    done = subprocess.run(command, input="", capture_output=True, text=True)
    assert done.returncode != 0
    assert path.read_bytes() == before


# -- killed halfway ----------------------------------------------------------------------------------------------------

# The second pass repeats the baseline: when it begins, the first is written.
KILLER = """
import os
from kvlab.subject import LocalSubject
whole, calls = LocalSubject.score, []
def dying(self, items, configs, **kwargs):
    calls.append(len(items))
    if len(calls) == 2:
        os.kill(os.getpid(), 9)
    yield from whole(self, items, configs, **kwargs)
LocalSubject.score = dying
"""


def test_a_killed_kernel_fails_and_going_on_scores_only_what_is_missing(executed, given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(notebook_of("int4").parent)  # where Jupyter and nbmake start kernels
    notebook = nbformat.read(notebook_of("int4"), as_version=4)
    at = next(n for n, c in enumerate(notebook.cells) if c.id == "run")
    notebook.cells.insert(at, new_code_cell(KILLER, id="killer"))
    nbformat.write(notebook, tmp_path / "killed.ipynb")
    params = given["int4"] | {"out": str(tmp_path / "runs")}
    outcome = execute(tmp_path / "killed.ipynb", params, tmp_path / "runs")
    assert (outcome.code, outcome.run) == (1, None)
    (name,) = listing(tmp_path / "runs")["name"]
    killed = Run.open(tmp_path / "runs" / name)
    assert killed.state() == "interrupted"
    first, _ = shown(nbformat.read(executed("int4"), as_version=4))
    assert first is not None
    assert killed.hash8 == Run.open(first.path).hash8
    before = killed.rows()
    assert len(before) == 2 * 5  # the full cache, the control, three formats
    # whatever papermill wrote about it, the report knows
    assert report([str(killed.path)]) == 1
    assert "not complete" in capsys.readouterr().err
    scored, whole = [], LocalSubject.score

    def counted(self, items, configs, **kwargs):
        for row in whole(self, items, configs, **kwargs):
            scored.append((row.config_id, row.item_id))
            yield row

    monkeypatch.setattr(LocalSubject, "score", counted)
    config = config_of("int4", params)
    assert isinstance(config, SweepConfig)
    resumed = run_sweep(config, quiet=True)
    assert resumed.path == killed.path
    assert len(scored) == 2  # the baseline once more on two items
    rows = killed.rows()
    assert len(rows) == len(before) + len(scored)
    assert not rows.duplicated(["role", "config_id", "item_id"]).any()
    assert report([str(killed.path), "--out", str(tmp_path / "shown")]) == 0


def test_an_interrupted_search_is_gone_on_with(given, tmp_path, monkeypatch):
    config = config_of("sweet_spot", given["sweet_spot"] | {"out": str(tmp_path)})
    assert isinstance(config, SpotConfig)
    whole, seen = LocalSubject.score, []

    def stopped(self, items, configs, **kwargs):
        for row in whole(self, items, configs, **kwargs):
            seen.append(row.item_id)
            if len(list(tmp_path.glob("*/status.json"))) and "confirm" in row.item_id:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(LocalSubject, "score", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_search(config, quiet=True)
    monkeypatch.setattr(LocalSubject, "score", whole)
    (name,) = listing(tmp_path)["name"]
    assert Run.open(tmp_path / name).state() == "interrupted"
    kept = len(Run.open(tmp_path / name).rows())
    assert kept > 0
    # another question is another run
    other = dataclasses.replace(config, seed=1)
    assert _unfinished(engine.open_session(other.request()), tmp_path) is None
    resumed = run_search(config, quiet=True)
    assert resumed.path.name == name
    rows = Run.open(resumed.path).rows()
    assert len(rows) > kept
    assert not rows.duplicated(["role", "config_id", "item_id"]).any()
    assert SweepRun.open(resumed.path).table.equals(resumed.table)


# -- what a search shows -----------------------------------------------------------------------------------------------


def test_a_search_shows_its_verdict_and_its_settings(executed):
    run, _ = shown(nbformat.read(executed("sweet_spot"), as_version=4))
    assert run is not None
    assert list(run.table["format"]) == [f["label"] for f in run.result["finalists"]]
    assert run.toml == ""  # a random model holds nothing
    assert run.code == 0
    held = {**run.result["finalists"][0], "verdict": "HOLDS"}
    won = SweepRun(run.path, {**run.result, "finalists": [held], "winner": held["config_id"]})
    assert won.toml == held["toml"]
    assert SweepRun(run.path, {**run.result, "finalists": []}).code == 3
    assert SweepRun(run.path, {**run.result, "trials": [{"state": "failed"}]}).code == 4
    with pytest.raises(ValueError, match="no likelihoods"):
        run.losses()


def test_the_likelihoods_of_a_sweep_are_those_of_its_rows(executed):
    run, _ = shown(nbformat.read(executed("eviction"), as_version=4))
    assert run is not None
    rows = Run.open(run.path).rows()
    rows = rows[rows.role == "confirm"].set_index(["config_id", "item_id"])
    for entry in run.result["configs"]:
        found = entry["likelihood"]["math"]
        mine = rows.loc[entry["config_id"]]
        full = rows.loc[run.result["baseline"]["config_id"]].loc[mine.index]
        assert found["n"] == len(mine) == 2
        assert found["dnll"] == pytest.approx((mine.nll - full.nll).mean())
        assert found["low"] <= found["dnll"] <= found["high"]
        assert found["kl"] == pytest.approx(mine.kl.mean())
        assert found["top1"] == pytest.approx(mine.top1.mean())
    assert list(run.likelihoods.columns) == ["format", "bits", "math"]


def test_bytes_read_are_told_of_every_arm_where_one_is_sparse(executed):
    sparse, _ = shown(nbformat.read(executed("sparse"), as_version=4))
    assert sparse is not None
    configs = {c["format"]: c for c in sparse.result["configs"]}
    dense = configs["raw"]
    # 16 bit, all of it, but for pages that are counted whole
    assert dense["read_bytes"] == pytest.approx(sparse.result["raw_workload_bytes"], rel=0.01)
    for name, entry in configs.items():
        if name != "raw":
            assert entry["read_bytes"] < dense["read_bytes"]
            assert entry["workload_bytes"] > dense["workload_bytes"]
    assert "read a step" in sparse.table
    fp8, _ = shown(nbformat.read(executed("fp8"), as_version=4))
    assert fp8 is not None
    assert not any("read_bytes" in c for c in fp8.result["configs"])
    assert "read a step" not in fp8.table
