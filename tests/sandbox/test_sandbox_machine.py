"""The machine around the sandbox: who may use it, what is said where it can not be, and what is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import below, eventually, gone

from kvlab.sandbox import Limits, Program, Sandbox, SandboxUnavailable, running, worker
from kvlab.sandbox.__main__ import main
from kvlab.sandbox.refused import FIXES, refused

ROOT = Path(__file__).resolve().parents[2]
SLEEPS = Program(source="import time\ndef f(): time.sleep(1e6)", tests="f()", entry="f")
QUICK = Program(source="def f(): return 1", tests="assert f() == 1", entry="f")
SHORT = Limits(cpu_s=1, wall_s=1.5)
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts a process that runs a program which never ends."""
    started = []

    def start(before: str = "") -> subprocess.Popen:
        script = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from kvlab.sandbox import Limits, Program, Sandbox
with Sandbox(Limits(cpu_s=600, wall_s=1e6), workers=2) as sandbox:
{textwrap.indent(before, "    ")}
    sandbox.run([Program(source={SLEEPS.source!r}, tests="f()", entry="f")] * 2)
"""
        started.append(subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("before", ["", "if os.fork() == 0: time.sleep(1e6)"], ids=["alone", "with a forked child"])
def test_a_killed_owner_takes_everything_along(owner: Callable[[str], subprocess.Popen], before: str) -> None:
    process = owner(before)
    # Side by side, two of each: nursery, waiter, judge, keeper and solver.
    assert eventually(lambda: len(below(process.pid)) >= 10 + bool(before)), process.poll()
    mine = below(process.pid)
    (forked,) = [pid for pid in mine if b"Sandbox(" in Path(f"/proc/{pid}/cmdline").read_bytes()] if before else (None,)
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        assert eventually(lambda: gone(mine - {forked}))
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)
            assert eventually(lambda: gone({forked}))


def test_an_interrupt_ends_what_runs(owner: Callable[[str], subprocess.Popen]) -> None:
    process = owner("")
    assert eventually(lambda: len(below(process.pid)) >= 10), process.poll()
    mine = below(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    assert eventually(lambda: gone(mine))


def test_a_killed_nursery_is_an_error_and_not_a_verdict() -> None:
    with Sandbox(SHORT, workers=1) as sandbox:
        assert sandbox.run([QUICK])[0].passed
        (nursery,) = below(os.getpid())
        os.kill(nursery, signal.SIGKILL)
        with pytest.raises(SandboxUnavailable, match="while it was being set up"):
            sandbox.run([QUICK])


def test_a_killed_waiter_takes_its_cell_along() -> None:
    with Sandbox(Limits(wall_s=600), workers=1) as sandbox:
        found: list[Exception] = []

        def work() -> None:
            try:
                sandbox.run([SLEEPS])
            except (SandboxUnavailable, RuntimeError) as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert eventually(lambda: len(below(os.getpid())) == 5)
        everyone = below(os.getpid())
        (nursery,) = [pid for pid in everyone if len(below(pid)) == 4]
        (waiter,) = [pid for pid in everyone if len(below(pid)) == 3]
        os.kill(waiter, signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive()
        assert len(found) == 1
        assert eventually(lambda: gone(everyone - {nursery}))


def test_a_timeout_leaves_no_process() -> None:
    with Sandbox(SHORT, workers=1) as sandbox:
        before = below(os.getpid())
        assert sandbox.run([SLEEPS])[0].verdict == "timeout"
        assert below(os.getpid()) == before
        assert sandbox.run([QUICK])[0].passed


# -- where it can run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copied() -> Iterator[Path]:
    """kvlab's sandbox where every user can read it, and nothing else of kvlab."""
    folder = Path("/var/tmp") / f"kvlab-test-{os.getpid()}"
    (folder / "kvlab").mkdir(parents=True)
    try:
        shutil.copy(ROOT / "kvlab/__init__.py", folder / "kvlab")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "kvlab/sandbox", folder / "kvlab/sandbox", ignore=ignored)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


def python_for_all() -> str:
    """A Python that every user may run."""
    for found in filter(None, (shutil.which(name, path="/usr/bin:/usr/local/bin") for name in ("python3", "python"))):
        asked = [found, "-c", "import sys, ctypes; print(sys.version_info >= (3, 11))"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == "True":
            return found
    pytest.skip("no Python of 3.11 or newer in /usr/bin or /usr/local/bin that another user could run")


def test_an_ordinary_user_can_use_it(copied: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: every other test here is this one")
    done = subprocess.run(
        [python_for_all(), "-m", "kvlab.sandbox", "--json"],
        capture_output=True, text=True, check=False, cwd=copied, env={}, user=12345, group=12345, extra_groups=[],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


@pytest.mark.parametrize(
    ("setting", "named"),
    [("user", "user"), ("pid", "PID"), ("net", "network"), ("mnt", "mount"), ("ipc", "IPC"), ("uts", "UTS")],
)
def test_a_machine_without_a_part_is_told_which(setting: str, named: str) -> None:
    """A user namespace in which no more of one kind may be made: such a machine, for all that runs in it."""
    forbid = f"""
import os, sys
users = (os.getuid(), os.getgid())
sys.path.insert(0, {str(ROOT)!r})
from kvlab.sandbox import linux
linux.unshare(linux.CLONE_NEWUSER, "user namespaces")
for name, text in [("setgroups", "deny"), ("uid_map", f"0 {{users[0]}} 1"), ("gid_map", f"0 {{users[1]}} 1")]:
    with open(f"/proc/self/{{name}}", "w") as file:
        file.write(text)
with open("/proc/sys/user/max_{setting}_namespaces", "w") as file:
    file.write("0")
from kvlab.sandbox.__main__ import main
sys.exit(main(["--json"]))
"""
    done = subprocess.run([sys.executable, "-c", forbid], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    why = json.loads(done.stdout)["why"]
    assert why.startswith(f"the sandbox needs {named} namespaces, refused here (No space left on device): allow them")
    assert "sysctl" in why


def test_every_refusal_says_what_to_change() -> None:
    for primitive in FIXES:
        assert len(str(refused(primitive, 1)).partition("): ")[2]) > 20
    assert "Operation not permitted" in str(refused("something new", 1))


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(running.sys, "platform", "darwin")
        with pytest.raises(SandboxUnavailable, match=r"darwin.*Linux"), Sandbox():
            pass
    real = os.uname()
    with monkeypatch.context() as patch:
        patch.setattr(running.os, "uname", lambda: os.uname_result((*real[:4], "riscv64")))
        with pytest.raises(SandboxUnavailable, match="riscv64"), Sandbox():
            pass
    with monkeypatch.context() as patch:
        patch.setattr(running.sys, "executable", "")
        with pytest.raises(SandboxUnavailable, match=r"sys\.executable"), Sandbox():
            pass


def test_a_sandbox_whose_harness_fails_gives_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "_HOME", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="No module named 'kvlab'"), Sandbox(workers=1):
        pass


def test_the_command_says_yes_or_why_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    assert "canaries got their verdicts" in capsys.readouterr().out
    monkeypatch.setattr(running.sys, "platform", "darwin")
    assert main(["--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"] is False
    assert "darwin" in shown.err
    with pytest.raises(SystemExit) as wrong:
        main(["--unknown"])
    assert wrong.value.code == 2


def test_the_kernel_s_threads_limit_is_the_one_that_is_set() -> None:
    """Found by counting: as root no limit on processes may bind."""
    source = textwrap.dedent("""
        import threading as t
        t.stack_size(65536)
        def f():
            count = 0
            try:
                while count < 200:
                    t.Thread(target=t.Event().wait).start()
                    count += 1
            except RuntimeError:
                pass
            return count
    """)
    for threads in (4, 40):
        tests = f"n = f()\nassert {threads} <= n <= {threads + 2}, n"
        with Sandbox(Limits(threads=threads), workers=1) as sandbox:
            assert sandbox.run([Program(source=source, tests=tests, entry="f")])[0].verdict == "passed"
