"""Items, sets and rows: what is refused, prefixes, and a hash that sees every change."""

import dataclasses
from typing import Any

import pytest

from kvlab.evals.item import EvalSet, Item
from kvlab.evals.subject import ItemScore


def item(index: int = 0, family: str = "math", **changes: Any) -> Item:
    facts: dict[str, Any] = {
        "id": f"t/search/0/{family}{index}",
        "task": "t",
        "family": family,
        "context": "1 + 1 = 2\n",
        "question": "2 + 1 =",
        "answers": (" 3",),
        "cluster": "c",
    }
    return Item(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"family": "maths"}, "unknown family 'maths'; did you mean 'math'"),
        ({"id": "other/search/0/1"}, "must read t/<search"),
        ({"id": "t/test/0/1"}, "must read t/<search"),
        ({"context": ""}, "must not be empty"),
        ({"question": ""}, "must not be empty"),
        ({"answers": ()}, "at least one non-empty"),
        ({"answers": ("",)}, "at least one non-empty"),
        ({"choices": (" 4", " 5")}, "is not among choices"),
        ({"choices": (" 3", " 3")}, "two or more different"),
        ({"choices": (" 3",)}, "two or more different"),
        ({"max_new_tokens": 0}, "must be at least 1"),
    ],
)
def test_wrong_items_are_refused(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        item(**changes)


def test_form_and_split_are_read_from_the_item() -> None:
    assert (item().form, item().split) == ("greedy", "search")
    assert item(choices=(" 3", " 4")).form == "choice"
    assert item(id="t/confirm/5/2").split == "confirm"


def test_head_takes_the_first_of_every_family() -> None:
    items = tuple(item(index, family) for index in range(3) for family in ("code", "math"))
    whole = EvalSet("s", 1, items)
    assert [one.id for one in whole.head(2).items] == [one.id for one in items[:4]]
    assert whole.head(9).items == items
    assert whole.families == ("math", "code")
    assert len(whole) == 6
    with pytest.raises(ValueError, match="at least one"):
        whole.head(0)
    with pytest.raises(ValueError, match="holds item 't/search/0/math0' twice"):
        EvalSet("s", 1, (item(), item()))


def test_the_hash_sees_every_field_and_nothing_else() -> None:
    base = EvalSet("s", 1, (item(0), item(1)))
    assert base.sha256 == EvalSet("s", 1, (item(0), item(1))).sha256
    changed = [
        EvalSet("s", 2, base.items),
        EvalSet("z", 1, base.items),
        EvalSet("s", 1, base.items[::-1]),
        EvalSet("s", 1, (item(0), item(1, answers=(" 4",)))),
        EvalSet("s", 1, (item(0), item(1, max_new_tokens=3))),
        EvalSet("s", 1, (item(0), item(1, stop=("é",)))),
    ]
    assert len({one.sha256 for one in [base, *changed]}) == 7


ROW = ItemScore(
    config_id="0" * 12,
    item_id="t/search/0/1",
    task="t",
    family="math",
    cluster="c",
    split="search",
    mode="forked",
    form="greedy",
    score=1.0,
    exact=1.0,
    token_accuracy=1.0,
    nll=0.1,
    kl=None,
    top1=None,
    prediction=" 3",
    context_tokens=10,
    answer_tokens=2,
    measured_bytes=1,
    predicted_bytes=1,
    raw16_bytes=2,
    seconds=0.1,
)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"score": 1.5}, "score=1.5 must lie in"),
        ({"exact": float("nan")}, "exact=nan must lie in"),
        ({"nll": float("nan")}, "is not finite"),
        ({"nll": float("inf")}, "is not finite"),
        ({"mode": "fork"}, "did you mean 'forked'"),
        ({"form": "choices"}, "did you mean 'choice'"),
        ({"split": "train"}, "unknown split"),
    ],
)
def test_wrong_rows_are_refused(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        dataclasses.replace(ROW, **changes)


def test_a_generate_row_may_lack_a_likelihood() -> None:
    row = dataclasses.replace(ROW, form="generate", nll=float("nan"))
    assert row.nll != row.nll
