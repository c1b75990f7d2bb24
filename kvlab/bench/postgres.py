"""A PostgreSQL server of one's own, thrown away afterwards: in a temporary folder, on a unix socket."""

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

_PLACES = ("/usr/lib/postgresql", "/usr/pgsql", "/opt/homebrew/opt/postgresql")
_USERS = ("postgres", "nobody")


class NoServerError(RuntimeError):
    """No server can be started here; the message says why and what would help."""


class Server:
    """Starts on construction. `stop` and `start` as often as wanted; a context manager that removes everything."""

    def __init__(self, *, durable: bool = True) -> None:
        self.bin, self.user = _programs(), _user()
        self.folder = Path(tempfile.mkdtemp(prefix="kvlab-pg-", dir="/tmp"))
        self.durable = durable
        if self.user:
            os.chown(self.folder, pwd.getpwnam(self.user).pw_uid, -1)
        try:
            self._run("initdb", "-D", str(self._data), "-U", "kvlab", "-A", "trust", "-E", "UTF8", "--no-sync")
            self.start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def url(self) -> str:
        return f"postgresql://kvlab@/postgres?host={self.folder}"

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        """Start and wait until it answers."""
        options = f"-k {self.folder} -c listen_addresses= -c max_connections=200"
        options += "" if self.durable else " -F"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop: `immediate` is a crash, `fast` ends sessions, `smart` waits for them."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", mode, "stop")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if (self._data / "postmaster.pid").exists():
                self.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.bin / program), *arguments]
        with tempfile.TemporaryFile("w+") as said:
            # A file, not a pipe: the server keeps its starter's output open for as long as it runs.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=self.folder, user=self.user
            )
            said.seek(0)
            if done.returncode:
                raise NoServerError(f"{program} failed ({done.returncode}): {said.read().strip()[-500:]}")


def _programs() -> Path:
    """Where the server's programs lie, the newest of them."""
    found = shutil.which("pg_ctl")
    versions = [p for place in _PLACES for p in Path(place).glob("*/bin") if (p / "pg_ctl").exists()]
    if not found and not versions:
        raise NoServerError("PostgreSQL is not installed: on Debian, apt-get install postgresql")
    return max(versions, key=lambda p: float(p.parent.name)) if versions else Path(str(found)).parent


def _user() -> str | None:
    """Whom to be: the server refuses root."""
    if os.geteuid():
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in _USERS:
        if name in known:
            return name
    raise NoServerError(f"PostgreSQL does not run as root, and there is no user {' or '.join(_USERS)} to be")
