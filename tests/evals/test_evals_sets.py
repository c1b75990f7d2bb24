"""Suites and sets by name: which families there are, how many items, whose turn it is, and what cannot be chosen."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from kvlab.evals.bundled import bundled
from kvlab.evals.item import FAMILIES
from kvlab.evals.loaders import PUBLIC, find_spec
from kvlab.evals.sets import SUITES, choose, families_of
from kvlab.evals.several import QUESTIONS
from kvlab.evals.suite import load_suite
from kvlab.evals.tasks import build

SPLITS = ("search", "confirm", "replicate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, family, rows in (("one", "math", 40), ("two", "code", 200)):
        lines = [json.dumps({"q": f"{name} {n}?", "a": n}) for n in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\nfamily = "{family}"\nkey = "q"\n[source]\nfile = "{name}.jsonl"\n'
            '[template]\ncontext = "Now:"\nquestion = " {q}"\nanswer = " {a}"\n'
        )
    return tmp_path


def test_the_default_choice_is_the_default_suite_item_for_item() -> None:
    for families in (FAMILIES, ("code",)):
        for n in (1, 7):
            found = choose().build(families, split="search", n=n, seed=3)
            assert found == build(families, split="search", n=n, seed=3)
    assert choose().families == FAMILIES
    assert choose().most(FAMILIES, "confirm") is None


def test_sources_of_a_family_take_turns_and_shorter_is_a_prefix(folder: Path) -> None:
    chosen = choose(["default", str(folder / "one.toml")])
    long = chosen.build(("math", "code"), split="confirm", n=12, seed=0)
    assert [item.family for item in long.items] == ["math", "code"] * 12
    math = [item.task for item in long.items if item.family == "math"]
    assert math == ["word_problem", "count_on", "one"] * 4
    for n in range(1, 12):
        assert chosen.build(("math", "code"), split="confirm", n=n, seed=0).items == long.head(n).items
    assert long.sha256 != chosen.build(("math", "code"), split="confirm", n=12, seed=1).sha256
    assert not set(long.items) & set(chosen.build(("math", "code"), split="search", n=12, seed=0).items)


def test_a_set_that_runs_out_leaves_the_turn_to_the_others(folder: Path) -> None:
    chosen = choose(["default", str(folder / "one.toml")])
    size = chosen.sets[0].size("replicate")
    items = chosen.build(("math",), split="replicate", n=6 * size, seed=0).items
    assert Counter(item.task for item in items)["one"] == size
    assert len({item.id for item in items}) == 6 * size


def test_how_many_items_there_are(folder: Path) -> None:
    chosen = choose([str(folder / "one.toml"), str(folder / "two.toml")])
    assert chosen.families == families_of(chosen.names) == ("math", "code")
    few, many = (one.size("confirm") for one in chosen.sets)
    assert few < many
    assert chosen.most(("math", "code"), "confirm") == few
    assert chosen.most(("code",), "confirm") == many
    assert len(chosen.build(("math", "code"), split="confirm", n=few, seed=0)) == 2 * few
    with pytest.raises(ValueError, match=rf"has {few} items of a family in split 'confirm', {few + 1} were asked for"):
        chosen.build(("math", "code"), split="confirm", n=few + 1, seed=0)
    with pytest.raises(ValueError, match="no items of family retrieval, only of math, code"):
        chosen.build(FAMILIES, split="confirm", n=1, seed=0)


def test_questions_of_one_context_stand_side_by_side() -> None:
    chosen = choose(["several", "default"])
    found = chosen.build(("retrieval", "math"), split="search", n=20, seed=0)
    assert Counter(item.family for item in found.items) == {"retrieval": 20, "math": 20}
    groups: dict[str, list[int]] = {}
    for place, item in enumerate(found.items):
        groups.setdefault(item.cluster, []).append(place)
    several = [places for cluster, places in groups.items() if cluster.startswith("several")]
    assert several
    for places in several:
        assert len({found.items[place].context for place in places}) == 1
        assert places == list(range(places[0], places[0] + len(places)))
    assert sorted(map(len, several))[-1] == QUESTIONS


def test_a_length_behind_a_suite() -> None:
    chosen = choose(["several@900"])
    items = chosen.build(("retrieval",), split="search", n=8, seed=0).items
    assert all(3500 < len(item.context) < 6000 for item in items)
    for wrong in ("several@", "several@x", "several@0", "several@-3"):
        with pytest.raises(ValueError, match="behind @ stands a number of tokens"):
            choose([wrong])


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ([], "name at least one set: default, several"),
        (["gsm8"], "unknown set 'gsm8'; did you mean 'gsm8k'"),
        (["default", "default"], "'needle_text' is chosen twice"),
        (["default=x"], "suite 'default' is generated and takes no file"),
        (["gsm8k=/nowhere/x.jsonl"], "no file '/nowhere/x.jsonl'"),
        (["nowhere.toml"], r"no file 'nowhere\.toml'"),
        (["text"], "no rows of its own"),
    ],
)
def test_what_cannot_be_chosen(names: list[str], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        choose(names)


def test_names_that_collide(folder: Path) -> None:
    one = folder / "one.toml"
    with pytest.raises(ValueError, match="'one' is chosen twice"):
        choose([str(one), str(one)])
    one.write_text(one.read_text().replace('name = "one"', 'name = "passkey"'))
    with pytest.raises(ValueError, match="a generated task has that name"):
        choose([str(one)])
    one.write_text("name = ")
    with pytest.raises(ValueError, match=r"one\.toml is not valid TOML"):
        choose([str(one)])


def test_a_suite_file_of_ones_own_among_sets(folder: Path) -> None:
    (folder / "mine.toml").write_text('name = "mine"\nversion = 1\n[families]\nmath = ["add1"]\n[lengths]\n')
    chosen = choose([str(folder / "mine.toml"), str(folder / "one.toml")])
    assert [item.task for item in chosen.build(("math",), split="search", n=4, seed=0).items] == ["add1", "one"] * 2


def test_everything_bundled_can_be_named() -> None:
    for name in SUITES:
        assert load_suite(name).name == name
    for name in PUBLIC:
        assert find_spec(name).name == name
    sources = bundled("SOURCES.md").read_text(encoding="utf-8")
    for name in (*SUITES, *PUBLIC):
        assert f"{name}.toml" in sources
    assert hashlib.sha256(bundled("plain_prose.txt").read_bytes()).hexdigest() in sources


# -- several questions over one context -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["several_facts", "several_instructions"])
def test_each_context_holds_every_answer_and_asks_for_each_once(name: str) -> None:
    found = build(("retrieval",), split="search", n=40, seed=0, suite={"retrieval": [name]})
    for start in range(0, 40, QUESTIONS):
        four = found.items[start : start + QUESTIONS]
        assert len({item.context for item in four}) == len({item.cluster for item in four}) == 1
        assert len({item.question for item in four}) == len({item.answers for item in four}) == QUESTIONS
    assert len({item.cluster for item in found.items}) == 40 // QUESTIONS
    assert not {i.context for i in found.items} & {
        i.context for i in build(("retrieval",), split="confirm", n=40, seed=0, suite={"retrieval": [name]}).items
    }


def test_instructions_stand_at_the_start_and_a_smaller_set_is_a_prefix() -> None:
    suite = {"retrieval": ["several_instructions", "several_facts"]}
    found = build(("retrieval",), split="search", n=22, seed=0, suite=suite)
    assert build(("retrieval",), split="search", n=9, seed=0, suite=suite).items == found.items[:9]
    assert [item.task for item in found.items[:9]] == ["several_instructions"] * 4 + ["several_facts"] * 4 + [
        "several_instructions"
    ]
    told = found.items[0].context.split("\n\n")[0].split("\n- ")
    assert len(told) == 1 + QUESTIONS
    kinds = {item.context.split("\n- ")[1].split()[0] for item in found.items if item.task == "several_instructions"}
    assert len(kinds) > 1  # no kind always comes first
