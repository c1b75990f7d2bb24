"""The journal: whole lines only, whoever is killed; many writers, one file."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalStorage

from kvlab.study.journal import JournalFile

ROOT = Path(__file__).resolve().parents[2]


def test_a_torn_last_line_is_not_read_and_the_next_writer_cuts_it_off(tmp_path) -> None:
    path = tmp_path / "j.log"
    writer = JournalFile(path)
    writer.append_logs([{"n": 0}, {"n": 1}])
    with path.open("ab") as file:
        file.write(b'{"n": 2, "half')
    reader = JournalFile(path)
    assert [x["n"] for x in reader.read_logs(0)] == [0, 1]
    writer.append_logs([{"n": 3}])
    assert [x["n"] for x in reader.read_logs(2)] == [3]
    assert path.read_bytes() == b'{"n":0}\n{"n":1}\n{"n":3}\n'


def test_a_torn_line_longer_than_a_block_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "j.log"
    path.write_bytes(b"x" * 200_000)
    journal = JournalFile(path)
    assert list(journal.read_logs(0)) == []
    journal.append_logs([{"n": 0}])
    assert [x["n"] for x in journal.read_logs(0)] == [0]


def test_records_are_read_from_any_number(tmp_path) -> None:
    journal = JournalFile(tmp_path / "j.log")
    journal.append_logs([{"n": n} for n in range(5)])
    assert [x["n"] for x in journal.read_logs(3)] == [3, 4]
    journal.append_logs([{"n": 5, "text": "two\nlines, ü"}])
    assert [x["n"] for x in journal.read_logs(5)] == [5]
    assert [x["n"] for x in JournalFile(tmp_path / "j.log").read_logs(4)] == [4, 5]


def test_a_line_that_is_no_json_names_the_line_and_the_fix(tmp_path) -> None:
    path = tmp_path / "j.log"
    path.write_bytes(b'{"n": 0}\nwhat\n{"n": 1}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*j\.log is no JSON.*start a new study"):
        list(JournalFile(path).read_logs(0))


def test_a_writer_killed_with_the_lock_in_its_hand_hinders_nobody(tmp_path) -> None:
    path = tmp_path / "j.log"
    code = f"""
import os, signal
from pathlib import Path
from kvlab.study.journal import JournalFile
class Torn(JournalFile):
    def _write(self, file, data):
        os.write(file.fileno(), data[:5])
        os.kill(os.getpid(), signal.SIGKILL)
Torn(Path({str(path)!r})).append_logs([{{"lost": True}}])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.stat().st_size == 5
    JournalFile(path).append_logs([{"n": 0}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"n": 0}]


def test_many_writers_lose_nothing(tmp_path) -> None:
    path = tmp_path / "j.log"

    def write(me: int) -> None:
        journal = JournalFile(path)
        for n in range(25):
            journal.append_logs([{"me": me, "n": n, "pad": "x" * 500}])

    threads = [threading.Thread(target=write, args=(me,)) for me in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seen = [(x["me"], x["n"]) for x in JournalFile(path).read_logs(0)]
    assert sorted(seen) == [(me, n) for me in range(8) for n in range(25)]
    assert all([n for m, n in seen if m == me] == list(range(25)) for me in range(8))


def test_optunas_own_reader_reads_the_file(tmp_path) -> None:
    path = tmp_path / "j.log"
    optuna.create_study(storage=JournalStorage(JournalFile(path)), study_name="s").optimize(
        lambda trial: trial.suggest_float("x", 0, 1), n_trials=3
    )
    from optuna.storages.journal import JournalFileBackend

    assert len(optuna.load_study(study_name="s", storage=JournalStorage(JournalFileBackend(str(path)))).trials) == 3
