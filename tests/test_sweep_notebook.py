"""The committed sweep notebooks: what can be checked without running them."""

import json
import re

import nbformat
import papermill
import pytest

from kvlab.sweep.catalog import AXES, SWEEPS
from kvlab.sweep.places import notebook_of
from kvlab.sweep.settings import config_of, kind_of, shown_of


@pytest.fixture(params=SWEEPS)
def name(request):
    return request.param


@pytest.fixture
def path(name):
    return notebook_of(name)


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def test_the_catalogue_and_the_folder_hold_the_same_notebooks():
    folder = notebook_of("fp8").parent
    assert sorted(p.name for p in folder.glob("*.ipynb")) == sorted(s.notebook for s in SWEEPS.values())


def test_every_default_of_the_catalogue_is_a_parameter(name):
    assert set(SWEEPS[name].defaults) <= set(kind_of(name).names())
    assert len(SWEEPS[name].what) < 90
    assert config_of(name, {}) == kind_of(name).from_params(shown_of(name)), "what is hidden differs from its default"


def test_it_is_valid_small_and_clean(path, notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    text = path.read_text()
    assert len(text) < 20_000
    json.loads(text, parse_constant=refuse)
    assert not re.search(r"[\"'\s(](/(home|root|tmp|work|Users|mnt)/|[A-Z]:\\)", text), "an absolute path"
    assert notebook.metadata.kernelspec.name == "python3"
    assert not {"papermill", "widgets"} & set(notebook.metadata)
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z][a-z-]*", cell.id), f"{cell.id} is no readable id"
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert set(cell.metadata) <= {"tags"}


def test_papermill_sees_exactly_the_parameters_with_their_defaults_and_help(name, path):
    seen = papermill.inspect_notebook(str(path))
    params = shown_of(name)
    assert list(seen) == list(params)
    assert set(kind_of(name).names()) - set(seen) <= set(AXES)
    for parameter, found in seen.items():
        assert found["default"] == json.dumps(params[parameter]).replace("false", "False").replace("true", "True")
        assert found["inferred_type_name"] == type(params[parameter]).__name__
        assert found["help"]


def test_the_parameter_cell_holds_nothing_papermill_misreads(notebook):
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    for line in cell.source.splitlines():
        assert re.fullmatch(r"[a-z_]+: (str|int|float|bool) = [^=#]+  # [^#=]+", line), line


def test_the_notebook_is_thin_and_tells_how_to_run_it(name, notebook):
    code = [
        c.source for c in notebook.cells if c.cell_type == "code" and "parameters" not in c.metadata.get("tags", [])
    ]
    assert sum(len([x for x in source.splitlines() if x]) for source in code) <= 12
    assert notebook.cells[0].source.splitlines()[0].endswith("?")
    assert f"python -m kvlab.sweep {name}" in notebook.cells[0].source
    assert f"sweeps/{SWEEPS[name].notebook}" in notebook.cells[0].source
    assert notebook.cells[-1].source == "run"
