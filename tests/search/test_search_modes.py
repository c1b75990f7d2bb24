"""Maps and the smallest that holds, on scores by formula: what is drawn, what is judged, and what may be claimed."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from standin import LOADED, StandInSession, damage, harmed, luck

from kvlab import confirm, stats
from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.layer import LayerShape, ModelShape
from kvlab.report import document as report
from kvlab.report.files import write
from kvlab.report.frames import tables
from kvlab.runs import Run
from kvlab.search import engine
from kvlab.search.__main__ import main
from kvlab.search.engine import Session
from kvlab.search.settings import Request
from kvlab.search.space import Space
from kvlab.search.workload import Workload
from kvlab.subject import BASELINE

SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
WORK = Workload(4096, 1)
RAW = 2_100_000  # as a budget: nothing has to go
ITEMS = 30
Go = Callable[..., tuple[int, str, Run]]


def _size(config: KVConfig) -> int:
    return WORK.bytes(config, SHAPE)


def _is_control(config: KVConfig) -> bool:
    return config.budget.evicts and config.budget.label == "25%"


def _score(config: KVConfig, item: Item) -> float:
    """All hold but the control."""
    return 0.0 if _is_control(config) else float(luck("right", item.id) < 0.6)


@pytest.fixture
def search(monkeypatch, tmp_path, capsys) -> Go:
    def go(nll: Any, score: Any, *flags: str, budget: str = f"{RAW}B", trials: int = 32) -> tuple[int, str, Run]:
        def open_session(request: Request) -> Session:
            subject: Any = StandInSession(SHAPE, nll, score)
            space = Space(SHAPE, Workload(request.context, request.concurrency), request.budget_bytes, "float16")
            return Session(request, LOADED, subject, space, {})  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "open_session", open_session)
        monkeypatch.setattr("kvlab.report.files.write", lambda run: {"html": run.path / "report.html"})
        out = tmp_path / "runs"
        given = ["--budget-gb", budget, "--context", "4096", "--concurrency", "1", "--items", str(ITEMS)]
        code = main([*given, "--trials", str(trials), "--seed", "1", "--out", str(out), "--quiet", *flags])
        (folder,) = (p for p in out.iterdir() if p.is_dir())
        return code, capsys.readouterr().out, Run.open(folder)

    return go


# -- the map -----------------------------------------------------------------------------------------------------------


def _broken(config: KVConfig, item: Item) -> float:
    """Some cannot be scored: one with NaN, one with an error, one after half of the items."""
    if config.key.kind == "fp8" and config.value.kind == "fp8" and config.budget.evicts:
        return float("nan")
    if config.label.startswith("int8 sym") and config.budget.evicts:
        raise MemoryError("no room")
    return harmed(config, item)


def test_a_map_holds_what_is_feasible_complete_and_unbeaten_and_nothing_else(search) -> None:
    budget = 1_200_000
    code, printed, run = search(_broken, _score, "--mode", "map", budget=f"{budget}B", trials=40)
    result = run.read_json("result.json")
    assert code in (0, 4)
    assert result["goal"] == "map"
    front = result["front"]
    assert len(front) >= 5
    assert [f["workload_bytes"] for f in front] == sorted({f["workload_bytes"] for f in front})
    assert [f["value"] for f in front] == sorted({f["value"] for f in front}, reverse=True)
    assert front[-1]["workload_bytes"] <= budget
    # Checked against the rows themselves.
    rows = run.rows()
    rows = rows[rows.role == "search"]
    wide = rows.pivot(index=["family", "item_id"], columns="config_id", values="nll")
    spread = wide[BASELINE.id].groupby("family").std(ddof=0)
    complete = wide.dropna(axis="columns")
    value = (complete.sub(complete[BASELINE.id], axis=0).groupby("family").mean().div(spread, axis=0)).mean()
    size = {r["config_id"]: r["workload_bytes"] for r in [*result["trials"], *result["anchors"]] if r["config_id"]}
    points = {c: (size[c], v) for c, v in value.items() if c in size and size[c] <= budget}
    best = {c for c, p in points.items() if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points.values())}
    assert {f["config_id"] for f in front} == best
    failed = {t["config_id"] for t in result["trials"] if t["state"] == "failed"}
    assert not failed & best
    assert "Best search score of every size" in printed


def test_a_map_covers_sizes_and_judges_both_ends_and_a_middle(search) -> None:
    _, _, run = search(harmed, _score, "--mode", "map")
    result = run.read_json("result.json")
    sizes = [t["workload_bytes"] for t in result["trials"] if t["state"] == "scored"]
    assert max(sizes) > 4 * min(sizes)
    assert all(t["feasible"] for t in result["trials"] if t["state"] == "scored")
    judged = [f["config_id"] for f in result["finalists"]]
    complete = [f for f in result["front"] if not f["anchor"]]
    assert 2 <= len(judged) <= 3
    assert judged[-1] == complete[0]["config_id"]
    assert judged[0] == complete[-1]["config_id"]
    assert {f["verdict"] for f in result["finalists"]} == {"HOLDS"}
    assert result["winner"] == judged[-1]


def test_a_map_is_drawn_and_tabled(search, monkeypatch) -> None:
    _, _, run = search(harmed, _score, "--mode", "map", trials=16)
    monkeypatch.undo()
    result = run.read_json("result.json")
    frame = tables(result)["front"]
    assert list(frame.workload_bytes) == [f["workload_bytes"] for f in result["front"]]
    assert set(frame.n) == {3 * len(set(run.rows()[run.rows().role == "search"].item_id)) / 3}
    paths = write(run)
    assert paths["png"].stat().st_size > 10_000 if "png" in paths else (run.path / "figures" / "pareto.png").exists()
    page = (run.path / "report.html").read_text()
    assert "Best search score of every size" in page
    assert "Losses of layers added up" in page


# -- the smallest that holds -------------------------------------------------------------------------------------------


def _holds_down_to(least: int) -> Callable[[KVConfig, Item], float]:
    def score(config: KVConfig, item: Item) -> float:
        lost = config != BASELINE and _size(config) < least and luck("lost", item.id) < 0.7
        return 0.0 if lost else _score(config, item)

    return score


@pytest.mark.parametrize("least", [500_000, 800_000])
def test_the_winner_is_the_smallest_before_the_first_that_fails(search, least) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        """The search sees no more than a hint of it, so that the sequence goes on below."""
        return harmed(config, item) if config == BASELINE else harmed(BASELINE, item) + 0.1 * damage(config)

    _, printed, run = search(nll, _holds_down_to(least), "--mode", "smallest", trials=40)
    result = run.read_json("result.json")
    rows = result["finalists"]
    assert 3 < len(rows) <= 6
    sizes = [f["workload_bytes"] for f in rows]
    assert sizes == sorted(sizes, reverse=True)
    words = [f["verdict"] for f in rows]
    held = words.index("WORSE")
    assert words[:held] == ["HOLDS"] * held
    assert held >= 2
    assert all(s >= least for s in sizes[:held])
    assert sizes[held] < least
    assert result["winner"] == rows[held - 1]["config_id"]
    word, sentence = report.headline(result)
    assert word == "HOLDS"
    assert sentence.startswith("The smallest that holds is ")
    assert re.sub(r"\s+", " ", printed).startswith("HOLDS The smallest that holds is ")
    assert KVConfig.from_toml((run.path / "sweet_spot.toml").read_text()).id == result["winner"]


def test_what_passes_below_a_failure_is_shown_and_not_claimed(search) -> None:
    """Else every further step would be another chance to be lucky."""

    def nll(config: KVConfig, item: Item) -> float:
        return harmed(config, item) if config == BASELINE else harmed(BASELINE, item) + 0.1 * damage(config)

    def score(config: KVConfig, item: Item) -> float:
        inside = config != BASELINE and 600_000 <= _size(config) < 1_000_000
        return 0.0 if inside and luck("lost", item.id) < 0.7 else _score(config, item)

    _, _, run = search(nll, score, "--mode", "smallest", trials=40)
    result = run.read_json("result.json")
    rows = result["finalists"]
    words = [f["verdict"] for f in rows]
    first = words.index("WORSE")
    below = [f for f in rows[first + 1 :] if f["workload_bytes"] < 600_000]
    assert below
    assert {f["verdict"] for f in below} == {"INCONCLUSIVE"}
    assert all("the sequence stops there" in fam["note"] for f in below for fam in f["families"].values())
    assert all(fam["diff"] == 0 for f in below for fam in f["families"].values())
    winner = next((f for f in rows if f["config_id"] == result["winner"]), None)
    assert winner is None if first == 0 else winner is not None and winner["workload_bytes"] >= 1_000_000


def test_where_the_largest_fails_nothing_is_claimed(search) -> None:
    _, _, run = search(harmed, _holds_down_to(RAW * 2), "--mode", "smallest")
    result = run.read_json("result.json")
    assert result["winner"] is None
    assert result["verdict"] == "WORSE"
    assert not (run.path / "sweet_spot.toml").exists()


def test_a_sequence_of_any_length_keeps_the_level() -> None:
    """Six configs that each lose exactly the margin: how often any of them is claimed to hold."""
    rng = np.random.default_rng(11)
    margin, n, runs, steps = 0.10, 60, 500, 6
    ids = tuple(map(str, range(n)))
    base = tuple(float(k < 0.6 * n) for k in range(n))
    configs = [KVConfig(sink_tokens=k) for k in range(steps)]
    claimed = 0
    for _ in range(runs):
        judged = {}
        for config in configs:
            lost = rng.random(n) < margin / 0.6
            arm = tuple(b * (1.0 - miss) for b, miss in zip(base, lost, strict=True))
            paired = stats.Paired(ids, base, arm)
            judged[config.id] = stats.judge({"math": paired}, margin, control_failed={"math": True})
            if judged[config.id].verdict != "HOLDS":
                break  # no claim can follow
        verdicts = confirm.Verdicts(confirm.Margin(margin, n, ""), judged, {}, {}, {})
        claimed += any(j.verdict == "HOLDS" for j in confirm.in_sequence(configs, verdicts).values())
    assert claimed / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


# -- layers ------------------------------------------------------------------------------------------------------------


def test_layers_are_told_apart_once_and_said_so_in_the_document(search) -> None:
    _, _, run = search(harmed, _score, "--mode", "map")
    result = run.read_json("result.json")
    table = result["sensitivity"]
    assert table["layers"] == [0, 1]
    assert np.array(table["kl"]["K"]).shape == (2, 4)
    assert table["items_per_family"] == 2
    rows = run.rows()
    layers = rows[rows.role == "layers"]
    assert len(layers) == 2 * 8 * 2 * 3
    mixed = [t for t in result["trials"] if t["label"].startswith("mixed ")]
    assert mixed
    assert len({t["label"] for t in mixed}) == len({t["config_id"] for t in mixed})
    assert table["additivity"]["n"] == len(table["additivity"]["pairs"])


def test_uniform_layers_are_measured_by_nobody(search) -> None:
    _, _, run = search(harmed, _score, "--layers", "uniform", budget="900000B", trials=12)
    result = run.read_json("result.json")
    assert result["sensitivity"] is None
    assert "layers" not in set(run.rows().role)
    assert all(not t["label"].startswith("mixed ") for t in result["trials"])
    assert not any("share their formats" in note for note in result["notes"])


def test_where_layers_cannot_be_scored_the_search_goes_on_and_says_why(search) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        if config.overrides and config.key.kind == "raw":
            raise MemoryError("no room for one layer")
        return harmed(config, item)

    code, _, run = search(nll, _score, budget="900000B", trials=12)
    result = run.read_json("result.json")
    assert code == 0
    assert result["winner"]
    assert any("all layers share their formats: layers could not be told apart" in note for note in result["notes"])


def test_a_resumed_map_ends_where_it_was_going(search, tmp_path, monkeypatch) -> None:
    """Taken again over all of its rows, it scores nothing and says the same."""
    _, _, run = search(harmed, _score, "--mode", "map", trials=16)
    before = run.read_json("result.json")
    run.set_status("interrupted")
    asked: list[Any] = []

    def nll(config: KVConfig, item: Item) -> float:
        asked.append(config)
        return harmed(config, item)

    def open_session(request: Request) -> Session:
        subject: Any = StandInSession(SHAPE, nll, _score)
        space = Space(SHAPE, Workload(request.context, request.concurrency), request.budget_bytes, "float16")
        return Session(request, LOADED, subject, space, {})  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "open_session", open_session)
    assert main(["--resume", str(run.path), "--out", str(run.path.parent), "--quiet"]) == 0
    after = Run.open(run.path).read_json("result.json")
    assert asked == []
    same = ("front", "trials", "finalists", "verdict", "winner", "sensitivity")
    assert json.dumps([before[k] for k in same]) == json.dumps([after[k] for k in same])
