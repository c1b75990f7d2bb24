"""Code generators: Python sessions and small programs whose output is asked for after the context.

Nothing is executed: every answer is computed beside the text that is written. This file refuses to know any model.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from kvlab.evals.draft import Draft, estimate_tokens, fill, near_misses, shuffled

WORDS = (
    "red", "blue", "green", "white", "black", "pink", "gold", "brown", "orange", "silver", "cat", "dog", "cow", "fox",
    "pig", "owl", "tree", "moon", "star", "fish", "bird", "snow", "rain", "wind",
)  # fmt: skip
KEYS = (
    "apple", "pear", "lemon", "peach", "grape", "melon", "cherry", "mango", "plum", "onion", "carrot", "bean",
    "rice", "corn", "bread", "milk", "salt", "sugar", "honey", "tea", "egg", "soup", "cake", "fish",
)  # fmt: skip
FUNCTIONS = ("f", "g", "h", "k", "p", "q")


def _keys(rng: random.Random, count: int) -> list[str]:
    """`count` different names in random order; beyond the list two names are joined by an underscore."""
    names: list[str] = [*KEYS]
    rng.shuffle(names)
    joined = (f"{left}_{right}" for left in names for right in names if left != right)
    while len(names) < count:
        names.append(next(joined))
    return names[:count]


def _lookup(
    rng: random.Random, length: int, value: Callable[[], str], shots: int, head: str, entry: str, tail: str, call: str
) -> tuple[Draft, list[str]]:
    """A table written entry by entry, `shots` look-ups of other keys, and one look-up asked; also all values."""
    ask = estimate_tokens(call.format(key="apple") + value()) + 2
    per_entry = estimate_tokens(entry.format(key="apple", value=value()))
    count = max(shots + 3, (length - estimate_tokens(head + tail) - shots * ask) // per_entry)
    table = {key: value() for key in _keys(rng, count)}
    picked = rng.sample(sorted(table), shots + 1)
    body = "".join(entry.format(key=key, value=item) for key, item in table.items())
    shown = "".join(f"{call.format(key=key)}\n{table[key]}\n" for key in picked[1:])
    question, answer = call.format(key=picked[0]), table[picked[0]]
    draft = Draft(context=head + body + tail + shown, question=question, cue="\n", answers=(answer,))
    return draft, sorted(set(table.values()))


def dict_number(rng: random.Random, length: int) -> Draft:
    """A dictionary of two-digit numbers and a look-up by key."""
    form = ("d = {\n", '    "{key}": {value},\n', "}\n", '>>> d["{key}"]')
    return _lookup(rng, length, lambda: str(rng.randint(10, 99)), 3, *form)[0]


def dict_word(rng: random.Random, length: int) -> Draft:
    """A dictionary of words and a look-up by key."""
    form = ("d = {\n", '    "{key}": {value},\n', "}\n", '>>> d["{key}"]')
    return _lookup(rng, length, lambda: f"'{rng.choice(WORDS)}'", 3, *form)[0]


def dict_word_choice(rng: random.Random, length: int) -> Draft:
    """A dictionary of words and a look-up by key, all values of the dictionary offered (at most six)."""
    form = ("d = {\n", '    "{key}": {value},\n', "}\n", '>>> d["{key}"]')
    draft, values = _lookup(rng, length, lambda: f"'{rng.choice(WORDS)}'", 3, *form)
    others = [value for value in values if value != draft.answers[0]]
    options = [draft.answers[0], *rng.sample(others, min(5, len(others)))]
    rng.shuffle(options)
    return replace(draft, choices=tuple(options))


def variable_number(rng: random.Random, length: int) -> Draft:
    """Assignments of numbers to names, then one name is evaluated."""
    return _lookup(rng, length, lambda: str(rng.randint(10, 99)), 3, "", "{key} = {value}\n", "", ">>> {key}")[0]


def variable_word(rng: random.Random, length: int) -> Draft:
    """Assignments of words to names, then one name is evaluated."""
    form = ("", "{key} = {value}\n", "", ">>> {key}")
    return _lookup(rng, length, lambda: f"'{rng.choice(WORDS)}'", 3, *form)[0]


def list_index(rng: random.Random, length: int) -> Draft:
    """Short lists of words, each with one index taken; the last list is in the context, its index asked after it."""

    def session() -> tuple[str, str, str, list[str]]:
        items = [f"'{word}'" for word in rng.sample(WORDS, 4)]
        at = rng.randrange(4)
        return f">>> x = [{', '.join(items)}]\n", f">>> x[{at}]", items[at], items

    def line(_: int) -> str:
        made, call, answer, _items = session()
        return f"{made}{call}\n{answer}\n"

    made, call, answer, items = session()
    context = fill("", line, length - estimate_tokens(made)) + made
    return Draft(context=context, question=call, cue="\n", answers=(answer,), choices=tuple(items))


def list_index_greedy(rng: random.Random, length: int) -> Draft:
    """The same without choices."""
    return replace(list_index(rng, length), choices=())


def call(rng: random.Random, length: int) -> Draft:
    """A function that adds a constant, example calls, and a call of a new argument."""
    constant = rng.randint(1, 9)
    asked = rng.choice([x for x in range(1, 20) if x != constant])
    others = [x for x in range(1, 20) if x != asked]

    def line(_: int) -> str:
        x = rng.choice(others)
        return f">>> f({x})\n{x + constant}\n"

    context = fill(f"def f(x):\n    return x + {constant}\n", line, length)
    return Draft(context=context, question=f">>> f({asked})", cue="\n", answers=(str(asked + constant),))


def call_choice(rng: random.Random, length: int) -> Draft:
    """The same with three near misses."""
    return _bare_choice(rng, call(rng, length), 3)


def _bare_choice(rng: random.Random, draft: Draft, count: int, spread: int = 4) -> Draft:
    value = int(draft.answers[0])
    options = shuffled(rng, [value, *near_misses(rng, value, count, spread=spread)])
    return replace(draft, choices=tuple(option.strip() for option in options))


def constants(rng: random.Random, length: int) -> Draft:
    """Functions that return a constant word, calls of some of them, and a call of another one."""
    form = ("", "def {key}(): return {value}\n", "", ">>> {key}()")
    return _lookup(rng, length, lambda: f"'{rng.choice(WORDS)}'", 3, *form)[0]


def program_output(rng: random.Random, length: int) -> Draft:
    """Three-line programs with their printed result; the last program is in the context and its result is asked."""

    def program() -> tuple[str, int]:
        x, y = rng.randint(1, 9), rng.randint(1, 9)
        return f"x = {x}\ny = x + {y}\nprint(y)\n", x + y

    def line(_: int) -> str:
        text, value = program()
        return f"{text}# prints {value}\n"

    text, value = program()
    context = fill("", line, length - estimate_tokens(text)) + text
    return Draft(context=context, question="# prints", cue="", answers=(f" {value}",))


def program_output_choice(rng: random.Random, length: int) -> Draft:
    """The same with three near misses."""
    draft = program_output(rng, length)
    value = int(draft.answers[0])
    return replace(draft, choices=tuple(shuffled(rng, [value, *near_misses(rng, value, 3, spread=4)])))


def trace(rng: random.Random, length: int) -> Draft:
    """Chains of assignments `a = word; b = a; c = b`; the value at the end of the last chain is asked."""

    def chain() -> tuple[str, str, str]:
        first, second, third = rng.sample("abcdefghjkmnpqrstuvwxyz", 3)
        word = f"'{rng.choice(WORDS)}'"
        return f"{first} = {word}\n{second} = {first}\n{third} = {second}\n", f">>> {third}", word

    def line(_: int) -> str:
        text, ask, word = chain()
        return f"{text}{ask}\n{word}\n"

    text, ask, word = chain()
    context = fill("", line, length - estimate_tokens(text)) + text
    return Draft(context=context, question=ask, cue="\n", answers=(word,))
