"""A search over chosen sets: what is refused before a model is loaded, and a run on rows of one's own."""

import json
from pathlib import Path

import pytest
from tiny_folder import save_tiny

from kvlab.runs import Run
from kvlab.search.__main__ import main

ASKED = ["--context", "4096", "--concurrency", "1", "--quiet", "--json", "--no-memo"]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    rows = [{"n": n, "said": f"box {n} holds {n * 7 % 10} keys. " * 3} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "boxes"\nfamily = "code"\nkey = "n"\nforced = "tokens"\n[source]\nfile = "rows.jsonl"\n'
        '[template]\ncontext = "{said}"\nquestion = "box {n} holds"\nanswer = " {said}"\n'
    )
    return path


def refused(capsys, *more: str) -> str:
    assert main(["--budget-gb", "1GB", "--model", "/nowhere", *ASKED, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_wrong_sets_are_refused_before_a_model_is_looked_for(capsys, mine: Path, tmp_path: Path) -> None:
    assert "unknown set 'gsm8'; did you mean 'gsm8k'" in refused(capsys, "--sets", "gsm8")
    assert "no items of family math, only of code" in refused(capsys, "--sets", str(mine), "--families", "math")
    assert "20 were asked for" in refused(capsys, "--sets", str(mine), "--items", "20")
    mine.write_text(mine.read_text().replace("family", "famly"))
    assert "mine.toml line 2: unknown key 'famly'; did you mean 'family'" in refused(capsys, "--sets", str(mine))
    mine.write_text(mine.read_text().replace("famly", "family"))
    (tmp_path / "rows.jsonl").write_text('{"n": 1, "said": "x"}\n{"n": 2}\n')
    assert "rows.jsonl line 2 has no column 'said'" in refused(capsys, "--sets", str(mine))


def test_a_search_over_rows_of_ones_own(capsys, mine: Path, tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "model"))
    out = str(tmp_path / "runs")
    asked = [
        "--budget-gb",
        "900kB",
        "--model",
        model,
        "--sets",
        str(mine),
        "--items",
        "4",
        "--trials",
        "8",
        "--out",
        out,
    ]
    assert main([*asked, *ASKED]) == 0
    result = json.loads(capsys.readouterr().out)
    run = Run.open(result["run"])
    assert (run.config["request"]["sets"], run.config["request"]["families"]) == ([str(mine)], ["code"])
    rows = run.rows()
    assert set(rows.task) == {"boxes"}
    assert set(rows.form) == {"tokens"}
    assert (rows.score == rows.token_accuracy).all()
    assert set(result["finalists"][0]["families"]) == {"code"}
    confirmed = rows[rows.role == "confirm"].item_id.unique()
    assert len(confirmed) == result["finalists"][0]["families"]["code"]["n"] == 4
    assert not set(confirmed) & set(rows[rows.role == "search"].item_id)
    assert result["counters"]["prefills"] == result["counters"]["items"]
    # Nothing is left to do; and other sets would be another run.
    assert main(["--resume", result["run"], "--sets", "default", "--out", out, *ASKED]) == 2
    assert "contradicts the run" in capsys.readouterr().err


def test_a_search_that_judges_decoded_answers(capsys, mine: Path, tmp_path: Path) -> None:
    model, out = str(save_tiny(tmp_path / "model")), str(tmp_path / "runs")
    mine.write_text(mine.read_text().replace("forced", 'metric = "contains"\nmax_new_tokens = 4\nforced'))
    asked = ["--budget-gb", "900kB", "--model", model, "--sets", str(mine), "--trials", "8", "--out", out, "--generate"]
    assert main([*asked, *ASKED]) == 2
    assert "say how many with --items" in capsys.readouterr().err
    assert main([*asked, "--items", "4", *ASKED]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = Run.open(result["run"]).rows()
    assert set(rows[rows.role == "search"].form) == {"tokens"}
    judged = rows[rows.role.isin(["confirm", "aa"])]
    assert set(judged.form) == {"generate"}
    assert judged.extracted.notna().all()
    for finalist in result["finalists"]:
        mine_rows = judged[(judged.config_id == finalist["config_id"]) & (judged.role == "confirm")]
        failed = int((mine_rows.extracted == False).sum())  # noqa: E712 - a column
        assert finalist["tasks"]["boxes"]["extraction_failures"] == failed
        assert finalist["tasks"]["boxes"]["form"] == "generate"
    (note,) = [n for n in result["notes"] if n.startswith("no answer could be read in: ")]
    assert note.count(" of 4") == 1 + len(result["finalists"])
