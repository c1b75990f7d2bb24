"""Code generators: Python sessions and small programs whose output is asked for after the context.

Nothing is executed: every answer is computed beside the text that is written. This file refuses to know any model.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from kvlab.evals.draft import Draft, estimate_tokens, fill, near_misses

WORDS = (
    "red", "blue", "green", "white", "black", "pink", "gold", "brown", "orange", "silver", "cat", "dog", "cow", "fox",
    "pig", "owl", "tree", "moon", "star", "fish", "bird", "snow", "rain", "wind",
)  # fmt: skip
KEYS = (
    "apple", "pear", "lemon", "peach", "grape", "melon", "cherry", "mango", "plum", "onion", "carrot", "bean",
    "rice", "corn", "bread", "milk", "salt", "sugar", "honey", "tea", "egg", "soup", "cake", "fish",
)  # fmt: skip


def _keys(rng: random.Random) -> Iterator[str]:
    """Different names in random order without end; after the list each name comes again with a number."""
    names: list[str] = [*KEYS]
    rng.shuffle(names)
    yield from names
    for turn in count(1):
        yield from (f"{name}_{turn}" for name in names)


def _number(rng: random.Random) -> str:
    return str(rng.randint(10, 99))


def _word(rng: random.Random) -> str:
    return f"'{rng.choice(WORDS)}'"


def _assertion(context: str, expression: str, value: str) -> Draft:
    return Draft(context=context, question=f"assert {expression}", cue=" ==", answers=(f" {value}",))


def _offer(rng: random.Random, draft: Draft, others: Sequence[str]) -> Draft:
    """The same item as multiple choice: the gold answer among up to three other values, in random order."""
    wrong = sorted({f" {other}" for other in others} - {draft.answers[0]})
    options = [draft.answers[0], *rng.sample(wrong, min(3, len(wrong)))]
    rng.shuffle(options)
    return replace(draft, choices=tuple(options))


def _offer_near(rng: random.Random, draft: Draft) -> Draft:
    return _offer(rng, draft, [str(miss) for miss in near_misses(rng, int(draft.answers[0]), 3, low=1, spread=4)])


def _lookup(
    rng: random.Random, length: int, value: Callable[[random.Random], str], layout: tuple[str, str, str, str]
) -> tuple[Draft, list[str]]:
    """A table written entry by entry, three assertions about it, and one more that is asked; also all its values.

    `layout` is the text before the table, of an entry, after the table, and the expression that reads an entry.
    """
    before, entry, after, read = layout
    shot = estimate_tokens(f"assert {read.format(key='apple')} == {value(rng)}\n")
    budget = length - estimate_tokens(before + after) - 3 * shot
    table: dict[str, str] = {}
    body = ""
    for key in _keys(rng):
        table[key] = value(rng)
        line = entry.format(key=key, value=table[key])
        budget -= estimate_tokens(line)
        body += line
        if budget <= shot // 2 and len(table) >= 6:
            break
    asked, *shown = rng.sample(sorted(table), 4)
    tests = "".join(f"assert {read.format(key=key)} == {table[key]}\n" for key in shown)
    return _assertion(before + body + after + tests, read.format(key=asked), table[asked]), list(table.values())


LITERAL = ("d = {\n", '    "{key}": {value},\n', "}\n", 'd["{key}"]')
ITEMS = ("d = dict()\n", 'd["{key}"] = {value}\n', "", 'd["{key}"]')
ATTRIBUTES = ("box = Box()\n", "box.{key} = {value}\n", "", "box.{key}")
FUNCTIONS = ("", "def {key}(): return {value}\n", "", "{key}()")


def dict_lookup(rng: random.Random, length: int) -> Draft:
    """A dictionary literal of two-digit numbers; one key is read."""
    return _lookup(rng, length, _number, LITERAL)[0]


def dict_lookup_choice(rng: random.Random, length: int) -> Draft:
    """The same with three other values of the dictionary."""
    return _offer(rng, *_lookup(rng, length, _number, LITERAL))


def dict_assign(rng: random.Random, length: int) -> Draft:
    """Two-digit numbers assigned to keys one by one; one key is read."""
    return _lookup(rng, length, _number, ITEMS)[0]


def attribute(rng: random.Random, length: int) -> Draft:
    """Words assigned to attributes one by one; one attribute is read."""
    return _lookup(rng, length, _word, ATTRIBUTES)[0]


def constant_call(rng: random.Random, length: int) -> Draft:
    """Functions that return a word each; one of them is called."""
    return _lookup(rng, length, _word, FUNCTIONS)[0]


def _list(rng: random.Random) -> tuple[str, str, str, list[str]]:
    items = [f"'{word}'" for word in rng.sample(WORDS, 4)]
    at = rng.randrange(4)
    return f"x = [{', '.join(items)}]\n", f"x[{at}]", items[at], items


def _programs(length: int, program: Callable[[], tuple[str, str, str]]) -> Draft:
    """Programs with an assertion each; the last program is in the context and its assertion is asked."""

    def line(_: int) -> str:
        text, expression, value = program()
        return f"{text}assert {expression} == {value}\n"

    text, expression, value = program()
    return _assertion(fill("", line, length - estimate_tokens(text)) + text, expression, value)


def list_index(rng: random.Random, length: int) -> Draft:
    """Lists of four words; the word at an index of the last one."""
    return _programs(length, lambda: _list(rng)[:3])


def list_index_choice(rng: random.Random, length: int) -> Draft:
    """The same with the other three words of the list."""
    draft = list_index(rng, length)
    last = draft.context.splitlines()[-1]
    return _offer(rng, draft, last[last.index("[") + 1 : -1].split(", "))


def call(rng: random.Random, length: int) -> Draft:
    """A function that adds a constant, example calls, and a call of a new argument."""
    constant, asked = rng.randint(1, 9), rng.randint(1, 19)
    others = [x for x in range(1, 20) if x != asked]

    def line(_: int) -> str:
        x = rng.choice(others)
        return f"assert f({x}) == {x + constant}\n"

    context = fill(f"def f(x):\n    return x + {constant}\n", line, length)
    return _assertion(context, f"f({asked})", str(asked + constant))


def call_choice(rng: random.Random, length: int) -> Draft:
    """The same with three near misses."""
    return _offer_near(rng, call(rng, length))


def program_output(rng: random.Random, length: int) -> Draft:
    """Two-line programs that add; the result of the last one."""

    def program() -> tuple[str, str, str]:
        x, more = rng.randint(1, 9), rng.randint(1, 9)
        return f"x = {x}\ny = x + {more}\n", "y", str(x + more)

    return _programs(length, program)


def program_output_choice(rng: random.Random, length: int) -> Draft:
    """The same with three near misses."""
    return _offer_near(rng, program_output(rng, length))


def trace(rng: random.Random, length: int) -> Draft:
    """Chains of assignments from a word over two names to a third; the value at the end of the last chain."""

    def chain() -> tuple[str, str, str]:
        first, second, third = rng.sample("abcdefghjkmnpqrstuvwxyz", 3)
        word = _word(rng)
        return f"{first} = {word}\n{second} = {first}\n{third} = {second}\n", third, word

    return _programs(length, chain)
