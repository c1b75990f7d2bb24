"""Runs beside each other: refused where they differ in more than configs, else paired on the items they share."""

import json

import numpy as np
import pytest

from kvlab.report.__main__ import main
from kvlab.report.comparison import UnlikeError, compare, pair_rows, summary, unlike
from kvlab.stats import Paired, judge_family

FAMILIES = ("retrieval", "math", "code")


def confirm_rows(config_id, scores, *, extra=0):
    return [
        {
            "role": "confirm", "config_id": config_id, "item_id": f"{family}/confirm/{i}", "family": family,
            "cluster": f"{family}{i}", "score": float(score), "context_tokens": 100, "measured_bytes": 10,
            "raw16_bytes": 20, "split": "confirm", "mode": "forked", "nll": 0.1, "kl": None,
        }
        for family in FAMILIES
        for i, score in enumerate([*scores, *[0.0] * extra])
    ]  # fmt: skip


@pytest.fixture
def two(tmp_path, make_run, search, sweep):
    """The same sweep twice; in the second, one format answers three items worse and one better."""
    scores = np.array([1, 0, 1, 1, 0, 1, 0, 1])
    worse = scores.copy()
    worse[[0, 2, 3]], worse[1] = 0, 1
    runs = []
    for n, arm in enumerate((scores, worse)):
        run = make_run(tmp_path / "runs", sweep | {"seed": n}, slug="sweep")
        run.append(confirm_rows(sweep["baseline"]["config_id"], scores))
        run.append(confirm_rows(sweep["configs"][1]["config_id"], arm, extra=2 * n))  # two items only the second has
        runs.append(run)
    return runs


def rewrite(run, name, **changes):
    path = run.path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_differences_are_paired_on_shared_items(two):
    found = compare(two)
    kinds = [(p["kind"], p["label"]) for p in found["pairs"]]
    assert kinds == [("full cache", "full cache in both"), ("same config", "fp8_e4m3 in both")]
    pair = found["pairs"][1]["families"]["math"]
    assert (pair["n"], pair["b"], pair["c"], pair["diff"]) == (8, 3, 1, -0.25)
    first, second = [1, 0, 1, 1, 0, 1, 0, 1], [0, 1, 0, 0, 0, 1, 0, 1]
    paired = Paired(tuple("abcdefgh"), tuple(map(float, first)), tuple(map(float, second)))
    own = judge_family(paired, 0.1, control_failed=True)
    assert (pair["low"], pair["high"], pair["p"]) == (own.low, own.high, own.p)
    assert found["pairs"][0]["families"]["code"]["b"] == 0
    assert summary(found) == "2 runs, 24 shared items; the full caches agree on all of them."
    frame = pair_rows(found)
    assert frame.loc[frame["family"] == "math", "diff_points"].tolist() == [0.0, -25.0]


def test_seeds_and_code_are_told_but_not_refused(two):
    told = {d["what"]: d["refused"] for d in unlike(two)}
    assert told == {"seed": False}


@pytest.mark.parametrize(
    ("what", "file", "changes"),
    [
        ("machine", "status.json", {"host": "elsewhere"}),
        ("machine", "provenance.json", {"cpu": "another"}),
        ("machine", "provenance.json", {"gpus": [{"name": "H200"}]}),
        ("model", "result.json", {"model": {"name": "other", "weights_sha256": "cd" * 32, "dtype": "float32"}}),
        ("items", "provenance.json", {"evalset": {"confirm": "ef" * 32}}),
        ("margin", "result.json", {"margin": {"value_points": 3, "n": 64, "rule": "x"}}),
        ("workload", "result.json", {"workload": {"context": 4096, "concurrency": 1}}),
    ],
)
def test_what_is_unlike_is_refused_by_name_unless_allowed(two, tmp_path, capsys, what, file, changes):
    rewrite(two[1], file, **changes)
    with pytest.raises(UnlikeError, match=f"in more than their configs \\({what}: "):
        compare(two)
    assert main([*(str(run.path) for run in two), "--out", str(tmp_path / "out")]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert [d["what"] for d in compare(two, allow_different=True)["unlike"] if d["refused"]] == [what]


def test_an_allowed_difference_stands_on_top(two, tmp_path, capsys):
    rewrite(two[1], "status.json", host="elsewhere")
    out = tmp_path / "out"
    assert main([*(str(run.path) for run in two), "--out", str(out), "--allow-different"]) == 0
    printed = capsys.readouterr().out
    warning = "DIFFERENT MACHINE: these runs do not differ in their configs alone."
    assert printed.startswith(warning)
    page, paper = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert page.index(warning) < page.index("<h1>")
    assert paper.startswith(f"**{warning}**")
    assert page.rindex("Provenance of") > page.rindex("<h2>")
    assert page.count("<img ") == 2 + 2 * 5  # differences and flips, then each run's own
    assert (out / "figures" / "differences.svg").exists()
    for run in two:
        assert run.path.name in page


def test_an_unfinished_run_is_compared_but_not_as_final(two, tmp_path, capsys):
    two[1].set_status("interrupted")
    assert main([*(str(run.path) for run in two), "--out", str(tmp_path / "out"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert [about["state"] for about in json.loads(out)["runs"]] == ["done", "interrupted"]
    assert "not complete: interrupted" in err
    assert "PARTIAL: the run is interrupted" in (tmp_path / "out" / "report.html").read_text()


def test_configs_may_be_named(two, sweep):
    found = compare(two, configs=["raw", sweep["configs"][1]["config_id"]])
    assert [about["config"] for about in found["runs"]] == ["raw", "fp8_e4m3"]
    with pytest.raises(ValueError, match="judged no config 'int9'; it judged raw, fp8_e4m3"):
        compare(two, configs=["raw", "int9"])
    with pytest.raises(ValueError, match="one config for each of 2 runs, got 1"):
        compare(two, configs=["raw"])
    with pytest.raises(ValueError, match="at least two runs"):
        compare(two[:1])


def test_nothing_shared_is_said(tmp_path, make_run, sweep):
    runs = [make_run(tmp_path, sweep | {"seed": n}, slug="sweep") for n in range(2)]
    found = compare(runs)
    assert found["pairs"] == []
    assert summary(found) == "2 runs, and no item that two of them scored: nothing can be paired."
