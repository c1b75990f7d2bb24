import copy
import math

import pytest

from kvlab.report import document as doc
from kvlab.report import headline, load, tables
from kvlab.report.frames import readable
from kvlab.stats import wilson


def test_the_raw_cache_is_shown_over_budget(search):
    line = doc.budget_line(search)
    assert "Budget 6.00 GB (5.59 GiB) for 131072 tokens x 8 conversations" in line
    assert "raw cache needs 24.16 GB (22.50 GiB): 4.0 times the budget, over budget" in line
    frame = tables(search)["finalists"]
    assert frame.loc[0, ["config", "verdict", "fits"]].tolist() == ["raw", "baseline", False]
    assert "does not bind" in doc.budget_line(search | {"budget_bytes": 30e9})


def test_before_and_after(search):
    frame = tables(search)["before_after"].set_index("measure")
    assert frame.loc["KV bytes at the workload", ["before", "after"]].tolist() == [24_159_191_040, 5_662_310_400]
    assert frame.loc["effective bits per value", ["before", "after"]].tolist() == [16.0, 3.75]
    assert frame.loc["time to first token, ms", "after"] == 430.0
    code = frame.loc["accuracy, code"]
    expected = search["baseline"]["families"]["code"]
    assert (code["before"], code["before_low"], code["n"]) == (expected["score"], expected["low"], 128)
    assert code["verdict"] == "HOLDS"
    text = readable("before_after", tables(search)["before_after"]).set_index("measure")
    assert text.loc["KV bytes at the workload", "after"] == "5.66 GB (5.27 GiB)"
    assert text.loc["accuracy, code [95% interval]", "before"] == "0.617 [0.531, 0.697]"


def test_family_rows_are_in_points(search):
    frame = tables(search)["families"]
    recorded = search["finalists"][1]["families"]["math"]
    row = frame[(frame["config"] == "K4V2 g64") & (frame["family"] == "math")].iloc[0]
    assert row["diff_points"] == pytest.approx(100 * recorded["diff"])
    assert row["low_points"] == pytest.approx(100 * recorded["low"])
    assert (row["margin_points"], row["b"], row["verdict"]) == (3.0, recorded["b"], recorded["verdict"])
    assert set(frame["family"]) == {"retrieval", "math", "code"}
    assert frame["family"].tolist()[:3] == ["retrieval", "math", "code"]


def test_a_sweep_uses_the_same_tables(sweep):
    made = tables(sweep)
    assert set(made) == {"before_after", "finalists", "families", "controls"}
    assert "raw" not in made["families"]["config"].tolist()
    assert doc.best(sweep)["label"] == "fp8_e4m3"
    assert headline(sweep) == (
        "HOLDS",
        "The smallest that holds is fp8_e4m3 at 12.08 GB (11.25 GiB): accuracy holds on retrieval, math, code, "
        "margin 5 points.",
    )
    row = made["before_after"].set_index("measure").loc["accuracy, math"]
    assert (row["after_low"], row["after_high"]) == wilson(row["after"] * 64, 64)  # not the interval of a difference


def altered(result, **changes):
    """A copy whose finalists, in order, take the given values of one field."""
    twin = copy.deepcopy(result)
    for field, values in changes.items():
        for entry, value in zip(twin["finalists"], values, strict=True):
            entry[field] = value
    return twin


def test_what_exceeds_the_budget_is_never_best(search):
    over = altered(search, workload_bytes=[7e9, 5e9, 4e9])
    assert over["winner"] == over["finalists"][0]["config_id"]
    assert doc.best(over) is None
    assert "K4V2 g32 exceeds the budget and is not shown as best" in doc.warnings(over)[0]
    assert headline(over)[0] not in ("HOLDS", "RISES")
    assert tables(over)["before_after"]["after"].isna().all()
    for unknown in (None, math.nan):
        assert doc.best(altered(search, workload_bytes=[unknown, 5e9, 4e9])) is None
    assert doc.best(altered(search, verdict=["INCONCLUSIVE", "WORSE", "WORSE"])) is None


def test_when_nothing_fits_the_nearest_miss_is_named(search):
    none = copy.deepcopy(search) | {"budget_bytes": 1_000_000_000, "winner": None}
    word, sentence = headline(none)
    assert word == "NOTHING FITS"
    assert sentence == ("No feasible setting. The smallest is int2 g32 at 3.77 GB (3.52 GiB), 2.77 GB (2.58 GiB) over.")
    assert not tables(none)["configs"]["fits"].any()


def test_trials_without_a_finite_score_are_counted_and_named(search):
    odd = copy.deepcopy(search)
    for found in odd["trials"][6]["search"].values():
        found["dnll"] = math.nan
    odd["trials"][7]["search"] = {}
    assert doc.warnings(odd)[0] == "2 configs have no finite score and are not drawn: K4V2 g32, int2 g32."


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        (0, None),
        (1, None),
        (2, "look 2 at these items: each errs in up to 5%, one of 2 in up to 10%"),
        (30, "up to 100%"),
    ],
)
def test_a_later_look_at_the_same_items_is_said(search, looks, words):
    told = [
        line for line in doc.warnings(search | {"ledger": [{"look": n + 1} for n in range(looks)]}) if "look" in line
    ]
    assert len(told) == (words is not None)
    assert words is None or words in told[0]


def test_an_open_verdict_says_how_many_items_would_decide(search):
    open_ = altered(search, verdict=["INCONCLUSIVE"] * 3) | {"winner": None, "verdict": "INCONCLUSIVE"}
    open_ = copy.deepcopy(open_)
    # What decides one config is enough: its worst open family. One that cannot be decided says nothing, nor does one
    # over the budget.
    for entry, needs in zip(open_["finalists"], ((90, 182, 7), (80, 60_000, 9), (None, 3, 3)), strict=True):
        for found, need in zip(entry["families"].values(), needs, strict=True):
            found |= {"verdict": "INCONCLUSIVE", "n_needed": need}
    more = " About 182 items a family would decide."
    assert headline(open_) == ("INCONCLUSIVE", f"No config is shown to hold within 6.00 GB (5.59 GiB).{more}")
    open_["finalists"][0]["workload_bytes"] = 7 * 10**9
    assert "About 60,000 items" in headline(open_)[1]
    open_["finalists"][1]["families"]["code"]["n_needed"] = None
    assert "would decide" not in headline(open_)[1]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (24_159_191_040, "24.16 GB (22.50 GiB)"),
        (5_660_000, "5.66 MB"),
        (40, "40 B"),
        (None, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_sizes(count, text):
    assert doc.size(count) == text


@pytest.mark.parametrize("state", ["running", "failed", "interrupted", "partial"])
def test_an_unfinished_run_is_refused_or_labelled(tmp_path, make_run, search, state):
    run = make_run(tmp_path, search, state=state)
    shown = "interrupted" if state == "running" else state  # no process holds it: it was killed
    with pytest.raises(doc.IncompleteError, match=f"is {shown}, not complete"):
        load(run)
    assert load(run, partial=True)["partial"] == shown


def test_a_run_without_a_result_is_summed_up_from_its_rows(tmp_path, make_run):
    run = make_run(tmp_path, None, state="interrupted")
    run.append([run.rows().to_dict("records")[0]])  # scored again after a resume: still one item
    result = load(run, partial=True)
    raw, small = result["scored"]
    assert (raw["n"], raw["score"], raw["dnll"], raw["effective_bits"]) == (6, 0.5, 0.0, 16.0)
    assert (small["n"], small["effective_bits"]) == (6, 8.0)
    assert small["dnll"] == pytest.approx(0.1)
    assert (small["low"], small["high"]) == wilson(3, 6)
    assert headline(result)[0] == "NO VERDICT"
    assert list(tables(result)) == ["scored"]
    done = make_run(tmp_path, None, state="done")
    with pytest.raises(doc.IncompleteError, match=r"has no result\.json"):
        load(done)


def test_an_unknown_schema_is_refused(tmp_path, make_run, search):
    run = make_run(tmp_path, search | {"schema": "kvlab.search/9"})
    with pytest.raises(ValueError, match=r"schema 'kvlab\.search/9', this report reads kvlab\.search/1"):
        load(run)
