"""Clean output from inside a notebook kernel. Imports nothing heavy, so that the first cell can call it first."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from IPython.core.getipython import get_ipython
from tqdm import TqdmWarning


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


@contextlib.contextmanager
def live_stderr() -> Iterator[TextIO]:
    """A stream to file descriptor 2: under papermill it reaches both the notebook and the terminal, sys.stderr only
    the notebook."""
    if not in_kernel():
        yield sys.stderr
        return
    with os.fdopen(os.dup(2), "w", buffering=1) as stream:
        yield stream
