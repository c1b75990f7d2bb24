"""Controls beside a picture, where ipywidgets is installed (extra `lab`).

The picture is a plain output of the cell, shown before any control and replaced in place: what was last looked at is
saved with the notebook and needs neither kernel nor widget to be seen again.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from IPython.display import display

HOW = "Controls need ipywidgets: pip install 'kvlab[lab]'. Until then change the arguments and run the cell again."


def browse(draw: Callable[..., Any], **choices: Sequence[Any]) -> None:
    """Show `draw(**first choices)`, and a control for each argument that draws it again.

    `draw` returns a Picture, or anything else that shows itself. `choices` are the values each argument may take, the
    first of them shown at the start. Without ipywidgets the picture comes with one line that says how to get controls.
    """
    empty = [name for name, values in choices.items() if not len(values)]
    if empty:
        raise ValueError(f"nothing to choose from for {', '.join(empty)}")
    start = {name: values[0] for name, values in choices.items()}
    shown = display(draw(**start), display_id=True)
    if importlib.util.find_spec("ipywidgets") is None:
        display({"text/plain": HOW}, raw=True)
        return
    display(_controls(draw, shown, choices))


def _controls(draw: Callable[..., Any], shown: Any, choices: dict[str, Sequence[Any]]) -> Any:
    ipywidgets: Any = importlib.import_module("ipywidgets")  # an optional extra

    sliders = {
        name: ipywidgets.SelectionSlider(
            options=[(_label(v), v) for v in values], value=values[0], description=name, continuous_update=False
        )
        for name, values in choices.items()
    }

    def redraw(_change: Any) -> None:
        shown.update(draw(**{name: slider.value for name, slider in sliders.items()}))

    for slider in sliders.values():
        slider.observe(redraw, names="value")
    return ipywidgets.VBox(list(sliders.values()))


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
