"""--check on a real run of a tiny model: right as it is, and wrong wherever rows, document or pages are touched."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from tiny_folder import save_tiny

from kvlab.report.__main__ import main
from kvlab.report.check import check
from kvlab.report.recompute import Rows
from kvlab.runs import Run

FLAGS = [
    *("--context", "4096", "--concurrency", "1", "--budget-gb", "900kB", "--items", "4", "--trials", "6"),
    *("--mode", "map", "--seed", "3", "--quiet"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A finished search, with layers told apart."""
    from kvlab.search.__main__ import main as search

    folder = tmp_path_factory.mktemp("checked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(folder / "cache"))
        code = search([*FLAGS, "--model", str(save_tiny(folder / "tiny")), "--out", str(folder / "runs")])
    assert code == 0
    (path,) = (folder / "runs").glob("*-search-*")
    return path


@pytest.fixture
def copied(found, tmp_path):
    return Run.open(shutil.copytree(found, tmp_path / found.name))


def test_a_run_is_what_its_rows_give(copied, capsys):
    result = copied.read_json("result.json")
    assert result["sensitivity"]
    assert main([str(copied.path), "--check"]) == 0
    assert re.search(r"(\d+) of \1 figures are what the rows give", capsys.readouterr().out)
    checked = check(copied)
    assert checked.wrong == ()
    assert checked.figures > 1000


def change_row(run, role, column, value, *, config=None):
    """Alter one row of a role in its parquet part."""
    for part in sorted((run.path / "items").glob("part-*.parquet")):
        frame = pd.read_parquet(part)
        mine = frame.index[(frame["role"] == role) & ((frame["config_id"] == config) if config else True)]
        if len(mine):
            at = mine[0]
            frame.loc[at, column] = value(frame.loc[at, column])
            frame.to_parquet(part)
            return frame.loc[at]
    raise AssertionError(f"no row of role {role}")


def change(run, *keys, value):
    """Alter one figure of result.json."""
    result = run.read_json("result.json")
    place = result
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value(place[keys[-1]])
    (run.path / "result.json").write_text(json.dumps(result))
    return result


def named(run, capsys):
    """What --check says is wrong, in its own words."""
    assert main([str(run.path), "--check"]) == 1
    return capsys.readouterr().out


def test_a_changed_score_is_named(copied, capsys):
    finalist = copied.read_json("result.json")["finalists"][0]
    row = change_row(copied, "confirm", "score", lambda s: 1.0 - s, config=finalist["config_id"])
    said = named(copied, capsys)
    assert f"configs confirmed, {finalist['label']}, {row['family']}, score: printed 0, the rows give 0.25" in said
    assert f"{row['family']}, c: printed 0, the rows give 1" in said


@pytest.mark.parametrize(
    ("role", "column", "value", "words"),
    [
        ("confirm", "measured_bytes", lambda b: b + 1000, "bytes_per_token"),
        ("aa", "score", lambda s: 1.0 - s, "controls, baseline against itself, flips: printed 0, the rows give 1"),
        ("search", "nll", lambda x: x + 1.0, "configs searched"),
        ("layers", "kl", lambda x: x + 1.0, "layers, "),
        ("search", "role", lambda _: "gone", "counters"),
    ],
)
def test_a_changed_row_is_named(copied, capsys, role, column, value, words):
    own = copied.read_json("result.json")
    config = None if role in ("aa", "layers") else own["finalists"][0]["config_id"]
    change_row(copied, role, column, value, config=config)
    expected = "configs searched" if column == "role" else words
    assert expected in named(copied, capsys)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("finalists", 0, "families", "code", "low"), lambda x: x + 1e-6, "code, low: printed"),
        (("finalists", 0, "families", "math", "n_needed"), lambda _: 3, "math, n_needed: printed 3"),
        (("finalists", 0, "verdict"), lambda _: "HOLDS", "verdict: printed HOLDS, the rows give INSENSITIVE"),
        (("verdict",), lambda _: "RISES", "verdict: printed RISES"),
        (("winner",), lambda _: "0123456789ab", "winner: printed 0123456789ab, the rows give nothing"),
        (("baseline", "families", "code", "high"), lambda x: x - 0.01, "baseline, code, high"),
        (("finalists", 0, "workload_bytes"), lambda x: x - 4096, "sizes, "),
        (("finalists", 0, "streams", "K"), lambda x: x - 1, "bytes at workload"),
        (("finalists", 0, "sessions"), lambda x: x + 1, "sessions"),
        (("anchors", 0, "search", "code", "dnll"), lambda x: x + 0.001, "configs searched, raw"),
        (("sensitivity", "kl", "V", 1, 0), lambda x: x + 0.5, "layers, V of layer 1"),
        (("controls", "positive", "families", "math", "failed"), lambda x: not x, "known bad"),
        (("before_after", "after", "effective_bits"), lambda x: x + 0.5, "after, effective_bits"),
        (("counters", "item_scores"), lambda x: x + 1, "counters, item_scores"),
        (("margin", "value_points"), lambda _: 5.0, "margin, value_points: printed 5, the rows give 10"),
    ],
)
def test_a_changed_figure_of_the_document_is_named(copied, capsys, keys, value, words):
    change(copied, *keys, value=value)
    assert words in named(copied, capsys)


def test_a_size_that_only_the_formula_contradicts_is_named(copied, capsys):
    """Bytes, parts, conversations and bits changed together agree with each other, and are wrong."""
    own = copied.read_json("result.json")
    entry, load = own["finalists"][0], own["workload"]
    size = entry["workload_bytes"] - 4096
    change(copied, "finalists", 0, "workload_bytes", value=lambda _: size)
    change(copied, "finalists", 0, "streams", "K", value=lambda x: x - 4096)
    change(copied, "finalists", 0, "sessions", value=lambda _: own["budget_bytes"] // (size // load["concurrency"]))
    bits = round(16 * size / (own["model"]["raw_bytes_per_token"] * load["context"] * load["concurrency"]), 4)
    change(copied, "finalists", 0, "workload_effective_bits", value=lambda _: bits)
    said = named(copied, capsys)
    assert f"sizes by formula, {entry['label']}, workload_bytes: printed {size}, the rows give {size + 4096}" in said
    assert f"sizes by formula, {entry['label']}, K: printed" in said
    assert "\nsizes, " not in said


def test_predicted_bytes_of_rows_follow_from_the_config_on_record(copied, capsys):
    change_row(copied, "layers", "predicted_bytes", lambda b: b + 7)
    assert re.search(r"rows, .* tokens, predicted: printed", named(copied, capsys))


def test_a_config_that_is_not_on_record_is_named(copied, capsys):
    told = copied.read_json("configs.json")
    gone = copied.read_json("result.json")["finalists"][0]["config_id"]
    del told["configs"][gone]
    (copied.path / "configs.json").write_text(json.dumps(told))
    assert f"config on record: printed {gone}, the rows give nothing" in named(copied, capsys)


def test_a_page_elsewhere_is_checked_where_it_was_written(copied, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(copied.path), "--out", str(out)]) == 0
    assert main([str(copied.path), "--out", str(out), "--check"]) == 0
    page = out / "report.html"
    page.write_text(page.read_text().replace("<td>0.000</td>", "<td>0.900</td>", 1))
    assert main([str(copied.path), "--check"]) == 0
    assert main([str(copied.path), "--out", str(out), "--check"]) == 1
    assert "report.html, " in capsys.readouterr().out


def test_a_comparison_is_checked_too(found, tmp_path, capsys):
    root, out = tmp_path / "runs", tmp_path / "out"
    stamp, rest = found.name.split("-", 1)
    runs = [str(shutil.copytree(found, root / f"{stamp[:-2]}{n}Z-{rest}")) for n in range(2)]
    for run in runs:
        Run(Path(run)).write_json("result.json", Run(Path(run)).read_json("result.json") | {"run": run})
    flags = [*runs, "--root", str(root)]
    assert main([*flags, "--check"]) == 0
    assert "no page compares these runs" in capsys.readouterr().err
    assert main([*flags, "--out", str(out), "--check"]) == 1
    assert "out cannot be checked: [Errno 2]" in capsys.readouterr().err
    assert main([*flags, "--out", str(out)]) == 0
    capsys.readouterr()
    assert main([*flags, "--out", str(out), "--check"]) == 0
    counted = re.findall(r"(\d+) of (\d+) figures", capsys.readouterr().out)
    assert len(counted) == 3
    assert int(counted[2][0]) > 200
    page, paper = out / "report.html", out / "report.md"
    whole = page.read_text()
    top, folded = whole.split('<details class="run">', 1)
    for changed in (
        top.replace("<td>+0.0</td>", "<td>+9.0</td>", 1) + '<details class="run">' + folded,
        top + '<details class="run">' + folded.replace("<td>0.000</td>", "<td>0.900</td>", 1),
    ):
        assert changed != whole
        page.write_text(changed)
        assert main([*flags, "--out", str(out), "--check"]) == 1
        assert "out: comparison, " in capsys.readouterr().out
    page.write_text(whole)
    paper.write_text(paper.read_text().replace("| +0.0 |", "| +9.0 |", 1))
    assert main([*flags, "--out", str(out), "--check"]) == 1
    assert "out: report.md, Differences on shared items" in capsys.readouterr().out


def test_a_changed_page_is_named(copied, capsys):
    page = copied.path / "report.html"
    text = page.read_text()
    page.write_text(text.replace("<td>0.000</td>", "<td>0.900</td>", 1))
    assert "report.html, " in (said := named(copied, capsys))
    assert "printed 0.900, the rows give 0.000" in said
    page.write_text(text.replace("INSENSITIVE</span>", "HOLDS</span>", 1))
    assert "report.html, verdict: printed HOLDS" in named(copied, capsys)
    page.write_text(text)
    paper = copied.path / "report.md"
    paper.write_text(paper.read_text().replace("| INSENSITIVE | 4 |", "| HOLDS | 4 |", 1))
    assert "report.md, Accuracy against the baseline, per family, line 3" in named(copied, capsys)


def test_a_changed_summary_is_named(copied, capsys):
    path = copied.path / "summary.parquet"
    frame = pd.read_parquet(path)
    frame.loc[0, "score"] = 0.75
    frame.to_parquet(path)
    assert "summary.parquet, " in (said := named(copied, capsys))
    assert "score: printed 0.75, the rows give 0.0" in said


def test_a_long_list_is_cut(copied, capsys):
    for part in (copied.path / "items").glob("*.parquet"):
        frame = pd.read_parquet(part)
        frame["score"] = 1.0 - frame["score"]
        frame.to_parquet(part)
    said = named(copied, capsys).splitlines()
    assert len(said) < 25
    assert re.search(r"and \d+ more$", said[20])


def test_lost_rows_and_unfinished_runs_cannot_be_checked(copied, capsys):
    for part in (copied.path / "items").glob("*.parquet"):
        part.unlink()
    assert main([str(copied.path), "--check"]) == 1
    assert "no item rows" in capsys.readouterr().err
    copied.set_status("failed")
    assert main([str(copied.path), "--check"]) == 1
    assert "is failed, not complete" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no item rows"):
        Rows(pd.DataFrame())


def test_the_last_of_two_scores_counts():
    row = {"role": "confirm", "config_id": "c", "item_id": "i", "family": "code", "cluster": "x"}
    rows = Rows(pd.DataFrame([row | {"score": 0.0}, row | {"score": 1.0}]))
    assert [r["score"] for r in rows.of("confirm", "c")] == [1.0]
    assert rows.of("confirm", "other") == []
