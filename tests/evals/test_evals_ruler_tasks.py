"""The RULER-style tasks: what stands where, lengths in tokens, depths, and the same items in every process."""

import hashlib
import math
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.evals.draft import Draft, estimate_tokens, seeded
from kvlab.evals.item import Item
from kvlab.evals.ruler import lists, needles, scores, words
from kvlab.evals.ruler.fit import TOLERANCE, Drawn, counter, depth_of, fitted, placed, spread
from kvlab.evals.suite import load_suite
from kvlab.evals.tasks import RULER, TASKS, build
from kvlab.models import load

ALL = [*RULER, "ruler_single_word"]
EACH = pytest.mark.parametrize("name", ALL)
ANY = st.sampled_from(ALL)
INDEX = st.integers(0, 10_000)


def make(name: str, length: int, index: int = 0, count=estimate_tokens, seed: object = 0) -> Draft:
    return TASKS[name].make(seeded(name, length, index, seed), length, index=index, count=count)


def items(name: str, **changes) -> tuple[Item, ...]:
    request = {"split": "search", "n": 12, "seed": 3, "length": 600, "suite": {"retrieval": (name,)}, **changes}
    return build(["retrieval"], **request).items


def times(text: str, context: str) -> int:
    """How often `text` stands in the context as whole words; a hyphen does not end a word."""
    return len(re.findall(rf"(?<![\w-]){re.escape(text)}(?![\w-])", context))


@pytest.fixture(scope="module")
def tokenizer():
    return load("smollm2-135m", device="cpu").tokenizer


# -- what is asked for stands where it should, and nowhere else ------------------------------------------------------


@EACH
@settings(max_examples=8)
@given(length=st.integers(600, 3000), index=INDEX)
def test_the_answer_is_in_the_context_as_often_as_it_should_be(name, length, index):
    draft = make(name, length, index)
    golds = draft.references or (draft.answers[0].strip(),)
    for gold in golds:
        found = times(gold, draft.context)
        if name == "ruler_variables":
            assert found == (1 if gold == golds[-1] else 2)  # each but the last is handed on
        elif name == "ruler_common_words":
            assert found == lists._SCALES[0 if length >= 4096 else 1 if length >= 1024 else 2][2]
        elif name == "ruler_frequent_words":
            assert found >= 2
        else:
            assert found == 1
            assert gold.lower() in draft.context.lower()
            assert draft.context.lower().count(gold.lower()) == 1, "no distractor holds it, as a part of a word either"
        assert times(gold, draft.question + draft.cue) == 0
    assert draft.answers[0] == " " + ", ".join(golds)


@settings(max_examples=30)
@given(st.sampled_from([n for n in ALL if "single" in n or "multi" in n]), st.integers(600, 3000), INDEX)
def test_needles_stand_at_the_recorded_depths_with_their_keys(name, length, index):
    draft = make(name, length, index)
    said = re.findall(r"(?:The|One) secret (?:number|code|word) of ([\w-]+) is ([\w-]+)\.", draft.context)
    values = dict.fromkeys(key for key, _ in said)
    assert len({value for _, value in said}) == len(said), "no value comes twice"
    assert len(values) == (1 if name == "ruler_multivalue" else len(said)), "no key comes twice"
    asked = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", draft.cue)
    by_key = {key: [v for k, v in said if k == key] for key in asked}
    assert [v for key in asked for v in by_key[key]] == list(draft.references), "in the order that the question states"
    for value, depth in zip(draft.references, draft.depths, strict=True):
        start = round(depth * len(draft.context))
        assert re.match(rf"(The|One) secret \w+ of [\w-]+ is {value}\.", draft.context[start:])
    if "needles" in name or "multikey_uuid" in name:
        assert len(said) >= 4
    else:
        wanted = {"ruler_multikey_text": 4, "ruler_multivalue": 4, "ruler_multiquery": 4}
        assert len(said) == wanted.get(name, 1)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), INDEX)
def test_a_chain_of_variables_can_be_followed_and_others_lead_elsewhere(chains, hops, index):
    draft = lists.variables(seeded(index), 1500, index=index, chains=chains, hops=hops)
    example, _, text = draft.context.partition("\n\n")
    value = re.search(r"value (\d+)", draft.question)
    assert value
    known: dict[str, str] = {}
    for line in text.splitlines():
        if step := re.fullmatch(r"VAR (\w+) = (?:VAR )?(\w+)", line):
            assert step[1] not in known
            known[step[1]] = known.get(step[2], step[2])  # a later line than its source, always
    assert tuple(name for name, held in known.items() if held == value[1]) == draft.references
    assert len(draft.references) == hops + 1
    assert len(known) == chains * (hops + 1)
    assert all(held.isdigit() for held in known.values())
    assert value[1] not in example
    assert list(draft.depths) == sorted(draft.depths)


@settings(max_examples=30)
@given(st.integers(600, 9000), INDEX)
def test_common_words_are_far_more_frequent_than_the_rest(length, index):
    draft = make("ruler_common_words", length, index)
    (listing,) = draft.context.splitlines()[-1:]
    entries = re.findall(r"(\d+)\. ([\w-]+)", listing)
    assert [int(place) for place, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    golds = draft.references
    rest = [n for word, n in counts.items() if word not in golds]
    assert min(counts[gold] for gold in golds) >= 4 * max(rest)
    assert list(golds) == [word for word in dict.fromkeys(word for _, word in entries) if word in golds]
    pairs = {"-" in word for word in counts}
    assert len(pairs) == 1, "single words and pairs are never mixed"


@settings(max_examples=30)
@given(st.integers(400, 9000), INDEX)
def test_frequent_words_are_ranked_without_a_tie(length, index):
    draft = make("ruler_frequent_words", length, index)
    counts = Counter(draft.context.splitlines()[1].split())
    ranked = counts.most_common()
    assert ranked[0][0] == "..."
    assert tuple(word for word, _ in ranked[1:4]) == draft.references
    assert ranked[1][1] > ranked[2][1] > ranked[3][1] > max([n for _, n in ranked[4:]], default=0)


def test_frequent_words_fall_as_told():
    counts = Counter(make("ruler_frequent_words", 60_000).context.splitlines()[1].split())
    first, second, third = [n for _, n in counts.most_common()[1:4]]
    assert second / first == pytest.approx(4 / 9, abs=0.01)
    assert third / first == pytest.approx(1 / 4, abs=0.01)
    steep = lists.frequent_words(seeded(1), 20_000, alpha=3.0)
    a, b = [n for _, n in Counter(steep.context.splitlines()[1].split()).most_common()[1:3]]
    assert b / a == pytest.approx((2 / 3) ** 3, abs=0.02)


@settings(max_examples=30)
@given(st.sampled_from(["ruler_qa", "ruler_qa_hops"]), st.integers(600, 4000), INDEX)
def test_questions_over_paragraphs_follow_from_them(name, length, index):
    draft = make(name, length, index)
    town = re.search(r"(?:of|founded|in) (\w+)(?:\?| born)", draft.question)
    assert town
    lines = [line for line in draft.context.splitlines() if f"The town of {town[1]} was founded" in line]
    assert len(lines) == 1
    founder = re.search(r"was founded by ([\w .]+?)\. The number", lines[0])
    people = re.search(r"is ([\d,]+)\.$", lines[0])
    assert founder
    assert people
    gold = draft.answers[0].strip()
    if name == "ruler_qa_hops":
        lives = [line for line in draft.context.splitlines() if line.startswith(f"{founder[1]} was born in")]
        assert [line.split(".")[0] for line in lives] == [f"{founder[1]} was born in {gold}"]
    elif "How many" in draft.question:
        assert gold == people[1]
        assert draft.answers[1:] == (f" {gold.replace(',', '')}", f" {gold} people")
    else:
        assert gold == founder[1]
    start = round(draft.depths[0] * len(draft.context))
    assert gold in draft.context[start:].splitlines()[0]


# -- both scores of gold and wrong answers ---------------------------------------------------------------------------


@settings(max_examples=30)
@given(ANY, st.integers(600, 2000), INDEX)
def test_gold_scores_one_and_a_wrong_answer_nothing(name, length, index):
    (item,) = items(name, n=1, length=length, seed=index)
    assert scores.both(item, item.answers[0]) == scores.Both(1.0, 1.0)
    (other,) = items(name, n=1, length=length, seed=index + 1)
    if set(other.references or other.answers).isdisjoint(item.references or item.answers):
        wrong = scores.both(item, other.answers[0])
        assert wrong == scores.Both(0.0, 0.0)
    assert scores.both(item, "").strict == scores.both(item, "").compatible == 0.0
    if len(item.references) > 1:
        assert scores.both(item, ", ".join(reversed(item.references))).strict == 1.0
        part = scores.both(item, item.references[0])
        assert part == scores.Both(0.0, 1 / len(item.references))


@EACH
def test_the_whole_context_as_an_answer_is_right_for_rulers_score_only(name):
    for item in items(name, n=3):
        found = scores.both(item, item.context)
        assert found.compatible == 1.0
        assert found.strict == 0.0


# -- length ----------------------------------------------------------------------------------------------------------


def spaced(text: str) -> int:
    """A tokenizer of words and line ends."""
    return len(re.findall(r"\S+|\n", text))


def by_three(text: str) -> int:
    """A tokenizer of three letters a token that puts one in front."""
    return 1 + math.ceil(len(text) / 3)


@settings(max_examples=30)
@given(ANY, st.integers(600, 5000), INDEX, st.sampled_from([estimate_tokens, by_three, spaced]))
def test_prompt_and_room_are_never_longer_and_hardly_shorter(name, length, index, count):
    draft = make(name, length, index, count) if count is not by_three else make(name, 3 * length, index, count)
    asked = length if count is not by_three else 3 * length
    used = count(draft.context) + count(draft.question + draft.cue) + draft.max_new_tokens
    assert 0 <= asked - used <= TOLERANCE
    assert draft.max_new_tokens >= count(draft.answers[0]) + 4


@EACH
@pytest.mark.parametrize("length", [256, 512, 1000, 9000])
def test_length_in_tokens_of_the_default_model(name, length, tokenizer):
    count = counter(tokenizer)
    if (name, length) == ("ruler_multikey_uuid", 256):
        with pytest.raises(ValueError, match=r"does not fit into 256 tokens: its least length is 4\d\d"):
            items(name, n=1, length=length, count=count)
        return
    for item in items(name, n=3 if length < 5000 else 1, length=length, count=count):
        used = count(item.context) + count(item.question) + item.max_new_tokens
        assert 0 <= length - used <= 4
        assert item.max_new_tokens >= count(item.answers[0]) + 4


@EACH
def test_pieces_tokenize_as_the_whole(name, tokenizer):
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    for aware in (False, True):
        for item in items(name, n=4, query_aware=aware):
            pieces = ids(item.context) + ids(item.question) + ids(item.answers[0])
            assert pieces == ids(item.context + item.question + item.answers[0])


@EACH
def test_a_length_that_cannot_hold_the_task_names_the_least_that_can(name):
    for index in range(3):
        with pytest.raises(ValueError, match=f"task '{name}' does not fit into 40 tokens") as refused:
            TASKS[name].make(seeded(name, index), 40, index=index)
        found = re.search(r"least length is (\d+), of which (\d+) are for question and answer", str(refused.value))
        assert found
        least = int(found[1])
        draft = TASKS[name].make(seeded(name, index), least, index=index)
        used = estimate_tokens(draft.context) + estimate_tokens(draft.question + draft.cue) + draft.max_new_tokens
        assert used == least
        with pytest.raises(ValueError, match=f"least length is {least}"):
            TASKS[name].make(seeded(name, index), least - 1, index=index)


@EACH
def test_the_shortest_is_still_the_task(name):
    with pytest.raises(ValueError, match="least length is") as refused:
        make(name, 40)
    least = int(re.findall(r"least length is (\d+)", str(refused.value))[0])
    rng = seeded(name, 40, 0, 0)  # the stream that gave this length
    draft = TASKS[name].make(rng, least)
    if name in ("ruler_multikey_needles", "ruler_multikey_uuid"):
        assert draft.context.count("The secret") == 4, "three that nobody asks for"
    elif name == "ruler_multikey_text":
        assert draft.context.count("The secret") == 4
    elif name.startswith("ruler_qa"):
        assert len(draft.context.splitlines()) == 1 + (2 if name == "ruler_qa_hops" else 1) + 2
    elif name == "ruler_common_words":
        counts = Counter(re.findall(r"\d+\. ([\w-]+)", draft.context.splitlines()[-1]))
        assert sorted(counts.values()) == [1, 1, 1, 1, 4, 4, 4, 4]
    elif name == "ruler_frequent_words":
        ranked = Counter(draft.context.splitlines()[1].split()).most_common()
        assert ranked[1][1] > ranked[2][1] > ranked[3][1] > ranked[4][1] >= 1
    else:
        assert len(draft.context) > 150


@pytest.mark.parametrize("name", ["ruler_single_text", "ruler_multikey_needles", *RULER[8:]])
def test_counting_grows_with_the_length_only_linearly(name):
    """Letters counted, in multiples of the text; what 131,072 tokens take is some ten counts of the text at most."""
    read = 0

    def count(text: str) -> int:
        nonlocal read
        read += len(text)
        return len(text) // 4  # as quick as can be: what is left is the generator's own work

    shares = []
    for length in (8_192, 131_072):
        read = 0
        draft = make(name, length, count=count)
        used = count(draft.context) + count(draft.question + draft.cue) + draft.max_new_tokens
        assert 0 <= length - used <= TOLERANCE
        shares.append(read / len(draft.context))
    assert max(shares) < 12


# -- words -----------------------------------------------------------------------------------------------------------


def test_every_combination_comes_once():
    assert sorted(words.combined(seeded(0), "ab", "xyz", between="-")) == ["a-x", "a-y", "a-z", "b-x", "b-y", "b-z"]
    assert list(words.combined(seeded(0), "abcdef")) != list(words.combined(seeded(1), "abcdef"))


@pytest.mark.parametrize(
    ("stream", "n", "shape"),
    [
        (words.numbers(seeded(0), 1, 9), 9, r"\d"),
        (words.variables(seeded(0), 1), 26, "[A-Z]"),
        (words.coded(seeded(0), 1), 75, "[a-z]{2}"),
        (words.codes(seeded(0)), 50, r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        (words.keys(seeded(0)), 12_000, "[a-z]+(-[a-z]+){1,2}"),
        (words.towns(seeded(0)), 12_000, "[A-Z][a-z]+"),
        (words.people(seeded(0)), 6_000, r"[A-Z][a-z]+( [A-Z]\.)? [A-Z][a-z]+"),
    ],
)
def test_streams_repeat_nothing(stream, n, shape):
    """All there are of the small ones; more than the first kind has of the others."""
    drawn = [next(stream) for _ in range(n)]
    assert len(set(drawn)) == n
    assert all(re.fullmatch(shape, one) for one in drawn)


@pytest.mark.parametrize(("need", "hyphens"), [(1, 0), (200, 0), (201, 1), (10_000, 1), (10_001, 2)])
def test_plain_words_are_of_one_kind_that_is_enough(need, hyphens):
    stream = words.plain(seeded(0), need)
    drawn = [next(stream) for _ in range(need)]
    assert len(set(drawn)) == need
    assert {word.count("-") for word in drawn} == {hyphens}


# -- the parts of a fit ----------------------------------------------------------------------------------------------


def test_a_stream_remembers_and_leaves_out_what_would_give_the_answer_away():
    drawn = Drawn(iter(["Galton", "ALTONA", "Pirport", "Jedden"]), without=("alton",))
    assert drawn.first(1) == ["Pirport"]
    assert drawn.first(2) == ["Pirport", "Jedden"]
    assert drawn.first(1) == ["Pirport"]
    with pytest.raises(ValueError, match="ends after 2 units, 3 are needed"):
        drawn.first(3)


def test_needles_are_placed_by_depth_and_touching_ones_in_order_of_depth():
    assert placed(["a", "b", "c", "d"], ["X", "Y"], [0.5, 0.0]) == ["Y", "a", "b", "X", "c", "d"]
    assert placed(["a"], ["X", "Y", "Z"], [0.9, 0.8, 0.1]) == ["Z", "a", "Y", "X"]
    assert placed([], ["X"], [0.7]) == ["X"]


def test_depths_of_one_item_stand_evenly_around_the_first():
    for index in range(20):
        depths = spread(index, 4)
        assert all(0 <= depth < 1 for depth in depths)
        assert sorted(round((depth - depths[0]) % 1, 9) for depth in depths) == [0.0, 0.25, 0.5, 0.75]
    assert depth_of("abcd", "c") == 0.5
    with pytest.raises(ValueError, match="stands 2 times"):
        depth_of("abab", "ab")


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3000), st.integers(0, 50))
def test_any_unit_and_padding_fit_to_the_token_of_the_smaller(unit, pad, length, rest):
    def write(units: int, pads: int) -> str:
        return "-" * (10 + unit * units + pad * pads)

    if length < 10 + rest + unit:
        with pytest.raises(ValueError, match=f"least length is {10 + rest + unit}, of which {rest} are"):
            fitted(write, task="t", length=length, rest=rest, count=len, least=1)
        return
    left = length - rest - len(fitted(write, task="t", length=length, rest=rest, count=len, least=1))
    assert 0 <= left < pad


def test_a_tokenizer_that_joins_over_the_seam_is_still_not_exceeded():
    def count(text: str) -> int:
        return len(text) + 3 * (len(text) > 150)  # a long text takes more than its padding measured on a short one

    def write(units: int, pads: int) -> str:
        return "-" * (5 + 7 * units + pads)

    for length in range(150, 175):
        assert 0 <= length - count(fitted(write, task="t", length=length, rest=0, count=count)) <= 3


# -- seeds, depths, identity -----------------------------------------------------------------------------------------


def test_seeds_are_told_apart_by_task_length_split_and_number():
    texts = [
        item.context
        for name in ("ruler_single_text", "ruler_single_uuid")
        for length in (600, 601)
        for split in ("search", "confirm")
        for seed in (0, 1)
        for item in items(name, length=length, split=split, seed=seed, n=3)
    ]
    assert len({re.findall(r"secret \w+ of [\w-]+ is [\w-]+", text)[0] for text in texts}) == len(texts) == 48


def test_the_stream_is_sha256_of_the_parts():
    text = "ruler_single_text|600|search|3|0|0"
    wanted = hashlib.sha256(text.encode()).digest()[:16]
    rng = seeded("ruler_single_text", 600, "search", 3, 0, 0)
    assert rng.getstate() == type(rng)(int.from_bytes(wanted, "big")).getstate()
    assert items("ruler_single_text")[0].context == needles.single_text(seeded(*text.split("|")), 600).context


@EACH
def test_ids_hold_the_length_so_that_two_lengths_are_never_taken_for_one(name):
    short, long = items(name, n=2), items(name, n=2, length=700)
    assert [item.id for item in short] == [f"{name}/search/3@600/0", f"{name}/search/3@600/1"]
    assert {item.id for item in short}.isdisjoint(item.id for item in long)
    assert short[0].references != long[0].references or short[0].answers != long[0].answers
    assert items(name, n=1) == short[:1]


def test_another_process_makes_the_same_items():
    code = (
        "from kvlab.evals.tasks import RULER, build\n"
        "print(build(['retrieval'], split='confirm', n=26, seed=5, length=700, suite={'retrieval': RULER}).sha256)\n"
    )
    here = build(["retrieval"], split="confirm", n=26, seed=5, length=700, suite={"retrieval": RULER}).sha256
    for hashing in ("0", "77"):
        env = {**os.environ, "PYTHONHASHSEED": hashing}
        there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert there.stdout.strip() == here


@pytest.mark.parametrize("name", ["ruler_single_noise", "ruler_multikey_needles", "ruler_qa_hops"])
@pytest.mark.parametrize("n", [5, 24])
def test_any_number_of_items_covers_all_depths_evenly(name, n):
    found = sorted(item.depths[0] for item in items(name, n=n, length=2500))
    gaps = [b - a for a, b in zip([0.0, *found], [*found, 1.0], strict=True)]
    assert max(gaps) < 2.8 / n + 0.06, "what goes before the haystack takes a few per cent"


def test_questions_come_after_compression_unless_asked_for_earlier():
    for name in ALL:
        for plain, aware in zip(items(name, n=2), items(name, n=2, query_aware=True), strict=True):
            assert plain.context + plain.question == aware.context + aware.question
            assert plain.question.endswith(aware.question)
            assert plain.question[: -len(aware.question)].endswith("?")
            assert aware.context.endswith("?")
            assert not plain.context.endswith("?")


def test_the_suite_names_the_thirteen_in_order():
    suite = load_suite("ruler")
    assert suite.tasks["retrieval"] == RULER
    assert len(RULER) == 13
    assert set(suite.lengths.values()) == {512}
    made = build(["retrieval"], split="search", n=13, seed=0, suite=suite.tasks, length=suite.lengths)
    assert [item.task for item in made.items] == list(RULER)


@pytest.mark.parametrize(("chains", "hops"), [(0, 2), (2, 0)])
def test_chains_and_hops_are_checked(chains, hops):
    with pytest.raises(ValueError, match=f"chains={chains}, hops={hops}: both must be at least 1"):
        lists.variables(seeded(0), 600, chains=chains, hops=hops)


@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_alpha_is_checked(alpha):
    with pytest.raises(ValueError, match=f"alpha={alpha} must lie above 1"):
        lists.frequent_words(seeded(0), 600, alpha=alpha)
