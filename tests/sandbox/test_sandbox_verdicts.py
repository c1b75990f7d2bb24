"""Verdicts of right, wrong and hostile programs: each is contained, and each says what it was."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.evals.code_answers import program
from kvlab.evals.item import CodeCheck
from kvlab.sandbox import MEANINGS, VERDICTS, CanaryError, Limits, Outcome, Program, Sandbox, run
from kvlab.sandbox.canaries import CANARIES, check
from kvlab.sandbox.root import libraries

RIGHT = "def double(x):\n    return x + x\n"
TESTS = "assert double(2) == 4\nassert double([1]) == [1, 1]"


def while_called(text: str) -> str:
    """The right answer, after something else."""
    return f"def double(x):\n{textwrap.indent(text, '    ')}\n    return x + x\n"


def one(sandbox: Sandbox, source: str, tests: str = TESTS, entry: str = "double", given: str = "") -> Outcome:
    (outcome,) = sandbox.run([Program(source=source, tests=tests, entry=entry, given=given)])
    return outcome


# What ends by itself. Name -> source, verdict, and a part of the reason.
HOSTILE: dict[str, tuple[str, str, str]] = {
    "fork bomb": ("import os\nwhile True: os.fork()\n" + RIGHT, "forbidden", "not permitted (line 2)"),
    "fork in a call": (while_called("import os; os.fork()"), "forbidden", "not permitted (line 2)"),
    "child that sleeps": (
        while_called("import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1e6)"), "forbidden", "line 3"),
    "subprocess": (while_called("import subprocess; subprocess.run(['true'])"), "forbidden", "not permitted"),
    "spawn": (while_called("import os; os.posix_spawn('/bin/true', ['true'], {})"), "forbidden", "not permitted"),
    "exec": (while_called("import os; os.execv('/bin/true', ['true'])"), "forbidden", "not permitted"),
    "threads": (
        while_called("import threading as t\nt.stack_size(65536)\nfor _ in range(100): t.Thread(target=t.Event().wait)"
                     ".start()"), "forbidden", "start new thread"),
    "internet": (while_called("import socket; socket.socket()"), "forbidden", "not permitted"),
    "urllib": (while_called("import urllib.request as u; u.urlopen('http://127.0.0.1:9/')"), "forbidden", "permitted"),
    "abstract socket": (
        while_called("import socket as s; s.socket(s.AF_UNIX).connect('\\0x')"), "forbidden", "not permitted"),
    "socket to the host of a machine": (while_called("import socket; socket.socket(40, 1)"), "forbidden", "permitted"),
    "write to the root": (while_called("open('/kvlab_x', 'w')"), "forbidden", "Read-only"),
    "write to a library": (while_called("import os; open(os.__file__, 'a')"), "forbidden", "Errno"),
    "delete the libraries": (
        while_called("import os, shutil; shutil.rmtree(os.path.dirname(os.__file__))"), "forbidden", "Errno"),
    "read accounts": (while_called("open('/etc/passwd')"), "crashed", "FileNotFoundError"),
    "read its own memory map": (while_called("open('/proc/self/maps')"), "crashed", "FileNotFoundError"),
    "read this test": (while_called(f"open({__file__!r})"), "crashed", "FileNotFoundError"),
    "memory at once": (while_called("bytearray(1 << 40)"), "memory", "MemoryError"),
    "memory bit by bit": (while_called("y = []\nwhile True: y.append(bytearray(1 << 20))"), "memory", "MemoryError"),
    "memory with a file": (while_called("import os; os.memfd_create('x')"), "forbidden", "not permitted"),
    "files": (
        while_called("for i in range(10**6):\n  with open(f'{i}', 'wb') as f: f.write(bytes(1 << 18))"),
        "output_limit", "No space"),
    "one file": (
        while_called("with open('f', 'wb') as f:\n  while True: f.write(bytes(9999))"), "output_limit", "wrote more"),
    "endless output": (while_called("while True: print('x' * 1000)"), "output_limit", "wrote more"),
    "endless complaints": (
        while_called("import sys\nwhile True: sys.stderr.write('x' * 1000)"), "output_limit", "wrote more"),
    "ten megabytes": (while_called("print('x' * 10_000_000)"), "output_limit", "wrote more"),
    "a long answer": ("def double(x): return 'x' * (1 << 26)", "output_limit", "bytes in one value"),
    "a deep answer": (
        "def double(x):\n  y = []\n  for _ in range(10**5): y = [y]\n  return y", "crashed", "RecursionError"),
    "an answer that holds itself": ("def double(x):\n  y = []\n  y.append(y)\n  return y", "wrong", "line 1"),
    "kill the parent": (while_called("import os; os.kill(os.getppid(), 9)"), "forbidden", "not permitted"),
    "kill its group": (while_called("import os; os.kill(0, 9)"), "forbidden", "not permitted"),
    "kill everything": (while_called("import os; os.kill(-1, 9)"), "forbidden", "not permitted"),
    "kill itself": (while_called("import os; os.kill(os.getpid(), 9)"), "crashed", "SIGKILL"),
    "terminate itself": (while_called("import os; os.kill(os.getpid(), 15)"), "crashed", "SIGTERM"),
    "abort": (while_called("import os; os.abort()"), "crashed", "SIGABRT"),
    "read address 0": (while_called("import ctypes; ctypes.string_at(0)"), "crashed", "SIGSEGV"),
    "become root": (while_called("import os; os.setuid(0)"), "forbidden", "not permitted"),
    "_exit": (while_called("import os; os._exit(0)"), "exited_early", "exit code 0"),
    "_exit when loaded": ("import os; os._exit(0)\n" + RIGHT, "exited_early", "exit code 0"),
    "sys.exit": (while_called("import sys; sys.exit(0)"), "exited_early", "SystemExit"),
    "exit when loaded": (RIGHT + "exit()", "exited_early", "SystemExit"),
    "quit": (while_called("quit()"), "exited_early", "SystemExit"),
    "interrupt": ("def double(x): raise KeyboardInterrupt", "exited_early", "KeyboardInterrupt"),
    "close every file": ("import os\nos.closerange(0, 256)\n" + RIGHT, "exited_early", "before the tests"),
    "input": (while_called("input()"), "stdin", "closed"),
    "read stdin": (while_called("import sys; sys.stdin.read()"), "stdin", "closed"),
    "lines of stdin": (while_called("import sys; [line for line in sys.stdin]"), "stdin", "closed"),
    "fileinput": (while_called("import fileinput; list(fileinput.input())"), "stdin", "closed"),
    "open(0)": (while_called("open(0).read()"), "stdin", "line 2"),
    "os.read(0)": (while_called("import os; os.read(0, 1)"), "stdin", "line 2"),
    "recursion": ("def double(x): return double(x) + 1", "crashed", "RecursionError"),
    "recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __getattr__(s, n): return getattr(s, n + 'x')\n"
        "def double(x): return A().x", "crashed", "SIGSEGV"),
    "a huge number": ("def double(x): return 1 << (1 << 33)", "memory", "MemoryError"),
    "an exception of its own": (
        "class Oops(Exception): pass\ndef double(x): raise Oops('\\x1b[31mred')", "crashed", "Oops:  [31mred (line 2)"),
    "no function": ("def triple(x): return 3 * x", "wrong", "defines no 'double'"),
    "not Python": ("def double(x) return x", "syntax", "expected ':'"),
    "a null byte": ("x = '\0'", "syntax", "null bytes"),
    "parentheses": ("(" * 10000 + ")" * 10000, "syntax", "nested"),
    "nothing": ("", "wrong", "defines no"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_contained_and_named(sandbox: Sandbox, name: str) -> None:
    source, verdict, reason = HOSTILE[name]
    outcome = one(sandbox, source)
    assert (outcome.verdict, reason in outcome.detail) == (verdict, True), outcome
    assert one(sandbox, RIGHT).passed  # and the next one finds all in order


_DEAF = "import signal, time\nfor s in {1, 2, 3, 15, 24, 25}: signal.signal(s, signal.SIG_IGN)\n"
ENDLESS = {
    "loop": "while True: pass",
    "loop that is deaf": _DEAF + "while True: pass",
    "sleep that is deaf": _DEAF + "while True: time.sleep(1e6)",
    "loop when called": "def double(x):\n  while True: pass",
    "arithmetic": "def double(x): return 9 ** 9 ** 9",
    "forks that fail": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "a stopped process": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "endless answers": "def double(x):\n  while True: yield x\n",
}


def test_what_never_ends_is_ended(short: Sandbox) -> None:
    tests = "assert list(double(2)) == 4"
    outcomes = short.run([Program(source=text + "\n", tests=tests) for text in ENDLESS.values()])
    assert dict(zip(ENDLESS, (o.verdict for o in outcomes), strict=True)) == dict.fromkeys(ENDLESS, "timeout")


def test_code_that_hangs_up_and_stays_is_ended(sandbox: Sandbox) -> None:
    outcome = one(sandbox, "import os, time\ndef double(x):\n  os.closerange(0, 256)\n  time.sleep(1e6)")
    assert (outcome.verdict, outcome.detail) == ("exited_early", "closed the channel it answers through")


def test_processor_time_is_a_limit_of_its_own(kernel_allows: None) -> None:
    limits = Limits(cpu_s=1, wall_s=600)
    (spins,) = run([Program(source="while True: pass", tests="pass")], limits, workers=1)
    assert (spins.verdict, spins.detail) == ("timeout", "used 1 s of processor time")


def test_five_shapes_of_a_right_answer_pass(sandbox: Sandbox) -> None:
    prompt = 'import math\n\n\ndef area(r):\n    """ Area of a disc.\n    """\n'
    tests = "import math\nassert area(1) == math.pi\nassert area(0) == 0"
    answer = CodeCheck(before=prompt, entry="area", tests=tests)
    full = "def area(r):\n    return math.pi * r ** 2\n"
    shapes = {
        "body": "    return math.pi * r ** 2\n",
        "full": full,
        "fenced": f"Here it is:\n```python\n{full}```\nIt squares the radius.",
        "helper": "    return math.pi * square(r)\n\n\ndef square(r):\n    return r * r\n",
        "tabs": "\tif r:\n\t\treturn math.pi * r ** 2\n\treturn 0\n",
    }
    for wrong, verdict in (("", "passed"), (" + 1e-9", "wrong")):
        sources = [program(answer, text.replace("math.pi", f"math.pi{wrong}")) for text in shapes.values()]
        outcomes = sandbox.run(
            [Program(source=source or "", tests=tests, entry="area", given=prompt) for source in sources]
        )
        assert [outcome.verdict for outcome in outcomes[:4]] == [verdict] * 4
        assert outcomes[4].verdict == "passed" or wrong


def test_printing_and_reading_back_are_no_fault(sandbox: Sandbox) -> None:
    source = while_called("print('x' * 1000)\nwith open('f', 'w') as f: f.write('y')\nassert open('f').read() == 'y'")
    assert one(sandbox, source).passed
    assert one(sandbox, while_called("import os\nassert os.listdir() == []")).passed  # and the next finds nothing


def test_a_main_block_does_not_run(sandbox: Sandbox) -> None:
    assert one(sandbox, RIGHT + "if __name__ == '__main__':\n    print(double(int(input())))\n").passed


def test_what_a_program_leaves_running_is_no_fault(sandbox: Sandbox) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,)).start()\n"
    left = f"{thread}import atexit\natexit.register(input)\n"
    assert one(sandbox, left + RIGHT).passed


def test_nothing_of_the_caller_is_seen(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLAB_SECRET", "not for programs")
    (tmp_path / "answers.json").write_text("{}")
    hidden = [__file__, str(tmp_path), "/etc/passwd", "/proc/self", "/sys", "/var", "/run", "/dev/shm", "/usr/bin"]
    source = f"""
import os, sys
def told():
    there = [path for path in {hidden} if os.path.exists(path)]
    return sorted(os.environ), sys.argv, os.getuid(), os.getgid(), there, os.listdir('/'), os.listdir('/tmp')
"""
    top = {"dev", "empty", "tmp", *(folder.split("/")[1] for folder in libraries())}
    tests = f"""
environment, arguments, user, group, there, root, folder = told()
assert environment == ['HOME', 'LANG', 'PYTHONHASHSEED', 'TMPDIR'], environment
assert (arguments, user, group, there, folder) == (['solution'], 65534, 65534, [], []), there
assert set(root) <= {top}, root
"""
    with Sandbox(Limits(), workers=1) as opened:
        assert one(opened, source, tests, "told").verdict == "passed"


def test_what_code_holds_open_and_what_it_could_write(sandbox: Sandbox) -> None:
    """Five files: standard ones, questions and answers. Rights on files are not what keeps libraries as they are."""
    source = """
import os, sys
def opened():
    found = []
    for file in range(4096):
        try:
            os.fstat(file)
        except OSError:
            continue
        found.append(file)
    return found
def fixed():
    folders = ["/", "/empty", os.path.dirname(os.__file__), *(path for path in sys.path if os.path.isdir(path))]
    wanted = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV
    return [folder for folder in folders if os.statvfs(folder).f_flag & wanted != wanted]
def packages():
    folders = [os.path.join(path, "site-packages") for path in sys.path]
    return [name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]
"""
    tests = "assert len(opened()) == 5, opened()\nassert fixed() == [], fixed()\nassert packages() == [], packages()"
    outcome = one(sandbox, source, tests, "opened")
    assert outcome.passed, outcome


def test_outcomes_come_in_order_and_sets_in_one_order(sandbox: Sandbox) -> None:
    programs = [Program(source=f"def f(): return {n}", tests=f"assert f() == {n % 3}", entry="f") for n in range(12)]
    assert [o.verdict for o in sandbox.run(programs)] == [("passed" if n < 3 else "wrong") for n in range(12)]
    source = "def f(): return list(set('abcdefghijklmnop')), hash('kvlab')"
    told = {o.detail for o in sandbox.run([Program(source=source, tests="raise ValueError(f())", entry="f")] * 4)}
    assert len(told) == 1


def test_broken_tests_are_no_fault_of_the_code(sandbox: Sandbox) -> None:
    assert one(sandbox, RIGHT, "assert double(2) = 4").verdict == "bad_tests"
    assert one(sandbox, RIGHT, given="helper = missing + 1").verdict == "bad_tests"
    handed = "class A: pass\nassert double(A()) == 1"
    assert "can not be handed" in one(sandbox, RIGHT, handed).detail
    assert one(sandbox, RIGHT, "import sys\nsys.exit(0)").verdict == "exited_early"
    assert one(sandbox, RIGHT, "import os\nos._exit(0)").verdict == "crashed"
    assert one(sandbox, RIGHT, "assert double(2) == unknown").verdict == "wrong"


def test_canaries_cover_the_verdicts_and_a_wrong_one_ends_the_evaluation() -> None:
    assert {"passed", "wrong", "syntax", "exited_early", "output_limit", "stdin", "timeout", "forbidden"} <= {
        canary.verdict for canary in CANARIES
    }
    good = [Outcome(canary.verdict, "", 0.0) for canary in CANARIES]
    check(good)
    for place, canary in enumerate(CANARIES):
        other = "wrong" if canary.verdict == "passed" else "passed"
        bad = [*good[:place], replace(good[place], verdict=other), *good[place + 1 :]]
        with pytest.raises(CanaryError, match=rf"{canary.name}.*{canary.verdict}.*{other}"):
            check(bad)


def test_an_executor_that_passes_everything_is_refused(kernel_allows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlab.sandbox import worker

    monkeypatch.setattr(worker.Worker, "judge", lambda self, program, limits: Outcome("passed", "", 0.0))
    with pytest.raises(CanaryError, match="wrong"):
        run([Program(source=RIGHT, tests=TESTS)])
    monkeypatch.setattr(worker.Worker, "judge", lambda self, program, limits: Outcome("crashed", "", 0.0))
    with pytest.raises(CanaryError, match="right"):
        run([Program(source=RIGHT, tests=TESTS)])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="without tests"):
        Program(source=RIGHT, tests=" \n")
    with pytest.raises(ValueError, match="cpu_s"):
        Limits(cpu_s=0)
    with pytest.raises(ValueError, match="wall_s"):
        Limits(wall_s=float("nan"))
    with pytest.raises(ValueError, match="memory_bytes"):
        Limits(memory_bytes=1 << 20)
    with pytest.raises(ValueError, match="workers"):
        Sandbox(workers=0)
    assert tuple(MEANINGS) == VERDICTS
