"""The floors: imports go down only, and each heavy dependency is let in at few doors."""

import ast
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvlab"

# The unit is the file or folder right under kvlab/. A unit may import units of lower floors, and itself.
FLOORS: dict[str, float] = {
    "kernels": 0,
    "codecs": 1,
    "policies": 1,
    "store": 1.5,
    "centre": 1.5,
    "layer": 1.8,
    "plain": 1.8,
    "config": 2,
    "vocabulary": 2.5,
    "selecting": 2.55,
    "reading": 2.6,
    "evicting": 2.65,
    "stepping": 2.65,
    "row": 2.7,
    "settling": 2.75,
    "once": 1,
    "launching": 2.8,
    "attending": 2.9,
    "inventory": 2.9,
    "cache": 3,
    "stacked": 3.2,
    "centring": 3.5,
    "export": 3,
    "models": 4,
    "seam": 3.5,
    "attach": 4,
    "snapshot": 4.5,  # runs its one prefill on an attached model
    "calibration": 4.7,
    "room": 0.5,
    "batching": 0.6,
    "likelihood": 4.1,
    "questions": 4.1,
    "decoding": 4.6,
    "generating": 4.8,
    "subject": 5,
    "answering": 5.2,
    "recorded": 5.2,
    "book": 5.3,
    "confirm": 5.6,
    "explore": 5.9,  # looks into caches and runs; decides nothing
    "search": 6,
    "bench": 6.2,  # simulates whole searches
    "sweep": 6.5,  # the search's sizes, sessions and documents, for formats named beforehand
    "nb": 6.7,  # sweeps' kernel and places, runs, reports
    "reproduce": 6.8,
    "worker": 6.8,
    "housekeeping": 6.9,
    "__main__": 7,
}
# Beside the tower: no torch, no transformers, and of kvlab only each other. Floors from 4 on may use them.
BESIDE = {
    *(
        "evals",
        "folders",
        "memo",
        "piping",
        "progress",
        "provenance",
        "report",
        "runs",
        "sandbox",
        "stats",
        "stopping",
        "study",
    ),
}
BESIDE_FROM = 4
# Below everything: the standard library and itself only, so that anybody may say how it looks.
UNDER = {"show"}
# Who may import what, directly. Names that are not listed here are free.
DOORS: dict[str, set[str]] = {
    # The benches compare with transformers; the search only notes its version.
    "transformers": {
        "cache",
        "centring",
        "stacked",
        "seam",
        "attach",
        "models",
        "snapshot",
        "subject",
        "bench",
        "search",
    },
    "torch": set(FLOORS) - {"nb"},
    "safetensors": {"calibration", "models", "snapshot"},
    "gguf": {"models"},
    "datasets": {"evals"},
    "optuna": {"search", "study", "__main__"},
    "papermill": {"sweep"},
    "triton": {"kernels", "bench"},  # bench: compiling ahead of time
    "numba": {"kernels"},
}
NEVER = {"tests", "sweeps", "notebooks", "tiny", "conftest", "pytest", "hypothesis", "beartype"}


def unit_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    # A program stands on top, whatever package it speaks for.
    return "" if parts == ("__init__",) else parts[-1] if parts[-1] == "__main__" else parts[0]


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports, wherever in it; relative names resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                context = module if is_package else module.rpartition(".")[0]
                base = importlib.util.resolve_name("." * node.level + base, context)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif is_package and isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOME":
            # Names that load on first use, from modules written out in one dict.
            yield from ((value.lineno, f"{ast.literal_eval(value)}.*") for value in node.value.values)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                argument = node.args[0]
                written = isinstance(argument, ast.Constant)
                lazy = is_package and ast.unparse(argument) == "_HOME[name]"
                if not lazy:
                    yield node.lineno, argument.value if written else "<computed>"  # type: ignore[misc]


def faults(package: Path) -> list[str]:
    """Every import under `package` that breaks a rule above, as `file:line: why`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        unit = unit_of(path, package)
        dotted = path.relative_to(package.parent).with_suffix("").parts
        is_package = dotted[-1] == "__init__"
        module = ".".join(dotted[:-1] if is_package else dotted)
        if unit and unit not in FLOORS and unit not in BESIDE | UNDER:
            found.append(f"{path.name}:1: {unit} has no floor: give it one in FLOORS or BESIDE")
            continue
        for line, name in imported(ast.parse(path.read_text()), module, is_package):
            why = fault(unit, name)
            if why:
                found.append(f"{path.relative_to(package.parent)}:{line}: {why}")
    return found


def fault(unit: str, name: str) -> str | None:
    """Why `unit` may not import `name`, or None."""
    top, _, rest = name.partition(".")
    if top == "<computed>":
        return "imports a computed name: nobody can tell what it needs"
    if top in NEVER:
        return f"{unit} imports {top}: the package must not know its tests, notebooks and tools"
    if unit in UNDER and top not in {"kvlab", *sys.stdlib_module_names}:
        return f"{unit} imports {top}: it may import the standard library only"
    if top != "kvlab":
        if top in DOORS and unit not in DOORS[top]:
            return f"{unit or 'kvlab'} imports {top}: only {sorted(DOORS[top])} may"
        return None
    target = rest.partition(".")[0]
    if not target:
        return f"{unit} imports kvlab itself: name the module"
    if rest == "__version__":
        return None
    if unit == "":
        return None if name.endswith(".*") else f"kvlab imports {target} on import: names load on first use"
    if target == unit:
        return None
    if target in UNDER:
        return None
    if unit in UNDER:
        return f"{unit} imports {target}: it may import only itself"
    if target not in FLOORS and target not in BESIDE:
        return f"{unit} imports {name}, which is no module: import it from where it lives"
    if unit in BESIDE:
        return None if target in BESIDE else f"{unit} imports {target}: it may import only {sorted(BESIDE)}"
    if target in BESIDE:
        allowed = FLOORS[unit] >= BESIDE_FROM
        return None if allowed else f"{unit} (floor {FLOORS[unit]}) imports {target}: the engine knows no evaluation"
    if FLOORS[target] >= FLOORS[unit]:
        way = "sideways" if FLOORS[target] == FLOORS[unit] else "upwards"
        return f"{unit} (floor {FLOORS[unit]}) imports {target} (floor {FLOORS[target]}), {way}"
    return None


def test_every_import_goes_down() -> None:
    assert faults(PACKAGE) == []


def test_every_floor_is_looked_at() -> None:
    # An empty walk would pass the test above.
    seen = {unit_of(path, PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert {"", "kernels", "codecs", "policies", "store", "config", "row", "cache", "attach", "models"} <= seen


@pytest.mark.parametrize(
    ("path", "source", "word"),
    [
        ("kernels/pack.py", "from kvlab.codecs import Raw", "upwards"),
        ("kernels/pack.py", "def f():\n    import transformers", "transformers"),
        ("codecs/raw.py", "from kvlab.policies.base import Scorer", "sideways"),
        ("codecs/raw.py", "from ..policies import base", "sideways"),
        ("codecs/raw.py", "from .. import config", "upwards"),
        ("policies/recency.py", "import kvlab.config", "upwards"),
        ("store.py", "from kvlab import cache", "upwards"),
        ("config.py", "import optuna.trial", "optuna"),
        ("row.py", "import importlib\nimportlib.import_module('kvlab.attach')", "upwards"),
        ("row.py", "import importlib\nname = 'x'\nimportlib.import_module(name)", "computed"),
        ("codecs/__init__.py", "_HOME = {'a': 'kvlab.policies.base'}", "sideways"),
        ("row.py", "from kvlab.evals.item import Item", "no evaluation"),
        ("vocabulary.py", "from kvlab.row import Row", "upwards"),
        ("models/loading.py", "from kvlab.attach import attach", "sideways"),
        ("cache.py", "from kvlab import KVConfig", "no module"),
        ("stats/paired.py", "from kvlab.config import KVConfig", "only"),
        ("evals/item.py", "import torch.nn", "torch"),
        ("runs.py", "if True:\n    from transformers import AutoModel", "transformers"),
        ("models/loading.py", "from tests import tiny", "tests"),
        ("models/loading.py", "import kvlab", "name the module"),
        ("__init__.py", "from kvlab.config import KVConfig", "first use"),
        ("utilities.py", "", "no floor"),
        ("show/cache.py", "from kvlab.runs import Run", "only itself"),
        ("show/cache.py", "import numpy", "standard library"),
        ("nb/session.py", "import torch", "torch"),
        ("report/check.py", "from kvlab.search.recount import sizes", "only"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, path: str, source: str, word: str) -> None:
    file = tmp_path / "kvlab" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    found = faults(tmp_path / "kvlab")
    assert len(found) == 1
    assert word in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("codecs/raw.py", "import torch\nfrom kvlab.codecs.base import Codec\nfrom kvlab.kernels import pack"),
        ("config.py", "from kvlab.codecs import Raw\nfrom kvlab.policies import Recency"),
        ("subject.py", "from kvlab.evals.item import Item\nfrom kvlab.attach import attach"),
        ("runs.py", "import pandas\nfrom kvlab.provenance import provenance"),
        ("runs.py", "from kvlab import __version__"),
        (
            "report/__init__.py",
            "import importlib\n_HOME = {'a': 'kvlab.report.page'}\nimportlib.import_module(_HOME[name])",
        ),
        ("evals/loaders.py", "def f():\n    from datasets import load_dataset"),
        ("config.py", "def f():\n    from kvlab.show import bundle"),
        ("runs.py", "def f():\n    from kvlab.show import bundle"),
        ("report/__main__.py", "def f():\n    from kvlab.search.recount import sizes"),
        ("show/cache.py", "import math\nfrom kvlab.show.page import esc"),
    ],
)
def test_a_right_import_is_no_fault(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / "kvlab" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    assert faults(tmp_path / "kvlab") == []


def loaded_after(statements: str, names: set[str]) -> set[str]:
    """Which of `names` a fresh Python holds after running `statements`."""
    code = f"import sys\n{textwrap.dedent(statements)}\nprint(*({names!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def test_importing_kvlab_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "nbformat", "jsonschema", "numpy", "pandas", "optuna", "matplotlib"}
    assert loaded_after("import kvlab\nassert 'load' in dir(kvlab)", heavy) == set()


def test_no_lazy_name_is_a_module_too() -> None:
    # Importing the module would put it in the name's place.
    for init in PACKAGE.rglob("__init__.py"):
        tree = ast.parse(init.read_text())
        names = [
            ast.literal_eval(key)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOME"
            for key in node.value.keys  # type: ignore[attr-defined]
        ]
        modules = {path.stem for path in init.parent.iterdir()}
        assert not modules & set(names), f"{init}: {modules & set(names)}"


def test_what_stands_beside_the_tower_never_loads_torch() -> None:
    files = [p for unit in sorted(BESIDE | UNDER) for p in (PACKAGE / f"{unit}.py", *(PACKAGE / unit).glob("*.py"))]
    dotted = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in files if p.exists()]
    modules = [name.removesuffix(".__init__") for name in dotted if not name.endswith("__main__")]
    assert len(modules) > 5
    statements = "\n".join(f"import {name}" for name in modules)
    assert loaded_after(statements, {"torch", "transformers", "kvlab.config", "kvlab.codecs"}) == set()
