"""A picture with controls as papermill saves it: seen again with neither kernel nor widgets.

Skipped where ipywidgets is missing.
"""

import importlib.util
import os
from pathlib import Path

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from kvlab.sweep.execution import to_html

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ipywidgets") is None, reason="no ipywidgets: pip install 'kvlab[lab]'"
)
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
CELL = """from kvlab.explore.picture import Picture, sheet
from kvlab.explore.widgets import browse
import pandas as pd

def draw(side):
    figure, axes = sheet(1, 1, width=side)
    return Picture(figure, pd.DataFrame(), f"a figure {side} inches wide")

browse(draw, side=[5.0, 8.0])
"""


def test_a_picture_with_controls_is_saved_as_a_picture(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    source, out = tmp_path / "browse.ipynb", tmp_path / "done.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(CELL)], metadata=KERNEL), source)
    papermill.execute_notebook(str(source), str(out), progress_bar=False)
    done = nbformat.read(out, as_version=4)
    kinds = [set(output.data) for output in done.cells[0].outputs]
    assert any("application/vnd.jupyter.widget-view+json" in kind for kind in kinds)
    (picture,) = [output for output in done.cells[0].outputs if "image/png" in output.data]
    assert picture.metadata["image/png"]["alt"] == "a figure 5.0 inches wide"
    # Viewers refuse a notebook that names widgets without their state.
    assert all(saved["state"] for saved in done.metadata.get("widgets", {}).values())
    assert to_html(done).count("<img") == 1
