"""The process in which generated code runs. It answers calls; it holds no tests, no expected values and no verdict.

Whatever the code does to this interpreter (its built-ins, frames, memory, open files) it does to itself alone. What it
answers is taken as its answer, whoever in here wrote it.
"""

import builtins
import errno
import io
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

from kvlab.sandbox.peer import GoneError, Peer, call
from kvlab.sandbox.wire import MalformedError, TooLongError

_DENIED = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENETUNREACH)
_FULL = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)
MODULE = "solution"


class StdinError(EOFError):
    """The program read its standard input, which is closed."""


class _NoInput(io.TextIOBase):
    """Standard input that says it is closed, in every way of reading it."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0  # a folder: see kvlab.sandbox.cell

    def _refuse(self, *_: Any) -> Any:
        raise StdinError("standard input is closed: a program is called, not typed to")

    read = readline = readlines = __next__ = read1 = readinto = _refuse

    @property
    def buffer(self) -> "_NoInput":
        return self


def solve(source: str, read: int, write: int, most_bytes: int) -> None:
    """Load `source` when asked to and answer until the judge is gone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; by default it ends the process
    sys.stdin = sys.__stdin__ = _NoInput()
    sys.argv[:] = [MODULE]
    for name in ("exit", "quit"):  # what `site` would have added
        setattr(builtins, name, sys.exit)
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    peer = Peer(
        read,
        write,
        most_bytes,
        {**_OPERATIONS, "load": lambda peer: _load(source, module), "names": lambda peer: _names(module)}
        | {"lookup": lambda peer, name: module.__dict__[name]},
        refers=lambda value: True,
        raises=lambda fault: RuntimeError(f"{fault.name} in a function of the tests"),
        tells=_told,
    )
    try:
        peer.serve()
    except (GoneError, MalformedError):
        return


def _load(source: str, module: types.ModuleType) -> None:
    try:
        code = compile(source, f"<{MODULE}>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _NotPython(str(error)) from error
    exec(code, module.__dict__)


class _NotPython(Exception):  # noqa: N818 - never seen by a program
    """The source does not compile."""


def _names(module: types.ModuleType) -> list[str]:
    return [name for name in module.__dict__ if not name.startswith("__")]


def _told(error: BaseException) -> tuple[str, str, tuple]:
    """An exception as verdict, name of its nearest built-in class, and arguments that are plain data."""
    builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    text = str(error) if isinstance(error, _NotPython) else f"{type(error).__name__}: {error}"[:300]
    where = _line(error)
    arguments = tuple(a for a in error.args if type(a) in (str, int, float, bool, type(None)))
    return _kind(error), builtin.__name__, (f"{text}{where}", *arguments[:4])


def _line(error: BaseException) -> str:
    trace, found = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == f"<{MODULE}>":
            found = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _kind(error: BaseException) -> str:
    if isinstance(error, _NotPython):
        return "syntax"
    if isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
        return "exited_early"
    for one in _behind(error):
        if isinstance(one, StdinError) or (isinstance(one, IsADirectoryError) and one.filename in (None, 0)):
            return "stdin"
        if isinstance(one, MemoryError):
            return "memory"
        if isinstance(one, TooLongError) or (isinstance(one, OSError) and one.errno in _FULL):
            return "output_limit"
        if isinstance(one, OSError) and one.errno in _DENIED:
            return "forbidden"
        if type(one) is RuntimeError and "start new thread" in str(one):
            return "forbidden"
    return "crashed"


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The exception and what caused it, a few steps back."""
    for _ in range(8):
        yield error
        # urllib keeps what happened in `reason`
        cause = error.__cause__ or error.__context__ or getattr(error, "reason", None)
        if not isinstance(cause, BaseException):
            return
        error = cause


def _next(peer: Peer, steps: Any) -> tuple:
    for value in steps:
        return (value,)
    return ()


def _set(peer: Peer, target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


_OPERATIONS = {
    "call": call,
    "get": lambda peer, target, name: getattr(target, name),
    "set": _set,
    "item": lambda peer, target, key: target[key],
    "iter": lambda peer, target: _Steps(iter(target)),
    "next": _next,
    "bool": lambda peer, target: bool(target),
    "len": lambda peer, target: len(target),
    "str": lambda peer, target: str(target),
    "repr": lambda peer, target: repr(target),
}


class _Steps:
    """An iterator that never crosses as data."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return self.inner
