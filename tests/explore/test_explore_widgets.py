"""Controls beside a picture: a plain output first, replaced in place, with or without ipywidgets."""

import importlib.util
import sys
import types

import pytest

from kvlab.explore import widgets


class Handle:
    def __init__(self):
        self.shown = []

    def update(self, what):
        self.shown.append(what)


@pytest.fixture
def outputs(monkeypatch):
    seen, handle = [], Handle()

    def display(what, **more):
        seen.append((what, more))
        return handle if more.get("display_id") else None

    monkeypatch.setattr(widgets, "display", display)
    return seen, handle


def found(monkeypatch, there):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == "ipywidgets" else real(name))


def test_without_ipywidgets_the_picture_comes_with_one_line(outputs, monkeypatch):
    found(monkeypatch, None)
    widgets.browse(lambda layer: f"layer {layer}", layer=[3, 4])
    (picture, how), (line, _) = outputs[0]
    assert (picture, how) == ("layer 3", {"display_id": True})
    assert line == {"text/plain": widgets.HOW}
    assert "pip install 'kvlab[lab]'" in widgets.HOW


def test_a_moved_control_replaces_the_picture(outputs, monkeypatch):
    seen, handle = outputs

    class Slider:
        def __init__(self, options, value, description, continuous_update):
            self.options, self.value, self.description = options, value, description

        def observe(self, function, names):
            assert names == "value"
            self.moved = function

    fake = types.ModuleType("ipywidgets")
    fake.SelectionSlider, fake.VBox = Slider, list
    monkeypatch.setitem(sys.modules, "ipywidgets", fake)
    found(monkeypatch, fake)
    widgets.browse(lambda layer, head: f"layer {layer} head {head}", layer=[3, 4], head=[0, 1])
    assert seen[0][0] == "layer 3 head 0"
    first, second = seen[1][0]
    assert [first.description, second.description] == ["layer", "head"]
    assert first.options == [("3", 3), ("4", 4)]
    first.value = 4
    first.moved(None)
    assert handle.shown == ["layer 4 head 0"]


def test_an_empty_choice_is_an_error():
    with pytest.raises(ValueError, match="nothing to choose from for layer"):
        widgets.browse(lambda layer: layer, layer=[])
