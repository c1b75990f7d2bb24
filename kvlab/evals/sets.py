"""Which items a run is about: suites of generated tasks and sets of questions, by name, and one item set made of them.

`default`, `ruler@4096`, `gsm8k`, `gsm8k=FILE`, `mine.toml`. The sources of a family take turns, so
that every prefix is balanced. This file refuses to know models.
"""

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.evals import loaders
from kvlab.evals.draft import estimate_tokens
from kvlab.evals.item import FAMILIES, EvalSet, Item, unknown
from kvlab.evals.loaders import PUBLIC, LoadedSet
from kvlab.evals.ruler.fit import Count
from kvlab.evals.suite import Suite, load_suite
from kvlab.evals.tasks import TASKS, build
from kvlab.evals.userset import SetSpec

DEFAULT = ("default",)
SUITES = ("default", "several", "ruler")
"""Bundled suites of generated tasks; PUBLIC are the bundled sets."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """What all items of a set have in common."""

    split: str
    seed: int
    query_aware: bool
    count: Count

    def generated(
        self, families: Sequence[str], n: int, tasks: Mapping[str, Sequence[str]], lengths: Mapping[str, int]
    ) -> EvalSet:
        return build(
            families,
            split=self.split,
            n=n,
            seed=self.seed,
            suite=tasks,
            length=lengths,
            query_aware=self.query_aware,
            count=self.count,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, with all rows read: `names` as they were written, suites and sets in that order."""

    names: tuple[str, ...]
    suites: tuple[Suite, ...]
    sets: tuple[LoadedSet, ...]

    @property
    def families(self) -> tuple[str, ...]:
        """The families there are items for."""
        there = {family for suite in self.suites for family in suite.tasks} | {one.spec.family for one in self.sets}
        return tuple(family for family in FAMILIES if family in there)

    def most(self, families: Sequence[str], split: str) -> int | None:
        """The most items a family can have; None where generated tasks never run out in any of them."""
        bounded = [
            sum(one.size(split) for one in self.sets if one.spec.family == family)
            for family in families
            if not any(family in suite.tasks for suite in self.suites)
        ]
        return min(bounded, default=None)

    def build(
        self,
        families: Sequence[str],
        *,
        split: str,
        n: int,
        seed: int,
        query_aware: bool = False,
        count: Count = estimate_tokens,
    ) -> EvalSet:
        """`n` items of each family; `count` is for tasks of a fixed length in tokens.

        Items of one cluster stand side by side, so that a context is compressed once for all its questions. Raises
        ValueError where a family has no source or too few items.
        """
        self._check(families, split, n)
        draw = _Draw(split, seed, query_aware, count)
        if not self.sets and [suite.name for suite in self.suites] == ["default"]:
            return draw.generated(families, n, self.suites[0].tasks, self.suites[0].lengths)
        columns = [self._column(family, n, draw) for family in families]
        parts = [f"{suite.name}.{suite.version}" for suite in self.suites]
        parts += [f"{one.spec.name}.{one.spec.version}" for one in self.sets]
        aware = "/query-aware" if query_aware else ""
        return EvalSet(f"{'+'.join(parts)}/{'+'.join(families)}/{split}/{seed}{aware}", 1, _in_turn(columns, n))

    def _check(self, families: Sequence[str], split: str, n: int) -> None:
        missing = [family for family in families if family not in self.families]
        if missing:
            raise ValueError(
                f"{', '.join(self.names)}: no items of family {', '.join(missing)}, only of {', '.join(self.families)}"
            )
        most = self.most(families, split)
        if most is not None and n > most:
            raise ValueError(
                f"{', '.join(self.names)} has {most} items of a family in split {split!r}, {n} were asked for; ask for "
                "fewer or choose more sets"
            )

    def _column(self, family: str, n: int, draw: "_Draw") -> list[list[Item]]:
        """At least `n` items of a family in runs of one cluster, its sources taking turns run by run."""
        makers: list[Callable[[int], Sequence[Item]]] = []
        for suite in self.suites:
            for name in suite.tasks.get(family, ()):
                tasks, lengths = {family: (name,)}, suite.lengths
                makers.append(lambda n, tasks=tasks, lengths=lengths: draw.generated([family], n, tasks, lengths).items)
        for one in self.sets:
            if one.spec.family == family:
                makers.append(lambda n, one=one: one.items(draw.split, n, draw.seed, draw.query_aware))
        queues = [iter(_runs(make, n)) for make in makers]
        out: list[list[Item]] = []
        while queues and sum(map(len, out)) < n:
            for queue in list(queues):
                run = next(queue, None)
                if run is None:
                    queues.remove(queue)
                else:
                    out.append(run)
        return out


def _in_turn(columns: Sequence[Sequence[list[Item]]], n: int) -> tuple[Item, ...]:
    """The first `n` items of every column, run by run, always from the column that has given fewest."""
    queues = [iter(column) for column in columns]
    given = [0] * len(columns)
    out: list[Item] = []
    while min(given) < n:
        turn = given.index(min(given))
        run = next(queues[turn])[: n - given[turn]]
        out += run
        given[turn] += len(run)
    return tuple(out)


def _runs(make: Callable[[int], Sequence[Item]], n: int) -> Iterator[list[Item]]:
    """The items of a source as runs that share a cluster, made in growing batches since most are never asked for."""
    given, size = 0, min(n, 16)
    while True:
        items = make(size)
        whole = [list(run) for _, run in itertools.groupby(items, key=lambda item: item.cluster)]
        ended = len(items) < size or size >= n
        # The last run of an unfinished batch may go on in the next.
        ready = whole if ended else whole[:-1]
        yield from ready[given:]
        if ended:
            return
        given, size = len(ready), min(n, size * 2)


def choose(names: Iterable[str] = DEFAULT) -> Choice:
    """Find what the names say, and read and check all rows. Raises ValueError that names what is wrong and where."""
    names = tuple(names)
    suites, specs = _described(names)
    return Choice(names, suites, tuple(loaders.load(spec) for spec in specs))


def families_of(names: Iterable[str]) -> tuple[str, ...]:
    """The families that the names have items for; reads no rows."""
    suites, specs = _described(tuple(names))
    there = {family for suite in suites for family in suite.tasks} | {spec.family for spec in specs}
    return tuple(family for family in FAMILIES if family in there)


def _described(names: Sequence[str]) -> tuple[tuple[Suite, ...], tuple[SetSpec, ...]]:
    if not names:
        raise ValueError(f"name at least one set: {', '.join((*SUITES, *PUBLIC))}, or a .toml file")
    suites: list[Suite] = []
    specs: list[SetSpec] = []
    for written in names:
        name, _, place = written.partition("=")
        plain, _, length = name.rpartition("@") if "@" in name else (name, "", "")
        if _is_suite(plain):
            if place:
                raise ValueError(f"{written!r}: suite {plain!r} is generated and takes no file")
            suites.append(_at_length(load_suite(plain), written, length))
        elif name in PUBLIC or name.endswith(".toml"):
            spec = loaders.find_spec(name)
            specs.append(loaders.at(spec, place) if place else spec)
        else:
            raise unknown("set", name, [*SUITES, *PUBLIC])
    _check_apart(suites, specs)
    return tuple(suites), tuple(specs)


def _at_length(suite: Suite, written: str, length: str) -> Suite:
    """The suite with all contexts of one length, where one is written behind its name."""
    if "@" not in written:
        return suite
    if not re.fullmatch(r"[1-9]\d*", length):
        raise ValueError(f"{written!r}: behind @ stands a number of tokens, such as {suite.name}@4096")
    return dataclasses.replace(suite, lengths=dict.fromkeys(suite.lengths, int(length)))


def _is_suite(name: str) -> bool:
    """A bundled suite, or a TOML file with a table of families, which no description of a set has."""
    if not name.endswith(".toml"):
        return name in SUITES
    path = Path(name).expanduser()
    try:
        return path.is_file() and "families" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False  # read as a set it is refused with its line


def _check_apart(suites: Sequence[Suite], specs: Sequence[SetSpec]) -> None:
    used = [name for suite in suites for names in suite.tasks.values() for name in names]
    used += [spec.name for spec in specs]
    for name in used:
        if used.count(name) > 1:
            raise ValueError(f"{name!r} is chosen twice; its items would count twice")
    for spec in specs:
        if spec.name in TASKS:
            raise ValueError(f"a set cannot be called {spec.name!r}: a generated task has that name")
