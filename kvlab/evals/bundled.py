"""Find and read the small evaluation files that travel with kvlab.

In a source checkout they lie in `evalsets/` beside the package, in an installed wheel under `kvlab/_data/evalsets/`.
This file refuses to know what is inside them and to download anything.
"""

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "_data" / "evalsets", _PACKAGE.parent / "evalsets")


def bundled(name: str) -> Path:
    """The path of a bundled file. FileNotFoundError names the folders that were searched."""
    for folder in FOLDERS:
        if (folder / name).is_file():
            return folder / name
    where = " or ".join(str(folder) for folder in FOLDERS)
    raise FileNotFoundError(f"bundled file {name!r} is not in {where}; reinstall kvlab or run from a full checkout")


@cache
def sentences(name: str = "plain_prose.txt") -> tuple[str, ...]:
    """The sentences of a bundled text, one a line, in file order."""
    lines = bundled(name).read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip())
