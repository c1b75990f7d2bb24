"""A Python that has run nothing and holds nothing, and forks one cell for each program it is sent.

Starting an interpreter takes longer than most programs. What is forked here is as fresh: no program ever runs in this
process, and it never reads one. `python -m` is not how it starts: see `kvlab.sandbox.worker`.
"""

import os
import select
import signal
import socket
import sys
from array import array
from contextlib import suppress

from kvlab.sandbox import root
from kvlab.sandbox.cell import Bounds, Ends, run

HANDED = 4  # files sent with every program


def main() -> None:
    """Serve the socket on descriptor 0 until the other side closes it, or dies."""
    caller, owner = socket.socket(fileno=os.dup(0)), os.pidfd_open(int(sys.argv[2]))
    if os.getppid() != int(sys.argv[2]):
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open("/proc/self/oom_score_adj", "w") as first_to_go:
        first_to_go.write("1000")
    sys.path.remove(sys.argv[1])  # where kvlab lies; a program must not see it
    folders, machine = root.libraries(), os.uname().machine
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    while _ready(caller.fileno(), owner):
        words, files = _received(caller)
        if not words:
            return
        as_root, *bounds = (int(word) for word in words.split())
        waiter = os.fork()
        if waiter == 0:
            run(Ends(*files), Bounds(*bounds), folders, machine, bool(as_root))
        for file in files:
            os.close(file)
        with suppress(OSError):
            caller.send(str(waiter).encode())
        ended = os.pidfd_open(waiter)
        if not _ready(ended, owner):
            os.kill(waiter, signal.SIGKILL)
        os.waitpid(waiter, 0)
        os.close(ended)
        with suppress(OSError):  # the caller hung up
            caller.send(b"gone")


def _ready(awaited: int, owner: int) -> bool:
    """Wait for one of two; whether it was the awaited one. A socket alone does not show that the owner is dead: a
    process that it forked may hold it open."""
    poll = select.poll()
    for file in (awaited, owner):
        poll.register(file, select.POLLIN | select.POLLHUP)
    return owner not in dict(poll.poll())


def _received(caller: socket.socket) -> tuple[bytes, array]:
    files = array("i")
    words, extra, _, _ = caller.recvmsg(256, socket.CMSG_SPACE(HANDED * files.itemsize))
    for _, _, data in extra:
        files.frombytes(data)
    return words, files
