"""Runtime checks of annotations, limits for property tests, and shared fixtures.

The import hook must be in place before the modules it checks are imported, so this file imports none of kvlab.
"""

import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]


def _no_gpu() -> bool:
    """Asked of the driver: importing torch here would import triton too, before it is told to interpret."""
    return not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists()


if importlib.util.find_spec("triton") is not None and _no_gpu():
    # Triton binds its functions to the interpreter or the compiler once, when it is imported.
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before it could be told to interpret")
    os.environ["TRITON_INTERPRET"] = "1"

# Shapes and types of every annotated function here are checked at each call a test makes. Of the kernels, all but the
# Triton and numba files: a compiler reads their source and takes no rewritten functions.
KERNELS = sorted(
    f"kvlab.kernels.{path.stem}"
    for path in (ROOT / "kvlab/kernels").glob("[!_]*.py")
    if not path.stem.endswith(("_triton", "_numba"))
)
CHECKED = (
    *KERNELS,
    "kvlab.centre",
    "kvlab.codecs",
    "kvlab.policies",
    "kvlab.reading",
    "kvlab.stepping",
    "kvlab.row",
    "kvlab.attending",
    "kvlab.cache",
    "kvlab.stacked",
)

_early = sorted(name for name in sys.modules if name.startswith(CHECKED))
if _early:
    raise RuntimeError(f"{_early} were imported before their annotations could be checked")
install_import_hook(list(CHECKED), "checking.check")

# No deadlines: two shared cores make no promise about time.
hypothesis.settings.register_profile("kvlab", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("kvlab")


def pytest_configure(config: pytest.Config) -> None:
    # beartype looks at a random item of a list, also while hypothesis builds one.
    config.addinivalue_line("filterwarnings", "ignore:Do not use the `random` module")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and xdist workers share the cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Public data sets kept outside the repository; skips where there are none."""
    named = os.environ.get("KVLAB_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set KVLAB_DATA to a folder that holds it")
    return folder


@pytest.fixture
def tiny_model():
    """The factory of tests/tiny.py."""
    import tiny

    return tiny.tiny_model
