"""Both scores of answers that name one or several things, and the faults that have been published about such scores."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.evals.grading import Graded, grade
from kvlab.evals.item import Item
from kvlab.evals.ruler.scores import Both, both, compatible, formula, stands_in, strict, summary
from kvlab.evals.tasks import RULER, build

NUMBERS = ["1234567", "7654321", "2345678", "8765432"]


def item(index: int = 0, task: str = "ruler_multivalue", **changes) -> Item:
    fields = {
        "id": f"{task}/search/0@600/{index}",
        "task": task,
        "family": "retrieval",
        "context": "c",
        "question": "q",
        "answers": (" 1234567, 7654321",),
        "references": ("1234567", "7654321"),
        "cluster": "c",
        **changes,
    }
    return Item(**fields)


@pytest.mark.parametrize(
    ("text", "ours", "theirs"),
    [
        (" 1234567, 7654321, 2345678, 8765432", 1.0, 1.0),
        (" 8765432, 7654321, 2345678 and 1234567.", 1.0, 1.0),  # any order
        ("They are 1234567; 7654321; 2345678; 8765432", 1.0, 1.0),
        ("1. 1234567 2. 7654321 3. 2345678 4. 8765432", 1.0, 1.0),
        (" 1234567, 7654321, 2345678", 0.0, 0.75),  # one is missing
        (" 1234567, 7654321", 0.0, 0.5),  # two references, of four
        (" 1234567, 7654321, 2345678, 87654321", 0.0, 1.0),  # a part of a longer number
        (" 1234567, 7654321, 2345678, 8765432, 1111111", 0.0, 1.0),  # one more than there are
        (" 12345677654321 2345678 8765432", 0.0, 1.0),
        ("1234567,7654321,2345678,8765432", 1.0, 1.0),
        (" 1234567, 7654321, 2345678, 8765432. Then 1111111 came.", 1.0, 1.0),  # it was over
        (" 1111111. No: 1234567, 7654321, 2345678, 8765432.", 0.0, 1.0),
        ("1. 1234567 2. 7654321 3. 2345678 4. 8765432 5. 1111111", 0.0, 1.0),
        ("", 0.0, 0.0),
        (" none", 0.0, 0.0),
    ],
)
def test_several_numbers(text, ours, theirs):
    assert strict(text, NUMBERS) == ours
    assert compatible(text, NUMBERS) == theirs


def test_two_references_are_both_needed_by_all_and_one_suffices_by_any():
    assert compatible("it is abc", ["abc", "xyz"]) == 0.5
    assert compatible("it is abc", ["abc", "xyz"], "any") == 1.0
    assert strict("it is abc", ["abc", "xyz"]) == 0.0
    assert strict("it is abc", ["abc", "xyz"], "any") == 1.0


def test_a_gold_answer_with_its_unit_is_met_by_an_alias():
    """A reader that says 3,677 was marked wrong, for the gold answer was `3,677 seated`."""
    assert compatible("3,677", ["3,677 seated"], "any") == 0.0
    aliases = ["3,677 seated", "3,677", "3677"]
    for text in (" 3,677", "3,677 seated", "about 3677 people", "3,677."):
        assert compatible(text, aliases, "any") == strict(text, aliases, "any") == 1.0
    for text in ("13,677", "3,6775", "3,677,000", "3677000"):
        assert compatible(text, aliases, "any") == 1.0, "a substring"
        assert strict(text, aliases, "any") == 0.0


def test_long_dumps_are_right_for_substrings_only():
    every = ", ".join(str(1_000_000 + 7 * n) for n in range(400))
    gold = str(1_000_000 + 7 * 123)
    assert compatible(every, [gold]) == 1.0
    assert strict(every, [gold]) == 0.0
    prose = "the ferry was late again so the passengers bought tea and complained " * 4 + "Brimford " + "and so on " * 5
    assert compatible(prose, ["Brimford"], "any") == 1.0
    assert strict(prose, ["Brimford"], "any") == 0.0
    assert strict("That was in Brimford, as the paragraph says.", ["Brimford"], "any") == 1.0


@pytest.mark.parametrize(
    ("text", "references", "ours", "theirs"),
    [
        (" kavilo, zubone, mirapo", ["kavilo", "zubone", "mirapo"], 1.0, 1.0),
        (" Mirapo, zubone and KAVILO. These are the most frequent ones.", ["kavilo", "zubone", "mirapo"], 1.0, 1.0),
        (" kavilo, zubone, mirapo, tadeli", ["kavilo", "zubone", "mirapo"], 0.0, 1.0),  # a guess more
        (" kavilo, zubone, mirapo, 3", ["kavilo", "zubone", "mirapo"], 1.0, 1.0),
        (" quiet-anchor", ["quiet-anchor"], 1.0, 1.0),
        (" quiet-anchor, pale-bell", ["quiet-anchor"], 0.0, 1.0),
        (" quiet-anchor. The secret word of pale-bell", ["quiet-anchor"], 1.0, 1.0),
        (" pale-bell. No, quiet-anchor", ["quiet-anchor"], 0.0, 1.0),
        (" quiet-anchors", ["quiet-anchor"], 0.0, 1.0),
        (" very-quiet-anchor", ["quiet-anchor"], 0.0, 1.0),
        (" Anna Bell", ["Anna Bell"], 1.0, 1.0),
        (" Anna Bell, as told in the text", ["Anna Bell"], 1.0, 1.0),
        (" Anna Bell, Ivan Crow", ["Anna Bell"], 0.0, 1.0),
        (" Ivan Crow and Anna Bell. They met there.", ["Anna Bell"], 0.0, 1.0),
        (" Anna Bell. Ivan Crow founded the next town.", ["Anna Bell"], 1.0, 1.0),
        (" Anna\nBell", ["Anna Bell"], 1.0, 0.0),
        (" Pirport and Jedden", ["Pirport"], 0.0, 1.0),
        (" Pirport, on the river", ["Pirport"], 1.0, 1.0),
        (" ABCDE, FGHIJ", ["ABCDE", "FGHIJ"], 1.0, 1.0),
        (" ABCDE, FGHIJ, KLMNO", ["ABCDE", "FGHIJ"], 0.0, 1.0),
        (" abcde and fghij", ["ABCDE", "FGHIJ"], 1.0, 1.0),
        ("7f3e2a10-3c4d-4b5a", ["7f3e2a10-3c4d-4b5a"], 1.0, 1.0),
        ("7F3E2A10-3C4D-4B5A", ["7f3e2a10-3c4d-4b5a"], 1.0, 1.0),
        ("7f3e2a10-3c4d-4b5a 00000000-1111-2222", ["7f3e2a10-3c4d-4b5a"], 0.0, 1.0),
        ("7f3e2a10-3c4d-4b5a-9999", ["7f3e2a10-3c4d-4b5a"], 0.0, 1.0),
        ("a\x00b", ["a\nb"], 1.0, 1.0),  # control characters are white space
    ],
)
def test_words_names_and_codes(text, references, ours, theirs):
    assert strict(text.replace("\x00", "\n"), references) == ours
    assert compatible(text, references) == theirs


@pytest.mark.parametrize(
    ("reference", "text", "hit"),
    [
        ("12", "it is 12", True),
        ("12", "12, 13", True),
        ("12", "312", False),
        ("12", "12.5", False),
        ("12", "3.12", False),
        ("12", "12,500", False),
        ("500", "12,500", False),
        ("12", "12,13", True),
        ("1234567", "7654321,1234567", True),
        ("12", "12.", True),
        ("12", "-12-", False),
        ("1.5", "1.5 m", True),
        ("a+b", "a+b", True),
        (" anna  bell ", "Anna Bell", True),
        ("bell", "bells", False),
    ],
)
def test_whole_words(reference, text, hit):
    assert stands_in(reference, text) is hit


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_strict_never_exceeds_what_any_text_may_score(text, references):
    if not all(one.strip() for one in references):
        with pytest.raises(ValueError, match="non-empty reference"):
            strict(text, references)
        return
    assert strict(text, references) in (0.0, 1.0)
    assert 0.0 <= compatible(text, references) <= 1.0
    assert strict(text, references, "any") in (0.0, 1.0)


@given(st.permutations(NUMBERS), st.sampled_from([", ", " and ", "; ", " "]))
def test_order_and_separator_do_not_matter(order, between):
    assert strict(between.join(order), NUMBERS) == 1.0


@pytest.mark.parametrize("score", [strict, compatible])
def test_references_are_checked(score):
    with pytest.raises(ValueError, match="did you mean 'any'"):
        score("a", ["a"], "an")
    for wrong in ([], [""], [" "], "abc"):
        with pytest.raises(ValueError, match="list of at least one non-empty reference"):
            score("a", wrong)


# -- items and summaries ---------------------------------------------------------------------------------------------


def test_an_item_with_references_needs_them_all_and_one_without_any_answer():
    listed = item()
    assert both(listed, " 7654321, 1234567") == Both(1.0, 1.0)
    assert both(listed, " 1234567") == Both(0.0, 0.5)
    open_ = item(task="ruler_qa", answers=(" 3,677", " 3677"), references=())
    assert both(open_, " 3677") == both(open_, "3,677 people") == Both(1.0, 1.0)
    assert both(open_, " 36775") == Both(0.0, 1.0)


def test_references_have_to_be_in_the_list_that_is_forced():
    with pytest.raises(ValueError, match="must list all of"):
        item(references=("1234567", "999"))
    with pytest.raises(ValueError, match=r"depths=\(1\.5,\) must lie in"):
        item(depths=(1.5,))


def test_sets_without_references_keep_their_hash():
    """Fields that came later are not in the hash where they hold nothing."""
    made = build(["math"], split="search", n=1, seed=0)
    assert dataclasses.replace(made.items[0], references=()) == made.items[0]
    with_depth = dataclasses.replace(made, items=(dataclasses.replace(made.items[0], depths=(0.5,)),))
    assert with_depth.sha256 != made.sha256


def test_predictions_are_paired_by_id_and_never_by_position():
    """A generator that wrote a needle's offset where the number of the item belongs made pairs that were none."""
    every = [item(0), item(1, answers=(" 5555555, 6666666",), references=("5555555", "6666666"))]
    right = {one.id: one.answers[0] for one in every}
    for order in (every, every[::-1]):
        for texts in (right, dict(reversed(right.items()))):
            assert summary(order, texts).strict == 1.0
    crossed = {every[0].id: right[every[1].id], every[1].id: right[every[0].id]}
    assert summary(every, crossed).strict == summary(every, crossed).compatible == 0.0
    with pytest.raises(ValueError, match=r"1 items without a prediction .* 0 predictions without an item"):
        summary(every, {every[0].id: "x"})
    with pytest.raises(ValueError, match="1 predictions without an item"):
        summary(every, {**right, "ruler_multivalue/search/0@600/7": "x"})
    with pytest.raises(ValueError, match="each of them once"):
        summary([every[0], every[0]], right)
    with pytest.raises(ValueError, match="needs items"):
        summary([], {})


def test_positions_do_not_number_the_items():
    made = build(["retrieval"], split="search", n=26, seed=0, length=600, suite={"retrieval": RULER}).items
    numbers = [int(one.id.rsplit("/", 1)[1]) for one in made]
    assert numbers == [0] * 13 + [1] * 13
    assert len({one.id for one in made}) == 26


def test_every_task_weighs_alike_whatever_its_n():
    first = [item(n) for n in range(3)]
    second = [item(9, "ruler_multiquery")]
    texts = {one.id: " 1234567, 7654321" for one in first} | {second[0].id: " 1234567"}
    found = summary([*first, *second], texts)
    assert found.tasks == {"ruler_multivalue": (3, 1.0, 1.0), "ruler_multiquery": (1, 0.0, 0.5)}
    assert (found.strict, found.compatible) == (0.5, 0.75)
    text = found.text()
    assert "ruler_multivalue               3    1.000    1.000" in text
    assert "mean over tasks                4    0.500    0.750" in text
    assert "Tasks: ruler_multivalue, ruler_multiquery." in text
    assert "mean = (1/2) * sum over tasks" in text


def test_the_formula_names_every_task_that_is_averaged():
    text = formula(RULER)
    assert text.startswith("mean = (1/13) * sum over tasks of (1/n_task)")
    assert all(name in text for name in RULER)
    assert "ruler_single_word" not in text


def test_generated_answers_are_graded_strictly_with_rulers_score_beside_it():
    assert grade(item(metric="ruler"), " 7654321, 1234567\nmore") == Graded(1.0, True, benchmark=1.0)
    assert grade(item(metric="ruler"), " 1234567\n7654321") == Graded(0.0, True, benchmark=0.5)
    assert grade(item(metric="ruler"), "  \n") == Graded(0.0, False, benchmark=0.0)
    for one in build(["retrieval"], split="search", n=13, seed=1, length=600, suite={"retrieval": RULER}).items:
        assert grade(one, one.answers[0]) == Graded(1.0, True, benchmark=1.0)
