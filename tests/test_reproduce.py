"""`python -m kvlab reproduce` on real runs of a tiny model: every row comes out again, and a changed one is named."""

import json
import shutil

import pandas as pd
import pytest
from tiny_folder import save_tiny

from kvlab.__main__ import main
from kvlab.reproduce import UnlikeError, again, chosen
from kvlab.runs import Run
from kvlab.search.__main__ import main as search
from kvlab.sweep import SweepConfig, run_sweep


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduced")
    save_tiny(folder / "tiny", layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def searched(place):
    flags = [
        "--context",
        "4096",
        "--concurrency",
        "1",
        "--budget-gb",
        "600kB",
        "--items",
        "2",
        "--trials",
        "4",
        "--quiet",
    ]
    assert search([*flags, "--model", str(place / "tiny"), "--out", str(place / "runs")]) == 0
    (path,) = (place / "runs").glob("*-search-*")
    return path


@pytest.fixture(scope="module")
def generated(place):
    config = SweepConfig(
        model=str(place / "tiny"), families=("math",), items=2, formats=("int8",), generate=True, samples=2,
        temperature=0.7, out=str(place / "sweeps"),
    )  # fmt: skip
    return run_sweep(config, quiet=True).path


@pytest.fixture
def copied(searched, tmp_path):
    return Run.open(shutil.copytree(searched, tmp_path / searched.name))


def printed(capsys, *flags):
    code = main(["reproduce", *map(str, flags), "--json", "--quiet"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_every_row_of_a_search_comes_out_again(searched, capsys):
    rows = Run.open(searched).rows()
    assert set(rows["role"]) == {"search", "layers", "confirm", "aa"}
    code, told, _ = printed(capsys, searched, "--rows", 10_000)
    assert (code, told["schema"], told["ok"]) == (0, "kvlab.reproduce/1", True)
    own = rows[rows["scored_in"].isna()]
    assert len(told["rows"]) == len(own)
    assert {r["role"] for r in told["rows"]} == set(own["role"])
    assert 0 <= told["nats_apart"] < 1e-4
    assert all(r["then"]["measured_bytes"] == r["now"]["measured_bytes"] > 0 for r in told["rows"])
    assert main(["reproduce", str(searched), "--rows", "3"]) == 0
    out, err = capsys.readouterr()
    assert "3 of 3 rows came out again; nats apart by" in out
    assert "scoring again: 100%" in err


def test_drawn_answers_come_out_again(generated, capsys):
    rows = Run.open(generated).rows()
    assert set(rows["form"]) == {"generate"}
    code, told, _ = printed(capsys, generated, "--rows", 6)
    assert (code, told["ok"], len(told["rows"])) == (0, True, 6)
    assert any(r["now"]["prediction"] for r in told["rows"])


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("score", lambda x: 1.0 - x), ("prediction", lambda x: f"{x}!"), ("measured_bytes", lambda x: x + 1),
        ("nll", lambda x: x + 0.01), ("kl", lambda x: x + 0.01), ("context_tokens", lambda x: x - 1),
    ],
)  # fmt: skip
def test_a_row_that_was_changed_is_named(copied, capsys, column, change):
    parts = {path: pd.read_parquet(path) for path in (copied.path / "items").glob("part-*.parquet")}
    # a compressed row: the full cache has no distance to itself
    part, frame = next((path, frame) for path, frame in sorted(parts.items()) if frame["kl"].notna().any())
    at = frame.index[frame["kl"].notna()][0]
    frame.loc[at, column] = change(frame.loc[at, column])
    frame.to_parquet(part)
    flags = ("--config", frame.loc[at, "config_id"], "--item", frame.loc[at, "item_id"], "--rows", 99)
    code, told, _ = printed(capsys, copied.path, *flags)
    assert code == 1
    assert [r["different"] for r in told["rows"] if r["different"]] == [[column]]
    assert told["ok"] is False
    if column in ("nll", "kl"):
        assert told["nats_apart"] == pytest.approx(0.01, rel=0.01)
        assert printed(capsys, copied.path, *flags, "--tolerance", 0.02)[0] == 0
    assert main(["reproduce", str(copied.path), *map(str, flags)]) == 1
    assert f"no: {column}" in capsys.readouterr().out


def test_other_weights_are_refused(searched, place, capsys):
    kept = place / "kept"
    (place / "tiny").rename(kept)
    try:
        save_tiny(place / "tiny", layers=2, seed=5)
        code, _, err = printed(capsys, searched)
    finally:
        shutil.rmtree(place / "tiny")
        kept.rename(place / "tiny")
    assert code == 2
    assert "used weights_sha256" in err


def test_what_cannot_be_had_again_is_said(copied, capsys):
    rows = copied.rows().to_dict("records")
    with pytest.raises(UnlikeError, match="pass --allow-code-exec"):
        next(again(copied, [rows[0] | {"outcome": "passed"}]))
    with pytest.raises(UnlikeError, match="is not among those"):
        next(again(copied, [rows[0] | {"item_id": "math/search/9/99"}]))
    for flags, words in (
        (["--config", "int9"], "scored no config 'int9'"),
        (["--item", "none"], "no row of this run has item none"),
        (["--rows", 0], "--rows must be at least 1"),
        (["--tolerance", -1], "--tolerance at least 0"),
    ):
        code, _, err = printed(capsys, copied.path, *flags)
        assert (code, words in err) == (2, True)
    made = copied.read_json("provenance.json")
    (copied.path / "provenance.json").write_text(json.dumps(made | {"evalset": {"search": "ab" * 32}}))
    assert "search items of" in printed(capsys, copied.path, "--rows", 99)[2]
    (copied.path / "configs.json").unlink()
    assert "keeps no config" in printed(capsys, copied.path)[2]


def test_rows_are_drawn_by_a_seed_and_only_what_the_run_scored_itself():
    rows = [{"config_id": "c", "item_id": str(n), "scored_in": "another" if n < 3 else None} for n in range(20)]
    first = chosen(rows, count=5, seed=0)
    assert first == chosen(rows, count=5, seed=0) != chosen(rows, count=5, seed=1)
    assert len({r["item_id"] for r in first}) == 5
    assert {r["item_id"] for r in chosen(rows, count=99, seed=0)} == {str(n) for n in range(3, 20)}
    assert chosen(rows, count=9, seed=0, item="7") == [rows[7]]
    with pytest.raises(ValueError, match="no row of this run has config d and item 7"):
        chosen(rows, count=1, seed=0, config="d", item="7")
    with pytest.raises(ValueError, match="scored no row itself"):
        chosen(rows[:3], count=1, seed=0)
