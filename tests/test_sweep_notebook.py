"""The committed sweep notebook: what can be checked without running it."""

import json
import re

import nbformat
import papermill
import pytest

from kvlab.sweep.places import SWEEPS, notebook_of
from kvlab.sweep.settings import SweepConfig


@pytest.fixture(params=SWEEPS)
def path(request):
    return notebook_of(request.param)


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def test_it_is_valid_small_and_clean(path, notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert path.stat().st_size < 20_000
    json.loads(path.read_text(), parse_constant=refuse)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not {"papermill", "widgets"} & set(notebook.metadata)
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z][a-z-]*", cell.id), f"{cell.id} is no readable id"
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert set(cell.metadata) <= {"tags"}


def test_papermill_sees_exactly_the_fields_with_their_defaults_and_help(path):
    seen = papermill.inspect_notebook(str(path))
    params = SweepConfig().to_params()
    assert list(seen) == list(params)
    for name, found in seen.items():
        assert found["default"] == json.dumps(params[name]).replace("false", "False").replace("true", "True")
        assert found["inferred_type_name"] == type(params[name]).__name__
        assert found["help"]


def test_the_parameter_cell_holds_nothing_papermill_misreads(notebook):
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    for line in cell.source.splitlines():
        assert re.fullmatch(r"[a-z_]+: (str|int|float|bool) = [^=#]+  # [^#=]+", line), line


def test_the_notebook_is_thin(notebook):
    code = [
        c.source for c in notebook.cells if c.cell_type == "code" and "parameters" not in c.metadata.get("tags", [])
    ]
    assert sum(len([x for x in source.splitlines() if x]) for source in code) <= 12
    assert notebook.cells[-1].source == "run"
