"""The caller's side of one worker: start a nursery, hand it programs one at a time, and hold the clock.

Raises SandboxUnavailable where the kernel refuses a part of the isolation: there is no lesser sandbox to fall back to.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvlab.sandbox.cell import USER
from kvlab.sandbox.program import VERDICTS, Limits, Outcome, Program
from kvlab.sandbox.refused import SandboxUnavailable, refused
from kvlab.sandbox.wire import Encoder

_START = "import sys; sys.path.append(sys.argv[1]); from kvlab.sandbox.nursery import main; main()"
_HOME = str(Path(__file__).resolve().parents[2])
# The one thing a program's interpreter is told: the same order of sets in every run.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp"}
_SETUP_S = 60.0
_LOOK_S = 0.2


class Stopped(Exception):  # noqa: N818 - no error: the caller wants no more outcomes
    """The evaluation was called off."""


class _Message(NamedTuple):
    word: str
    rest: tuple[str, ...]


class Worker:
    """One nursery. Use as a context manager; it and all below it end with the block."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        # Its complaints, if it ever has any. A file in memory: nobody reads a pipe meanwhile.
        self._errors = os.memfd_create("errors")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._nursery = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-c", _START, _HOME, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            self._socket.close()
            os.close(self._errors)
            raise
        finally:
            theirs.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        try:
            self._nursery.wait(_SETUP_S)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        os.close(self._errors)

    def judge(self, program: Program, limits: Limits) -> Outcome:
        """Run one program to its verdict."""
        tests = Encoder(_no_reference, 1 << 30).bytes_of((program.tests, program.given, program.entry))
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        files: list[int] = [theirs.detach(), write]
        try:
            files += [_file(program.source.encode("utf-8", "surrogatepass")), _file(tests)]
            self._send(limits, files)
        except BaseException:
            control.close()
            os.close(read)
            raise
        finally:
            for file in files:
                os.close(file)
        with control, open(read, "rb", buffering=0) as report:
            try:
                outcome = self._followed(control, report.fileno(), limits)
            finally:
                control.close()  # the waiter ends all, whatever happened here
                with suppress(OSError):
                    self._socket.recv(32)  # the nursery saw the waiter end: no process of the cell is left
        return outcome

    def _send(self, limits: Limits, files: list[int]) -> None:
        words = " ".join(map(str, (int(_as_root()), *limits.whole_numbers())))
        try:
            self._socket.sendmsg([words.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))])
            waiter = self._socket.recv(32)
        except OSError:
            waiter = b""
        if not waiter:
            raise self._broken()
        self._waiter = int(waiter)

    def _followed(self, control: socket.socket, report: int, limits: Limits) -> Outcome:
        """From the first sign of life to the verdict."""
        deadline, started, verdict = time.monotonic() + _SETUP_S, 0.0, b""
        ended: tuple[str, ...] | None = None
        while True:
            left = deadline - time.monotonic()
            if left <= 0 and not started:
                raise SandboxUnavailable(f"a sandbox was not ready after {_SETUP_S:g} s: use fewer workers")
            if left <= 0:
                return Outcome("timeout", f"took more than {limits.wall_s:g} s", time.monotonic() - started)
            if self._stop.is_set():
                raise Stopped
            ready, _, _ = select.select([control, report], [], [], min(left, _LOOK_S))
            if report in ready:
                part = os.read(report, 4096)
                if part and not started:
                    started = time.monotonic()
                    deadline = started + limits.wall_s
                verdict += part
            if control in ready:
                message = _message(control)
                if message.word == "apart":
                    _map_user(self._waiter)
                    control.send(b"mapped")
                elif message.word == "refused":
                    raise refused(message.rest[0], int(message.rest[1]))
                elif message.word == "ended":
                    ended = message.rest
                    verdict += _rest_of(report)
                else:
                    raise self._broken()
            if ended is not None:
                return self._outcome(verdict, ended, limits, time.monotonic() - started)

    def _outcome(self, verdict: bytes, ended: tuple[str, ...], limits: Limits, seconds: float) -> Outcome:
        code, spent = int(ended[0]), float(ended[1])
        word, found, detail = verdict.decode(errors="replace").removeprefix("S").partition("\0")
        if found and code == 0:
            if word == "refused":
                primitive, _, number = detail.partition("\0")
                raise refused(primitive, int(number))
            if word not in VERDICTS:
                raise RuntimeError(f"the sandbox failed, which is a fault of kvlab: {word} {detail}")
            return Outcome(word, _printable(detail), seconds)  # type: ignore[arg-type]
        if not verdict:  # before any code from outside ran
            raise self._broken()
        if code in (-signal.SIGXCPU, -signal.SIGKILL) and spent >= limits.whole_numbers()[0]:
            return Outcome("timeout", f"the tests used {limits.cpu_s:g} s of processor time", seconds)
        how = f"killed by signal {-code}; is the machine out of memory?" if code < 0 else f"ended with {code}"
        return Outcome("crashed", f"the process of the tests was {how}", seconds)

    def _broken(self) -> SandboxUnavailable:
        size = os.fstat(self._errors).st_size
        said = os.pread(self._errors, min(size, 2000), max(0, size - 2000)).decode(errors="replace").strip()
        return SandboxUnavailable(f"a sandbox ended while it was being set up{f': {said}' if said else ''}")


def _printable(text: str) -> str:
    """Exceptions of a program bring text along that a terminal must not obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _message(control: socket.socket) -> _Message:
    try:
        word, *rest = control.recv(512).decode().split("\0")
    except OSError:
        return _Message("", ())
    return _Message(word, tuple(rest))


def _rest_of(report: int) -> bytes:
    out = b""
    while part := os.read(report, 4096):
        out += part
    return out


def _file(data: bytes) -> int:
    """`data` as a file in memory, of which a copy of the descriptor can be handed on."""
    file = os.memfd_create("program")
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return file


def _as_root() -> bool:
    """Whether two users can be given to a cell: root, to reach Python's own files, and one without rights."""
    if os.geteuid() != 0:
        return False
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return any(first <= USER < first + count for first, count in ranges)


def _map_user(waiter: int) -> None:
    """Give the cell of `waiter` its users. Done from outside: only there root has a right to map itself."""
    folder = Path(f"/proc/{waiter}")
    try:
        if _as_root():
            (folder / "uid_map").write_text(f"0 0 1\n{USER} {USER} 1\n")
            (folder / "gid_map").write_text(f"0 0 1\n{USER} {USER} 1\n")
        else:
            (folder / "setgroups").write_text("deny")
            (folder / "uid_map").write_text(f"{USER} {os.geteuid()} 1\n")
            (folder / "gid_map").write_text(f"{USER} {os.getegid()} 1\n")
    except OSError as error:
        raise refused("uid_map", error.errno or 0) from error


def _no_reference(value: object) -> tuple[bytes, int]:
    raise TypeError(f"a program is text, got {type(value).__name__}")
