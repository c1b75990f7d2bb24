"""Clean output from inside a notebook kernel. Imports nothing heavy, so that the first cell can call it first."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TextIO

from IPython.core.getipython import get_ipython
from tqdm import TqdmWarning

from kvlab.progress import form


def notebook_setup() -> None:
    """Send raw writes to file descriptor 1 to 2, so that a notebook piped to stdout stays valid JSON.

    Compiled libraries and subprocesses write there behind Python's back; the kernel echoes it to the stdout of the
    program that started it. Nothing changes outside a kernel, nor when called again.
    """
    if in_kernel():
        sys.stdout.flush()
        os.dup2(2, 1)
        # Libraries import tqdm's widget bar; that it cannot be drawn concerns nobody who shows no bar.
        warnings.filterwarnings("ignore", category=TqdmWarning, message="IProgress not found")


def in_kernel() -> bool:
    """Whether this process runs a notebook."""
    return getattr(get_ipython(), "kernel", None) is not None


def watched(environ: Mapping[str, str]) -> bool:
    """Whether a person looks at this kernel's notebook: Jupyter and VS Code say so, papermill and nbmake do not.

    KVLAB_PROGRESS=bar asks for the bar, plain and 0 for none.
    """
    if asked := environ.get("KVLAB_PROGRESS"):
        return form(environ, terminal=False) == "bar" and asked == "bar"
    return bool(environ.get("JPY_SESSION_NAME") or environ.get("VSCODE_PID"))


@contextlib.contextmanager
def telling() -> Iterator[TextIO]:
    """A stream for what a person may want to know meanwhile: stderr; of a watched notebook stdout, where stderr looks
    like an error; of any other file descriptor 2, which under papermill reaches both the notebook and the terminal."""
    if not in_kernel():
        yield sys.stderr
    elif watched(os.environ):
        yield sys.stdout
    else:
        with os.fdopen(os.dup(2), "w", buffering=1) as stream:
            yield stream
