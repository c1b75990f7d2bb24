"""One program's cell: the processes around it and what each may do.

    waiter    outside, in the new user, mount, network, IPC and UTS namespaces; ends the judge when told to
    judge     first in a PID namespace: makes the file system, then runs the tests without privileges
    keeper    first in a PID namespace within: reports how the solver ended
    solver    runs the generated code: sees no process but its keeper, can make none

The end of the judge is the end of all, as that of the first process of a PID namespace is; the waiter ends it, and it
ends with the waiter. Nobody but the judge holds the pipe that the verdict goes through.
"""

import os
import resource
import select
import signal
import socket
import traceback
from typing import NamedTuple, NoReturn

from kvlab.sandbox import linux, root, seccomp
from kvlab.sandbox.judge import Job, ended, judge
from kvlab.sandbox.solver import solve
from kvlab.sandbox.wire import Decoder

# User and group inside; by name "nobody" on most machines.
USER = 65534
_APART = (
    (linux.CLONE_NEWUSER, "user namespaces"),
    (linux.CLONE_NEWNS, "mount namespaces"),
    (linux.CLONE_NEWPID, "PID namespaces"),
    (linux.CLONE_NEWNET, "network namespaces"),
    (linux.CLONE_NEWIPC, "IPC namespaces"),
    (linux.CLONE_NEWUTS, "UTS namespaces"),
)
_FILES = 64
_GRACE_S = 2


class Bounds(NamedTuple):
    """Limits as whole numbers; see `kvlab.sandbox.Limits`."""

    cpu_s: int
    memory: int
    output: int
    files: int
    threads: int


class Ends(NamedTuple):
    """Open files of a cell: a socket to the caller, the pipe for the verdict, the code and the tests as files."""

    control: int
    report: int
    source: int
    tests: int


def run(ends: Ends, bounds: Bounds, folders: list[str], machine: str, as_root: bool) -> NoReturn:
    """Be the waiter. Never returns: this process ends here."""
    code = 70
    try:
        _close_all_but(*ends)
        control = socket.socket(fileno=ends.control)
        try:
            if as_root:
                os.setgroups([])
            for flags, primitive in _APART:
                linux.unshare(flags, primitive)
                if flags == linux.CLONE_NEWUSER:
                    control.send(b"apart")
                    if control.recv(16) != b"mapped":
                        os._exit(0)
            linux.die_with_parent(signal.SIGKILL)
            life = os.pipe()
            inner = os.fork()
            if inner == 0:
                os.close(life[1])
                _inside(control, life[0], ends, bounds, folders, machine)
            _wait(control, ends, inner)
            code = 0
        except linux.RefusedError as error:
            control.send(_refusal(error))
    except BaseException:  # nothing may return into the nursery's loop
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait(control: socket.socket, ends: Ends, inner: int) -> None:
    """Until the judge has ended, or the caller hangs up: then end it."""
    for end in ends[1:]:
        os.close(end)
    watch = os.pidfd_open(inner)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.register(control, select.POLLIN | select.POLLHUP)
    if not any(ready == watch for ready, _ in poll.poll()):
        os.kill(inner, signal.SIGKILL)
    _, status, usage = os.wait4(inner, 0)
    try:
        spent = usage.ru_utime + usage.ru_stime
        control.send(f"ended\0{os.waitstatus_to_exitcode(status)}\0{spent:.3f}".encode())
    except OSError:  # it hung up
        return


def _inside(
    control: socket.socket, life: int, ends: Ends, bounds: Bounds, folders: list[str], machine: str
) -> NoReturn:
    """Be the judge."""
    try:
        _end_with_waiter(life)
        os.setsid()  # a signal to one's own group crosses PID namespaces
        root.enter(folders, bounds.files)
        linux.unshare(linux.CLONE_NEWPID, "PID namespaces")
        question, answer, end = os.pipe(), os.pipe(), os.pipe()
        keeper = os.fork()
        if keeper == 0:
            _close_all_but(ends.source, question[0], answer[1], end[1])
            _keep(ends.source, question[0], answer[1], end[1], bounds, machine)
        _close_all_but(control.fileno(), life, ends.report, ends.tests, question[1], answer[0], end[0])
        linux.drop_privileges(USER)
        _restrict(bounds, machine)
        linux.hide_memory()
        _end_with_waiter(life)
        job = Job(*Decoder(_all_of(ends.tests), _no_reference).value())
        control.close()
        os.dup2(0, 2)  # what tests print goes nowhere
        os.write(ends.report, b"S")

        def ending() -> tuple[str, str]:
            return _ending(end[0], bounds.cpu_s)

        verdict, detail = judge(job, answer[0], question[1], _message(bounds), ending)
        os.write(ends.report, f"{verdict}\0{detail[:800]}".encode("utf-8", "backslashreplace"))
        os._exit(0)
    except linux.RefusedError as error:
        control.send(_refusal(error))
    except BaseException:  # nothing may return into the nursery's loop; the caller is told that this is a fault
        os.write(ends.report, _fault())
    finally:
        os._exit(0)


def _end_with_waiter(life: int) -> None:
    """Ask the kernel for it, and look whether it is too late to ask."""
    linux.die_with_parent(signal.SIGKILL)
    if select.select([life], [], [], 0)[0]:
        os._exit(0)


def _ending(end: int, cpu_s: int) -> tuple[str, str]:
    """Why the solver no longer answers."""
    if not select.select([end], [], [], _GRACE_S)[0]:
        return "exited_early", "closed the channel it answers through"
    word, *rest = os.read(end, 4096).decode().split("\0")
    return (word, "\0".join(rest)) if word in ("refused", "fault") else ended(int(word), float(rest[0]), cpu_s)


def _keep(source: int, read: int, write: int, end: int, bounds: Bounds, machine: str) -> NoReturn:
    """Be the keeper, and start the solver."""
    try:
        linux.drop_privileges(USER)
        os.setsid()
        solver = os.fork()
        if solver == 0:
            _solver(source, read, write, end, bounds, machine)
        _close_all_but(end)
        _, status, usage = os.wait4(solver, 0)
        os.write(end, f"{os.waitstatus_to_exitcode(status)}\0{usage.ru_utime + usage.ru_stime:.3f}".encode())
    except linux.RefusedError as error:
        os.write(end, _refusal(error))
    except BaseException:  # as in the judge
        os.write(end, _fault())
    finally:
        os._exit(0)


def _solver(source: int, read: int, write: int, end: int, bounds: Bounds, machine: str) -> NoReturn:
    try:
        try:
            os.setsid()
            text = _all_of(source).decode("utf-8", "surrogatepass")
            output = os.memfd_create("output", 0)
            closed = os.open("/empty", os.O_RDONLY)  # reading a folder fails like nothing else does
            for wanted, standard in ((closed, 0), (output, 1), (output, 2)):
                os.dup2(wanted, standard)
            _restrict(bounds, machine)
        except linux.RefusedError as error:
            os.write(end, _refusal(error))
            os._exit(0)
        except BaseException:  # as in the judge
            os.write(end, _fault())
            os._exit(0)
        _close_all_but(read, write)
        solve(text, read, write, _message(bounds))
    finally:
        os._exit(0)


def _restrict(bounds: Bounds, machine: str) -> None:
    """Limits and the filter of system calls, after privileges are gone: now code from outside may run."""
    linux.limit(resource.RLIMIT_CPU, bounds.cpu_s, bounds.cpu_s + 1)
    linux.limit(resource.RLIMIT_AS, bounds.memory)
    linux.limit(resource.RLIMIT_FSIZE, bounds.output)
    linux.limit(resource.RLIMIT_NOFILE, _FILES)
    linux.limit(resource.RLIMIT_NPROC, bounds.threads + 4)  # waiter, judge, keeper and solver are one each
    linux.limit(resource.RLIMIT_CORE, 0)
    linux.limit(resource.RLIMIT_MEMLOCK, 0)
    linux.limit(resource.RLIMIT_MSGQUEUE, 0)
    linux.filter_calls(seccomp.compiled(machine, os.getpid()))


def _refusal(error: linux.RefusedError) -> bytes:
    return f"refused\0{error.primitive}\0{error.errno}".encode()


def _fault() -> bytes:
    return f"fault\0{traceback.format_exc()[-2000:]}".encode("utf-8", "backslashreplace")


def _message(bounds: Bounds) -> int:
    return bounds.memory // 16


def _all_of(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    with open(file, "rb") as whole:
        return whole.read()


def _no_reference(tag: bytes, number: int) -> object:
    raise ValueError(f"a job is plain data, got {tag!r} {number}")


def _close_all_but(*kept: int) -> None:
    """Close every file but the three standard ones and `kept`."""
    first = 3
    for file in sorted(file for file in kept if file > 2):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, 1 << 16)
