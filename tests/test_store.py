"""The paged store against plain lists: nothing lost, nothing owned twice, every page given back."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.codecs import Stream
from kvlab.store import PagePool, PageTable

PAGE, HEADS = 4, 2
CPU = torch.device("cpu")


class StoreMachine(RuleBasedStateMachine):
    """Tables on one pool. Each token is a fresh number; `held[table][head]` lists what must be there."""

    unit = 1  # tokens that move together

    def __init__(self) -> None:
        super().__init__()
        rows = PAGE // self.unit
        self.pool = PagePool({"a": Stream(PAGE, 2, torch.int32), "b": Stream(rows, 1, torch.int64)}, PAGE, CPU)
        self.held: dict[PageTable, list[list[int]]] = {}
        self.tokens = 0

    @initialize()
    def first(self) -> None:
        self.add_table()

    @precondition(lambda self: len(self.held) < 4)
    @rule()
    def add_table(self) -> None:
        self.held[PageTable(self.pool, HEADS)] = [[] for _ in range(HEADS)]

    def pick(self, number: int) -> PageTable:
        return list(self.held)[number % len(self.held)]

    @rule(
        number=st.integers(0, 9),
        lengths=st.lists(st.integers(0, 9), min_size=HEADS, max_size=HEADS),
        even=st.booleans(),
    )
    def append(self, number: int, lengths: list[int], even: bool) -> None:
        table = self.pick(number)
        lengths = [n * self.unit for n in (lengths[:1] * HEADS if even else lengths)]
        longest = max(lengths)
        numbers = torch.arange(self.tokens, self.tokens + HEADS * longest).view(HEADS, longest)
        self.tokens += HEADS * longest
        blocks = numbers[:, :: self.unit].unsqueeze(-1)
        packed = {"a": torch.stack([numbers, -numbers], dim=-1).int(), "b": blocks}
        table.append(packed, None if even else lengths)
        for head, (count, new) in enumerate(zip(lengths, numbers.tolist(), strict=True)):
            self.held[table][head] += new[:count]

    @rule(number=st.integers(0, 9), seed=st.integers(0, 2**16), even=st.booleans())
    def keep(self, number: int, seed: int, even: bool) -> None:
        table = self.pick(number)
        rng = random.Random(seed)
        units = [len(head) // self.unit for head in self.held[table]]
        counts = [rng.randint(0, min(units))] * HEADS if even else [rng.randint(0, n) for n in units]
        longest = max(counts)
        chosen = [sorted(rng.sample(range(n), c)) for n, c in zip(units, counts, strict=True)]
        padded = [c + [0] * (longest - len(c)) for c in chosen]
        unit_tokens = PAGE if self.unit == PAGE else 1
        table.keep(torch.tensor(padded, dtype=torch.long).view(HEADS, longest), unit_tokens, None if even else counts)
        for head, index in enumerate(chosen):
            old = self.held[table][head]
            self.held[table][head] = [old[i * self.unit + j] for i in index for j in range(self.unit)]

    @precondition(lambda self: len(self.held) < 4)
    @rule(number=st.integers(0, 9))
    def copy(self, number: int) -> None:
        table = self.pick(number)
        self.held[table.copy()] = [list(head) for head in self.held[table]]

    @rule(number=st.integers(0, 9))
    def clear(self, number: int) -> None:
        table = self.pick(number)
        table.clear()
        self.held[table] = [[] for _ in range(HEADS)]

    @rule(number=st.integers(0, 9))
    def rewrite(self, number: int) -> None:
        table = self.pick(number)
        if table.length:
            table.write("a", table.gather(["a"])["a"] * 1)

    @rule()
    def fit(self) -> None:
        self.pool.fit(list(self.held))
        assert self.pool.n_pages == self.pool.used_pages
        assert self.pool.free == []

    @invariant()
    def tables_hold_what_they_were_given(self) -> None:
        for table, heads in self.held.items():
            assert table.counts == [len(head) for head in heads]
            assert table.ragged == (len({len(head) for head in heads}) > 1)
            gathered = table.gather()
            for n, head in enumerate(heads):
                if head:
                    assert gathered["a"][n, : len(head), 0].tolist() == head
                    assert gathered["a"][n, : len(head), 1].tolist() == [-x for x in head]
                    assert gathered["b"][n, : len(head) // self.unit, 0].tolist() == head[:: self.unit]

    @invariant()
    def pages_have_one_owner(self) -> None:
        owned = [page for table in self.held for head in table.pages for page in head]
        assert len(owned) == len(set(owned))
        assert sorted(owned + self.pool.free) == list(range(self.pool.n_pages))
        assert self.pool.used_pages == len(owned)
        needed = sum(-(-len(head) // PAGE) for heads in self.held.values() for head in heads)
        assert len(owned) == needed

    @invariant()
    def streams_have_the_size_of_the_pool(self) -> None:
        size = sum(x.numel() * x.element_size() for x in self.pool.storages())
        assert size == self.pool.n_pages * self.pool.page_bytes

    def teardown(self) -> None:
        for table in self.held:
            table.clear()
        assert self.pool.used_pages == 0
        assert self.pool.free == list(range(self.pool.n_pages))


class BlockMachine(StoreMachine):
    """The same where tokens come and go in whole pages, as per-channel codecs need it."""

    unit = PAGE


TestTokens = StoreMachine.TestCase
TestBlocks = BlockMachine.TestCase
TestTokens.settings = TestBlocks.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_growth_doubles_and_keeps_what_is_there() -> None:
    pool = PagePool({"a": Stream(PAGE, 1, torch.int32)}, PAGE, CPU)
    table = PageTable(pool, 1)
    sizes = []
    for token in range(64):
        table.append({"a": torch.full((1, 1, 1), token)})
        sizes.append(pool.n_pages)
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16]  # never by one page per page of tokens
    assert table.gather()["a"].flatten().tolist() == list(range(64))


def test_fit_gives_slack_back_and_renumbers() -> None:
    pool = PagePool({"a": Stream(PAGE, 1, torch.int32)}, PAGE, CPU)
    first, second = PageTable(pool, 1), PageTable(pool, 1)
    for table, base in ((first, 0), (second, 100), (first, 50)):
        table.append({"a": torch.arange(base, base + 5).view(1, 5, 1)})
    first.clear()
    pool.fit([first, second])
    assert (pool.n_pages, pool.streams["a"].shape[0], second.pages) == (2, 2, [[0, 1]])
    assert second.gather()["a"].flatten().tolist() == [100, 101, 102, 103, 104]
    # What is kept after an eviction owns its own memory, not a view of the old.
    assert pool.streams["a"].untyped_storage().nbytes() == 2 * PAGE * 4


def test_nothing_kept_is_nothing_held() -> None:
    pool = PagePool({"a": Stream(PAGE, 1, torch.int32)}, PAGE, CPU)
    table = PageTable(pool, 2)
    table.append({"a": torch.arange(10).view(2, 5, 1)})
    table.keep(torch.zeros(2, 0, dtype=torch.long))
    assert (table.counts, table.gather(), pool.used_pages) == ([0, 0], {}, 0)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_alloc_takes_the_lowest_free_pages(count: int) -> None:
    pool = PagePool({"a": Stream(PAGE, 1, torch.int32)}, PAGE, CPU)
    pool.alloc(6)
    pool.release([4, 1])
    assert pool.alloc(count)[:2] == [1, 4][:count]


@given(st.lists(st.lists(st.sampled_from([0, 4, 8, 12]), min_size=2, max_size=2) | st.sampled_from([4, 8]), max_size=6))
def test_the_index_is_what_the_lists_say(steps: list[list[int] | int]) -> None:
    """Whether it was built anew or went on from the last one."""
    pool = PagePool({"k.data": Stream(4, 2, torch.float32)}, 4, torch.device("cpu"))
    table = PageTable(pool, 2)
    for step in steps:
        table.index()
        table.extend([step, step] if isinstance(step, int) else step)
        longest = max(len(held) for held in table.pages)
        assert table.index().tolist() == [held + [0] * (longest - len(held)) for held in table.pages]
