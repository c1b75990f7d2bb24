"""Sweeps that really run, on a tiny model: the documents, a resumed run, the notebook under papermill, its wrapper."""

import copy
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from tiny_folder import save_tiny

from kvlab.book import Interrupted
from kvlab.runs import Run, listing
from kvlab.search.settings import UsageError
from kvlab.subject import LocalSubject
from kvlab.sweep import SweepConfig, SweepRun, run_sweep
from kvlab.sweep import __main__ as command
from kvlab.sweep.execution import execute, shown, to_html
from kvlab.sweep.places import notebook_of
from kvlab.sweep.result import MIME

PAPERMILL = [sys.executable, "-m", "papermill"]


@pytest.fixture(autouse=True)
def _kernels_capture_as_for_users(monkeypatch):
    # ipykernel leaves file descriptors alone when it finds itself under pytest.
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "model", layers=1))


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("runs"))
    return SweepConfig(model=tiny, items=4, families=("math",), formats=("raw", "int8"), out=out)


@pytest.fixture(scope="module")
def run(config):
    return run_sweep(config, quiet=True)


def bare(cells):
    """A notebook of code cells."""
    made = new_notebook(cells=[new_code_cell(source, id=f"cell-{n}") for n, source in enumerate(cells)])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def written(path, notebook):
    nbformat.write(notebook, path)
    return path


# -- the run and its document ------------------------------------------------------------------------------------------


def test_the_document_says_what_was_judged(run, config):
    result = json.loads((run.path / "result.json").read_text())
    assert result["schema"] == "kvlab.sweep/1"
    assert [c["format"] for c in result["configs"]] == ["raw", "int8"]
    assert result["budget_bytes"] == 6_000_000_000
    assert result["margin"]["value_points"] == 10
    assert "29" in result["margin"]["rule"]
    # a random model answers nothing: no verdict on any format may come of that
    assert {c["verdict"] for c in result["configs"]} == {"INSENSITIVE"}
    assert (result["verdict"], result["winner"]) == ("INSENSITIVE", None)
    again = result["controls"]["aa"]
    assert (again["n"], again["flips"], again["share"]) == (4, 0, 0.0)
    assert 0 <= again["dnll"] < 1e-4
    assert result["controls"]["positive"]["families"]["math"]["failed"] is False
    # the full cache, its repeat, the control and two formats: four items prefilled once
    assert result["counters"] == {
        "items": 4, "prefills": 4, "configs_scored": 4, "item_scores": 20, "remembered": 0,
        "corrupt_snapshots": 0,
    }  # fmt: skip
    for row in result["configs"]:
        assert row["measured_bytes"] == row["predicted_bytes"]
        assert row["families"]["math"]["n"] == 4
    raw, int8 = result["configs"]
    # head dim 64: two bytes a value, or one and a 16-bit scale per head and token
    assert raw["workload_effective_bits"] == pytest.approx(16, abs=0.01)
    assert int8["workload_effective_bits"] == pytest.approx(8.25, abs=0.01)
    assert Path(result["run"]) == run.path


def test_the_run_folder_is_complete(run):
    assert Run.open(run.path).is_complete()
    for name in ("report.html", "summary.parquet", "figures/pareto.png", "figures/pareto.svg", "provenance.json"):
        assert (run.path / name).stat().st_size > 0
    provenance = json.loads((run.path / "provenance.json").read_text())
    assert provenance["notebook"]["items"] == 4
    assert len(provenance["evalset"]["confirm"]) == 64
    assert provenance["sanity"]["perplexity"] > 1


def test_an_interrupted_run_is_gone_on_with_and_nothing_is_scored_twice(tiny, tmp_path, monkeypatch, run):
    config = SweepConfig(model=tiny, items=4, families=("math",), formats=("raw", "int8"), out=str(tmp_path))
    whole = LocalSubject.score

    def cut_short(self, items, configs, **kwargs):
        for n, row in enumerate(whole(self, items, configs, **kwargs)):
            if n == 6:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(LocalSubject, "score", cut_short)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(config, quiet=True)
    monkeypatch.setattr(LocalSubject, "score", whole)
    (first,) = listing(tmp_path)["name"]
    stopped = Run.open(tmp_path / first)
    assert stopped.state() == "interrupted"
    assert len(stopped.rows()) == 6
    resumed = run_sweep(config, quiet=True)
    assert resumed.path == stopped.path
    rows = stopped.rows()
    assert len(rows) == 20
    assert not rows.duplicated(["role", "config_id", "item_id"]).any()
    same = ("configs", "margin", "baseline", "controls", "verdict")
    assert {k: resumed.result[k] for k in same} == {k: run.result[k] for k in same}
    # done is done: the same again is a new run
    assert run_sweep(config, quiet=True).path != stopped.path


def test_a_stop_between_items_is_saved(tiny, tmp_path, monkeypatch):
    config = SweepConfig(model=tiny, items=4, families=("math",), formats=("int8",), out=str(tmp_path))
    whole = LocalSubject.score

    def then_asked(self, items, configs, **kwargs):
        for row in whole(self, items, configs, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)
            yield row
            monkeypatch.setattr(LocalSubject, "score", whole)

    monkeypatch.setattr(LocalSubject, "score", then_asked)
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run_sweep(config, quiet=True)
    (name,) = listing(tmp_path)["name"]
    assert Run.open(tmp_path / name).state() == "interrupted"


def test_an_unwritable_folder_fails_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        run_sweep(SweepConfig(model="no/such-model", out=str(tmp_path / "file" / "runs")))


# -- what it shows ----------------------------------------------------------------------------------------------------


def test_a_run_shows_itself_without_network_or_kernel(run, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("a repr asked the network"))
    bundle = run._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", MIME}
    assert bundle[MIME] == json.loads((run.path / "result.json").read_text())
    page = bundle["text/html"]
    assert len(page) < 20_000
    assert "<script" not in page
    assert "http" not in page
    assert bundle["text/plain"] == repr(run)
    for text in (repr(run), page):
        assert "INSENSITIVE" in text
        assert "margin 10 points, n = 4" in text
        assert "missed on math" in text
    # read back from disk, it says the same
    assert SweepRun.open(run.path)._repr_mimebundle_() == bundle
    assert run.figure.data[:4] == b"\x89PNG"
    assert "int8" in run.figure.alt


def test_text_of_a_result_is_escaped(run):
    evil = "<script>alert(1)</script>"
    configs = [c | {"format": evil, "label": evil} for c in run.result["configs"]]
    page = SweepRun(run.path, run.result | {"configs": configs, "notes": [evil]})._repr_mimebundle_()["text/html"]
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 3


# -- papermill --------------------------------------------------------------------------------------------------------


def test_piped_output_is_a_notebook_even_when_a_cell_writes_to_the_raw_stdout(tiny, tmp_path):
    notebook = nbformat.read(notebook_of("fp8"), as_version=4)
    at = next(n for n, c in enumerate(notebook.cells) if c.id == "run")
    notebook.cells.insert(at, new_code_cell("import os\n_ = os.system('echo raw words')", id="raw"))
    path = written(tmp_path / "piped.ipynb", notebook)
    given = {"model": tiny, "items": "4", "families": "[math]", "formats": "int8", "out": str(tmp_path / "runs")}
    flags = [word for name, value in given.items() for word in ("-p", name, value)]
    command = [*PAPERMILL, str(path), "--execution-timeout", "300", *flags]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = nbformat.reads(done.stdout, as_version=4)
    assert "raw words" in done.stderr
    found, why = shown(read)
    assert why == ""
    assert found is not None
    assert found.path.parent == tmp_path / "runs"
    cells = {c.id: c for c in read.cells}
    assert "image/png" in cells["figure"].outputs[0].data
    assert MIME in cells["result"].outputs[0].data
    assert len(done.stdout) < 2_000_000
    assert not [o for o in cells["setup"].outputs + cells["config"].outputs if o.output_type == "stream"]
    # progress and the place of the run reach the terminal while it runs
    assert f"run: {found.path}" in done.stderr


def test_a_misspelt_parameter_fails_the_notebook_with_the_nearest_name(tmp_path):
    out = tmp_path / "out.ipynb"
    command = [*PAPERMILL, str(notebook_of("fp8")), str(out), "-p", "bitz", "4"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1
    assert "unknown parameter 'bitz'; did you mean 'items'" in done.stderr
    read = nbformat.read(out, as_version=4)
    assert shown(read) == (None, "some cells were never run")


def test_a_pipe_as_stdin_leaves_the_notebook_alone(tmp_path):
    path = tmp_path / "sweep.ipynb"
    path.write_bytes(notebook_of("fp8").read_bytes())
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    done = subprocess.run([*PAPERMILL, str(path)], input="", capture_output=True, text=True)
    assert done.returncode != 0
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


# -- the wrapper ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fp9"], "nearest is 'fp8'"),
        (["fp8", "-p", "bitz", "4"], "did you mean 'items'"),
        (["sweet_spot", "-p", "mode", "bets"], "did you mean 'best'"),
        (["sweet_spot", "-p", "formats", "int8"], "unknown parameter 'formats'"),
        (["sweet_spot", "-p", "generate", "True"], "say how many with items"),
        (["eviction", "-p", "keep", "2"], "must lie in (0, 1]"),
        (["fp8", "-p", "items", "nan"], "whole number"),
        (["fp8", "-p", "budget_gb", "-1"], "positive"),
        (["fp8", "-p", "out", "a", "--out", "b"], "leave one out"),
        (["fp8", "--out", "{file}/runs"], "is a file"),
    ],
)
def test_bad_requests_end_with_2_and_write_nothing(argv, words, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert command.main([word.format(file=file) for word in argv]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == [file]


def test_a_killed_kernel_is_a_failure_whatever_papermill_notes(tmp_path):
    path = written(tmp_path / "dies.ipynb", bare(["import os", "os.kill(os.getpid(), 9)", "1"]))
    outcome = execute(path, {}, tmp_path / "runs")
    assert (outcome.code, outcome.run) == (1, None)
    assert "Kernel" in outcome.why


def test_a_notebook_that_ends_well_without_a_result_is_a_failure(tmp_path, capfd):
    outcome = execute(written(tmp_path / "empty.ipynb", bare(["1 + 1"])), {}, tmp_path / "runs")
    assert (outcome.code, outcome.why) == (1, "the notebook shows no result")
    assert "TCP without encryption" not in capfd.readouterr().err


def test_an_error_of_the_request_in_a_cell_ends_with_2(tmp_path):
    cell = "class UnknownModelError(ValueError): pass\nraise UnknownModelError('no such model')"
    outcome = execute(written(tmp_path / "asks.ipynb", bare([cell])), {}, tmp_path / "runs")
    assert (outcome.code, outcome.why) == (2, "UnknownModelError: no such model")


def test_an_interrupt_reaches_the_kernel_and_ends_with_130(tmp_path):
    started, saved = tmp_path / "started", tmp_path / "saved"
    cell = f"""
import pathlib, time
pathlib.Path({str(started)!r}).touch()
try:
    time.sleep(300)
except KeyboardInterrupt:
    pathlib.Path({str(saved)!r}).touch()
    raise"""
    path = written(tmp_path / "long.ipynb", bare([cell]))

    def interrupt_once_running():
        while not started.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_once_running, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    outcome = execute(path, {}, tmp_path / "runs")
    assert outcome.code == 130
    assert saved.exists()
    assert outcome.why.startswith("KeyboardInterrupt")
    assert signal.getsignal(signal.SIGINT) is before


def test_only_a_done_run_counts_as_shown(tmp_path, run):
    def with_result(state, count=1):
        other = Run.create(tmp_path, f"sweep {state}", {"state": state})
        other.write_json("result.json", dict(run.result) | {"run": str(other.path)})
        other.set_status(state)
        notebook = bare(["run"])
        notebook.cells[0].execution_count = count
        notebook.cells[0].outputs = [new_output("display_data", {MIME: {"run": str(other.path)}})]
        return notebook

    assert shown(with_result("done"))[0] is not None
    assert shown(with_result("failed"))[0] is None
    assert shown(with_result("done", count=None)) == (None, "some cells were never run")


def test_the_page_of_a_notebook_asks_no_network():
    plain, controls = bare(["1 + 1"]), bare(["browse()"])
    view = {"version_major": 2, "version_minor": 0, "model_id": "ab12"}
    data = {"application/vnd.jupyter.widget-view+json": view, "text/plain": "a slider"}
    controls.cells[0].outputs = [new_output("display_data", data)]
    state = {"ab12": {"model_module": "@jupyter-widgets/controls", "model_name": "IntSliderModel", "state": {}}}
    held = {"state": state, "version_major": 2, "version_minor": 0}
    controls.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": held}
    before = copy.deepcopy(controls)
    for notebook in (plain, controls):
        page = to_html(notebook)
        assert not re.search(r"""(src|href)=["']https?:|https?://[^"' ]*(cdn|unpkg|jsdelivr)""", page)
    assert "a slider" in page
    assert controls == before


@pytest.mark.slow
def test_the_default_model_under_papermill(tmp_path, capfd):
    given = ["-p", "items", "4", "-p", "formats", "fp8_e4m3,int8"]
    assert command.main(["fp8", *given, "--out", str(tmp_path), "--json", "--no-html"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert not list(tmp_path.glob("*/notebook.html"))
    assert result["controls"]["aa"]["flips"] == 0
    assert result["raw_workload_bytes"] > 4 * result["budget_bytes"]
    assert [c["feasible"] for c in result["configs"]] == [False, False]
    assert {f["n"] for c in result["configs"] for f in c["families"].values()} == {4}
    assert result["counters"]["prefills"] == result["counters"]["items"] == 12
    # 24.16 GB in 16 bit; 8 bit and, for int8, a scale of 16 bit for every 64 values
    assert result["configs"][0]["workload_bytes"] == pytest.approx(12.08e9, rel=0.01)
    assert result["configs"][1]["workload_bytes"] == pytest.approx(12.46e9, rel=0.01)
