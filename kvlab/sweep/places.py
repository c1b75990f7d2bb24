"""Where sweep notebooks lie and where their runs go, the same from any current folder. Imports nothing heavy."""

import difflib
from pathlib import Path

from kvlab.sweep.catalog import SWEEPS

_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parent


def notebook_of(name: str) -> Path:
    """The notebook of a sweep: in a checkout under `sweeps/`, in an installed wheel beside the package's data.

    Raises ValueError for an unknown name with the nearest one, FileNotFoundError where the file is missing.
    """
    if name not in SWEEPS:
        near = difflib.get_close_matches(name, SWEEPS, 1, cutoff=0.0)[0]
        raise ValueError(f"unknown sweep {name!r}; nearest is {near!r}, all are {', '.join(SWEEPS)}")
    file = SWEEPS[name].notebook
    for folder in (_CHECKOUT / "sweeps", _PACKAGE / "_data" / "sweeps"):
        if (folder / file).is_file():
            return folder / file
    raise FileNotFoundError(f"{file} is neither in a checkout of kvlab nor in its wheel; install kvlab again")


def default_root() -> Path:
    """`runs/` of the checkout this package is imported from, whatever the current folder; else `runs/` under that."""
    in_checkout = (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "sweeps").is_dir()
    return (_CHECKOUT if in_checkout else Path.cwd()) / "runs"
