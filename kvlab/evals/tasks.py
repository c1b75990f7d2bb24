"""The task registry and how evaluation sets are built from it: seeded, split, balanced, and a prefix when shorter.

A new task is one function in a generator file and one line here. This file refuses to know any model or metric.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.evals import arithmetic, programs, retrieval, several
from kvlab.evals.draft import Draft, estimate_tokens, seeded
from kvlab.evals.item import FAMILIES, SPLITS, EvalSet, Item, unknown
from kvlab.evals.ruler import lists, needles, qa
from kvlab.evals.ruler.fit import Count

Make = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A generator with its family, its form (`greedy` or `choice`) and its default context length.

    `make(rng, length)` writes one item whose context holds about `length` tokens. Where `fitted`, the prompt and the
    room for its answer take exactly `length` tokens, short of a few: `make(rng, length, index=..., count=...)` counts
    them, and spreads what is asked for over the depths of the context as the index goes on. Where `group` is more than
    one, `make` writes that many items over one and the same context.
    """

    name: str
    family: str
    form: str
    make: Make
    length: int
    fitted: bool = False
    group: int = 1


def _ruler(name: str, make: Make) -> Task:
    return Task(f"ruler_{name}", "retrieval", "greedy", make, 512, fitted=True)


def _tasks(*rows: Task) -> dict[str, Task]:
    return {row.name: row for row in rows}


TASKS = _tasks(
    Task("needle_text", "retrieval", "greedy", retrieval.needle_text, 250),
    Task("needle_word", "retrieval", "greedy", retrieval.needle_word, 300),
    Task("passkey", "retrieval", "greedy", retrieval.passkey, 300),
    Task("multikey", "retrieval", "greedy", retrieval.multikey, 250),
    Task("multikey_choice", "retrieval", "choice", retrieval.multikey_choice, 300),
    Task("json_value", "retrieval", "greedy", retrieval.json_value, 200),
    Task("several_facts", "retrieval", "greedy", several.facts, 280, group=several.QUESTIONS),
    Task("several_instructions", "retrieval", "greedy", several.instructions, 280, group=several.QUESTIONS),
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
    _ruler("single_noise", needles.single_noise),
    _ruler("single_text", needles.single_text),
    _ruler("single_uuid", needles.single_uuid),
    _ruler("multikey_text", needles.multikey_text),
    _ruler("multikey_needles", needles.multikey_needles),
    _ruler("multikey_uuid", needles.multikey_uuid),
    _ruler("multivalue", needles.multivalue),
    _ruler("multiquery", needles.multiquery),
    _ruler("variables", lists.variables),
    _ruler("common_words", lists.common_words),
    _ruler("frequent_words", lists.frequent_words),
    _ruler("qa", qa.qa),
    _ruler("qa_hops", qa.qa_hops),
    _ruler("single_word", needles.single_word),
)
RULER = tuple(name for name in TASKS if name.startswith("ruler_") and name != "ruler_single_word")
"""The thirteen tasks that stand for RULER's, in its order: its average is over these."""

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
    count: Count = estimate_tokens,
) -> EvalSet:
    """`n` items of each family, its tasks taking turns and the families too, so that every prefix is balanced.

    `length` is the context length in estimated tokens, for all tasks or by task name; without it each task uses its
    own. The tasks of RULER hold the length of the whole prompt to what `count` says, for example
    `kvlab.evals.ruler.fit.counter(tokenizer)`, and raise ValueError with the least length where it is too short.
    Splits never share a random stream: an item depends on task, split, seed and index only, and of RULER's on length
    and count, so a smaller `n` gives a prefix. With `query_aware` the question stands at the end of the context and
    only the cue comes after it.
    """
    _check(families, split, n, length, suite)
    draw = _Draw(split, seed, query_aware, count)
    columns = [_column(family, n, length, tuple(suite[family]), draw) for family in families]
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


@dataclass(frozen=True, slots=True)
class _Draw:
    """What all items of a set have in common."""

    split: str
    seed: int
    query_aware: bool
    count: Count

    def draft(self, one: Task, length: int, index: int, attempt: int) -> Draft:
        if one.fitted:
            rng = seeded(one.name, length, self.split, self.seed, index, attempt)
            return one.make(rng, length, index=index, count=self.count)
        if one.group > 1:
            whole = one.make(seeded(one.name, self.split, self.seed, index // one.group), length)
            return whole[index % one.group]
        return one.make(seeded(one.name, self.split, self.seed, index, attempt), length)


def _column(
    family: str, n: int, length: int | Mapping[str, int] | None, names: tuple[str, ...], draw: _Draw
) -> list[Item]:
    seen: set[tuple[str, str]] = set()
    out = []
    for one, index in itertools.islice(_turns(names), n):
        asked = length.get(one.name) if isinstance(length, Mapping) else length
        out.append(_item(one, index, asked or one.length, draw, seen))
    return out


def _turns(names: tuple[str, ...]) -> Iterator[tuple[Task, int]]:
    """Tasks taking turns, each with the indices of its next group."""
    for turn in itertools.count():
        for name in names:
            group = TASKS[name].group
            yield from ((TASKS[name], turn * group + part) for part in range(group))


def _item(one: Task, index: int, length: int, draw: _Draw, seen: set[tuple[str, str]]) -> Item:
    """One item; a draft that repeats an earlier one of the set is drawn again from a stream of its own."""
    for attempt in range(_ATTEMPTS):
        draft = draw.draft(one, length, index, attempt)
        key = (draft.context, draft.question)
        if key not in seen:
            seen.add(key)
            at = f"@{length}" if one.fitted else ""
            name = f"{one.name}/{draw.split}/{draw.seed}{at}/{index}"
            shared = f"{one.name}/{draw.split}/{draw.seed}{at}/{index - index % one.group}"
            return Item(
                id=name,
                task=one.name,
                family=one.family,
                context=draft.context + draft.question if draw.query_aware else draft.context,
                question=draft.cue if draw.query_aware else draft.question + draft.cue,
                answers=draft.answers,
                choices=draft.choices,
                cluster=shared,
                stop=draft.stop,
                max_new_tokens=draft.max_new_tokens,
                metric=draft.metric,
                references=draft.references,
                depths=draft.depths,
            )
    raise ValueError(
        f"task {one.name!r} has no more different items at length {length} after {index}; ask for fewer items or a "
        "longer context"
    )
