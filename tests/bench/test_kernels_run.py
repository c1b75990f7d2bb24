"""One run from outside: phases, what is kept when something dies, time that is up, and the command line."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kvlab.bench.__main__ import main
from kvlab.bench.kernels import cases
from kvlab.bench.kernels import run as bench
from kvlab.bench.kernels.run import KernelBenchError, Request, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# Answers every job as a GPU would, by the words in its case's name.
FAKE = """
import json, os, sys, time
names = open(sys.argv[0] + ".log", "a")
for job in json.load(sys.stdin):
    print(job["do"], job.get("case"), job.get("options"), os.environ.get("TRITON_INTERPRET"), file=names, flush=True)
    case, check = job.get("case", ""), {"error": 1e-4, "tolerance": 1e-3, "reference": "float64", "ok": True}
    if "fp8_e5m2" in case:
        raise RuntimeError("an illegal memory access")
    if "int3" in case:
        check = check | {"error": None, "ok": False}
    tile = (job.get("options") or {}).get("tile", 64)
    times = {"p10": 9.0, "p50": 10.0 if "raw" in case else tile / 16, "p90": 11.0, "replays": 100}
    answer = {"check": check, "bytes": 10**6, "impl": "triton", "times": times, "label": f"tile={tile}"}
    if job["do"] == "device":
        answer = {"name": "A GPU", "torch": "2", "triton": "3", "copy_gb_s": 1000.0, "floor_us": 2.0}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch):
    file = tmp_path / "fake.py"
    file.write_text(FAKE)
    monkeypatch.setattr(bench, "_COMMAND", (sys.executable, str(file)))
    return lambda: (tmp_path / "fake.py.log").read_text().splitlines()


def test_a_run_checks_warms_and_times_and_keeps_everything(fake, tmp_path) -> None:
    said: list[str] = []
    out = tmp_path / "deep" / "out"
    document = run(Request("cuda", out, 1, only="decode .*B32 L32k N8|sdpa B32 L32k N8|decode .*ragged"), said.append)
    assert json.loads((out / "kernels.json").read_text()) == document
    kinds = [line.split(" ")[0] for line in fake()]
    timed = [case for case in cases.timed("cuda") if case.name in {row["case"] for row in document["rows"]}]
    assert kinds.count("warm") == len(timed) - 1
    assert kinds.index("time") > max(i for i, kind in enumerate(kinds) if kind in ("warm", "check"))
    assert [row["case"] for row in document["rows"]] == [case.name for case in timed]
    rows = {row["pair"]: row for row in document["rows"] if row["page_tokens"] in (16, 32) and not row["variant"]}
    assert rows["raw"]["x_sdpa"] == pytest.approx(0.4)
    assert rows["int4"]["x_own_bf16"] == pytest.approx(2.5)
    assert rows["int4"]["gb_s"] == pytest.approx(1e6 / 4e-6 / 1e9)
    assert "RuntimeError: an illegal memory access" in rows["fp8_e5m2"]["error"]
    assert rows["int3"]["x_sdpa"] is None
    assert not document["ok"]
    assert any("int3" in problem and "off by None" in problem for problem in document["problems"])
    assert any("illegal memory access" in problem for problem in document["problems"])


def test_tuning_takes_the_place_of_the_table(fake, tmp_path) -> None:
    document = run(Request("cuda", tmp_path, 1, only="decode int4 tune", tune=True), lambda _: None)
    assert document["rows"] == []
    assert len(document["tuning"]) == 1 + len(cases.options("cuda"))
    assert [row["in_use"] for row in document["tuning"]].count(True) == 1
    text = bench.document.table(document)
    best = next(line for line in text.splitlines() if line.startswith("decode int4 tune"))
    assert "tile=32" in best
    assert "tile=64" in best


def test_what_the_time_did_not_reach_is_named(fake, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_FIRST_SHARE", 0.0)
    document = run(Request("cuda", None, 0.5, only="encode"), lambda _: None)
    assert document["checks"] == []
    skipped = {entry["case"] for entry in document["skipped"]}
    assert skipped == {case.name for case in cases.checks("cuda") if case.kernel == "encode"}
    assert all(entry["reason"] == "out of time" for entry in document["skipped"])
    assert document["ok"]


def test_the_interpreter_is_for_the_cpu_only(fake, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run(Request("cuda", None, 1, only="^encode raw"), lambda _: None)
    assert all(line.endswith(" None") for line in fake())


def test_the_interpreter_is_switched_on_for_the_cpu(fake, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run(Request("cpu", None, 1, only="^encode raw"), lambda _: None)
    assert all(line.endswith(" 1") for line in fake())
    assert not any(line.startswith("warm") for line in fake())


def test_no_device_ends_the_run(monkeypatch, tmp_path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('no CUDA GPUs are available')")
    monkeypatch.setattr(bench, "_COMMAND", (sys.executable, str(file)))
    with pytest.raises(KernelBenchError, match="no CUDA GPUs are available"):
        run(Request("cuda"), lambda _: None)


def test_what_cannot_be_written_is_said_before_any_work(fake, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelBenchError, match="file"):
        run(Request("cuda", tmp_path / "file" / "out"), lambda _: None)
    assert not (tmp_path / "fake.py.log").exists()


def test_no_case_is_an_error(fake) -> None:
    with pytest.raises(KernelBenchError, match="no case matches 'nonsense'"):
        run(Request("cuda", only="nonsense"), lambda _: None)


def test_a_real_run_in_the_interpreter(capsys, tmp_path) -> None:
    arguments = ["kernels", "--device", "cpu", "--only", "^(sdpa|encode int2 |select share)", "--seed", "5", "--json"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert json.loads((tmp_path / "kernels.json").read_text()) == document
    assert (document["schema"], document["seed"], document["device"]["name"]) == ("kvlab.bench.kernels/1", 5, "cpu")
    assert [row["kernel"] for row in document["rows"]] == ["sdpa", "encode", "select"]
    assert all(row["check"]["ok"] and row["times"] is None and row["x_sdpa"] is None for row in document["rows"])
    assert printed.err.rstrip().endswith("ok: True")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "one of the arguments --aot --device is required"),
        (["--aot", "--device", "cpu"], "not allowed with"),
        (["--device", "tpu"], "invalid choice"),
        (["--aot", "--targets", "sm_9"], "did you mean 'sm_90'"),
        (["--device", "cpu", "--targets", "sm_90"], "--targets belongs to --aot"),
        (["--aot", "--tune"], "belong to --device"),
        (["--aot", "--out", "x"], "belong to --device"),
        (["--device", "cpu", "--only", "("], "no regular expression"),
        (["--device", "cpu", "--minutes", "0"], "between 1 and 600"),
        (["--device", "cpu", "--minutes", "nan"], "between 1 and 600"),
    ],
    ids=str,
)
def test_wrong_usage_exits_with_2(arguments, word, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["kernels", *arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert word in printed.err
    assert printed.out == ""


def test_a_run_that_cannot_begin_exits_with_2(monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert main(["kernels", "--device", "cuda"]) == 2
    assert "pip install 'kvlab[gpu]'" in capsys.readouterr().err


def test_a_failed_check_exits_with_1(fake, capsys) -> None:
    assert main(["kernels", "--device", "cuda", "--only", "^encode int3"]) == 1
    assert "PROBLEM encode int3" in capsys.readouterr().out
