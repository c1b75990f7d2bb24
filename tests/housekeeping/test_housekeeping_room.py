"""gc: what would go, what never goes, and what went."""

import json
import os
import subprocess
import sys
import time

import filelock
import pytest

from kvlab.__main__ import main
from kvlab.housekeeping.room import caches, carry_out, runs
from kvlab.runs import Run

DAY = 86_400


def made(root, slug, state, *, days=30.0, seed=0):
    run = Run.create(root, slug, {"seed": seed})
    run.append([{"role": "confirm", "config_id": "c", "item_id": "i", "score": 1.0}])
    if state != "running":
        run.set_status(state)
    age(run.path, days)
    return run


def age(path, days):
    at = time.time() - days * DAY
    for file in [*path.rglob("*"), path]:
        os.utime(file, (at, at))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


def names(things):
    return sorted(thing.name for thing in things)


def test_only_old_runs_without_a_result_go(root):
    old = [
        made(root, "search", state, seed=n) for n, state in enumerate(("failed", "interrupted", "running", "partial"))
    ]
    young, done = made(root, "young", "failed", days=1), made(root, "done", "done")
    plan = runs(root)
    assert names(plan.going) == sorted(run.path.name for run in old)  # a running one whose process is gone is no more
    assert {thing.name: why for thing, why in plan.staying} == {
        young.path.name: "younger than 7 days",
        done.path.name: "has a result",
    }
    assert plan.bytes == sum(f.stat().st_size for run in old for f in run.path.rglob("*") if f.is_file()) > 0
    assert names(runs(root, older_days=0.5, done=True).going) == sorted(run.path.name for run in (*old, young, done))


def test_a_run_that_is_written_never_goes(root):
    run = made(root, "search", "running")
    with run.lock():
        age(run.path, 30)
        plan = runs(root, older_days=0, done=True)
    assert not plan.going
    assert [why for _, why in plan.staying] == ["being written"]


def test_a_run_locked_by_another_process_never_goes(root):
    run = made(root, "search", "failed")
    plan = runs(root)
    assert len(plan.going) == 1
    code = (
        "import sys; from pathlib import Path; from kvlab.runs import Run\n"
        "with Run(Path(sys.argv[1])).lock(): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        gone, left = carry_out(plan)  # planned while it was free
        other.stdin.close()
    assert gone == []
    assert "is being written by process" in left[0][1]
    assert run.rows()["score"].tolist() == [1.0]


def test_a_run_another_machine_may_still_write_never_goes(root):
    run = made(root, "search", "running")
    (run.path / "writer.json").write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "x"}))
    age(run.path, 30)
    assert [why for _, why in runs(root).staying] == ["being written"]


def test_what_is_asked_to_be_kept_is_kept_and_a_slip_is_refused(root):
    one, two = made(root, "search", "failed", seed=1), made(root, "search", "failed", seed=2)
    plan = runs(root, keep=[one.hash8[:6]])
    assert names(plan.going) == [two.path.name]
    assert [(t.name, why) for t, why in plan.staying] == [(one.path.name, "asked to be kept")]
    with pytest.raises(FileNotFoundError, match="nearest is"):
        runs(root, keep=["20270101"])


def test_a_link_is_left_alone(root, tmp_path):
    run = made(tmp_path / "elsewhere", "search", "failed")
    root.mkdir()
    (root / run.path.name).symlink_to(run.path)
    assert runs(root, older_days=0).going == ()
    assert run.path.exists()


def test_deleting_leaves_nothing_behind(root):
    run = made(root, "search", "failed")
    (root / "ledger.jsonl").write_text("{}\n")
    gone, left = carry_out(runs(root))
    assert (names(gone), left) == ([run.path.name], [])
    assert [p.name for p in root.iterdir()] == ["ledger.jsonl"]  # looks at items stay counted


def cached(root, kind, name, size, days):
    path = root / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in ("models", "scores"):
        path.mkdir()
        (path / "data").write_bytes(b"x" * size)
        age(path, days)
    else:
        path.write_bytes(b"x" * size)
        os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def test_the_longest_unused_go_until_the_rest_fits(tmp_path):
    cached(tmp_path, "models", "m-1", 1000, 9)
    cached(tmp_path, "scores", "s", 100, 30)
    cached(tmp_path, "centres", "c.safetensors", 10, 20)
    for part in ("k.safetensors", "k.sha256"):
        cached(tmp_path, "snapshots", part, 400, 1)
    assert caches(tmp_path).going == ()
    assert names(caches(tmp_path, limit_bytes=1900).going) == ["s"]
    assert names(caches(tmp_path, limit_bytes=850).going) == ["c", "m-1", "s"]
    assert names(caches(tmp_path, limit_bytes=0).going) == ["c", "k", "m-1", "s"]
    assert names(caches(tmp_path, unused_days=15).going) == ["c", "s"]
    gone, left = carry_out(caches(tmp_path, limit_bytes=0))
    assert (len(gone), left) == (4, [])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_what_kvlab_did_not_put_there_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    assert caches(tmp_path, limit_bytes=0, unused_days=0).going == ()
    assert caches(tmp_path / "none", limit_bytes=0).going == ()


def test_a_model_that_is_being_made_stays(tmp_path):
    cached(tmp_path, "models", "m-1", 1000, 9)
    with filelock.FileLock(tmp_path / "models" / ".m-1.lock"):
        plan = caches(tmp_path, limit_bytes=0)
    assert [why for _, why in plan.staying] == ["being made"]
    assert names(caches(tmp_path, limit_bytes=0).going) == ["m-1"]


def test_nothing_is_deleted_unless_asked(root, tmp_path, capsys):
    run = made(root, "search", "failed")
    kept = cached(tmp_path / "cache", "scores", "s", 100, 30)
    flags = ["gc", "--root", str(root), "--cache", str(tmp_path / "cache"), "--limit", "1kB", "--unused", "10"]
    for more in ([], ["--dry-run"]):
        assert main([*flags, *more]) == 0
        printed = capsys.readouterr().out
        assert run.path.name in printed
        assert "would be deleted; add --delete to do it" in printed
        assert run.path.exists()
        assert kept.exists()
    assert main([*flags, "--delete", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["deleted"] is True
    assert sorted(t["kind"] for t in found["going"]) == ["run", "scores"]
    assert not run.path.exists()
    assert not kept.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--delete", "--dry-run"], "exclude each other"),
        (["--keep", "nothing"], "no run 'nothing'"),
        (["--limit", "much"], "a number of GB or a size"),
        (["--older", "-1"], "at least 0"),
        (["--root", "no-such-folder"], "no folder no-such-folder"),
    ],
)
def test_a_wrong_request_deletes_nothing_and_exits_2(root, tmp_path, capsys, flags, words):
    run = made(root, "search", "failed")
    given = ["gc", "--root", str(root), "--cache", str(tmp_path / "cache"), *flags]
    assert main(given if "--delete" in flags else [*given, "--delete"]) == 2
    assert words in capsys.readouterr().err
    assert run.path.exists()
