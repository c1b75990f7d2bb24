import io
import json
import subprocess
import sys

import pandas as pd
import pytest

from kvlab.report import write
from kvlab.report.__main__ import main


def refuse(name):
    raise AssertionError(f"{name} in JSON")


def test_a_finished_run(tmp_path, make_run, search, capsys):
    run = make_run(tmp_path / "runs", search)
    assert main([str(run.path)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("HOLDS  K4V2 g32 at 5.66 GB")
    assert "over budget" in out.splitlines()[1]
    for title in ("Before and after", "Configs confirmed on fresh items", "Accuracy against the baseline", "Controls"):
        assert title in out
    assert "report.html" in err
    for name in ("figures/pareto.png", "figures/pareto.svg", "report.html", "summary.parquet"):
        assert (run.path / name).stat().st_size > 1000
    assert len(pd.read_parquet(run.path / "summary.parquet")) == 9


def test_json_is_one_document(tmp_path, make_run, search, capsys):
    run = make_run(tmp_path / "runs", search)
    out = tmp_path / "elsewhere"
    assert main([run.path.name[:19], "--root", str(tmp_path / "runs"), "--json", "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert document["schema"] == "kvlab.report/1"
    assert (document["verdict"], document["complete"], document["best"]) == ("HOLDS", True, search["winner"])
    assert len(document["tables"]["families"]) == 9
    assert document["files"]["html"] == str(out / "report.html")
    assert not (run.path / "report.html").exists()


@pytest.mark.parametrize("result", [True, False])
def test_a_killed_run_is_shown_as_partial_and_exits_1(tmp_path, make_run, search, capsys, result):
    run = make_run(tmp_path, search if result else None, state="running")
    assert main([str(run.path)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("PARTIAL: the run is interrupted. Nothing here is final.")
    assert "not complete: interrupted" in err
    assert "PARTIAL" in (run.path / "report.html").read_text()
    assert "PARTIAL" in (run.path / "report.md").read_text()
    if not result:
        assert main([str(run.path), "--partial", "--json"]) == 0  # what was asked for
        assert json.loads(capsys.readouterr().out, parse_constant=refuse)["complete"] is False


def test_a_failed_run_says_why(tmp_path, make_run, capsys):
    run = make_run(tmp_path, None, state="running")
    run.set_status("failed", error="RuntimeError: out of luck")
    assert main([str(run.path)]) == 1
    line = "FAILED: the run is failed (RuntimeError: out of luck). Nothing here is final."
    assert capsys.readouterr().out.startswith(line)
    assert line in (run.path / "report.html").read_text()


def test_an_unknown_run_exits_2_with_the_nearest(tmp_path, make_run, search, capsys):
    run = make_run(tmp_path, search)
    wrong = run.path.name.replace("search", "serch")
    assert main([wrong, "--root", str(tmp_path)]) == 2
    assert f"nearest is {run.path.name}" in capsys.readouterr().err
    assert main(["x", "--root", str(tmp_path / "none")]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["--jsn", "x"])


def test_a_damaged_result_exits_1(tmp_path, make_run, search, capsys):
    run = make_run(tmp_path, search)
    (run.path / "result.json").write_text("{")
    assert main([str(run.path)]) == 1
    assert "result.json" in capsys.readouterr().err


def test_a_live_run_can_be_looked_at_while_it_is_written(tmp_path, make_run, search):
    run = make_run(tmp_path, search, state="running")
    with run.lock():
        paths = write(run, partial=True)
    assert paths["html"].exists()


def test_a_sweep_run(tmp_path, make_run, sweep, capsys):
    run = make_run(tmp_path, sweep, slug="sweep")
    assert main([str(run.path)]) == 0
    assert capsys.readouterr().out.startswith("HOLDS  The smallest that holds is fp8_e4m3")


def test_help_loads_neither_torch_nor_figures():
    code = (
        "import sys, kvlab.report.__main__ as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas', 'seaborn', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--partial" in done.stdout
    assert "--check" in done.stdout


def notebook(*cells):
    return json.dumps({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def cell(count, **output):
    return {"cell_type": "code", "execution_count": count, "source": "", "outputs": [output] if output else []}


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 2, "stdin is no notebook"),
        ("[1]", 2, "no notebook"),
        (notebook(cell(1)), 1, "shows no result"),
        (notebook(cell(1), cell(None)), 1, "code cell 2 was never run"),
        (notebook(cell(1, output_type="error", ename="MemoryError", evalue="gone")), 1, "failed: MemoryError: gone"),
    ],
)
def test_a_notebook_that_did_not_run_is_refused(monkeypatch, capsys, text, code, said):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main([]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_a_notebook_is_read_from_a_pipe(monkeypatch, capsys, sweep):
    shown = cell(2, output_type="display_data", data={"application/vnd.kvlab.result+json": sweep})
    text = notebook({"cell_type": "markdown", "source": "x"}, cell(1), shown)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("HOLDS  The smallest that holds is fp8_e4m3")


def test_markdown_on_stdout(tmp_path, make_run, capsys):
    run = make_run(tmp_path, None, state="running")
    assert main([str(run.path), "--md", "--partial"]) == 0
    assert capsys.readouterr().out == (run.path / "report.md").read_text()
