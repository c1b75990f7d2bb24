"""Cells that ran out of order, with and without the notebook's file."""

import json
from types import SimpleNamespace

import pytest

from kvlab.nb.order import Order, cells_of, out_of_order

PAGE = ["setup()", "a = 1", "b = a", "plot(b)"]


@pytest.mark.parametrize(
    "ran", [[], PAGE[:2], PAGE, [*PAGE, PAGE[3]], [PAGE[0], PAGE[2]], ["injected", *PAGE], [*PAGE, ""]]
)
def test_in_order(ran):
    assert out_of_order(ran, PAGE) is None
    assert out_of_order(ran) is None


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        ([PAGE[0], PAGE[2], PAGE[1]], "cell 2 ran after cell 3 (a = 1)"),
        ([*PAGE, PAGE[1]], "cell 2 ran after cell 4 (a = 1)"),
        ([*PAGE, "edited", PAGE[0]], "cell 1 ran after cell 4"),
    ],
)
def test_out_of_the_order_of_the_page(ran, words):
    assert words in out_of_order(ran, PAGE)


def test_without_a_page_a_cell_that_runs_again_late_is_out_of_order():
    assert out_of_order(["a", "b", "b", "b"]) is None  # again at once is trying, not disorder
    assert "ran again after others (a)" in out_of_order(["a", "b", "a"])


def test_it_warns_once_and_before_the_cell(capsys):
    order = Order(lambda: PAGE)
    for source in (PAGE[2], PAGE[1], PAGE[0]):
        order.before_cell(SimpleNamespace(raw_cell=source, store_history=True))
    order.before_cell(SimpleNamespace(raw_cell=PAGE[3], store_history=False))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("out of order") == 1
    assert "cell 2 ran after cell 3" in said.err
    assert order.found == "cell 2 ran after cell 3 (a = 1)"
    assert len(order.ran) == 3


def test_cells_of_a_file(tmp_path):
    path = tmp_path / "n.ipynb"
    cells = [{"cell_type": "markdown", "source": "x"}, {"cell_type": "code", "source": ["a = 1\n", "b"]}]
    path.write_text(json.dumps({"cells": cells}))
    assert cells_of(path) == ["a = 1\nb"]
    path.write_text("{")
    assert cells_of(path) == cells_of(tmp_path / "none") == []
