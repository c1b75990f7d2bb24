"""Retrieval generators: something is said once in a long context and asked for afterwards.

Layouts follow the needle, passkey and multi-key tasks of RULER (arXiv 2404.06654, section 3.1) and key-value retrieval
of Lost in the Middle (arXiv 2307.03172, section 3), with our own words. This file refuses to know any model.
"""

import random

from kvlab.evals.bundled import sentences
from kvlab.evals.draft import Draft, estimate_tokens

PLACES = (
    "harbour", "chapel", "library", "bakery", "station", "garden", "museum", "tower", "market", "school",
    "bridge", "stable", "theatre", "hospital", "castle", "mill", "hotel", "office", "prison", "farm",
)  # fmt: skip
THINGS = (
    "lamp", "apple", "river", "stone", "bread", "chair", "horse", "glass", "paper", "clock",
    "knife", "window", "basket", "ribbon", "candle", "hammer", "pencil", "bottle", "carpet", "saddle",
    "mirror", "pillow", "ladder", "needle", "shovel", "wallet", "button", "kettle", "blanket", "feather",
)  # fmt: skip
NAMES = (
    "Anna", "Peter", "Laura", "David", "Maria", "Simon", "Julia", "Robert", "Alice", "Thomas",
    "Emma", "Daniel", "Sarah", "Martin", "Helen", "Oscar", "Clara", "Victor", "Nina", "Felix",
)  # fmt: skip
NOISE = (
    "The grass is green. The sky is blue. The sun is warm.\n",
    "Here we go. There and back again. Nothing new today.\n",
)


def haystack(rng: random.Random, length: int, needles: list[str]) -> str:
    """Sentences of the bundled prose with the needles at random depths, about `length` estimated tokens in all."""
    budget = length - sum(estimate_tokens(needle) for needle in needles)
    chosen: list[str] = []
    pool: list[str] = []
    while budget > 0 or not chosen:
        if not pool:  # longer than the text: a new order, so repeats are never in the same place
            pool = list(sentences())
            rng.shuffle(pool)
        chosen.append(pool.pop())
        budget -= estimate_tokens(chosen[-1])
    for needle in needles:
        chosen.insert(rng.randint(0, len(chosen)), needle)
    return " ".join(chosen) + "\n"


def needle_text(rng: random.Random, length: int) -> Draft:
    """One sentence with a number, in prose."""
    place, code = rng.choice(PLACES), rng.randint(100, 999)
    text = haystack(rng, length, [f"The secret number of the {place} is {code}."])
    return Draft(context=text, question=f"The secret number of the {place}", cue=" is", answers=(f" {code}",))


def needle_word(rng: random.Random, length: int) -> Draft:
    """One sentence with a word, in prose."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    text = haystack(rng, length, [f"The secret word of {name} is {thing}."])
    return Draft(context=text, question=f"The secret word of {name}", cue=" is", answers=(f" {thing}",))


def passkey(rng: random.Random, length: int) -> Draft:
    """A five-digit key between lines of noise."""
    key = rng.randint(10000, 99999)
    needle = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
    budget, lines = length - estimate_tokens(needle), []
    while budget > 0 or not lines:
        lines.append(rng.choice(NOISE))
        budget -= estimate_tokens(lines[-1])
    lines.insert(rng.randint(0, len(lines)), needle)
    return Draft(context="".join(lines), question="What is the pass key? The pass key", cue=" is", answers=(f" {key}",))


def multikey(rng: random.Random, length: int, keys: int = 3) -> Draft:
    """Several sentences of one form with different names; one of them is asked for."""
    names, things = rng.sample(NAMES, keys), rng.sample(THINGS, keys)
    needles = [f"The secret word of {name} is {thing}." for name, thing in zip(names, things, strict=True)]
    text = haystack(rng, length, needles)
    pick = rng.randrange(keys)
    return Draft(context=text, question=f"The secret word of {names[pick]}", cue=" is", answers=(f" {things[pick]}",))


def multikey_choice(rng: random.Random, length: int) -> Draft:
    """Multi-key retrieval where the choices are all the words that were given."""
    keys = 4
    names, things = rng.sample(NAMES, keys), rng.sample(THINGS, keys)
    needles = [f"The secret word of {name} is {thing}." for name, thing in zip(names, things, strict=True)]
    text = haystack(rng, length, needles)
    pick = rng.randrange(keys)
    return Draft(
        context=text,
        question=f"The secret word of {names[pick]}",
        cue=" is",
        answers=(f" {things[pick]}",),
        choices=tuple(f" {thing}" for thing in things),
    )


def json_value(rng: random.Random, length: int) -> Draft:
    """A JSON object of three-digit numbers, one entry a line; the value of one key is asked for."""
    names: list[str] = [*NAMES]
    rng.shuffle(names)
    values: dict[str, int] = {}
    lines: list[str] = []
    budget = length - 4
    while budget > 0 or len(values) < 3:
        turn, place = divmod(len(values), len(names))
        key = names[place] + (f" {turn}" if turn else "")  # beyond the names each comes again with a number
        values[key] = rng.randint(100, 999)
        lines.append(f'"{key}": {values[key]}')
        budget -= estimate_tokens(lines[-1] + ",\n")
    asked = rng.choice(list(values))
    context = "{\n" + ",\n".join(lines) + "\n}\n"
    return Draft(context=context, question=f'"{asked}', cue='":', answers=(f" {values[asked]}",))
