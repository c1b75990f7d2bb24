"""The other side's process: an interpreter of its own on our script, one JSON document a line each way."""

import json
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPT = Path(__file__).with_name("kvpress_side.py")
PACKAGE = "kvpress==0.5.5"


class PeerError(RuntimeError):
    """The peer cannot be asked; says which interpreter and what to do."""


class Peer:
    """A running peer. A context manager; its process ends with it."""

    def __init__(self, python: Path) -> None:
        self.python = python
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            # Isolated: neither this environment's paths nor the script's folder are the peer's business.
            self._process = subprocess.Popen(
                [str(python), "-I", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
        except OSError as error:
            self._said.close()
            raise PeerError(
                f"--peer-python {python} cannot be started ({error.strerror}): make an environment with "
                f"`python3.11 -m venv FOLDER`, `FOLDER/bin/pip install {PACKAGE}`, and pass FOLDER/bin/python"
            ) from error

    def start(self, request: dict[str, Any]) -> dict[str, str]:
        """Load what is asked; the versions over there. Raises PeerError where kvpress or what it needs is missing."""
        reply = self.ask(request)
        if "missing" in reply:
            raise PeerError(
                f"--peer-python {self.python} (Python {reply['python']}) has no {reply['missing']}: install it there "
                f"with `{self.python} -m pip install {PACKAGE}`"
            )
        return reply["versions"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises PeerError with the end of what it said where it gives none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"--peer-python {self.python} ended with code {self._process.wait()}: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()
        self._said.close()
