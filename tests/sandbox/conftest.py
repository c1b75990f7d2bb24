"""An open sandbox for the tests, and a look at the machine before and after.

Tests skip only where the kernel itself refuses namespaces or mounts, asked without the sandbox's code.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import children

from kvlab.sandbox import Limits, Sandbox

_PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, flag in [("user", 1 << 28), ("mount", 1 << 17), ("PID", 1 << 29), ("network", 1 << 30), ("IPC", 1 << 27)]:
    if libc.unshare(flag):
        raise SystemExit(f"the kernel refuses {name} namespaces: {os.strerror(ctypes.get_errno())}")
if libc.mount(None, b"/", None, (1 << 18) | (1 << 14), None) or libc.mount(b"t", b"/proc", b"tmpfs", 0, None):
    raise SystemExit(f"the kernel refuses mounts in a user namespace: {os.strerror(ctypes.get_errno())}")
"""


@pytest.fixture(scope="session")
def kernel_allows() -> None:
    if sys.platform != "linux":
        pytest.skip(f"namespaces are Linux', this is {sys.platform}")
    found = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())


@pytest.fixture(scope="module")
def nothing_left(kernel_allows: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, open file, temporary file or file in the working folder more than before.

    Orphans come to this process for the time being, so that one that got away is seen.
    """
    prctl = ctypes.CDLL(None).prctl
    assert prctl(36, 1, 0, 0, 0) == 0
    private, before = tmp_path_factory.mktemp("private"), tempfile.tempdir
    tempfile.tempdir = str(private)

    def seen() -> tuple[object, ...]:
        library = Path(os.__file__).parent
        return (
            children(os.getpid()),
            len(os.listdir("/proc/self/fd")),
            sorted(os.listdir()),
            sorted(os.listdir(library)),
        )

    try:
        first = seen()
        yield
        assert seen() == first
        assert list(private.iterdir()) == []
    finally:
        tempfile.tempdir = before
        prctl(36, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def sandbox(nothing_left: None) -> Iterator[Sandbox]:
    """With time enough on a busy machine for what must end by itself."""
    limits = Limits(cpu_s=2, wall_s=60, memory_bytes=256 << 20, files_bytes=2 << 20)
    with Sandbox(limits, workers=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def short(nothing_left: None) -> Iterator[Sandbox]:
    """For what never ends."""
    with Sandbox(Limits(cpu_s=1, wall_s=1.5, memory_bytes=256 << 20), workers=4) as opened:
        yield opened
