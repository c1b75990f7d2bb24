"""Ways to a pass that is none. Each is tried by code that is wrong; what it says of itself must not count."""

import secrets
import textwrap

import pytest

from kvlab.sandbox import Outcome, Program, Sandbox

TESTS = """
import unittest
assert double(2) == 4
assert double([1]) == [1, 1]
unittest.TestCase().assertEqual(double("a"), "aa")
"""
WRONG = "def double(x): return 0\n"
# Name -> code that is wrong and tries to pass. One verdict each, and none of them the one it wants.
FORGED: dict[str, tuple[str, str]] = {
    "nothing": (WRONG, "wrong"),
    "equal to everything": (
        "class Yes:\n  __eq__ = lambda s, o: True\n  __hash__ = None\ndef double(x): return Yes()", "wrong"),
    "a number equal to everything": (
        "class Yes(int):\n  __eq__ = lambda s, o: True\n  __ne__ = lambda s, o: False\ndef double(x): return Yes()",
        "wrong"),
    "a list equal to everything": (
        "class Yes(list):\n  __eq__ = lambda s, o: True\ndef double(x): return Yes()", "wrong"),
    "answers that compare through a metaclass": (
        "class M(type):\n  __eq__ = lambda s, o: True\n  __hash__ = type.__hash__\nclass A(metaclass=M): pass\n"
        "def double(x): return A", "wrong"),
    "not implemented": ("def double(x): return NotImplemented", "wrong"),
    "not a number": ("def double(x): return float('nan')", "wrong"),
    "built-ins": (
        "import builtins\nfor name in ('AssertionError', 'Exception', 'compile', 'exec', 'isinstance', 'type'):\n"
        "  setattr(builtins, name, lambda *a, **k: True)\n" + WRONG, "exited_early"),
    "assertions": ("import builtins\nclass A(Exception): pass\nbuiltins.AssertionError = A\n" + WRONG, "wrong"),
    "unittest": ("import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + WRONG, "wrong"),
    "tracing": (
        "import sys, threading\ndef t(*a): return t\nsys.settrace(t)\nthreading.settrace(t)\n" + WRONG, "wrong"),
    "a handler that swallows": ("import sys\nsys.excepthook = lambda *a: None\n" + WRONG, "wrong"),
    "exit 0": ("import os\ndef double(x): os._exit(0)", "exited_early"),
    "exit 0 in the end": ("import atexit, os\natexit.register(os._exit, 0)\n" + WRONG, "wrong"),
    "StopIteration": ("def double(x): raise StopIteration", "crashed"),
    "its own AssertionError": ("def double(x): raise AssertionError", "crashed"),
    "the verdict's words on every file": (
        "import os\nfor file in range(256):\n  for word in (b'S', b'passed\\0', b'Spassed\\0'):\n"
        "    try: os.write(file, word)\n    except OSError: pass\n" + WRONG, "output_limit"),
    "the harness' own frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n  for name, value in frame.f_locals.items():\n"
        "    if hasattr(value, 'tells'): value.tells = lambda error: ('passed', 'str', ())\n  frame = frame.f_back\n"
        "def double(x): raise ValueError", "crashed"),
    "the harness' own modules": (
        "import sys\nsys.modules['kvlab.sandbox.judge'].judge = lambda *a: ('passed', '')\n"
        "sys.modules['kvlab.sandbox.judge']._failed = lambda *a: ('passed', '')\n" + WRONG, "wrong"),
    "tests of its own": ("tests = 'pass'\ngiven = ''\nentry = 'double'\nunittest = None\n" + WRONG, "wrong"),
    "a look into another process": (
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nfor p in (1, 2, 3, 4):\n"
        "  if l.ptrace(16, p, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'ptrace')\n" + WRONG, "forbidden"),
    "a write into another process": (
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nfor p in (1, 3):\n"
        "  if l.process_vm_writev(p, 0, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'write')\n" + WRONG,
        "forbidden"),
    "new namespaces": (
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
        "if l.unshare(1 << 28) < 0: raise OSError(ctypes.get_errno(), 'unshare')\n" + WRONG, "forbidden"),
    "another's limits": ("import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\n" + WRONG, "forbidden"),
}  # fmt: skip


def one(sandbox: Sandbox, source: str, tests: str = TESTS, entry: str = "double", given: str = "") -> Outcome:
    (outcome,) = sandbox.run([Program(source=source, tests=tests, entry=entry, given=given)])
    return outcome


@pytest.mark.parametrize("name", FORGED)
def test_no_forgery_passes(sandbox: Sandbox, name: str) -> None:
    source, verdict = FORGED[name]
    outcome = one(sandbox, source)
    assert outcome.verdict == verdict, outcome


# Looks for b"needle-" and 16 digits wherever code can look: objects, frames, files, open files, the whole heap.
SEARCH = r"""
import ctypes, gc, os, re, sys

PATTERN = re.compile(rb"needle-[0-9a-f]{16}")

def heap():
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    end, block = libc.sbrk(0), 1 << 20
    blocks = {id(o) // block for o in gc.get_objects()} | {(end - k * block) // block for k in range(64)}
    read, write = os.pipe()
    for start in sorted(blocks):
        for page in range(start * block - 4096, (start + 1) * block, 4096):
            if libc.write(write, ctypes.c_void_p(page), 8192) == 8192:  # refused, not killed, where nothing is mapped
                yield os.read(read, 8192)

def everything():
    for o in gc.get_objects():
        yield repr(o)[:100_000].encode("utf-8", "replace") if type(o) in (dict, list, tuple) else b""
    for frame in sys._current_frames().values():
        while frame:
            yield repr(frame.f_locals).encode("utf-8", "replace")
            yield repr(frame.f_code.co_consts).encode("utf-8", "replace")
            frame = frame.f_back
    for file in range(256):
        try:
            yield os.pread(file, 1 << 20, 0)
        except OSError:
            pass
    for folder, _, names in os.walk("/tmp"):
        for name in names:
            yield open(os.path.join(folder, name), "rb").read()
    yield from heap()

def told(places=everything):
    for text in places():
        found = PATTERN.search(text)
        if found:
            return found.group().decode()
    return "not found"

def told_by_the_heap():
    return told(heap)
"""


def test_what_is_expected_is_nowhere_in_the_code_s_process(sandbox: Sandbox) -> None:
    needle = f"needle-{secrets.token_hex(8)}"
    there = f"hidden = bytes([x ^ 1 for x in {bytes(x ^ 1 for x in needle.encode())!r}])\n"  # only once it runs
    for search in ("told", "told_by_the_heap"):  # can it find at all?
        assert one(sandbox, there + SEARCH, f"assert {search}() == {needle!r}", search).passed
    tests = f"expected = {needle!r}\ndef check(f):\n    assert f() == {needle!r}, f()\ncheck(told)"
    outcome = one(sandbox, SEARCH, tests, "told", given=f"hint = {needle!r}")
    assert (outcome.verdict, outcome.detail[-11:]) == ("wrong", "(not found)")


def test_tests_that_catch_everything_notice_that_the_code_is_gone(sandbox: Sandbox) -> None:
    tests = "try:\n    double(2)\n    assert False\nexcept {}:\n    pass"
    ends, breaks = "import os\ndef double(x): os._exit(0)", "import os\ndef double(x): os.closerange(3, 256)"
    for caught in ("Exception", "BaseException"):
        assert one(sandbox, "def double(x): raise ValueError", tests.format(caught)).passed
        assert one(sandbox, ends, tests.format(caught)).verdict == "exited_early"
        assert one(sandbox, breaks, tests.format(caught)).verdict == "exited_early"
    garbage = (
        "import os\ndef double(x):\n  for f in range(3, 64):\n    try: os.write(f, bytes(64))\n    except OSError: pass"
    )
    assert not one(sandbox, garbage, tests.format("BaseException")).passed


def test_the_tests_side_does_what_it_is_asked_by_nobody(sandbox: Sandbox) -> None:
    """The code finds its end of the channel and asks, in the middle of a call, for what was not handed to it."""
    source = """
import gc
def double(x):
    (peer,) = [o for o in gc.get_objects() if type(o).__name__ == "Peer"]
    {}
    return x + x
"""
    assert one(sandbox, source.format("pass")).passed
    asked = {
        "peer.ask('call', int, ('5',), {})": "handed over",
        "peer.ask('get', int, 'real')": "'get'",
        "peer.ask('lookup', 'expected')": "'lookup'",
        "peer.ask('names')": "'names'",
        "peer._send(('answer',))": "wrong length",
        "peer._send(('answer', 4, 4))": "wrong length",
        "peer._send(4)": "neither a question",
        "peer._send(('raise', 'passed', 'str', ()))": "can not be read",
        "peer._send(('answer', (4, [(0, [4])])))": "can not be read",
        "peer._send(('answer', (4, [(9, [4])])))": "can not be read",
    }
    for what, why in asked.items():
        outcome = one(sandbox, source.format(what))
        assert (outcome.verdict, why in outcome.detail) == ("crashed", True), (what, outcome)


def test_control_flow_does_not_cross_into_loops_of_the_tests(sandbox: Sandbox) -> None:
    tests = "assert all(map(lambda x: double(x) == x + x, [1, 2, 3]))\nassert list(map(double, [1, 2])) == [2, 4]"
    assert one(sandbox, "def double(x): return x + x", tests).passed
    for name in ("StopIteration", "GeneratorExit", "StopAsyncIteration"):
        assert one(sandbox, f"def double(x): raise {name}", tests).verdict in ("crashed", "exited_early")


def test_code_has_no_say_in_names_that_the_tests_rely_on(sandbox: Sandbox) -> None:
    given = "def close(a, b):\n    return abs(a - b) < 1e-9\n"
    source = (
        "close = len = all = isinstance = abs = lambda *a: True\n"
        "class math:\n  isclose = staticmethod(lambda *a: True)\n"
        "def half(x): return 0\n"
    )
    for tests in (
        "assert close(half(1), 0.5)",
        "assert abs(half(1) - 0.5) < 1e-9",
        "assert math.isclose(half(1), 0.5)",
        "assert all(half(x) == x / 2 for x in [1, 2])",
        "assert isinstance(half(1), float)",
    ):
        assert one(sandbox, source, tests, "half", given).verdict == "wrong", tests
        assert one(sandbox, source + "def half(x): return x / 2", tests, "half", given).passed, tests


def test_what_the_code_defines_can_be_used_by_the_tests(sandbox: Sandbox) -> None:
    source = textwrap.dedent("""
        class Node:
            def __init__(self, value):
                self.value, self.next = value, None
            def __len__(self):
                return 1 + (len(self.next) if self.next else 0)
            def __iter__(self):
                node = self
                while node:
                    yield node.value
                    node = node.next
            def __repr__(self):
                return f"Node({self.value})"
        FIRST = [1, 2]
        def total(node):
            return 0 if node is None else node.value + total(node.next)
        def apply(f, x):
            x.append(f(x[0]))
            return f
        def sum(a, b):
            return a * b
        def up_to(n):
            yield from range(n)
    """)
    tests = textwrap.dedent("""
        node = Node(3)
        node.next = Node(4)
        assert total(node) == 7
        assert (len(node), list(node), str(node), node.next.value) == (2, [3, 4], "Node(3)", 4)
        assert node.next == node.next and node.next is node.next and node != node.next
        assert node.missing is None if hasattr(node, "missing") else True
        seen = []
        values = [5]
        f = lambda x: seen.append(x) or x + 1
        assert apply(f, values) is f
        assert (values, seen) == ([5, 6], [5])
        assert FIRST == [1, 2]
        assert (list(up_to(3)), list(zip(up_to(2), "ab"))) == ([0, 1, 2], [(0, "a"), (1, "b")])
        try:
            apply(f, ())
        except AttributeError:
            pass
        assert sum([1, 2]) == 3
    """)
    outcome = one(sandbox, source, tests, entry="")
    assert outcome.passed, outcome
    assert one(sandbox, source, "assert sum(3, 4) == 12", entry="").passed  # nothing else it could mean
    assert one(sandbox, source, "assert sum(3, 4) == 12", entry="sum").passed
    assert one(sandbox, source, "assert sum(3, 4) == 7", entry="sum").verdict == "wrong"


def test_exceptions_arrive_as_what_they_are(sandbox: Sandbox) -> None:
    kinds = "{'own': Own, 'value': ValueError, 'os': OSError}"
    source = f"class Own(KeyError): pass\ndef f(kind):\n  raise {kinds}[kind](2, 'x')"
    tests = textwrap.dedent("""
        for kind, expected in {"own": KeyError, "value": ValueError, "os": FileNotFoundError}.items():
            try:
                f(kind)
            except expected as error:
                assert error.args == (2, "x"), error.args
            else:
                assert False
    """)
    assert one(sandbox, source, tests, "f").passed
    assert one(sandbox, source, tests.replace("(2,", "(3,"), "f").verdict == "wrong"
