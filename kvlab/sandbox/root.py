"""The file system a program sees: Python's standard library and the system's libraries, read-only, and an empty /tmp.

Everything lies in memory, in a mount namespace of its own: no file of the machine can be written, none but those
libraries can be read, and all of it is gone with the last process inside. There is no /proc, no /sys, no home, no
network configuration, and of devices only /dev/null. Installed packages are covered, so what they hold (answer sets
among it) is not there.
"""

import os
import sys
from collections.abc import Iterable

from kvlab.sandbox import linux

# Where the new root is put together: always there, and no library lies in it.
_STAGE = "/proc"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store", "/gnu/store")
_COVERED = ("site-packages", "dist-packages")


def libraries() -> list[str]:
    """The folders that a Python without packages reads, outermost only; links among them are kept as links."""
    own = [
        os.path.join(prefix, name) for prefix in (sys.base_prefix, sys.base_exec_prefix) for name in ("lib", "lib64")
    ]
    own += [path for path in sys.path if os.path.isabs(path)]
    own += [os.path.realpath(path) for path in own]
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in (*_LIBRARIES, *own)}):
        if os.path.isdir(path) and not any(path.startswith(f"{outer}/") for outer in found):
            found.append(path)
    return found


def enter(folders: Iterable[str], temporary_bytes: int) -> None:
    """Make a root of `folders` and an empty /tmp of at most `temporary_bytes`, and go there.

    Needs CAP_SYS_ADMIN over the mount namespace, which must be this process's own. Raises RefusedError.
    """
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", _STAGE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=2k,mode=755")
    for name in ("/empty", "/tmp", "/dev"):
        os.mkdir(_STAGE + name)
    for folder in folders:
        _show(folder)
    with open(f"{_STAGE}/dev/null", "wb"):
        pass
    linux.mount("/dev/null", f"{_STAGE}/dev/null", None, linux.MS_BIND)
    room = f"size={temporary_bytes},nr_inodes=1k,mode=1777"
    linux.mount("tmpfs", f"{_STAGE}/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, room)
    os.chdir(_STAGE)
    linux.pivot_root(".", ".")  # the old root now lies on top
    linux.unmount(".")
    fixed = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount(None, "/", None, fixed)
    os.chdir("/tmp")


def _show(folder: str) -> None:
    """The machine's `folder` at the same place in the new root, read-only."""
    here = _STAGE + folder
    if os.path.lexists(here):  # below a link that is there already
        return
    os.makedirs(os.path.dirname(here), exist_ok=True)
    if os.path.islink(folder):
        os.symlink(os.readlink(folder), here)
        return
    os.mkdir(here)
    linux.mount(folder, here, None, linux.MS_BIND | linux.MS_REC)
    linux.mount_read_only(here)
    for packages in _packages(here):
        linux.mount(f"{_STAGE}/empty", packages, None, linux.MS_BIND)


def _packages(folder: str) -> list[str]:
    """Folders of installed packages, as `folder`/python3.X/site-packages or right below a standard library."""
    inner = [folder, *(entry.path for entry in os.scandir(folder) if entry.name.startswith("python"))]
    return [path for one in inner for name in _COVERED if os.path.isdir(path := os.path.join(one, name))]
