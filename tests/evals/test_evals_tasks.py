"""Conformance of every task in TASKS, and how sets are built: seeds, splits, prefixes, balance, errors."""

import re

import pytest

from kvlab.evals.draft import estimate_tokens, fill, near_misses, seeded
from kvlab.evals.item import FAMILIES, SPLITS, EvalSet
from kvlab.evals.retrieval import haystack
from kvlab.evals.tasks import DEFAULT_SUITE, TASKS, build, task
from kvlab.models import load

N = 24
EACH = pytest.mark.parametrize("name", list(TASKS))
EACH_SHORT = pytest.mark.parametrize("name", [name for name, one in TASKS.items() if not one.fitted])  # others: RULER


def sets(name: str, **changes) -> EvalSet:
    one = TASKS[name]
    return build([one.family], **{"split": "search", "n": N, "seed": 3, "suite": {one.family: (name,)}, **changes})


def stands_in(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w])", text) is not None


@EACH
def test_registered_under_its_own_name_and_form(name: str) -> None:
    one = TASKS[name]
    assert one.name == name
    assert one.family in FAMILIES
    assert {item.form for item in sets(name).items} == {one.form}
    assert one.make.__doc__


@EACH
def test_same_seed_same_items_and_shorter_is_a_prefix(name: str) -> None:
    first = sets(name)
    assert first.items == sets(name).items
    assert first.items[:7] == sets(name, n=7).items
    assert first.head(7).items == sets(name, n=7).items


@EACH
def test_splits_and_seeds_share_nothing(name: str) -> None:
    groups = [sets(name, split=split, seed=seed) for split in SPLITS for seed in (0, 1)]
    texts = [(item.context, item.question) for group in groups for item in group.items]
    assert len(set(texts)) == len(texts) == 6 * N
    assert len({item.id for group in groups for item in group.items}) == 6 * N


@EACH
def test_gold_is_among_choices_and_not_in_the_question(name: str) -> None:
    for item in sets(name, n=60).items:
        gold = item.answers[0]
        if item.choices:
            assert item.choices.count(gold) == 1
            assert len(item.choices) >= 2
            given = [choice for choice in item.choices if stands_in(choice.strip(), item.question)]
            assert gold not in given or len(given) == len(item.choices), (item.question, item.choices)
        else:
            assert not stands_in(gold.strip(), item.question), (item.question, gold)
        assert item.question in item.question.lstrip("\n"), "a question opens no new line: the context does"
        assert not re.search(r"\n\s", item.context[-2:]), "two line ends at the seam would be one token"
        assert gold == gold.rstrip()


@pytest.mark.parametrize("name", [name for name, one in TASKS.items() if one.form == "choice"])
def test_the_place_of_the_gold_choice_is_balanced(name: str) -> None:
    items = sets(name, n=120).items
    places = [item.choices.index(item.answers[0]) for item in items]
    count = max(len(item.choices) for item in items)
    for place in range(count):
        assert abs(places.count(place) / len(places) - 1 / count) < 0.2


@EACH_SHORT
def test_length_is_respected_from_short_to_long(name: str) -> None:
    least = max(estimate_tokens(item.context) for item in sets(name, n=3, length=1).items)
    for length in (60, TASKS[name].length, 1000, 6000):
        for item in sets(name, n=3, length=length).items:
            size = estimate_tokens(item.context)
            slack = 45  # one entry, sentence or example
            assert size <= max(length, least) + slack, (length, size)
            if length >= 200:
                assert size >= length - slack - length * 0.02, (length, size)
    by_name = sets(name, n=2, length={name: 400})
    assert all(abs(estimate_tokens(item.context) - 400) < 60 for item in by_name.items)


@EACH_SHORT
def test_query_aware_moves_the_question_and_keeps_the_cue(name: str) -> None:
    for plain, aware in zip(sets(name).items, sets(name, query_aware=True).items, strict=True):
        assert plain.context + plain.question == aware.context + aware.question
        assert len(aware.context) > len(plain.context)
        assert aware.question
        assert len(aware.question) <= 10
        assert (plain.id, plain.answers, plain.choices) == (aware.id, aware.answers, aware.choices)


@pytest.fixture(scope="module")
def tokenizer():
    return load("smollm2-135m", device="cpu").tokenizer


@EACH_SHORT
def test_pieces_tokenize_as_the_whole(name: str, tokenizer) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    for aware in (False, True):
        for item in sets(name, n=8, query_aware=aware).items:
            for answer in item.choices or item.answers[:1]:
                pieces = ids(item.context) + ids(item.question) + ids(answer)
                assert pieces == ids(item.context + item.question + answer), item
            estimate = estimate_tokens(item.context)
            assert abs(len(ids(item.context)) - estimate) <= 0.15 * estimate + 3


@EACH_SHORT
def test_greedy_answers_follow_from_the_context(name: str) -> None:
    """The gold answers, recomputed from the text by other means."""
    for item in sets(name, n=40).items:
        gold, context, question = item.answers[0].strip(), item.context, item.question
        if name == "several_instructions":
            said = question.replace("I always", "Always").replace("I end", "End").replace("I pay", "Pay")
            said = said.replace("Somebody says", "When somebody says").replace(". I answer", ", answer")
            assert context.count(f"- {said} {gold}.\n") == 1
        elif name in ("needle_text", "needle_word", "multikey", "multikey_choice", "several_facts"):
            assert f"{question} {gold}." in context
            assert context.count(f"{question} ") == 1
        elif name == "passkey":
            assert f"The pass key is {gold}. " in context
        elif name == "json_value":
            assert f"{question} {gold}" in context
        elif re.fullmatch(r"\d+ [+-] \d+ =", question):
            left, sign, right = question.split()[:3]
            assert int(gold) == int(left) + (1 if sign == "+" else -1) * int(right)
            assert f"\n{question} " not in "\n" + context
        elif name in ("count_on", "progression_choice"):
            shown = [int(part) for part in question.rstrip(",").split(", ")]
            assert int(gold) == 2 * shown[-1] - shown[-2]
        elif name == "compare_choice":
            assert int(gold) == max(int(choice) for choice in item.choices)
        elif name.startswith("word_problem"):
            story = context.splitlines()[-1]
            a, b = re.findall(r"\d+", story)
            value = int(a) + int(b) if "more" in story else int(a) - int(b)
            assert gold == f"{a} {'+' if 'more' in story else '-'} {b} = {value}"
        else:
            read = re.fullmatch(r"assert (.+) ==", question)
            assert read
            assert gold == str(python_value(name, context, read[1])), (context, question, gold)


def python_value(name: str, context: str, expression: str) -> object:
    """What the expression gives, by reading the text rather than by running it."""
    if name.startswith("call"):
        constant = re.search(r"return x \+ (\d+)", context)
        assert constant
        return int(expression[2:-1]) + int(constant[1])
    if name.startswith("list_index"):
        items = re.findall(r"\[(.*)\]\n", context)[-1].split(", ")
        return items[int(expression[2:-1])]
    if name.startswith("program_output"):
        x, more = re.findall(r"x = (\d+)\ny = x \+ (\d+)\n", context)[-1]
        return int(x) + int(more)
    if name == "trace":
        return re.findall(r"= ('\w+')\n", context)[-1]
    form = {
        "dict_lookup": '"{key}": ',
        "dict_lookup_choice": '"{key}": ',
        "dict_assign": 'd["{key}"] = ',
        "attribute": "box.{key} = ",
        "constant_call": "def {key}(): return ",
    }[name]
    key = re.sub(r'^d\["|"\]$|^box\.|\(\)$', "", expression)
    return context.split(form.format(key=key))[1].split("\n")[0].rstrip(",")


def test_default_suite_is_balanced_in_every_prefix() -> None:
    whole = build(FAMILIES, split="confirm", n=12, seed=0)
    assert len(whole) == 36
    assert [item.family for item in whole.items] == list(FAMILIES) * 12
    for family, names in DEFAULT_SUITE.items():
        for n in range(1, 13):
            counts = [sum(item.task == name for item in whole.head(n).items if item.family == family) for name in names]
            assert max(counts) - min(counts) <= 1
    alone = build(["code"], split="confirm", n=12, seed=0)
    assert alone.items == tuple(item for item in whole.items if item.family == "code")


def test_a_long_haystack_repeats_no_sentence_before_all_were_used() -> None:
    text = haystack(seeded("x"), 3000, [])
    parts = text.strip().split(". ")
    assert len(set(parts[:200])) == 200


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"families": ["maths"]}, "unknown family 'maths'; did you mean 'math'"),
        ({"families": []}, "must be a list of different names"),
        ({"families": "math"}, "must be a list of different names"),
        ({"families": ["math", "math"]}, "must be a list of different names"),
        ({"split": "serch"}, "did you mean 'search'"),
        ({"n": 0}, "n=0 items per family"),
        ({"length": 0}, "context length 0"),
        ({"length": {"add3": 10}}, "unknown task 'add3'; did you mean 'add"),
        ({"suite": {"math": ("needle_txt",)}}, "did you mean 'needle_text'"),
        ({"suite": {"math": ("needle_text",)}}, "belongs to family 'retrieval', not to 'math'"),
        ({"suite": {"code": ("trace",)}}, "the suite has no task for family 'math'; it has code"),
    ],
)
def test_wrong_requests_are_named(changes: dict, pattern: str) -> None:
    request = {"families": ["math"], "split": "search", "n": 2, "seed": 0, **changes}
    with pytest.raises(ValueError, match=re.escape(pattern)):
        build(request.pop("families"), **request)


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="did you mean 'passkey'"):
        task("paskey")


def test_estimate_and_fill() -> None:
    assert estimate_tokens("x == 12\n") == 6  # x, ==, space, 1, 2, newline
    assert estimate_tokens("The cat.") == 3
    assert fill("ab ", lambda index: f"w{index} ", 8) == "ab w0 w1 w2 "
    assert fill("", lambda index: "one two three four five ", 1) == "one two three four five "
    assert sorted(near_misses(seeded(1), 2, 3, low=0, spread=2)) in ([0, 1, 3], [0, 1, 4], [0, 3, 4], [1, 3, 4])
    with pytest.raises(ValueError, match="only 2 wrong numbers"):
        near_misses(seeded(1), 0, 3, spread=2)


def test_seeds_do_not_collide_when_parts_shift() -> None:
    assert seeded("a", 1, 23).random() != seeded("a", 12, 3).random()
    assert seeded("t", "search", 0, 0).random() == seeded("t", "search", 0, 0).random()
