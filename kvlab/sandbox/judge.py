"""The process in which the tests run. It never runs generated code: it calls it in another process and compares here.

So a pass is the tests' own end, reached in an interpreter the code under test had no part in. Names the tests use and
do not define (the function under test, a class the code brings along) stand for the other process' objects; names of
the standard library and of Python are this process' own.
"""

import builtins
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlab.sandbox.peer import CannotCrossError, Fault, GoneError, Peer, call
from kvlab.sandbox.wire import MalformedError, TooLongError

_FAULT = "_kvlab_fault"
# Control flow: raised inside map() or a for loop of the tests these would end it as if all was done.
_NOT_RAISED = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
KINDS = ("syntax", "crashed", "memory", "output_limit", "exited_early", "stdin", "forbidden")


class SolutionError(Exception):
    """The code under test raised something that is no built-in exception."""


class BadTestsError(Exception):
    """The fault lies with the set."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to judge: the tests, definitions they may rely on, and the function they test."""

    tests: str
    given: str
    entry: str


def judge(job: Job, read: int, write: int, most_bytes: int, ending: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """The verdict and its reason. `ending()` says why the other process ended, once it has."""
    peer = Peer(
        read, write, most_bytes, {"call": _call_lent}, refers=_may_be_called, raises=_raised, tells=_told_as_failed
    )
    try:
        tests = compile(job.tests, "<tests>", "exec", dont_inherit=True)
        given = compile(job.given, "<given>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return "bad_tests", f"the tests do not compile: {error}"
    try:
        return _judged(peer, job, tests, given)
    except GoneError:
        return ending()
    except MalformedError as error:
        return "crashed", f"broke the channel it answers through: {error}"
    except TooLongError as error:
        return "output_limit", str(error)
    except (BadTestsError, CannotCrossError) as error:
        return "bad_tests", str(error)
    # Tests are code from outside as well: what they raise is their verdict, SystemExit included.
    except BaseException as error:
        return _failed(error, job.tests)


def _judged(peer: Peer, job: Job, tests: types.CodeType, given: types.CodeType) -> tuple[str, str]:
    peer.ask("load")
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(given, space)
    except Exception as error:
        raise BadTestsError(f"the given code fails by itself: {type(error).__name__}: {error}") from error
    theirs = peer.ask("names")
    if type(theirs) is not list:
        raise MalformedError("names that are no list")
    if job.entry and job.entry not in theirs:
        return "wrong", f"defines no {job.entry!r}"
    if not all(type(name) is str for name in theirs):
        raise MalformedError("a name that is no text")
    wanted = _names(tests)
    shared = {name for name in theirs if name in wanted and name not in space and not _standard(name)}
    own = {name for name in shared if hasattr(builtins, name)}
    # A function that is called like a built-in one is meant where it is named, or where nothing else can be.
    meant = (shared - own) | {job.entry} if job.entry else (shared - own or own)
    for name in sorted(meant):
        space[name] = peer.ask("lookup", name)
    for name in wanted:
        if name not in space and _standard(name):
            exec(f"import {name}", space)  # a name of the standard library, as the tests could have written
    exec(tests, space)
    peer.ask("names")  # tests that catch every exception would not notice that nobody was there
    return "passed", ""


def _standard(name: str) -> bool:
    return name in sys.stdlib_module_names and not name.startswith("_")


def _names(code: types.CodeType) -> set[str]:
    """Names a code object and those inside it read or write; attributes are among them and do no harm."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _may_be_called(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _call_lent(peer: Peer, target: Any, arguments: tuple, named: dict) -> Any:
    if not any(target is lent for lent in peer.lent):
        raise MalformedError("a call of something that was not handed over")
    return call(peer, target, arguments, named)


def _raised(fault: Fault) -> BaseException:
    """The exception to raise in the tests for one raised in the code under test."""
    if fault.kind not in KINDS or type(fault.name) is not str or type(fault.arguments) is not tuple:
        raise MalformedError("an exception that can not be read")
    kind = getattr(builtins, fault.name, None)
    text, *arguments = fault.arguments or ("",)
    plain = isinstance(kind, type) and issubclass(kind, BaseException) and fault.name not in _NOT_RAISED
    try:
        error = kind(*arguments) if plain else SolutionError(text)  # type: ignore[misc]
    except (TypeError, ValueError):  # UnicodeDecodeError and its like need what did not cross
        error = SolutionError(text)
    setattr(error, _FAULT, (fault.kind, str(text)))
    return error


def _told_as_failed(error: BaseException) -> tuple[str, str, tuple]:
    """For a function of the tests that the code under test called."""
    return "crashed", type(error).__name__, ()


def _failed(error: BaseException, tests: str) -> tuple[str, str]:
    """Verdict and reason of an exception that ended the tests."""
    fault = getattr(error, _FAULT, None)
    if fault is not None:
        return fault
    place = _place(error, tests)
    if isinstance(error, AssertionError):
        return "wrong", f"{place}{f' ({error})' if error.args else ''}"
    if isinstance(error, MemoryError):
        return "memory", f"in the tests: {place}"
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return "exited_early", f"the tests ended the program: {place}"
    if isinstance(error, RecursionError):
        return "crashed", f"an answer nested too deep, or tests that are: {place}"
    return "wrong", f"{type(error).__name__}: {error} at {place}"


def _place(error: BaseException, tests: str) -> str:
    """The last line of the tests that was reached."""
    trace, number = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = tests.splitlines()
    return f"line {number}: {lines[number - 1].strip()[:160]}" if 0 < number <= len(lines) else "before the tests"


def ended(code: int, cpu_s: float, limit_s: float) -> tuple[str, str]:
    """Why a process ended before the tests did, from its wait status as `os.waitstatus_to_exitcode` gives it."""
    if code >= 0:
        return "exited_early", f"ended with exit code {code} before the tests were done"
    number = -code
    if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= limit_s):
        return "timeout", f"used {limit_s:g} s of processor time"
    if number == signal.SIGXFSZ:
        return "output_limit", "wrote more than is allowed"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return ("forbidden" if number == signal.SIGSYS else "crashed"), f"killed by {name}"
