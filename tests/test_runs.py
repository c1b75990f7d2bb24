import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.runs import Run, config_hash, find, listing

CONFIG = {"model": "tiny", "ratio": 0.125, "seed": 0, "families": ["math", "code"], "nested": {"on": True}}


def refuse_constant(name):
    raise AssertionError(f"{name} in written JSON")


def strict(path):
    return json.loads(Path(path).read_text(), parse_constant=refuse_constant)


def test_a_new_run_holds_config_provenance_and_status(tmp_path):
    run = Run.create(tmp_path / "runs", "Search SmolLM2_135M", CONFIG, extra_provenance={"dtype": "float32"})
    assert re.fullmatch(r"\d{8}T\d{9}Z-search-smollm2-135m-[0-9a-f]{8}", run.path.name)
    assert run.path.name.endswith(run.hash8)
    assert run.hash8 == config_hash(CONFIG)[:8]
    assert strict(run.path / "config.json") == CONFIG
    assert run.status["state"] == "running"
    assert run.status["peak_rss_bytes"] > 10**6
    assert not run.is_complete()
    record = strict(run.path / "provenance.json")
    assert record["dtype"] == "float32"
    assert record["model"] is None
    assert record["python"] == sys.version.split()[0]
    assert record["packages"]["numpy"] == np.__version__
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [run.path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 0.12},
        {"ratio": 0.125000000000001},
        {"seed": 1},
        {"seed": 0.0},
        {"families": ["code", "math"]},
        {"nested": {"on": False}},
        {"nested": {"on": 1}},
        {"model": "tiny "},
        {"new": None},
    ],
)
def test_the_hash_covers_every_field(change):
    assert config_hash(CONFIG | change) != config_hash(CONFIG)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), json_like, min_size=1, max_size=4))
def test_the_hash_survives_the_file_and_ignores_order(config):
    turned = dict(reversed(config.items()))
    assert config_hash(json.loads(json.dumps(config))) == config_hash(config) == config_hash(turned)


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"a": {"b": [1, float("nan")]}}, r"config\.a\.b\[1\] is nan"),
        ({"a": np.float64("inf")}, r"config\.a is inf"),
        ({"a": {1, 2}}, r"config\.a is a set"),
        ({"a": {3: "x"}}, r"config\.a has key 3"),
    ],
)
def test_a_config_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, config, place):
    with pytest.raises(ValueError, match=place):
        Run.create(tmp_path / "runs", "x", config)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="slug"):
        Run.create(tmp_path / "runs", " -- ", CONFIG)


def test_an_unwritable_root_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot create a run under .*file/runs: Not a directory"):
        Run.create(tmp_path / "file" / "runs", "x", CONFIG)
    if Path("/proc/self").exists():
        with pytest.raises(OSError, match="cannot create a run under /proc/kvlab"):
            Run.create(Path("/proc/kvlab"), "x", CONFIG)
    if os.getuid() != 0:
        (tmp_path / "shut").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match="cannot create a run"):
            Run.create(tmp_path / "shut", "x", CONFIG)


def test_runs_of_one_config_never_collide(tmp_path):
    names = [Run.create(tmp_path, "x", CONFIG).path.name for _ in range(5)]
    assert names == sorted(set(names))
    assert [p.name for p in find(tmp_path, config_hash(CONFIG))] == names[::-1]
    assert find(tmp_path, config_hash(CONFIG | {"seed": 1})) == []
    assert len(find(tmp_path, config_hash(CONFIG)[:8])) == 5
    with pytest.raises(ValueError, match="hex digits"):
        find(tmp_path, "seed")


class Coarse(datetime):
    """A clock so slow that runs begun together have the same time."""

    @classmethod
    def now(cls, tz=None):
        found = super().now(tz)
        return found.replace(microsecond=found.microsecond // 20_000 * 20_000)


def test_runs_of_one_config_begun_at_once_all_land(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.runs.datetime", Coarse)
    together = threading.Barrier(8)

    def sweep(n):
        together.wait()
        run = Run.create(tmp_path, "sweep", CONFIG)
        for part in range(3):
            run.append([{"id": f"{n}-{part}"}])
        run.set_status("done")
        return run.path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(sweep, range(8)))
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in paths}
    assert len(set(paths)) == 8
    for n, path in enumerate(paths):
        assert Run.open(path).is_complete()
        assert Run.open(path).rows()["id"].tolist() == [f"{n}-{part}" for part in range(3)]


def test_rows_come_back_in_order_with_nulls_where_a_column_is_new(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    assert run.rows().empty
    run.append([])
    run.append([{"id": "a", "score": 1.0, "kl": None}, {"id": "b", "score": 0.0, "kl": None}])
    run.append([{"id": "c", "score": np.float32(0.5), "kl": 0.25, "bytes": np.int64(2**40)}, {"id": "d", "late": True}])
    frame = Run.open(run.path).rows()
    assert frame["id"].tolist() == ["a", "b", "c", "d"]
    assert frame["score"].tolist()[:3] == [1.0, 0.0, 0.5]
    assert frame["kl"].isna().tolist() == [True, True, False, True]
    assert frame["bytes"].tolist()[2] == 2**40
    assert frame["late"].isna().tolist() == [True, True, True, False]


def test_parts_that_disagree_or_are_damaged_are_named(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    run.append([{"id": "a"}])
    run.append([{"id": 7}])
    with pytest.raises(ValueError, match="disagree"):
        run.rows()
    (run.path / "items" / "part-000001.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match="part-000001"):
        run.rows()


def test_json_is_written_whole_and_without_nan(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    run.write_json(
        "result.json", {"score": float("nan"), "low": -np.inf, "n": np.int64(3), "p": Path("a/b"), "t": (1,)}
    )
    assert strict(run.path / "result.json") == {"score": None, "low": None, "n": 3, "p": "a/b", "t": [1]}
    before = (run.path / "result.json").read_bytes()
    with pytest.raises(ValueError, match=r"result\.json\.bad is a object"):
        run.write_json("result.json", {"bad": object()})
    assert (run.path / "result.json").read_bytes() == before
    with pytest.raises(ValueError, match="inside its folder"):
        run.write_text("../escape.txt", "")
    assert not list(run.path.rglob("*.tmp"))


def test_status_keeps_what_it_knew(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    created = run.status["created"]
    run.set_status("partial", done=3, total=9)
    run.set_status("done", done=9, share=float("nan"))
    status = strict(run.path / "status.json")
    assert (status["state"], status["done"], status["total"], status["share"]) == ("done", 9, 9, None)
    assert status["created"] == created
    assert run.is_complete()
    with pytest.raises(ValueError, match="nearest is 'done'"):
        run.set_status("doen")


def test_open_by_path_name_or_hash(tmp_path):
    one = Run.create(tmp_path, "alpha", CONFIG)
    two = Run.create(tmp_path, "beta", CONFIG | {"seed": 1})
    for key in (one.path, str(one.path), one.path.name, one.path.name[:-4], one.hash8, one.hash8[:5]):
        assert Run.open(key, root=tmp_path).path.name == one.path.name
    with pytest.raises(ValueError, match="begins 2 runs"):
        Run.open(one.path.name[:4], root=tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"nearest is {two.path.name}")):
        Run.open(two.path.name.replace("beta", "bta"), root=tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no runs"):
        Run.open("x", root=tmp_path / "none")
    with pytest.raises(ValueError, match=r"no config\.json"):
        Run.open(tmp_path)


def test_an_edited_config_is_noticed(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    (run.path / "config.json").write_text(json.dumps(CONFIG | {"seed": 5}))
    with pytest.raises(ValueError, match="edited after the run"):
        Run.open(run.path)


def test_listing(tmp_path):
    assert listing(tmp_path / "none").empty
    one = Run.create(tmp_path, "alpha", CONFIG)
    one.append([{"id": "a"}])
    one.write_json("result.json", {"verdict": "HOLDS"})
    one.set_status("done")
    Run.create(tmp_path, "beta", CONFIG)
    frame = listing(tmp_path)
    assert frame["slug"].tolist() == ["alpha", "beta"]
    assert frame["state"].tolist() == ["done", "interrupted"]  # nobody holds the second one
    assert frame["verdict"].tolist()[0] == "HOLDS"
    assert frame["parts"].tolist() == [1, 0]


WRITER = """
import sys, time
from pathlib import Path
from kvlab.runs import Run
run = Run.open(Path(sys.argv[1]))
with run.lock():
    print("held", flush=True)
    i = 0
    while True:
        run.append([{"id": f"{i}-{j}", "text": "x" * 2000} for j in range(50)])
        run.write_json("result.json", {"upto": list(range(i))})
        run.set_status("running", upto=i)
        i += 1
        print(i, flush=True)
        time.sleep(float(sys.argv[2]))
"""


def start_writer(run, pause):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run.path), str(pause)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_killed_writer_leaves_whole_files_and_a_run_that_can_go_on(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    for round_ in range(3):
        before = len(run.rows())
        process = start_writer(run, 0)
        for _ in range(4 + round_):
            told = int(process.stdout.readline())
        time.sleep(0.003 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        reopened = Run.open(run.path)
        ids = reopened.rows()["id"].tolist()[before:]
        # All that was reported as stored is stored, parts are whole, and in order.
        assert len(ids) >= 50 * told
        assert ids == [f"{i}-{j}" for i in range(len(ids) // 50) for j in range(50)]
        strict(run.path / "result.json")
        assert strict(run.path / "status.json")["state"] == "running"
        assert reopened.state() == "interrupted"
        assert not reopened.is_complete()
    run.set_status("done")  # taken over without any cleaning
    assert run.is_complete()


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from kvlab.runs import Run
run = Run.open(Path(sys.argv[1]))
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
run.append([{"id": "new"}]) if sys.argv[2] == "rows" else run.write_json("result.json", {"new": True})
"""


@pytest.mark.parametrize("what", ["rows", "result"])
def test_a_kill_in_mid_write_leaves_the_old_file(tmp_path, what):
    run = Run.create(tmp_path, "x", CONFIG)
    run.append([{"id": "old"}])
    run.write_json("result.json", {"old": True})
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(run.path), what])
    assert done.returncode == -signal.SIGKILL
    assert Run.open(run.path).rows()["id"].tolist() == ["old"]
    assert strict(run.path / "result.json") == {"old": True}


def test_a_full_disk_leaves_no_half_made_run(tmp_path, monkeypatch):
    def full(extra):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvlab.runs.provenance", full)
    with pytest.raises(OSError, match=r"cannot create a run under .*: No space left on device"):
        Run.create(tmp_path, "x", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_are_refused_while_both_live(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    process = start_writer(run, 60)
    try:
        process.stdout.readline()
        assert run.state() == "running"
        for write in (
            lambda: run.append([{"id": "z"}]),
            lambda: run.set_status("done"),
            lambda: run.lock().__enter__(),
        ):
            with pytest.raises(RuntimeError, match=f"is being written by process {process.pid} on "):
                write()
        assert "z" not in run.rows()["id"].tolist()
    finally:
        process.kill()
        process.wait()
    with run.lock(), run.lock():
        run.append([{"id": "z"}])
        with pytest.raises(RuntimeError, match=f"process {os.getpid()}"):
            Run.open(run.path).append([{"id": "y"}])
    assert run.rows()["id"].tolist()[-1] == "z"


def test_a_writer_of_another_machine_is_not_overruled(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    note = run.path / "writer.json"
    note.write_text(json.dumps({"pid": 1, "host": socket.gethostname() + "-other", "since": "2020"}))
    with pytest.raises(RuntimeError, match="delete"):
        run.append([{"id": "a"}])
    assert note.exists()
    note.unlink()
    run.append([{"id": "a"}])
    assert not note.exists()


def test_the_lock_is_released_when_the_work_raises(tmp_path):
    run = Run.create(tmp_path, "x", CONFIG)
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    Run.open(run.path).set_status("failed", reason="division")
    assert run.state() == "failed"


def test_secrets_stay_out_of_the_folder_and_of_the_hash(tmp_path):
    secret = "sk-very-secret-1234"
    config = CONFIG | {"channel": {"api_key": secret, "base_url": f"https://user:{secret}@host/v1", "hf_token": secret}}
    run = Run.create(tmp_path, "x", config, extra_provenance={"notebook": {"parameters": {"openaiApiKey": secret}}})
    assert not [p for p in run.path.rglob("*.json") if secret in p.read_text()]
    assert run.config["channel"]["base_url"] == "https://[redacted]@host/v1"
    assert Run.open(run.path).config == run.config
    assert config_hash(config) == config_hash(run.config)
