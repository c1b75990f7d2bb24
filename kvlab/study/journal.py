"""A journal that survives writers killed in the middle of a line: an append-only file under a lock of the kernel.

Optuna's own file backend keeps its lock as a file, which a killed process leaves behind, and appends to a torn last
line, which no reader gets past. Here the kernel drops the lock with the process, and the next writer cuts the torn line
off: whoever wrote it was never told that it was written. Knows lines of JSON, not what they say.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

_BLOCK = 1 << 16


class JournalFile(BaseJournalBackend):
    """Log records as lines of one file. Not for files that another program appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = [0]  # where each record read so far begins, and where the next one will
        path.touch()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Records from `log_number_from` on. A last line without its end is not there yet."""
        number = min(log_number_from, len(self._offsets) - 1)
        with self.path.open("rb") as file:
            file.seek(self._offsets[number])
            data = file.read()
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            if number + 1 == len(self._offsets):
                self._offsets.append(self._offsets[number] + len(line))
            number += 1
            if number > log_number_from:
                yield self._parsed(line, number)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"line {number} of {self.path} is no JSON ({error}): the file was edited or written by another "
                "program. Restore it or start a new study"
            ) from None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write records and force them to disk; afterwards they survive a kill."""
        data = b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs)
        with FileIO(str(self.path), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = _whole(file)
            file.truncate(end)
            file.seek(end)
            while data:
                data = data[self._write(file, data) :]
            os.fsync(file.fileno())

    def _write(self, file: FileIO, data: bytes) -> int:
        return file.write(data) or 0


def _whole(file: FileIO) -> int:
    """Bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    stop = end
    while stop:
        start = max(0, stop - _BLOCK)
        file.seek(start)
        found = (file.read(stop - start) or b"").rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0
