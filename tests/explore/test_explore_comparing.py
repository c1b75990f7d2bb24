"""Runs compared item by item, on run folders written by hand."""

import warnings

import pandas as pd
import pytest

from kvlab import explore, stats
from kvlab.evals.sets import choose
from kvlab.explore.comparing import judged
from kvlab.recorded import items_of
from kvlab.runs import Run

REQUEST = {"families": ["retrieval", "math"], "sets": ["default"], "seed": 0, "items": 3}


def items(seed=0):
    return choose(("default",)).build(("retrieval", "math"), split="confirm", n=3, seed=seed)


def write(root, arms, *, seed=0, weights="w", finished=True):
    """A run with rows of `arms`: label -> {index of an item: (score, nll)}, 1 and .5 where nothing is said."""
    made = items(seed)
    config = {
        "request": REQUEST | {"seed": seed},
        "identity": {"weights_sha256": weights, "items": made.sha256, "arms": sorted(arms)},
    }
    run = Run.create(root, "sweep", config, extra_provenance={"evalset": {"confirm": made.sha256}})
    for label, told in {"full": {}, **arms}.items():
        rows = []
        for n, item in enumerate(made.items):
            score, nll = told.get(n, (1.0, 0.5))
            about = {"item_id": item.id, "family": item.family, "task": item.task, "role": "confirm", "mode": "forked"}
            kl = None if label == "full" else 0.1
            rows.append(
                about
                | {
                    "config_id": f"id-{label}",
                    "label": label,
                    "score": score,
                    "nll": nll,
                    "kl": kl,
                    "prediction": f" {label}",
                }
            )
        run.append(rows)
    # scored while searching, not judged
    run.append([rows[0] | {"role": "search", "config_id": "id-int8", "label": "int8", "score": 0.0, "kl": 0.1}])
    if finished:
        run.write_json("result.json", {"controls": {"positive": {"config_id": "id-bad"}}})
    return run


@pytest.fixture
def run(tmp_path):
    bad = dict.fromkeys(range(6), (0.0, 5.0))
    return write(tmp_path, {"int8": {0: (1.0, 0.6)}, "int2": {0: (0.0, 3.0), 1: (0.0, 1.5), 4: (1.0, 0.2)}, "bad": bad})


def test_arms_are_told_apart_and_the_control_is_named(run):
    arms = judged(run)
    assert list(arms) == ["full", "int8", "int2", "bad (control)"]
    assert all(len(rows) == 6 for rows in arms.values())


def test_flips_are_counted_for_the_arm_with_most(run):
    picture = explore.flips(run)
    assert picture.table["outcome"].value_counts().to_dict() == {"right in both": 4, "lost": 2}
    assert "4 right in both, 2 lost, 0 gained, 0 wrong in both" in picture.alt
    assert "int2" in picture.alt
    assert explore.flips(run, "int8").table["outcome"].unique().tolist() == ["right in both"]
    with pytest.raises(ValueError, match="judged no 'int3'"):
        explore.flips(run, "int3")


def test_the_hardest_items_come_first_with_their_text(run):
    table = explore.hardest(run, top=2).table
    made = items().items
    assert table["item_id"].tolist() == [made[0].id, made[1].id]
    # the mean of 0.1 and 2.5, and of 0 and 1.0
    assert table["added"].tolist() == pytest.approx([1.3, 0.5])
    assert table["question"][0] == made[0].question
    assert set(table.columns) == {"item_id", "added", "question", "gold", "full", "int8", "int2"}


def test_items_are_made_again_and_checked(run, tmp_path):
    assert items_of(run, ["confirm"]) == {item.id: item for item in items().items}
    other = write(tmp_path / "other", {"int8": {}})
    other.config["request"]["seed"] = 1
    with pytest.raises(ValueError, match="are not those that its request gives now"):
        items_of(other, ["confirm"])


def test_two_runs_side_by_side(run, tmp_path):
    second = write(tmp_path / "second", {"int4": {1: (0.0, 0.9)}})
    table = explore.compare_runs(run, second).table
    again = table[table["run"] == "both"]
    assert (again["lost"].sum(), again["gained"].sum(), again["n"].sum()) == (0, 0, 6)
    rows = {(r["config"], r["family"]): r for r in table.to_dict("records")}
    made = items().items
    family = made[1].family
    row = rows["int4", family]
    assert (row["run"], row["n"], row["lost"], row["gained"]) == (second.hash8, 3, 1, 0)
    assert row["diff_points"] == pytest.approx(-100 / 3)
    assert row["low_points"] < row["diff_points"] < row["high_points"]
    assert {config for config, _ in rows} == {"full cache, again", "int8", "int2", "bad (control)", "int4"}


def test_the_intervals_drawn_are_those_of_the_table(run, tmp_path):
    picture = explore.compare_runs(run, write(tmp_path / "second", {"int4": {1: (0.0, 0.9)}}))
    panels = {ax.get_title(loc="left").split(",")[0]: ax for ax in picture.figure.axes}
    assert set(panels) == {"retrieval", "math"}
    for family, ax in panels.items():
        own = picture.table[picture.table["family"] == family]
        bars = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2 and len(set(line.get_ydata())) == 1]
        counts = zip(own["lost"], own["gained"], own["n"], strict=True)
        right = [tuple(100 * end for end in stats.tango_interval(*c)) for c in counts]
        assert [tuple(bar) for bar in bars] == [pytest.approx(ends) for ends in right]
        assert list(zip(own["low_points"], own["high_points"], strict=True)) == [pytest.approx(e) for e in right]


def test_one_item_gives_no_interval_and_says_so(run, tmp_path):
    def alone(name, arms):
        source = write(tmp_path / name, arms)
        (part, *more) = sorted((source.path / "items").glob("part-*.parquet"))
        frames = [pd.read_parquet(path) for path in (part, *more)]
        for path, frame in zip((part, *more), frames, strict=True):
            frame.groupby("family", as_index=False).head(1).to_parquet(path)
        return source

    picture = explore.compare_runs(alone("one", {"int8": {0: (0.0, 2.0)}}), alone("two", {"int4": {}}))
    assert set(picture.table["n"]) == {1}
    assert picture.table["low_points"].isna().all()
    assert not [line for ax in picture.figure.axes for line in ax.lines if line.get_linewidth() == 1.6]
    assert "one item gives no interval" in picture.figure.get_supxlabel()


def test_nothing_drawn_is_on_its_way_out(run, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = write(tmp_path / "second", {"int4": {}})
        for picture in (explore.flips(run), explore.hardest(run), explore.compare_runs(run, second)):
            assert picture.png[:8] == b"\x89PNG\r\n\x1a\n"


def test_full_caches_that_differ_are_said(run, tmp_path):
    second = write(tmp_path / "second", {"int4": {}, "full": {2: (0.0, 4.0)}})
    picture = explore.compare_runs(run, second)
    assert "The full caches differ in 1 answers" in picture.alt


def test_runs_that_do_not_compare_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match="other items"):
        explore.compare_runs(run, write(tmp_path / "items", {"int4": {}}, seed=1))
    with pytest.raises(ValueError, match="other weights"):
        explore.compare_runs(run, write(tmp_path / "weights", {"int4": {}}, weights="v"))


def test_a_run_without_arms_says_so(tmp_path):
    with pytest.raises(ValueError, match="the full cache alone"):
        explore.flips(write(tmp_path, {}, finished=False))
