"""How many rows go together: the rule over numbers, the measured cost, and what happens when memory runs out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model

from kvlab.batching import MOST, MOST_ON_HOST, SHARE, Batcher, Cost, Need, fitting, out_of_memory

COST = Cost(token=10, logits=100)


def _on(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device))


@pytest.mark.parametrize(
    ("needs", "room", "most", "count"),
    [
        ([Need(3, 1, 5)] * 9, 1000, 48, 7),  # 7 * (3 * 10 + 100 + 5) = 945
        ([Need(3, 1, 5)] * 9, 944, 48, 6),
        ([Need(3, 1, 5)] * 9, 10**9, 4, 4),
        ([Need(3, 1, 5)] * 9, 0, 48, 1),  # one always
        ([Need(3, 1)] * 4 + [Need(50, 1)], 5 * 130, 48, 4),  # the wide row would widen all
        ([Need(3, 40)] * 9, 3 * 4030, 48, 3),  # long answers
        ([Need(1, 0, 300), Need(1, 0, 300), Need(1, 0, 1)], 620, 48, 2),
        ([], 100, 48, 0),
    ],
)
def test_rows_that_fit(needs, room, most, count) -> None:
    assert fitting(needs, COST, room, most) == count


def test_beside_others_it_may_be_none() -> None:
    assert fitting([Need(3, 1)], COST, 0, 9, least=0) == 0
    assert fitting([Need(3, 1)] * 2, COST, 130, 9, least=0) == 1


needs = st.lists(st.builds(Need, st.integers(1, 9), st.integers(0, 9), st.integers(0, 500)), min_size=1, max_size=12)


@given(needs, st.integers(0, 5000), st.integers(1, 14))
def test_what_is_taken_fits_and_one_more_would_not(needs, room, most) -> None:
    def size(rows: list[Need]) -> int:
        each = max(n.tokens for n in rows) * COST.token + max(n.kept for n in rows) * COST.logits
        return len(rows) * each + sum(n.held for n in rows)

    count = fitting(needs, COST, room, most)
    assert 1 <= count <= min(most, len(needs))
    assert count == 1 or size(needs[:count]) <= room
    assert count == min(most, len(needs)) or size(needs[: count + 1]) > room
    assert fitting(needs, COST, room + 1, most) >= count


class _Widening:
    """A model that holds 200 numbers for each token at its peak, 1000 apart from tokens, and has a word list of 50."""

    device, dtype = torch.device("cpu"), torch.float32
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(vocab_size=50))

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> None:
        fixed = torch.zeros(1000)
        wide = torch.ones(input_ids.shape[1], 150)
        narrow = wide[:, :50] + fixed[:50]
        del wide
        narrow += 1


def test_cost_is_what_a_token_more_holds_at_the_peak() -> None:
    assert Batcher(_Widening()).cost == Cost(token=8 + 4 * 200, logits=50 * 8)  # its number too


def test_cost_of_a_real_model() -> None:
    """At least what its MLP holds at once: input and residual, gate, up and their product; twice that in 64 bit."""
    model, wide = tiny_model("llama3", torch.float32), tiny_model("llama3", torch.float64)
    cost, config = Batcher(model).cost, model.config
    assert 4 * (2 * config.hidden_size + 3 * config.intermediate_size) < cost.token < 100 * config.hidden_size
    assert Batcher(wide).cost.token == pytest.approx(2 * cost.token, rel=0.01)
    assert Batcher(wide).cost.logits == 2 * cost.logits


def test_as_many_as_half_of_the_room_takes_asked_anew_each_time() -> None:
    rooms = iter([1300, 400, 10**9])
    batcher = Batcher(_on("cpu"), room=lambda: next(rooms))
    batcher.cost = COST
    assert SHARE == 0.5
    assert [batcher.count([Need(3, 1)] * 99) for _ in range(3)] == [5, 1, MOST_ON_HOST]
    assert Batcher(_on("cuda")).most == MOST > MOST_ON_HOST
    assert Batcher(_on("cpu"), 7).most == 7


def test_rows_beside_others_are_counted() -> None:
    batcher = Batcher(_on("cpu"), 8, room=lambda: 10**9)
    batcher.cost = COST
    assert [batcher.count([Need(3, 1)] * 20, beside) for beside in (0, 3, 8)] == [8, 5, 0]


def test_one_row_at_most_is_never_measured() -> None:
    assert Batcher(_on("cpu"), 1).count([Need(9, 9, 10**18)] * 5) == 1  # no model to measure on


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()]


def _allocate() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def test_errors_of_memory_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as found:
        _allocate()
    assert all(map(out_of_memory, [*ERRORS, found.value]))
    assert not any(map(out_of_memory, [RuntimeError("shapes differ"), ValueError("CUDA out of memory")]))


@pytest.mark.parametrize("error", [*ERRORS, None], ids=["cuda", "python", "host"])
def test_half_as_many_where_memory_runs_out_and_the_same_result(error) -> None:
    batcher = Batcher(_on("cpu"), 16, room=lambda: 10**9)
    batcher.cost = COST
    tried = []

    def forward(rows):
        tried.append(len(rows))
        if len(rows) > 3:
            if error is None:
                _allocate()
            else:
                raise error
        return [x * x for x in rows]

    found = list(batcher.run(range(20), lambda x: Need(1, 1), forward))
    assert [x for rows, _ in found for x in rows] == list(range(20))
    assert [y for _, made in found for y in made] == [x * x for x in range(20)]
    assert tried == [16, 8, 4, *[2] * 10]  # what was too much is not tried again
    assert batcher.most == 2


def test_one_row_too_many_and_other_errors_are_raised() -> None:
    batcher = Batcher(_on("cpu"), 4, room=lambda: 10**9)
    batcher.cost = COST
    tried = []

    def forward(rows, error):
        tried.append(len(rows))
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        list(batcher.run([1, 2, 3], lambda x: Need(1, 1), lambda rows: forward(rows, ERRORS[0])))
    with pytest.raises(RuntimeError, match="shapes"):
        list(
            Batcher(_on("cpu"), 1).run([1, 2], lambda x: Need(1, 1), lambda rows: forward(rows, RuntimeError("shapes")))
        )
    assert tried == [3, 1, 1]


def test_portions_hold_every_row_in_order() -> None:
    batcher = Batcher(_on("cpu"), 5, room=lambda: 2 * 3 * 110)
    batcher.cost = COST
    assert list(batcher.portions(range(8), lambda x: Need(1, 1))) == [range(3), range(3, 6), range(6, 8)]
    assert list(batcher.portions([], lambda x: Need(1, 1))) == []
