"""The notebooks: clean as committed, and executed with a tiny model from the repository root and from their own folder.

Each runs in a kernel of its own, as a person or papermill would run it.
"""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import papermill
import pytest
import yaml
from nbformat.v4 import new_output
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tiny_folder import save_tiny

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [
    "00_quickstart",
    "01_anatomy_of_a_codec",
    "02_what_eviction_forgets",
    "03_sparse_reading",
    "04_find_the_sweet_spot",
    "05_read_a_run",
]
# What makes each small; the model comes on top. Two families are enough to see families told apart.
SMALL = {
    "00_quickstart": {},
    "01_anatomy_of_a_codec": {"tokens": 160},
    "02_what_eviction_forgets": {},
    "03_sparse_reading": {"length": 150},
    "04_find_the_sweet_spot": {
        "budget_gb": 0.0018,
        "context": 4096,
        "concurrency": 1,
        "minutes": 0.1,
        "trials": 10,
        "items": 4,
        "families": "retrieval,math",
    },
    "05_read_a_run": {"items": 4, "families": "retrieval,math"},
}
FIGURES = {
    "00_quickstart": {"formats"},
    "01_anatomy_of_a_codec": {"channels", "errors", "map", "browse"},
    "02_what_eviction_forgets": {"shares", "map", "hitters", "kept", "answers", "answers-aware", "threshold"},
    "03_sparse_reading": {"readers", "scores", "browse", "answers"},
    "04_find_the_sweet_spot": {"search"},
    "05_read_a_run": {"read-figure", "flips", "hardest", "compare"},
}
SMALLER = {"items": 2, "families": "retrieval"}
# What a kernel says of itself, and would change with every version.
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py", "mimetype": "text/x-python",
    "nbconvert_exporter": "python", "pygments_lexer": "ipython3", "version": "3.99.1",
}  # fmt: skip
LONGEST = 180  # seconds a cell may take


def read(path):
    return nbformat.read(path, as_version=4)


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def test_they_are_all_there():
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_is_clean(path):
    notebook, text = read(path), path.read_text(encoding="utf-8")
    nbformat.validate(notebook)
    json.loads(text, parse_constant=refuse)
    assert len(text) < 20_000
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not {"papermill", "widgets"} & set(notebook.metadata)
    assert not re.search(r"(?<![\w.:/])/(home|root|tmp|Users|work|mnt|usr|var)/", text), "an absolute path"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z][a-z-]*", cell.id), f"{cell.id} is no readable id"
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert set(cell.metadata) <= {"tags"}


def stripped(folder):
    """What the repository's hook makes of a folder of notebooks."""
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (entry,) = [hook["entry"] for repo in repos for hook in repo["hooks"] if hook["id"] == "nbstripout"]
    paths = sorted(folder.glob("*.ipynb"))
    subprocess.run([sys.executable, "-m", *shlex.split(entry), *map(str, paths)], check=True, cwd=folder)
    return {path.name: path.read_bytes() for path in paths}


def test_stripped_after_a_run_they_are_as_committed(tmp_path):
    """Once or twice: ids and tags stay, and nothing of papermill, of widgets or of where it ran."""
    paths = [*NOTEBOOKS, *sorted((ROOT / "sweeps").glob("*.ipynb"))]
    for path in paths:
        notebook = read(path)
        notebook.metadata["papermill"] = {"output_path": "/home/me/done.ipynb", "exception": True, "duration": math.nan}
        notebook.metadata["language_info"] |= LANGUAGE
        notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
        for cell in notebook.cells:
            cell.metadata |= {"papermill": {"status": "completed"}, "execution": {"iopub.execute_input": "2026"}}
            if cell.cell_type == "code":
                cell.execution_count = 1
                cell.outputs = [new_output("stream", text="/home/me\n")]
        nbformat.write(notebook, tmp_path / path.name)
    for _ in range(2):
        assert stripped(tmp_path) == {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_asks_at_the_top_and_answers_at_the_end(path):
    cells = read(path).cells
    assert re.match(r"# .+\?\n", cells[0].source), "the title is no question"
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code[0].source.replace("\n\n\n", "\n\n") == "from kvlab import nb\n\nsession = nb.setup()"
    assert [c.metadata.get("tags") for c in code[:2]] == [None, ["parameters"]]
    assert cells[-2].source == "## Answer"
    assert cells[-1].id == "answer"
    # figures in an answer are measured: all digits stand in code, or name another notebook
    answer = re.sub(r"\{[^{}]*\}", "", "".join(re.findall(r'f?"((?:[^"\\]|\\.)*)"', cells[-1].source)))
    assert re.findall(r"(?<![\w`-])\d+(?![\w-])", answer) in ([], ["16"], ["16", "16"], ["8"]), answer
    prose = [len(c.source.split()) for c in cells if c.cell_type == "markdown"]
    assert sum(prose) > 120


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_papermill_reads_every_parameter(path):
    (cell,) = [c for c in read(path).cells if "parameters" in c.metadata.get("tags", [])]
    seen = papermill.inspect_notebook(str(path))
    for line in cell.source.splitlines():
        assert re.fullmatch(r"[a-z_]+: (str|int|float|bool) = [^=#]+  # [^#=]+", line), line
        assert seen[line.partition(":")[0]]["help"]
    assert set(SMALL[path.stem]) <= set(seen)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", layers=4)


def parameters_of(name, model, out):
    given = {"model": str(model), **SMALL[name]}
    return given | ({"out": str(out)} if name[:2] in ("04", "05") else {})


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    # ipykernel stops capturing raw output when it believes to be under test, and one thread does for a tiny model.
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def check(notebook, name):
    """No cell failed or was left out, every figure is there with words for it, and the answer is text."""
    by_id = {cell.id: cell for cell in notebook.cells}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count is not None, f"{cell.id} did not run"
            assert [o for o in cell.outputs if o.output_type == "error"] == []
    drawn = set()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                drawn.add(cell.id)
                assert len(output.metadata["image/png"]["alt"]) > 40, f"{cell.id} has no words for its figure"
    assert drawn == FIGURES[name]
    (answer,) = by_id["answer"].outputs
    said = answer.data["text/markdown"]
    assert len(said) > 150
    assert not re.search(r"\bnan\b|\bNone\b|\{|\}", said.replace("}V", "")), said
    assert len(nbformat.writes(notebook)) < 2_000_000
    # viewers refuse a notebook that names widgets without their state
    assert all("state" in saved for saved in notebook.metadata.get("widgets", {}).values())
    return said


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_papermill_runs_it_from_the_root(path, model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = parameters_of(path.stem, model, tmp_path / "runs")
    done = papermill.execute_notebook(
        str(path), str(tmp_path / "done.ipynb"), parameters=given, progress_bar=False, execution_timeout=LONGEST
    )
    check(done, path.stem)


@pytest.mark.usefixtures("kernel")
def test_runs_are_the_same_from_any_folder(model, tmp_path, monkeypatch):
    """As nbmake, nbconvert and JupyterLab run it: in its own folder. The hash in a run's name is that of its config."""
    path = ROOT / "notebooks" / "05_read_a_run.ipynb"
    hashes = []
    for place in (path.parent, tmp_path):
        out = tmp_path / f"runs-{len(hashes)}"
        notebook = parameterize_notebook(load_notebook_node(str(path)), parameters_of(path.stem, model, out) | SMALLER)
        monkeypatch.chdir(tmp_path)
        client = nbclient.NotebookClient(notebook, timeout=LONGEST, resources={"metadata": {"path": str(place)}})
        check(client.execute(), path.stem)
        hashes.append(sorted(run.name[-8:] for run in out.iterdir() if run.is_dir()))
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 2
