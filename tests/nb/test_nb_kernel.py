"""kvlab.nb where it is used: in kernels of papermill, piped, from several folders, out of order."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import showing
from jupyter_client.manager import start_new_kernel
from nbformat.v4 import new_code_cell, new_notebook

from kvlab.nb.loaded import load

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {"OMP_NUM_THREADS": "1", "KVLAB_PROGRESS": ""}


@pytest.fixture(autouse=True)
def _kernels_capture_as_for_users(monkeypatch):
    # ipykernel leaves file descriptors alone when it finds itself under pytest.
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


CELLS = [
    "from kvlab import nb\nsession = nb.setup()",
    "import os\nos.system('echo raw text')\nprint('said')",
    """
import json, pathlib
from kvlab.runs import Run
rows = json.loads(pathlib.Path("rows.json").read_text())
run = Run.create(pathlib.Path("runs"), "sweep", {"seed": 0})
with nb.live_pareto(every_s=0.0) as live:
    progress = live(run, len(rows))
    progress.at("confirm")
    for n in range(0, len(rows), 10):
        run.append(rows[n : n + 10])
        progress.add(10)
    progress.finish()
    document = json.loads(pathlib.Path("result.json").read_text())
    run.write_json("result.json", document | {"run": str(run.path)})
    run.set_status("done")
live.updates
""",
    "import sys\n[m for m in ('torch', 'transformers', 'nbformat', 'jsonschema', 'papermill') if m in sys.modules]",
    "session.out_of_order is None",
    "nb.load(run)",
    "from kvlab.sweep.kernel import telling\nwith telling() as stream:\n    print('run: there', file=stream)",
]


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """A notebook run by papermill with its output piped: stdout, stderr, the folder it ran in."""
    folder = tmp_path_factory.mktemp("piped")
    source = showing.run(folder / "source", document=showing.result())
    (folder / "rows.json").write_text(json.dumps(json.loads(source.rows().to_json(orient="records"))))
    (folder / "result.json").write_text(json.dumps(showing.result()))
    notebook = new_notebook(cells=[new_code_cell(s.strip(), id=f"cell-{n}") for n, s in enumerate(CELLS)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (folder / "n.ipynb").write_text(json.dumps(notebook))
    environ = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} | ENVIRON
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "papermill", "n.ipynb"]
    done = subprocess.run(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr, folder


def outputs(piped, cell):
    return json.loads(piped[0])["cells"][cell]["outputs"]


def test_piped_stdout_is_one_notebook_whatever_writes_to_it(piped):
    made = json.loads(piped[0], parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert all(cell["execution_count"] for cell in made["cells"])
    assert "raw text" in piped[1]  # seen, and kept apart
    assert "said" in "".join(outputs(piped, 1)[0]["text"]) + "".join(outputs(piped, 1)[-1].get("text", ""))


def test_setup_says_what_this_is_and_where(piped):
    (shown,) = [o for o in outputs(piped, 0) if o["output_type"] == "display_data"]
    document = shown["data"]["application/vnd.kvlab.session+json"]
    assert document["places"]["root"] == str(ROOT)
    assert document["places"]["runs"] == str(ROOT / "runs")
    assert document["line"].startswith("kvlab 0.")
    assert "Python 3" in "".join(shown["data"]["text/plain"])


def test_a_live_figure_leaves_one_png_with_words(piped):
    pictures = [o for o in outputs(piped, 2) if "image/png" in o.get("data", {})]
    assert len(pictures) == 1
    assert "int8" in pictures[0]["metadata"]["image/png"]["alt"]
    (updates,) = [o for o in outputs(piped, 2) if o["output_type"] == "execute_result"]
    assert int("".join(updates["data"]["text/plain"])) >= 2


def test_the_last_live_figure_is_that_of_the_run_read_back_by_another_process(piped):
    (folder,) = (piped[2] / "runs").iterdir()
    again = load(folder)
    (picture,) = [o for o in outputs(piped, 2) if "image/png" in o.get("data", {})]
    assert base64.b64decode("".join(picture["data"]["image/png"])) == again.figure.data
    assert picture["metadata"]["image/png"]["alt"] == again.figure.alt
    (shown,) = outputs(piped, 5)
    assert "".join(shown["data"]["text/html"]) == again._repr_mimebundle_()["text/html"]
    assert "".join(shown["data"]["text/plain"]) == repr(again)


def test_headless_progress_ends_at_100_on_the_terminal(piped):
    lines = [line for line in piped[1].splitlines() if line.startswith("confirm:")]
    assert lines
    assert lines[-1].startswith("confirm: 100%")


def test_nothing_heavy_was_needed(piped):
    assert "".join(outputs(piped, 3)[0]["data"]["text/plain"]) == "[]"


def test_cells_run_by_papermill_are_in_order(piped):
    assert "".join(outputs(piped, 4)[0]["data"]["text/plain"]) == "True"


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Runs a cell in a kernel that Jupyter told its notebook's name; gives the outputs."""
    path = tmp_path / "page.ipynb"
    page = ["from kvlab import nb\nsession = nb.setup(show=False)", "a = 1", "b = 2"]
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": s} for s in page]}))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:

        def execute(source):
            seen = []
            client.execute_interactive(source, output_hook=seen.append, timeout=60)
            return [m["content"] | {"type": m["msg_type"]} for m in seen if m["msg_type"] != "status"]

        yield execute, page
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_watched_kernel_warns_of_disorder_and_draws_one_bar(kernel):
    execute, page = kernel
    assert execute(page[0])[-1]["type"] == "execute_input"
    said = execute(page[2])
    assert not [m for m in said if m["type"] == "stream"]
    said = [m for m in execute(page[1]) if m["type"] == "stream"]
    assert [m["name"] for m in said] == ["stderr"]
    assert "cell 2 ran after cell 3 (a = 1)" in said[0]["text"]
    assert not [m for m in execute(page[1]) if m["type"] == "stream"]  # once is enough
    execute(page[0])  # begins anew
    assert not [m for m in execute(page[1]) if m["type"] == "stream"]
    assert execute("session.out_of_order is None")[-1]["data"]["text/plain"] == "True"

    said = execute("p = nb.progress(4); p.at('work'); p.add(4); p.finish()")
    drawn = [m for m in said if m["type"] in ("display_data", "update_display_data")]
    assert drawn[0]["type"] == "display_data"
    assert len({m["transient"]["display_id"] for m in drawn}) == 1
    assert "work: 100%" in drawn[-1]["data"]["text/plain"]
    assert 'role="progressbar"' in drawn[-1]["data"]["text/html"]

    said = execute("from matplotlib.figure import Figure\nf = Figure(); f.subplots().plot([1, 2]); f")
    assert "image/png" in said[-1]["data"]  # no pyplot and no magic needed


def test_a_run_tells_a_watched_notebook_in_black_and_papermill_on_the_terminal(kernel, piped):
    execute, _ = kernel
    said = execute(
        "from kvlab.sweep.kernel import telling\nwith telling() as stream:\n    print('run: here', file=stream)"
    )
    assert [(m["name"], m["text"]) for m in said if m["type"] == "stream"] == [("stdout", "run: here\n")]
    # the cell of the piped notebook that does the same
    assert "run: there" in piped[1]
    (shown,) = outputs(piped, 6)
    assert (shown["name"], "".join(shown["text"])) == ("stderr", "run: there\n")


def test_the_same_places_from_every_folder(tmp_path):
    folders = [ROOT, ROOT / "sweeps", ROOT / "tests", tmp_path]
    code = (
        "import json, os, sys\nfrom kvlab import nb\n"
        f"for folder in {[str(f) for f in folders]!r}:\n"
        "    os.chdir(folder)\n    s = nb.setup()\n"
        "    print(json.dumps([str(s.root), str(s.runs), str(s.evalsets), 'torch' in sys.modules]))"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [[str(ROOT), str(ROOT / "runs"), str(ROOT / "evalsets"), False]] * 4
    assert done.stderr.count("kvlab 0.") == 4


def test_every_name_of_nb_loads_nothing_heavy():
    heavy = {"torch", "transformers", "nbformat", "jsonschema", "papermill", "datasets", "optuna"}
    code = (
        "import sys\nfrom kvlab import nb\n"
        f"light = {heavy | {'numpy', 'pandas', 'matplotlib'}!r} & set(sys.modules)\n"
        "[getattr(nb, name) for name in nb.__all__]\n"
        f"print([sorted(light), sorted({heavy!r} & set(sys.modules))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[], []]"
