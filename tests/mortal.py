"""A worker that kills itself at a chosen point: mid-trial with a piece done, or in the middle of a write.

`python mortal.py JOB`, JOB being JSON: url, study, lease, log, die (null, "trial", "write" or "claim"), after.
`python mortal.py many N WORDS...`: N processes that all start `kvlab.worker WORDS...` at the same instant.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage

from kvlab import worker
from kvlab.study.board import Board
from kvlab.study.journal import JournalFile
from kvlab.study.loop import work
from kvlab.study.simulated import Settings, Simulated
from kvlab.study.storages import open_storage
from kvlab.study.unit import Unit


class Asked:
    asked = False


class Logged(Simulated):
    """Notes every piece that is computed, and by whom."""

    def __init__(self, settings: Settings, log: Path, me: str) -> None:
        super().__init__(settings)
        self.log, self.me, self.left = log, me, -1

    def run(self, body: Mapping[str, Any], piece: int) -> dict[str, float]:
        result = super().run(body, piece)
        with self.log.open("a") as file:
            file.write(json.dumps([dict(body), piece, self.me]) + "\n")
        if piece == 1:
            self.left -= 1
            if self.left == 0:
                die()  # one piece is saved, this one is not
        return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tear_writes(after: int) -> None:
    """Die in the middle of the `after`-th piece that is saved: half a line in a journal, an open transaction in SQL."""
    left = [after]

    def torn(self: JournalFile, file: Any, data: bytes) -> int:
        if b"kvlab.piece" in data:
            left[0] -= 1
            if left[0] == 0:
                os.write(file.fileno(), data[: len(data) // 2])
                die()
        return file.write(data)

    whole = RDBStorage._set_trial_attr_without_commit

    def open_transaction(self: RDBStorage, session: Any, model: Any, trial_id: int, key: str, value: Any) -> None:
        whole(self, session, model, trial_id, key, value)
        if key.startswith("kvlab.piece"):
            left[0] -= 1
            if left[0] == 0:
                session.flush()
                die()

    JournalFile._write = torn  # type: ignore[method-assign]
    RDBStorage._set_trial_attr_without_commit = open_transaction  # type: ignore[method-assign,assignment]


def main() -> None:
    job = json.loads(sys.argv[1])
    board = Board(open_storage(job["url"]), job["study"], lease_s=job["lease"])
    objective = Logged(Settings.from_dict(board.spec()), Path(job["log"]), board.me)
    if job["die"] == "trial":
        objective.left = job["after"]
    elif job["die"] == "write":
        tear_writes(job["after"])
    elif job["die"] == "claim":
        claimed = Board._claimed

        def unleased(self: Board, trial: Any) -> Unit | None:
            die()  # the trial runs, and no lease says whose it is
            return claimed(self, trial)

        Board._claimed = unleased  # type: ignore[method-assign]
    tally = work(board, objective, stop=Asked())
    print(json.dumps([board.me, tally.units, tally.why]))


def many(count: int, words: list[str]) -> int:
    """Forked, so that starting Python does not spread them out; the largest exit code."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(count)

    def one() -> None:
        gate.wait()
        sys.exit(worker.main(words))

    processes = [context.Process(target=one) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    if sys.argv[1] == "many":
        sys.exit(many(int(sys.argv[2]), sys.argv[3:]))
    main()
