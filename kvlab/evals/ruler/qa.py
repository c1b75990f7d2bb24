"""Questions over many short paragraphs, in the layout of RULER's QA tasks (arXiv 2404.06654, section 3.4).

The paragraphs are made up, so that no model knows an answer beforehand and no text of others is copied. One paragraph
holds the answer, or two in turn; all others are of the same kind. This file refuses to know any model and tokenizer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.evals.draft import Draft, estimate_tokens
from kvlab.evals.ruler import words
from kvlab.evals.ruler.fit import Count, Drawn, depth_of, excerpt, fitted, placed, spread

TRADES = (
    "baker", "barber", "brewer", "carpenter", "cartographer", "clockmaker", "cooper", "dyer", "glazier", "gardener",
    "innkeeper", "lawyer", "mason", "miller", "painter", "physician", "potter", "printer", "saddler", "shipwright",
    "tailor", "tanner", "teacher", "weaver",
)  # fmt: skip
_ROOM = 24
_LEAST_OTHERS = 2
_LEAD = "Read the paragraphs. You are asked about one of the towns afterwards.\n"


@dataclass(frozen=True, slots=True)
class _Town:
    name: str
    river: str
    founder: str
    people: int

    @property
    def paragraph(self) -> str:
        return (
            f"{self.name} lies on the river {self.river}. The town of {self.name} was founded by {self.founder}. The "
            f"number of people who live in {self.name} is {self.people:,}."
        )


def _life(person: str, birth: str, trade: str) -> str:
    return f"{person} was born in {birth}. For most of a long life {person} worked as a {trade}."


def qa(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """Who founded a town, or how many live in it; one paragraph says so (qa_1). A number is right with and without its
    comma, and with its unit."""
    draw = _towns(rng)
    town = next(draw)
    if rng.random() < 0.5:
        question, cue = f"Who founded {town.name}?", f" The town of {town.name} was founded by"
        answers: tuple[str, ...] = (f" {town.founder}",)
    else:
        question = f"How many people live in {town.name}?"
        cue = f" The number of people who live in {town.name} is"
        answers = (f" {town.people:,}", f" {town.people}", f" {town.people:,} people")
    others = (one.paragraph for one in draw)
    return _asked("ruler_qa", rng, length, index, count, [town.paragraph], others, question, cue, answers)


def qa_hops(rng: random.Random, length: int, *, index: int = 0, count: Count = estimate_tokens) -> Draft:
    """Where the founder of a town was born: one paragraph names the founder, another the place (qa_2)."""
    draw, births = _towns(rng), words.towns(random.Random(rng.getrandbits(64)))
    town = next(draw)
    birth = next(name for name in births if name.lower() not in town.paragraph.lower())
    gold = [_life(town.founder, birth, rng.choice(TRADES)), town.paragraph]
    question, cue = f"Where was the founder of {town.name} born?", f" The founder of {town.name} was born in"

    def others() -> Iterator[str]:
        for one in draw:
            yield one.paragraph
            yield _life(one.founder, next(births), rng.choice(TRADES))

    return _asked("ruler_qa_hops", rng, length, index, count, gold, others(), question, cue, (f" {birth}",))


def _towns(rng: random.Random) -> Iterator[_Town]:
    """Towns with names, founders and head counts of their own."""
    names, rivers, founders = words.towns(rng), words.combined(rng, words.ADJECTIVES, words.NOUNS), words.people(rng)
    heads = words.numbers(rng, 1_000, 999_999)
    for name, founder, people in zip(names, founders, heads, strict=False):
        yield _Town(name, next(rivers).capitalize(), founder, int(people))


def _asked(
    task: str,
    rng: random.Random,
    length: int,
    index: int,
    count: Count,
    gold: list[str],
    others: Iterator[str],
    question: str,
    cue: str,
    answers: tuple[str, ...],
) -> Draft:
    """The gold paragraphs, the first of which holds the answer, at their depths among the others."""
    room = max(_ROOM, count(answers[0]) + 4)
    units = Drawn(others, tuple(answer.strip() for answer in answers))
    depths, words_of = spread(index, len(gold)), excerpt(rng)

    def write(n: int, pad: int) -> str:
        text = placed(units.first(n), gold, depths)
        return _LEAD + "\n".join([words_of(pad), *text] if pad else text) + "\n"

    rest = count(question + cue) + room
    context = fitted(write, task=task, length=length, rest=rest, count=count, least=_LEAST_OTHERS)
    return Draft(
        context=context,
        question=question,
        cue=cue,
        answers=answers,
        depths=(depth_of(context, gold[0]),),
        metric="ruler",
        max_new_tokens=room,
    )
