"""The first cell of every notebook: where things are from any folder, clean output, the plot theme, what this is."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.evals.bundled import bundled
from kvlab.nb.order import Order, cells_of
from kvlab.provenance import provenance
from kvlab.sweep.kernel import in_kernel, notebook_setup
from kvlab.sweep.places import default_root

_ATTRIBUTE = "_kvlab_order"
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Session:
    """`root` holds the checkout, or is the current folder where kvlab is installed without one; `runs` is where runs
    go; `evalsets` where the bundled sets lie. `provenance` is what every run records, read once."""

    root: Path
    runs: Path
    evalsets: Path
    provenance: Mapping[str, Any]
    order: Order = field(compare=False)

    @property
    def out_of_order(self) -> str | None:
        """What ran out of order since `setup`, in words."""
        return self.order.found

    @property
    def line(self) -> str:
        """Where results of this session come from, in one line."""
        return provenance_line(self.provenance)

    def __repr__(self) -> str:
        return f"Session({self.root}, {self.line})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        places = {name: str(getattr(self, name)) for name in ("root", "runs", "evalsets")}
        return bundle("session", {"schema": "kvlab.session/1", "line": self.line, "places": places})


def setup(*, show: bool = True) -> Session:
    """Prepare a kernel for kvlab and say what it runs on. Outside a kernel it only finds places; stdout stays clean.

    In a kernel: raw writes to file descriptor 1 go to 2, figures show as PNG in the house style, and a warning comes
    before the first cell that runs out of order. Called again, it starts to watch the order anew.
    """
    notebook_setup()
    order = Order(_page)
    if in_kernel():
        _watch_order(order)
        _theme()
    root = _CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else Path.cwd()
    session = Session(root, default_root(), bundled("default.toml").parent, provenance(), order)
    if show:
        _say(session)
    return session


def provenance_line(record: Mapping[str, Any]) -> str:
    """Versions, commit and machine, in one line."""
    git = record.get("git") or {}
    sha = (git.get("sha") or "")[:10]
    packages = record.get("packages") or {}
    named = [f"{name} {packages[name]}" for name in ("torch", "transformers") if packages.get(name)]
    gpus = ", ".join(g.get("name", "GPU") for g in record.get("gpus") or []) or "no GPU"
    commit = [f"commit {sha}{' with local changes' if git.get('dirty') else ''}"] if sha else []
    about = [f"kvlab {record.get('kvlab')}", *commit, f"Python {record.get('python')}", *named]
    return " · ".join([*about, f"{record.get('cores')} cores", gpus])


def _say(session: Session) -> None:
    if in_kernel():
        from IPython.display import display

        display(session)
    else:
        print(session.line, file=sys.stderr)


def _page() -> list[str]:
    """The notebook's cells as last saved, where Jupyter says which file this kernel runs."""
    named = os.environ.get("JPY_SESSION_NAME", "")
    return cells_of(Path(named)) if named.endswith(".ipynb") else []


def _watch_order(order: Order) -> None:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    before = getattr(shell, _ATTRIBUTE, None)
    if before is not None:
        shell.events.unregister("pre_run_cell", before)
    setattr(shell, _ATTRIBUTE, order.before_cell)
    shell.events.register("pre_run_cell", order.before_cell)


def _theme() -> None:
    """seaborn's colour-blind palette on quiet axes; figures that no pyplot made show too.

    Nothing that the figures of reports leave to a default: they look the same here and elsewhere.
    """
    import matplotlib as mpl
    import seaborn as sns
    from IPython.core.getipython import get_ipython
    from IPython.core.pylabtools import select_figure_formats

    sns.set_palette("colorblind")
    mpl.rcParams.update({"figure.dpi": 120, "axes.spines.top": False, "axes.spines.right": False})
    select_figure_formats(get_ipython(), {"png"})
