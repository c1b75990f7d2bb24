"""Claims, leases and ends: one owner at a time, nothing lost, nothing recorded twice."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState

from kvlab.study import board as boards
from kvlab.study.__main__ import main
from kvlab.study.board import LEASE, MOST_ATTEMPTS, PIECE, REASON, Board, StudyError, create, find
from kvlab.study.loop import run_unit, work
from kvlab.study.storages import open_storage
from kvlab.study.summary import front, summary
from kvlab.study.unit import Outcome, Work, address, trial_seed

GOING = SimpleNamespace(asked=False)


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """Pieces named a, b, c; notes each that is run, and may fail."""

    def __init__(self, fail: Exception | None = None, before: Any = None) -> None:
        self.ran: list[str] = []
        self.fail, self.before = fail, before

    def prefers(self, body: Mapping[str, Any]) -> bool:
        return body.get("near", False)

    def pieces(self, body: Mapping[str, Any]) -> Mapping[str, str]:
        return {address(body["name"], p): p for p in "abc"}

    def run(self, body: Mapping[str, Any], piece: str) -> str:
        if self.before is not None:
            self.before(piece)
        if self.fail is not None and piece == "b":
            raise self.fail
        self.ran.append(piece)
        return f"{body['name']}{piece}"

    def outcome(self, body: Mapping[str, Any], results: Sequence[str]) -> Outcome:
        assert list(results) == [f"{body['name']}{p}" for p in "abc"]
        return Outcome(body.get("value", 1.0), body.get("violation"))


def watched(board: Board, clock: Clock, seconds: float) -> list[int]:
    """What a board gives back that looks again and again, until so much time has passed."""
    until, given = clock.now + seconds, []
    while True:
        board.look()
        given += board.reap()
        if clock.now >= until:
            return given
        clock.now = min(until, clock.now + 2)


def works(*bodies: dict[str, Any]) -> list[Work]:
    return [Work(key=b["name"], body=b) for b in bodies]


@pytest.fixture
def name(url, fresh) -> str:
    name = fresh("board")
    assert create(open_storage(url), name, {"objective": "steps"})
    return name


def at(url: str, name: str, me: str, clock: Clock | None = None, lease_s: float = 10.0) -> Board:
    return Board(open_storage(url), name, me=me, lease_s=lease_s, **({"clock": clock} if clock else {}))


def only(board: Board) -> Any:
    (trial,) = board.trials()
    return trial


def test_a_unit_is_claimed_once(url, name) -> None:
    one, two = at(url, name, "one"), at(url, name, "two")
    one.post(works({"name": "x"}, {"name": "y"}, {"name": "z"}))
    claims = [b.claim() for b in (one, two, one, two, one)]
    assert sorted(u.key for u in claims[:3]) == ["x", "y", "z"]  # type: ignore[union-attr]
    assert claims[3:] == [None, None]


def test_what_is_posted_again_is_there_once(url, name) -> None:
    one, two = at(url, name, "one"), at(url, name, "two")
    first = one.post(works({"name": "x"}, {"name": "y"}))
    assert two.post(works({"name": "y"}, {"name": "x"}, {"name": "y"})) == {"y": first["y"], "x": first["x"]}
    assert len(one.trials()) == 2


def test_of_two_that_were_posted_at_once_one_remains(url, name, monkeypatch) -> None:
    one, two = at(url, name, "one"), at(url, name, "two")
    one.post(works({"name": "x"}))
    monkeypatch.setattr(two, "trials", lambda *states: [])  # it has not seen the other's yet
    two.post(works({"name": "x"}))
    one.seal()
    kept, other = one.trials()
    assert (kept.state, other.state) == (TrialState.WAITING, TrialState.FAIL)
    assert other.user_attrs[REASON] == {"kind": "duplicate", "said": "the same as trial 0"}


def test_preferred_units_come_first(url, name) -> None:
    one = at(url, name, "one")
    one.post(works(*({"name": str(n), "near": n in (7, 19)} for n in range(24))))
    objective = Steps()
    first = [one.claim(objective.prefers) for _ in range(2)]
    assert {u.key for u in first if u} == {"7", "19"}


def test_a_silent_owner_loses_its_unit_after_a_whole_lease_and_its_pieces_stay(url, name) -> None:
    clock = Clock()
    dead, other = at(url, name, "dead", clock), at(url, name, "other", clock)
    dead.post(works({"name": "x"}))
    unit = dead.claim()
    assert unit is not None
    dead.save(unit, address("x", "a"), "xa")
    assert watched(other, clock, 9.9) == []
    assert watched(other, clock, 0.2) == [0]
    again = other.claim()
    assert again is not None
    assert (again.number, again.attempt, again.done) == (0, 2, {address("x", "a"): "xa"})
    steps = Steps()
    assert run_unit(other, steps, again, GOING)
    assert steps.ran == ["b", "c"]
    assert only(other).state == TrialState.COMPLETE


def test_an_owner_that_beats_keeps_its_unit_however_long_it_takes(url, name) -> None:
    clock = Clock()
    alive, other = at(url, name, "alive", clock), at(url, name, "other", clock)
    alive.post(works({"name": "x"}))
    unit = alive.claim()
    assert unit is not None
    for beat in range(1, 12):
        assert watched(other, clock, 8) == []
        assert alive.renew(unit, beat)


def test_a_trial_claimed_an_instant_ago_is_not_taken_for_the_owner_before(url, name, monkeypatch) -> None:
    clock = Clock()
    one, two, watcher = (at(url, name, n, clock) for n in ("one", "two", "watcher"))
    one.post(works({"name": "x"}))
    one.claim()
    for _ in range(5):
        assert watched(two, clock, 0) == watched(watcher, clock, 0) == []
        clock.now += 2
    clock.now += 0.1
    assert watched(two, clock, 0) == [0]
    # `two` has the trial, but has not got round to writing its lease: what is seen of it is that of `one`.
    assert two._start(only(two)._trial_id)
    assert watched(watcher, clock, 0) == []


def test_no_clocks_are_compared(url, name) -> None:
    fast, slow = Clock(), Clock()
    fast.now, slow.now = 1e9, 5.0
    owner, watcher = at(url, name, "owner", fast), at(url, name, "watcher", slow)
    owner.post(works({"name": "x"}))
    owner.claim()
    watched(watcher, slow, 1)
    fast.now += 1e6
    assert watched(watcher, slow, 1) == []


def test_who_slept_has_watched_nothing(url, name) -> None:
    clock = Clock()
    owner, watcher = at(url, name, "owner", clock), at(url, name, "watcher", clock)
    owner.post(works({"name": "x"}))
    unit = owner.claim()
    assert unit is not None
    assert watched(watcher, clock, 4) == []
    clock.now += 3600  # the machine sleeps, the owner with it
    assert watched(watcher, clock, 4) == []
    assert owner.renew(unit, 1)
    assert watched(watcher, clock, 8) == []


def test_who_was_away_finds_its_unit_gone_and_changes_nothing(url, name) -> None:
    clock = Clock()
    away, other = at(url, name, "away", clock), at(url, name, "other", clock)
    away.post(works({"name": "x", "value": 3.0}))
    unit = away.claim()
    assert unit is not None

    def meanwhile(piece: str) -> None:
        """While `away` sleeps in piece b, the other takes the unit and ends it."""
        if piece == "b":
            assert watched(other, clock, 11) == [0]
            taken = other.claim()
            assert taken is not None
            assert not away.renew(unit, 5)
            assert run_unit(other, Steps(), taken, GOING)

    run_unit(away, Steps(before=meanwhile), unit, GOING)
    trial = only(away)
    assert trial.state == TrialState.COMPLETE
    assert trial.value == 3.0
    assert trial.user_attrs[LEASE]["owner"] == "other"
    assert {k for k in trial.user_attrs if k.startswith(PIECE)} == {PIECE + address("x", p) for p in "abc"}


def test_a_lost_unit_may_be_taken_up_again_by_whom_it_was_lost(url, name) -> None:
    clock = Clock()
    one, other = at(url, name, "one", clock), at(url, name, "other", clock)
    one.post(works({"name": "x"}))
    unit = one.claim()
    assert unit is not None
    one.abandon(unit)
    assert watched(other, clock, 11) == [0]
    again = one.claim()
    assert again is not None
    assert again.attempt == 2
    assert one.renew(again, 1)


def test_a_unit_that_kills_its_workers_fails_for_good(url, name) -> None:
    clock = Clock()
    one = at(url, name, "one", clock)
    one.post(works({"name": "x"}))
    for attempt in range(1, MOST_ATTEMPTS + 1):
        unit = one.claim()
        assert unit is not None
        assert unit.attempt == attempt
        assert watched(one, clock, 11) == [0]
    trial = only(one)
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs[REASON]["kind"] == "lost"
    assert "3 workers died" in trial.user_attrs[REASON]["said"]
    assert one.claim() is None
    assert one.again() == [0]
    unit = one.claim()
    assert unit is not None
    assert unit.number == 1


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (ValueError("no such group"), "ValueError: no such group"),
        (MemoryError("12 GB"), "MemoryError: 12 GB"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_an_error_is_recorded_with_its_settings_and_stops_nothing(url, name, fail, said) -> None:
    one = at(url, name, "one")
    one.post(works({"name": "x", "scheme": "k2v2"}))
    one.seal()
    assert work(one, Steps(fail), stop=GOING).why == "over"
    (failed,) = summary(one)["failed"]
    assert failed == {"number": 0, "config": {"name": "x", "scheme": "k2v2"}, "kind": "error", "said": said}


def test_a_fault_of_the_program_is_no_failed_trial(url, name) -> None:
    one = at(url, name, "one")
    one.post(works({"name": "x"}))
    with pytest.raises(KeyError):
        work(one, Steps(KeyError("typo")), stop=GOING)
    assert only(one).state == TrialState.RUNNING  # its lease runs out


def test_best_is_feasible_and_finite_wherever_it_is_shown(url, name, capsys) -> None:
    one = at(url, name, "one")
    # Lower is better here: the values are errors, of accuracies .90 over the budget, .80 under it, and so on.
    one.post(
        works(
            {"name": "over", "value": 0.10, "violation": 5.0},
            {"name": "under", "value": 0.20, "violation": -1.0},
            {"name": "nan", "value": math.nan, "violation": -1.0},
            {"name": "nan bytes", "value": 0.05, "violation": math.nan},
            {"name": "inf", "value": -math.inf, "violation": -1.0},
        )
    )
    one.seal()
    work(one, Steps(), stop=GOING)
    found = summary(one)
    assert found["best"]["config"]["name"] == "under"
    assert {f["config"]["name"] for f in found["failed"]} == {"nan", "nan bytes", "inf"}
    assert all("must be finite" in f["said"] for f in found["failed"])
    assert found["trials"]["pruned"] == 0
    assert main(["status", name, "--storage", url]) == 0
    shown = capsys.readouterr().out
    assert "best feasible: trial 1, 0.2" in shown
    assert "value nan" in shown
    assert front(one.trials()) == [(-1.0, 0.20), (5.0, 0.10)]


def test_where_nothing_is_feasible_the_nearest_miss_is_shown(url, name, capsys) -> None:
    one = at(url, name, "one")
    one.post(works({"name": "a", "value": 0.1, "violation": 9.0}, {"name": "b", "value": 0.4, "violation": 2.0}))
    one.seal()
    work(one, Steps(), stop=GOING)
    assert summary(one)["best"] is None
    assert main(["status", name, "--storage", url]) == 3
    assert "no feasible setting; nearest is trial" in (shown := capsys.readouterr().out)
    assert "over by 2" in shown


def test_a_constraint_known_beforehand_counts_too(url, name) -> None:
    one = at(url, name, "one")
    one.post([Work(key="x", body={"name": "x"}, violation=3.0)])
    one.seal()
    work(one, Steps(), stop=GOING)
    assert summary(one)["nearest_miss"]["violation"] == 3.0


def test_a_worker_does_not_leave_before_the_study_is_sealed(url, name) -> None:
    one = at(url, name, "one")
    assert not one.over()
    one.look()
    poster = at(url, name, "poster")
    poster.post(works({"name": "x"}))
    poster.seal()
    assert not one.over()  # what was posted after it looked and before it was sealed
    assert work(one, Steps(), stop=GOING, idle_s=0).units == 1


def test_a_maker_that_died_while_posting_is_found_out(url, name) -> None:
    one = at(url, name, "one", lease_s=0.3)
    one.post(works({"name": "x"}))
    assert not one.filled()
    one.post(works({"name": "x"}, {"name": "y"}))
    one.seal()
    assert one.filled()
    assert work(one, Steps(), stop=GOING).units == 2


def test_withdrawn_units_are_done_by_nobody(url, name) -> None:
    one = at(url, name, "one")
    one.post(works({"name": "x"}))
    one.withdraw()
    assert one.claim() is None
    assert one.post(works({"name": "x"})) != {}
    assert one.claim() is not None


def test_names_are_found_by_their_beginning(url, fresh) -> None:
    storage, base = open_storage(url), fresh("find")
    for full in (f"{base}-0123456789ab", f"{base}2-0123456789ab", f"{base}3-0123456789ab"):
        create(storage, full, {"objective": "steps"})
    assert find(storage, base) == f"{base}-0123456789ab"
    assert find(storage, f"{base}2") == f"{base}2-0123456789ab"
    with pytest.raises(StudyError, match="nearest is"):
        find(storage, f"{base}9")
    create(storage, f"{base}-ba9876543210", {"objective": "steps"})
    with pytest.raises(StudyError, match="begins 2 studies"):
        find(storage, base)


def test_a_study_that_does_not_say_what_it_is_about_is_refused(url, fresh, monkeypatch) -> None:
    import optuna

    monkeypatch.setattr(boards, "_MAKING_S", 0.1)
    storage, name = open_storage(url), fresh("foreign")
    optuna.create_study(storage=storage.direct, study_name=name)
    with pytest.raises(StudyError, match="was not made by kvlab"):
        Board(storage, name).spec()
    # Its maker may have died between the name and the spec.
    assert create(storage, name, {"objective": "steps"})
    assert not create(storage, name, {"objective": "other"})
    assert Board(storage, name).spec() == {"objective": "steps"}


def test_a_deleted_study_says_so(url, name) -> None:
    one = at(url, name, "one")
    one.storage.direct.delete_study(one.id)
    with pytest.raises(StudyError, match="was deleted"):
        one.claim()


def test_seeds_are_by_study_and_number() -> None:
    seeds = {trial_seed(s, n) for s in ("a", "b") for n in range(50)}
    assert len(seeds) == 100
    assert trial_seed("a", 7) == trial_seed("a", 7) < 2**64
