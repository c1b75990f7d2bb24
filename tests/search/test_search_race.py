"""What the race decides, on scores by formula: who is tried, how long, who is set aside, who is a finalist."""

import math
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import optuna
import pandas as pd
import pyarrow.parquet as pq
import pytest
import standin
import torch
from standin import StandIn, harmed, items

from kvlab.book import Interrupted
from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import Fraction
from kvlab.runs import Run
from kvlab.search.choice import finalists
from kvlab.search.race import ROLE, Race, Racer, Trial
from kvlab.search.space import Space
from kvlab.search.workload import Workload
from kvlab.subject import BASELINE

SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
WORK = Workload(4096, 1)
RAW_BYTES = 2 * 2 * 64 * 2 * 4096  # 2.1 MB
N_ITEMS = 8  # rungs of 2, 4 and 8 items a family
SEARCH = items("search", N_ITEMS)


def space(budget: int = RAW_BYTES // 3) -> Space:
    return Space(SHAPE, WORK, budget, "float16")


def race(
    root: Any,
    nll: Callable[[KVConfig, Item], float] = harmed,
    *,
    budget: int = RAW_BYTES // 3,
    trials: int = 24,
    seed: int = 0,
    run: Run | None = None,
    previous: KVConfig | None = None,
) -> tuple[Race, Racer, StandIn]:
    s, subject = space(budget), StandIn(SHAPE, nll)
    racer = Racer(s, standin.book(root, subject, run), SEARCH, n_items=N_ITEMS, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return racer.run(trials, 8, list(s.anchors().values()), previous), racer, subject


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> tuple[Race, Racer, StandIn]:
    return race(tmp_path_factory.mktemp("runs"))


def _told(racer: Racer) -> list[str]:
    return [t.state.name for t in racer.study.trials]


# -- who is scored, and how often --------------------------------------------------------------------------------------


def test_every_trial_is_finished_and_numbered_and_none_is_over_the_budget(usual) -> None:
    found, racer, _ = usual
    assert len(found.trials) == 24
    assert sorted(t.number for t in found.trials) == list(range(24))
    assert "RUNNING" not in _told(racer)
    assert "WAITING" not in _told(racer)
    for t in found.trials:
        if t.state in ("scored", "repeat"):
            assert t.config is not None
            assert WORK.bytes(t.config, SHAPE) <= racer.space.budget


def test_no_item_is_scored_twice_under_one_config(usual) -> None:
    _, racer, subject = usual
    assert subject.most_asked == 1
    assert len(subject.asked) == len(racer.book.rows)


def test_duplicates_are_told_their_value_and_cost_nothing(tmp_path) -> None:
    """Where nothing has to be evicted, three schemes have one config each, so that repeats are certain."""
    found, racer, subject = race(tmp_path, budget=10 * RAW_BYTES, trials=40)
    repeats = [t for t in found.trials if t.state == "repeat"]
    assert len(repeats) >= 5
    assert subject.most_asked == 1
    first = {t.config.id: t for t in reversed(found.trials) if t.state == "scored" and t.config}
    assert len(found.feasible()) == len({t.config.id for t in found.trials if t.config}) == len(first)
    for t in repeats:
        assert t.config is not None
        assert t.items == 0
        told = racer.study.trials[t.number]
        assert told.state == optuna.trial.TrialState.COMPLETE
        assert told.value == t.value


def test_baseline_and_references_are_scored_on_everything(usual) -> None:
    _, racer, _ = usual
    for config in (BASELINE, *racer.space.anchors().values()):
        assert all((ROLE, config.id, i.id) in racer.book.rows for i in SEARCH.items)


def test_the_value_is_the_family_balanced_loss_in_baseline_deviations(usual) -> None:
    found, racer, _ = usual
    frame = pd.DataFrame(
        [{"config": c, "family": r.family, "item": i, "nll": r.nll} for (_, c, i), r in racer.book.rows.items()]
    )
    wide = frame.pivot(index=["family", "item"], columns="config", values="nll")
    base = wide.pop(BASELINE.id)
    spread = base.groupby("family").std(ddof=0)
    for t in found.feasible().values():
        assert t.config is not None
        extra = wide[t.config.id].sub(base).dropna()
        expected = (extra.groupby("family").mean() / spread).mean()
        assert t.value == pytest.approx(expected, rel=1e-9)
        assert t.items == len(extra)


# -- who is stopped ----------------------------------------------------------------------------------------------------


def test_at_most_half_of_a_batch_goes_on_and_the_best_see_everything(usual) -> None:
    found, _, _ = usual
    assert found.rungs == (2, 4, 8)
    scored = [t for t in found.trials if t.state == "scored"]
    assert {t.items for t in scored} == {6, 12, 24}
    best_four = sorted(scored, key=lambda t: t.value or 0.0)[:4]
    assert [t.items for t in best_four] == [24] * 4
    # Three batches of eight: 4 go on in each, of those 2; and the best four of all are brought up to everything.
    assert sum(t.items > 6 for t in scored) <= 3 * 4 + 4
    assert sum(t.items == 24 for t in scored) <= 3 * 2 + 4


def test_the_clearly_worse_are_stopped_on_the_first_rung(tmp_path) -> None:
    """From the second batch on all but one scheme is far worse than the best so far."""

    def nll(config: KVConfig, item: Item) -> float:
        return harmed(config, item) + (0 if config == BASELINE or config.key.kind == "fp8" else 3)

    found, racer, _ = race(tmp_path, nll)
    later = [t for t in found.trials if t.state == "scored" and t.number >= 8 and t.config is not None]
    worse = [t for t in later if t.config is not None and t.config.key.kind != "fp8"]
    promoted = sorted((t for t in found.trials if t.state == "scored"), key=lambda t: t.value or 0.0)[:4]
    assert worse
    assert all(t.items == 6 or t in promoted for t in worse)
    best = promoted[0].config
    assert best is not None
    assert best.key.kind == "fp8"
    assert racer.value(best) < 1


def test_equals_are_not_stopped_as_clearly_worse(tmp_path) -> None:
    """Differences that are only noise must not count, whoever came first."""

    def nll(config: KVConfig, item: Item) -> float:
        return 1 + standin.luck("item", item.id) + 0.1 * standin.luck(config.id, item.id)

    found, _, _ = race(tmp_path, nll)
    later = [t for t in found.trials if t.state == "scored" and t.number >= 8]
    assert sum(t.items > 6 for t in later) >= len(later) // 4


# -- who is set aside --------------------------------------------------------------------------------------------------


def _is(config: KVConfig, scheme: str) -> bool:
    kinds = {"fp8": Fp8(), "int8": Affine(bits=8, group=0, mode="symmetric"), "raw": Raw()}
    return config != BASELINE and config.key == config.value == kinds[scheme] and config.budget.evicts


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nan_and_errors_are_set_aside_with_settings_and_reason(tmp_path, broken) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        if _is(config, "fp8"):
            return broken
        if _is(config, "int8") and standin.index(item) >= 2:  # not before the second rung
            raise MemoryError("no room for this cache")
        return harmed(config, item)

    # Half of raw, so that 8 bits still evict.
    found, racer, subject = race(tmp_path, nll, budget=RAW_BYTES * 2 // 5)
    failed = [t for t in found.trials if t.state == "failed"]
    reasons = {t.config.key.kind if t.config else "": t.reason for t in failed}
    assert set(reasons) == {"fp8", "affine"}
    assert reasons["affine"] == "MemoryError: no room for this cache"
    assert f"nll={broken} is not finite" in reasons["fp8"]
    assert all(t.value is None and t.config is not None for t in failed)
    for t in failed:
        assert racer.study.trials[t.number].state == optuna.trial.TrialState.FAIL
    scored = found.feasible()
    assert len(scored) >= 8
    assert not {t.config.id for t in failed if t.config} & set(scored)
    assert subject.most_asked <= 2  # a batch that failed is asked again, one by one
    chosen = finalists(found, len(SEARCH), {c: WORK.bytes(t.config, SHAPE) for c, t in scored.items() if t.config})
    assert chosen
    assert not {c.id for c in chosen} & {t.config.id for t in failed if t.config}


def test_a_baseline_that_cannot_be_scored_ends_the_race(tmp_path) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        return float("nan") if config == BASELINE else harmed(config, item)

    with pytest.raises(RuntimeError, match=r"uncompressed baseline cannot be scored.*nan"):
        race(tmp_path, nll)


def test_where_nothing_fits_nothing_but_references_is_scored(tmp_path) -> None:
    found, racer, subject = race(tmp_path, budget=2000, trials=12)
    assert [t.state for t in found.trials] == ["infeasible"] * 12
    assert _told(racer) == ["PRUNED"] * 12
    assert {c for c, _ in subject.asked} == {BASELINE.id, *(c.id for c in racer.space.anchors().values())}
    assert finalists(found, len(SEARCH), {}) == []


@pytest.mark.parametrize("budget", [2000, RAW_BYTES // 3])
def test_the_sampler_learns_by_how_much_a_trial_misses(tmp_path, budget) -> None:
    _, racer, _ = race(tmp_path, budget=budget, trials=8)
    for t in racer.study.trials:
        assert (t.constraints["bytes"] <= 0) == (t.state.name != "PRUNED") == (budget > 2000)


# -- an earlier winner -------------------------------------------------------------------------------------------------


def test_an_earlier_winner_starts_the_race_where_it_fits(tmp_path) -> None:
    s = space()
    known = s.build(Fp8(), Affine(bits=4, group=64), budget=Fraction(0.5))
    found, _, subject = race(tmp_path, previous=known)
    assert (found.trials[0].config, found.trials[0].number, found.trials[0].state) == (known, -1, "scored")
    assert len(found.trials) == 24
    assert subject.most_asked == 1
    over, _, _ = race(tmp_path, previous=s.build(Raw(), Raw()))
    assert all(t.config != s.build(Raw(), Raw()) for t in over.trials)


# -- the same again ----------------------------------------------------------------------------------------------------


def _summary(found: Race) -> list[tuple[Any, ...]]:
    return [(t.number, t.config and t.config.id, t.state, t.value, t.items, t.reason) for t in found.trials]


def test_a_seed_decides_everything(usual, tmp_path) -> None:
    assert _summary(race(tmp_path)[0]) == _summary(usual[0])
    assert _summary(race(tmp_path, seed=1)[0]) != _summary(usual[0])


@pytest.mark.parametrize("kept", [0, 1, 40, 163])
def test_a_race_over_part_of_its_rows_ends_as_the_whole_one(usual, tmp_path, kept) -> None:
    found, racer, subject = usual
    racer.book.save()
    copy = tmp_path / racer.book.run.path.name
    shutil.copytree(racer.book.run.path, copy)
    rows = Run.open(copy).rows().to_dict("records")
    assert len(rows) == len(racer.book.rows) > 200
    for part in (copy / "items").iterdir():
        part.unlink()
    run = Run.open(copy)
    run.append([{str(k): v for k, v in r.items()} for r in rows[:kept]])
    again, second, fresh = race(tmp_path, run=run)
    assert _summary(again) == _summary(found)
    assert len(fresh.asked) == len(subject.asked) - kept
    second.book.save()
    stored = Run.open(copy).rows()
    assert not stored.duplicated(["role", "config_id", "item_id"]).any()
    assert len(stored) == len(rows)


def test_a_stop_between_items_saves_everything_and_the_race_goes_on(usual, tmp_path) -> None:
    def asks_to_stop(config: KVConfig, item: Item) -> float:
        if len(subject.asked) == 150:
            book.stop.asked = True
        return harmed(config, item)

    subject = StandIn(SHAPE, asks_to_stop)
    book = standin.book(tmp_path, subject)
    s = space()
    with pytest.raises(Interrupted):
        Racer(s, book, SEARCH, n_items=N_ITEMS, seed=0).run(24, 8, list(s.anchors().values()), None)
    saved = Run.open(book.run.path)
    assert len(saved.rows()) == len(subject.asked) >= 150
    again, _, fresh = race(tmp_path, run=saved)
    assert _summary(again) == _summary(usual[0])
    assert len(fresh.asked) + len(subject.asked) == len(usual[2].asked)


def test_rows_on_disk_are_the_rows_in_the_book(usual) -> None:
    _, racer, _ = usual
    racer.book.save()
    parts = sorted((racer.book.run.path / "items").glob("*.parquet"))
    frame = pd.concat([pq.read_table(p).to_pandas() for p in parts])
    assert set(frame.role) == {ROLE}
    for record in frame.to_dict("records"):
        row = racer.book.rows[(ROLE, record["config_id"], record["item_id"])]
        assert row.nll == record["nll"]
        assert (row.kl is None) == (row.config_id == BASELINE.id) == (record["kl"] != record["kl"])


# -- finalists ---------------------------------------------------------------------------------------------------------

CONFIGS = {name: KVConfig(sink_tokens=n) for n, name in enumerate(["a", "b", "c", "d", "e", "f", "g"])}


def _trials(*rows: tuple[str, float | None, int, str]) -> Race:
    made = [
        Trial(number=n, config=CONFIGS[name], state=state, value=value, items=got)
        for n, (name, value, got, state) in enumerate(rows)
    ]
    return Race(tuple(made), (2, 4, 8))


def _sizes(**sizes: int) -> dict[str, int]:
    return {CONFIGS[name].id: size for name, size in sizes.items()}


def _chosen(found: Race, sizes: dict[str, int], **more: Any) -> list[str]:
    names = {c.id: name for name, c in CONFIGS.items()}
    return [names[c.id] for c in finalists(found, 24, sizes, **more)]


def test_finalists_are_the_front_from_largest_to_smallest() -> None:
    found = _trials(
        ("a", 0.30, 24, "scored"),
        ("b", 0.10, 24, "scored"),  # the best
        ("c", 0.20, 24, "scored"),  # larger and worse than b
        ("d", 0.25, 24, "scored"),  # smaller than b
        ("e", 0.50, 24, "scored"),  # smaller than a
        ("f", 0.01, 12, "scored"),  # better, but not seen on everything
        ("g", None, 24, "failed"),
    )
    sizes = _sizes(a=50, b=90, c=95, d=70, e=10, f=20, g=5)
    assert _chosen(found, sizes) == ["b", "d", "a"]
    assert _chosen(found, sizes, limit=9) == ["b", "d", "a", "e"]
    assert _chosen(found, sizes, limit=1) == ["b"]


def test_equal_scores_prefer_the_smaller_and_equal_sizes_the_better() -> None:
    found = _trials(("a", 0.1, 24, "scored"), ("b", 0.1, 24, "scored"), ("c", 0.2, 24, "scored"))
    assert _chosen(found, _sizes(a=50, b=40, c=40)) == ["b"]


def test_a_negative_or_zero_value_is_a_value() -> None:
    found = _trials(("a", 0.0, 24, "scored"), ("b", -0.2, 24, "scored"), ("c", 0.1, 24, "scored"))
    assert _chosen(found, _sizes(a=50, b=60, c=40)) == ["b", "a", "c"]


def test_a_first_finalist_is_followed_by_what_is_clearly_smaller() -> None:
    found = _trials(
        ("a", 0.1, 24, "scored"), ("b", 0.0, 24, "scored"), ("c", 0.2, 24, "scored"), ("d", 0.3, 24, "scored")
    )
    sizes = _sizes(a=100, b=97, c=80, d=79)
    assert _chosen(found, sizes) == ["b", "c"]
    assert _chosen(found, sizes, first=CONFIGS["a"]) == ["a", "c"]
    assert _chosen(found, _sizes(a=100, b=60, c=50, d=49), first=CONFIGS["a"]) == ["a", "b", "c"]
    assert _chosen(found, sizes, first=CONFIGS["d"]) == ["d"]


def _scored_race(root: Any, rows: dict[str, tuple[float, float, float | None]]) -> tuple[Race, Racer]:
    """Configs with so many extra nats, a scatter of them over items, and a KL; all items scored."""
    told = {CONFIGS[name].id: row for name, row in rows.items()}

    def nll(config: KVConfig, item: Item) -> float:
        extra, scatter, _ = told.get(config.id, (0.0, 0.0, None))
        own = 1 + standin.luck("item", item.id)
        return own + extra + scatter * (standin.luck(config.id, item.id) - 0.5)

    def kl(config: KVConfig, item: Item) -> float | None:
        known = told[config.id][2]
        return None if known is None else known * (1 + standin.luck(item.id))

    racer = Racer(
        space(),
        standin.book(root, StandIn(SHAPE, nll, kl=kl)),
        SEARCH,
        n_items=N_ITEMS,
        seed=0,  # type: ignore[arg-type]
    )
    racer.book.ensure(ROLE, SEARCH.items, [BASELINE, *(CONFIGS[name] for name in rows)])
    racer._sd = dict.fromkeys(SEARCH.families, 1.0)
    found = _trials(*((name, racer.value(CONFIGS[name]), len(SEARCH), "scored") for name in rows))
    return found, racer


def test_of_scores_that_luck_may_have_ordered_the_nearest_to_the_full_cache_is_the_safest(tmp_path) -> None:
    rows = {"a": (-0.06, 0.4, 0.016), "b": (0.0, 0.4, 0.004), "c": (0.5, 0.4, 0.001), "d": (0.01, 0.4, 0.009)}
    found, racer = _scored_race(tmp_path, rows)
    values = {n: racer.value(CONFIGS[n]) for n in rows}
    assert min(values, key=lambda n: values[n]) == "a"
    assert racer.safest(found) == CONFIGS["b"]  # c is nearer still, and its score is clearly behind
    assert racer.distance(CONFIGS["b"]) == pytest.approx(0.004 * 1.5, rel=0.2)
    unseen = [t for t in found.trials if t.config != CONFIGS["b"]]
    # d is nearer than a, and 1.5 standard errors behind
    assert racer.safest(Race(tuple(unseen), (2, 4, 8))) == CONFIGS["a"]


def test_scores_that_do_not_scatter_are_told_apart(tmp_path) -> None:
    found, racer = _scored_race(tmp_path, {"a": (0.0, 0.0, 0.016), "b": (0.001, 0.0, 0.004), "c": (0.0, 0.0, 0.01)})
    assert racer.safest(found) == CONFIGS["c"]


def test_without_kl_the_best_score_is_the_safest_and_without_a_score_there_is_none(tmp_path) -> None:
    found, racer = _scored_race(tmp_path, {"a": (0.02, 0.4, None), "b": (-0.05, 0.4, None)})
    assert racer.safest(found) == CONFIGS["b"]
    assert racer.safest(_trials(("a", None, 24, "failed"), ("g", 0.1, 4, "scored"))) is None


def test_finalists_of_a_race_shrink_and_fit(usual) -> None:
    found, racer, _ = usual
    sizes = {t.config.id: WORK.bytes(t.config, SHAPE) for t in found.trials if t.config}
    chosen = finalists(found, len(SEARCH), sizes)
    assert 1 <= len(chosen) <= 3
    taken = [sizes[c.id] for c in chosen]
    assert taken == sorted(set(taken), reverse=True)
    assert taken[0] <= racer.space.budget
    values = [racer.value(c) for c in chosen]
    assert values == sorted(values)
    assert values[0] == min(t.value for t in found.feasible().values() if t.items == len(SEARCH))
