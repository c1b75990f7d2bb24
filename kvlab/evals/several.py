"""Generators of several questions over one context: facts of different kinds, and instructions given at the start.

A cache is compressed once and must serve every question: what one question would have kept, another may need (SCBench,
arXiv 2412.10319). Eviction tends to lose one instruction of several in silence (arXiv 2510.00231). This file refuses to
know any model.
"""

import random

from kvlab.evals.draft import Draft, estimate_tokens
from kvlab.evals.retrieval import NAMES, PLACES, THINGS, haystack

QUESTIONS = 4
TOWNS = (
    "Northam", "Elbury", "Stowford", "Marden", "Oakley", "Wexham", "Dunley", "Ashcombe", "Kelby", "Thornton",
    "Harwick", "Linford",
)  # fmt: skip
UNITS = (
    "shells", "beads", "feathers", "buttons", "pebbles", "acorns", "stamps", "ribbons", "candles", "corks", "nails",
    "marbles",
)  # fmt: skip

Asked = tuple[str, str, str, str]
"""What is said in the context, the question, its cue and its answer."""


def _drafts(context: str, asked: list[Asked]) -> list[Draft]:
    return [
        Draft(context=context, question=question, cue=cue, answers=(f" {answer}",))
        for _, question, cue, answer in asked
    ]


def facts(rng: random.Random, length: int) -> list[Draft]:
    """Four facts of different kinds at random depths of plain prose; each is asked for."""
    place, town, (holder, keeper), things = rng.choice(PLACES), rng.choice(TOWNS), *_two(rng)
    code, platform = rng.randint(100, 999), rng.randint(2, 9)
    asked = [
        (f"The secret number of the {place} is {code}.", f"The secret number of the {place}", " is", str(code)),
        (f"The secret word of {holder} is {things[0]}.", f"The secret word of {holder}", " is", things[0]),
        (
            f"{keeper} keeps the key under the {things[1]}.", f"{keeper} keeps the key under", " the", things[1],
        ),
        (
            f"The train to {town} leaves from platform {platform}.", f"The train to {town} leaves from", " platform",
            str(platform),
        ),
    ]  # fmt: skip
    return _drafts(haystack(rng, length, [said for said, *_ in asked]), asked)


def _two(rng: random.Random) -> tuple[list[str], list[str]]:
    return rng.sample(NAMES, 2), rng.sample(THINGS, 2)


def instructions(rng: random.Random, length: int) -> list[Draft]:
    """Four instructions of different kinds at the start, then prose; each question comes to one of them."""
    (reader, _), (word, reply) = _two(rng)
    unit, closing = rng.choice(UNITS), rng.choice([thing for thing in THINGS if thing not in (word, reply)])
    asked = [
        (f"Always call the reader {reader}.", "I always call the", " reader", reader),
        (f"Pay for everything in {unit}.", "I pay for everything", " in", unit),
        (f"When somebody says {word}, answer {reply}.", f"Somebody says {word}. I", " answer", reply),
        (f"End every letter with the word {closing}.", "I end every letter with the", " word", closing),
    ]
    rng.shuffle(asked)
    rules = "Instructions for all that follows.\n" + "".join(f"- {said}\n" for said, *_ in asked) + "\n"
    return _drafts(rules + haystack(rng, max(1, length - estimate_tokens(rules)), []), asked)
