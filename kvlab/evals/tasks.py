"""The task registry and how evaluation sets are built from it: seeded, split, balanced, and a prefix when shorter.

A new task is one function in a generator file and one line here. This file refuses to know any model or metric.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvlab.evals import arithmetic, programs, retrieval
from kvlab.evals.draft import Draft, seeded
from kvlab.evals.item import FAMILIES, SPLITS, EvalSet, Item, unknown

Make = Callable[[random.Random, int], Draft]


@dataclass(frozen=True, slots=True)
class Task:
    """A generator with its family, its form (`greedy` or `choice`) and its default context length.

    `make(rng, length)` writes one item whose context holds about `length` tokens.
    """

    name: str
    family: str
    form: str
    make: Make
    length: int


def _tasks(*rows: Task) -> dict[str, Task]:
    return {row.name: row for row in rows}


TASKS = _tasks(
    Task("needle_text", "retrieval", "greedy", retrieval.needle_text, 250),
    Task("needle_word", "retrieval", "greedy", retrieval.needle_word, 300),
    Task("passkey", "retrieval", "greedy", retrieval.passkey, 300),
    Task("multikey", "retrieval", "greedy", retrieval.multikey, 250),
    Task("multikey_choice", "retrieval", "choice", retrieval.multikey_choice, 300),
    Task("json_value", "retrieval", "greedy", retrieval.json_value, 200),
    Task("add1", "math", "greedy", arithmetic.add1, 140),
    Task("add1_choice", "math", "choice", arithmetic.add1_choice, 140),
    Task("add2", "math", "greedy", arithmetic.add2, 180),
    Task("add2_choice", "math", "choice", arithmetic.add2_choice, 180),
    Task("subtract", "math", "greedy", arithmetic.subtract, 140),
    Task("subtract_choice", "math", "choice", arithmetic.subtract_choice, 140),
    Task("progression_choice", "math", "choice", arithmetic.progression_choice, 180),
    Task("count_on", "math", "greedy", arithmetic.count_on, 160),
    Task("compare_choice", "math", "choice", arithmetic.compare_choice, 180),
    Task("word_problem", "math", "greedy", arithmetic.word_problem, 200),
    Task("word_problem_choice", "math", "choice", arithmetic.word_problem_choice, 200),
    Task("dict_lookup", "code", "greedy", programs.dict_lookup, 180),
    Task("dict_lookup_choice", "code", "choice", programs.dict_lookup_choice, 180),
    Task("dict_assign", "code", "greedy", programs.dict_assign, 180),
    Task("attribute", "code", "greedy", programs.attribute, 160),
    Task("constant_call", "code", "greedy", programs.constant_call, 180),
    Task("list_index", "code", "greedy", programs.list_index, 160),
    Task("list_index_choice", "code", "choice", programs.list_index_choice, 160),
    Task("call", "code", "greedy", programs.call, 160),
    Task("call_choice", "code", "choice", programs.call_choice, 160),
    Task("program_output", "code", "greedy", programs.program_output, 160),
    Task("program_output_choice", "code", "choice", programs.program_output_choice, 160),
    Task("trace", "code", "greedy", programs.trace, 140),
)

SUITE_VERSION = 1
DEFAULT_SUITE: dict[str, tuple[str, ...]] = {
    "retrieval": ("needle_text", "multikey"),
    "math": ("word_problem", "count_on"),
    "code": ("dict_assign", "attribute", "trace"),
}
"""Chosen by measurement on the default model; the table and the protocol are in sweeps/LOG.md."""

_ATTEMPTS = 50


def build(
    families: Sequence[str],
    *,
    split: str,
    n: int,
    seed: int,
    length: int | Mapping[str, int] | None = None,
    suite: Mapping[str, Sequence[str]] = DEFAULT_SUITE,
    query_aware: bool = False,
) -> EvalSet:
    """`n` items of each family, its tasks taking turns and the families too, so that every prefix is balanced.

    `length` is the context length in estimated tokens, for all tasks or by task name; without it each task uses its
    own. Splits never share a random stream: an item depends on task, split, seed and index only, so a smaller `n` gives
    a prefix. With `query_aware` the question stands at the end of the context and only the cue comes after it.
    """
    _check(families, split, n, length, suite)
    columns = [_column(family, split, n, seed, length, tuple(suite[family]), query_aware) for family in families]
    items = tuple(item for row in zip(*columns, strict=True) for item in row)
    aware = "/query-aware" if query_aware else ""
    return EvalSet(f"{'+'.join(families)}/{split}/{seed}{aware}", SUITE_VERSION, items)


def _check(
    families: Sequence[str],
    split: str,
    n: int,
    length: int | Mapping[str, int] | None,
    suite: Mapping[str, Sequence[str]],
) -> None:
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if n < 1:
        raise ValueError(f"n={n} items per family: at least 1 is needed")
    if isinstance(families, str) or not families or len(set(families)) != len(families):
        raise ValueError(f"families={families!r} must be a list of different names out of {', '.join(FAMILIES)}")
    for family in families:
        if family not in FAMILIES:
            raise unknown("family", family, FAMILIES)
        if not suite.get(family):
            raise ValueError(f"the suite has no task for family {family!r}; it has {', '.join(suite)}")
        for name in suite[family]:
            if task(name).family != family:
                raise ValueError(f"task {name!r} belongs to family {TASKS[name].family!r}, not to {family!r}")
    given = length.items() if isinstance(length, Mapping) else [(None, length)]
    for name, value in given:
        if name is not None:
            task(name)
        if value is not None and value < 1:
            raise ValueError(f"context length {value} must be at least 1 token")


def task(name: str) -> Task:
    """The task of that name, or an error with the nearest one."""
    if name not in TASKS:
        raise unknown("task", name, list(TASKS))
    return TASKS[name]


def _column(
    family: str,
    split: str,
    n: int,
    seed: int,
    length: int | Mapping[str, int] | None,
    names: tuple[str, ...],
    query_aware: bool,
) -> list[Item]:
    seen: set[tuple[str, str]] = set()
    out = []
    for position in range(n):
        one = TASKS[names[position % len(names)]]
        asked = length.get(one.name) if isinstance(length, Mapping) else length
        out.append(_item(one, split, seed, position // len(names), asked or one.length, query_aware, seen))
    return out


def _item(
    one: Task, split: str, seed: int, index: int, length: int, query_aware: bool, seen: set[tuple[str, str]]
) -> Item:
    """One item; a draft that repeats an earlier one of the set is drawn again from a stream of its own."""
    for attempt in range(_ATTEMPTS):
        draft = one.make(seeded(one.name, split, seed, index, attempt), length)
        key = (draft.context, draft.question)
        if key not in seen:
            seen.add(key)
            name = f"{one.name}/{split}/{seed}/{index}"
            return Item(
                id=name,
                task=one.name,
                family=one.family,
                context=draft.context + draft.question if query_aware else draft.context,
                question=draft.cue if query_aware else draft.question + draft.cue,
                answers=draft.answers,
                choices=draft.choices,
                cluster=name,
            )
    raise ValueError(
        f"task {one.name!r} has no more different items at length {length} after {index}; ask for fewer items or a "
        "longer context"
    )
