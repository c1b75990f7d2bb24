"""Processes of this machine, as /proc shows them."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int) -> set[int]:
    """Living processes right below `pid`; its dead ones are waited for if it is this process."""
    out = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                out.add(int(folder.name))
    return out


def below(pid: int) -> set[int]:
    """All living processes below `pid`."""
    found = children(pid)
    return found.union(*(below(child) for child in found))


def eventually(true: Callable[[], bool]) -> bool:
    """Waits long for what a busy machine may do late."""
    for _ in range(600):
        if true():
            return True
        time.sleep(0.05)
    return False


def gone(pids: set[int]) -> bool:
    """Whether all are dead; those that became this process' children are waited for."""
    alive = set()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.add(pid)
    return not alive
