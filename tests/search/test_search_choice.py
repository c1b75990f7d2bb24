"""Which config a whole search ends with, and that every place it is shown in says the same. Scores by formula."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from standin import LOADED, StandInSession, damage, harmed, luck

from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import AttentionMass, WindowAttention
from kvlab.report import document as report
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
BUDGET = 900_000  # raw takes 2.1 MB, int8 1.09 MB, int4 0.66 MB
ITEMS = 30


def _over(config: KVConfig, budget: int = BUDGET) -> bool:
    return Workload(4096, 1).bytes(config, SHAPE) > budget


def _nll(config: KVConfig, item: Item) -> float:
    """Two kinds of trial cannot be scored; what is over the budget is far better than anything that fits it."""
    if config.budget.evicts and config.key.kind == "fp8" and isinstance(config.scorer, WindowAttention):
        return float("nan")
    if config.budget.evicts and config.label.startswith("int8 sym") and isinstance(config.scorer, AttentionMass):
        raise MemoryError("no room")
    return harmed(config, item) - (0.9 if _over(config) and config != BASELINE else 0)


def _score(config: KVConfig, item: Item) -> float:
    """All hold but the control, which cannot answer anything."""
    control = config.budget.evicts and config.budget.label == "25%"
    return 0.0 if control else float(luck("right", item.id) < 0.6)


def _worse(config: KVConfig, item: Item) -> float:
    """Everything that fits loses half of its answers."""
    lost = config != BASELINE and not _over(config) and luck("lost", item.id) < 0.7
    return 0.0 if lost else _score(config, item)


def _open(nll: Any, score: Any) -> Any:
    def open_session(request: Request) -> Session:
        subject: Any = StandInSession(SHAPE, nll, score)
        space = Space(SHAPE, Workload(request.context, request.concurrency), request.budget_bytes, "float16")
        return Session(request, LOADED, subject, space, {})  # type: ignore[arg-type]

    return open_session


@pytest.fixture
def search(monkeypatch, tmp_path, capsys) -> Any:
    """Run the command on formulas; returns exit code, stdout and the run. Figures take longer than all the rest."""

    def go(
        nll: Any = _nll,
        score: Any = _score,
        budget: str = f"{BUDGET}B",
        *more: str,
        drawn: bool = False,
        seed: str = "1",
        trials: str = "16",
    ) -> tuple[int, str, Run]:
        monkeypatch.setattr(engine, "open_session", _open(nll, score))
        if not drawn:
            monkeypatch.setattr("kvlab.report.files.write", lambda run: {"html": run.path / "report.html"})
        out = tmp_path / "runs"
        flags = ["--context", "4096", "--concurrency", "1", "--items", str(ITEMS), "--trials", trials, "--seed", seed]
        code = main(["--budget-gb", budget, *flags, *more, "--out", str(out), "--quiet"])
        (folder,) = (p for p in out.iterdir() if p.is_dir())
        return code, capsys.readouterr().out, Run.open(folder)

    return go


def test_the_best_is_feasible_wherever_it_is_shown(search) -> None:
    code, printed, run = search(drawn=True)
    result = run.read_json("result.json")
    assert code == 4  # judged, but some trials failed

    # The document.
    winner = next(f for f in result["finalists"] if f["config_id"] == result["winner"])
    assert result["verdict"] == winner["verdict"] == "HOLDS"
    assert result["binding"] is True
    assert len(result["finalists"]) >= 2
    sizes = [f["workload_bytes"] for f in result["finalists"]]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= BUDGET
    assert winner["workload_bytes"] == min(sizes)
    for row in (*result["finalists"], *result["anchors"], *result["trials"]):
        assert row["feasible"] == (row["workload_bytes"] <= BUDGET)
    assert result["before_after"]["after"]["kv_bytes_workload"] == winner["workload_bytes"]
    assert result["before_after"]["before"]["kv_bytes_workload"] > BUDGET
    # Better in the search and over the budget: shown as an anchor, and as no more than that.
    raw = next(a for a in result["anchors"] if a["name"] == "raw")
    best = min(f["value"] for f in result["trials"] if f["value"] is not None)
    assert sum(f["dnll"] for f in raw["search"].values()) < 0 < best
    assert not raw["feasible"]

    # The saved file.
    text = (run.path / "sweet_spot.toml").read_text()
    config = KVConfig.from_toml(text)
    assert config.id == result["winner"]
    assert not _over(config)
    assert tomllib.loads(text)["kv_config"] == config.to_dict() or KVConfig.from_dict(winner["config"]) == config
    assert winner["label"] in text
    assert f"{BUDGET:,} bytes" in text

    # Report: tables, headline, page, and what was printed.
    chosen = report.best(result)
    assert chosen is not None
    assert chosen["config_id"] == result["winner"]
    frame = tables(result)["finalists"]
    assert list(frame[frame.config != "raw"].fits) == [True] * len(result["finalists"])
    word, sentence = report.headline(result)
    assert word == "HOLDS"
    assert winner["label"] in sentence
    assert winner["label"] in (run.path / "report.html").read_text()
    lines = printed.splitlines()
    assert lines[0].startswith("HOLDS")
    assert winner["label"] in lines[0]


def test_failed_trials_are_shown_with_settings_and_reason(search) -> None:
    _, printed, run = search()
    result = run.read_json("result.json")
    failed = {t["label"].split(" + ")[0]: t for t in result["trials"] if t["state"] == "failed"}
    assert set(failed) == {"fp8_e4m3", "int8 sym"}
    assert "nll=nan is not finite" in failed["fp8_e4m3"]["reason"]
    assert failed["int8 sym"]["reason"] == "MemoryError: no room"
    assert all(t["value"] is None and t["config_id"] and t["workload_bytes"] <= BUDGET for t in failed.values())
    assert sum(t["state"] == "scored" for t in result["trials"]) >= 8  # the others went on
    assert run.status["failed_trials"] == sum(t["state"] == "failed" for t in result["trials"])
    assert all(t["label"] in printed for t in failed.values())  # among the notes
    assert "NaN" not in (run.path / "result.json").read_text()


def test_nothing_feasible_is_no_result(search) -> None:
    code, printed, run = search(_nll, _score, "2kB")
    result = run.read_json("result.json")
    assert code == 3
    assert result["finalists"] == []
    assert result["winner"] is None
    assert result["before_after"] is None
    assert not (run.path / "sweet_spot.toml").exists()
    assert {t["state"] for t in result["trials"]} == {"infeasible"}
    assert printed.startswith("NOTHING FITS  No feasible setting. The smallest is int2")
    # The smallest violation comes first, and is the smallest there is.
    misses = result["nearest_misses"]
    assert [m["workload_bytes"] for m in misses] == sorted(m["workload_bytes"] for m in misses)
    assert misses[0]["name"] == "smallest"
    assert 2000 < misses[0]["workload_bytes"] < 20_000
    assert all(not m["feasible"] for m in misses)
    assert run.is_complete()


def test_the_smallest_of_the_space_is_the_smallest_sampled() -> None:
    import optuna

    s = Space(SHAPE, Workload(4096, 1), 9000, "float16")
    least = Workload(4096, 1).bytes(s.smallest(), SHAPE)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [c for c in (s.config(study.ask()) for _ in range(100)) if c is not None]
    assert all(Workload(4096, 1).bytes(c, SHAPE) >= least for c in found)
    exact = Space(SHAPE, Workload(4096, 1), least, "float16")
    assert not _over(exact.smallest(), least)


def test_where_nothing_holds_there_is_a_verdict_and_no_file(search) -> None:
    code, printed, run = search(harmed, _worse)
    result = run.read_json("result.json")
    assert code == 0
    assert result["verdict"] == "WORSE"
    assert result["winner"] is None
    assert not (run.path / "sweet_spot.toml").exists()
    assert result["finalists"][0]["verdict"] == "WORSE"
    assert {f["verdict"] for f in result["finalists"][1:]} <= {"WORSE", "INCONCLUSIVE"}
    assert printed.startswith("WORSE")


def test_all_trials_failing_is_not_called_infeasible(search) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        if config != BASELINE and not _over(config) and config.label != "int4 g32":
            raise MemoryError("no room")
        return harmed(config, item)

    code, _, run = search(nll, _score, "600kB")
    result = run.read_json("result.json")
    assert code == 4
    assert result["finalists"] == []
    assert {t["state"] for t in result["trials"]} == {"failed"}


def test_a_finalist_that_fails_on_fresh_items_is_named_and_stops_no_other(search) -> None:
    """The first one, which the search had scored on everything."""
    broken: list[str] = []

    def nll(config: KVConfig, item: Item) -> float:
        finalist = config != BASELINE and not _over(config) and config.budget.label != "25%"
        if item.split == "confirm" and finalist:
            broken.append(broken[0] if broken else config.id)
            if config.id == broken[0]:
                raise MemoryError("no room")
        return harmed(config, item)

    code, _, run = search(nll, seed="2")  # one that ends with several finalists
    result = run.read_json("result.json")
    assert code == 4
    failed = [t for t in result["trials"] if t["state"] == "failed"]
    assert {t["config_id"] for t in failed} == set(broken)
    assert all(t["reason"] == "MemoryError: no room" for t in failed)
    assert result["finalists"]
    assert broken[0] not in {f["config_id"] for f in result["finalists"]}
    # The sequence stops at it: what comes after is shown and not claimed.
    assert {f["verdict"] for f in result["finalists"]} == {"INCONCLUSIVE"}
    assert result["winner"] is None


def test_a_rise_is_replicated_before_it_is_claimed(search) -> None:
    def score(config: KVConfig, item: Item) -> float:
        better = config != BASELINE and not _over(config) and luck("gain", item.id) < 0.6
        control = config.budget.evicts and config.budget.label == "25%"
        return 0.0 if control else float(better or luck("right", item.id) < 0.5)

    code, _, run = search(harmed, score)
    result = run.read_json("result.json")
    assert code == 0
    assert result["verdict"] == "RISES"
    rows = run.rows()
    assert set(rows.role) == {"layers", "search", "confirm", "aa", "replicate"}
    assert set(rows[rows.role == "replicate"].split) == {"replicate"}
    assert not rows.duplicated(["role", "config_id", "item_id"]).any()


def test_the_next_search_starts_from_the_last_winner(search, monkeypatch, tmp_path) -> None:
    _, _, run = search()
    won = run.read_json("result.json")["winner"]
    monkeypatch.setattr(engine, "open_session", _open(_nll, _score))
    flags = ["--context", "4096", "--concurrency", "1", "--items", str(ITEMS), "--trials", "8", "--seed", "2"]
    assert main(["--budget-gb", f"{BUDGET}B", *flags, "--out", str(run.path.parent), "--quiet"]) == 4
    (second,) = (p for p in Path(run.path.parent).iterdir() if p.is_dir() and p.name != run.path.name)
    result = json.loads((second / "result.json").read_text())
    assert (result["trials"][0]["config_id"], result["trials"][0]["number"]) == (won, -1)
    # The ledger counts looks at the same items only: another seed has items of its own.
    assert [x["look"] for x in result["ledger"]] == [1]


def test_the_ledger_counts_looks_at_the_same_items(search, monkeypatch) -> None:
    _, _, run = search()
    monkeypatch.setattr(engine, "open_session", _open(_nll, _score))
    flags = ["--context", "4096", "--concurrency", "1", "--items", str(ITEMS), "--trials", "16", "--seed", "1"]
    main(["--budget-gb", "800kB", *flags, "--out", str(run.path.parent), "--quiet"])
    (second,) = (p for p in run.path.parent.iterdir() if p.is_dir() and p.name != run.path.name)
    ledger = Run.open(second).read_json("result.json")["ledger"]
    assert [(x["look"], x["run"]) for x in ledger] == [(1, run.path.name), (2, second.name)]
    assert ledger[0]["items_sha256"] == ledger[1]["items_sha256"]


def test_the_formulas_are_what_these_tests_need() -> None:
    space = Space(SHAPE, Workload(4096, 1), BUDGET, "float16")
    assert [n for n, c in space.anchors().items() if _over(c)] == ["raw", "fp8", "int8"]
    assert damage(space.anchors()["int8"]) < damage(space.anchors()["int4"]) < damage(space.control())
