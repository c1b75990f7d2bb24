"""Sets of one's own: a TOML beside a file becomes items; templates compute nothing; mistakes are named by line."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.evals import template
from kvlab.evals.grading import GRADERS
from kvlab.evals.loaders import find_spec, load, load_set
from kvlab.evals.userset import parse_spec

PLAIN = """\
name = "capitals"
family = "retrieval"
key = "id"

[source]
file = "rows.jsonl"

[columns]
land = "country"
short = ["text", "squeeze"]

[template]
context = "{short}\\n"
question = "The capital of {land}"
cue = " is"
answer = " {capital}"
"""
ROWS = [
    {"id": n, "country": f"Land {n}", "text": f"The  capital of\nLand {n} is Town {n}.", "capital": f"Town {n}"}
    for n in range(40)
]


def written(folder: Path, text: str, rows: list | None = None) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


def changed(*pairs: tuple[str, str]) -> str:
    text = PLAIN
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_a_file_and_a_description_make_items(tmp_path: Path) -> None:
    found = load_set(written(tmp_path, PLAIN), split="confirm", n=10)
    assert found.name == "capitals/confirm/0"
    for item in found.items:
        n = item.id.rsplit("/", 1)[1]
        assert item.context == f"The capital of Land {n} is Town {n}.\n"
        assert item.question == f"The capital of Land {n} is"
        assert item.answers == (f" Town {n}",)
        assert (item.family, item.task, item.metric, item.forced) == ("retrieval", "capitals", "exact", "exact")
        assert (item.stop, item.max_new_tokens, item.cluster) == (("\n",), 16, f"capitals-{n}")
    aware = load_set(str(tmp_path / "mine.toml"), split="confirm", n=10, query_aware=True)
    for one, item in zip(aware.items, found.items, strict=True):
        assert one.context + one.question == item.context + item.question
        assert one.question == " is"


def test_settings_reach_the_items(tmp_path: Path) -> None:
    text = changed(
        (
            'key = "id"',
            'key = "id"\nmetric = "contains"\nforced = "tokens"\nstop = ["\\n\\n"]\nmax_new_tokens = 7\nversion = 3',
        )
    )
    found = load_set(written(tmp_path, text), split="search", n=3)
    item = found.items[0]
    assert (item.metric, item.forced, item.stop, item.max_new_tokens) == (
        "contains", "tokens", ("\n\n",), 7,
    )  # fmt: skip


def test_a_list_gives_several_answers_or_choices(tmp_path: Path) -> None:
    rows = [{"id": n, "q": f"{n}?", "gold": [str(n), f"{n}.0"], "other": ["x", "y"]} for n in range(20)]
    body = (
        '[source]\nfile = "rows.jsonl"\n[template]\ncontext = "c{id}"\nquestion = "{q}"\nanswers = [" {gold}"]\n'
        'choices = [" {gold}", " {other}", " none"]\n'
    )
    text = 'name = "m"\nfamily = "math"\n' + body
    (item,) = load_set(written(tmp_path, text, rows), split="search", n=1).items
    n = item.id.rsplit("/", 1)[1]
    assert item.answers == (f" {n}", f" {n}.0")
    assert item.choices == (f" {n}", f" {n}.0", " x", " y", " none")
    assert item.form == "choice"


def test_several_questions_of_a_row_share_context_cluster_and_split(tmp_path: Path) -> None:
    rows = [
        {"text": f"Text {n}.", "questions": [{"ask": f"Q{n}{k}?", "is": f"a{k}"} for k in range(3)]} for n in range(30)
    ]
    text = (
        'name = "turns"\nfamily = "retrieval"\neach = "questions"\n[source]\nfile = "rows.jsonl"\n'
        '[template]\ncontext = "{text}"\nquestion = "{ask}"\nanswer = " {is}"\n'
    )
    loaded = load(find_spec(written(tmp_path, text, rows)))
    clusters: dict[str, set[str]] = {}
    for split in ("search", "confirm", "replicate"):
        items = loaded.items(split, 1000)
        assert len(items) == loaded.size(split)
        for start in range(0, len(items), 3):
            three = items[start : start + 3]
            assert len({item.context for item in three}) == len({item.cluster for item in three}) == 1
            assert [item.question[-2] for item in three] == ["0", "1", "2"]
        clusters[split] = {item.cluster for item in items}
        assert len({item.id for item in items}) == len(items)
    assert sum(map(len, clusters.values())) == len(set().union(*clusters.values())) == 30
    plain = [{"text": "T", "questions": ["one", "two"]}]
    each = text.replace("{ask}", "{questions}?").replace("{is}", "x")
    entries = load(find_spec(written(tmp_path, each, plain))).entries
    assert [entry.question for entry in entries] == ["one?", "two?"]


def test_rows_of_a_cluster_stay_in_one_split_side_by_side(tmp_path: Path) -> None:
    rows = [{"id": n, "page": f"p{n % 10}", "q": f"{n}?"} for n in range(40)]
    text = (
        'name = "pages"\nfamily = "code"\ncluster = "page"\n[source]\nfile = "rows.jsonl"\n'
        '[template]\ncontext = "{page}"\nquestion = "{q}"\nanswer = " {id}"\n'
    )
    loaded = load(find_spec(written(tmp_path, text, rows)))
    assert sum(loaded.size(split) for split in ("search", "confirm", "replicate")) == 40
    items = loaded.items("confirm", 100)
    pages = [item.context for item in items]
    assert pages == [page for page in dict.fromkeys(pages) for _ in range(4)]
    assert len({item.cluster for item in items}) == len(items) // 4


def test_columns_inside_columns_and_names_with_dots(tmp_path: Path) -> None:
    rows = [{"a": {"b": [f"x{n}"]}, "c.d": "dotted", "n": n} for n in range(20)]
    text = (
        'name = "deep"\nfamily = "code"\n[source]\nfile = "rows.jsonl"\n[columns]\ninner = "a.b"\nflat = "c.d"\n'
        '[template]\ncontext = "{flat}"\nquestion = "{n}?"\nanswers = [" {inner}"]\n'
    )
    (item,) = load_set(written(tmp_path, text, rows), split="search", n=1).items
    assert (item.context, item.answers[0][:2]) == ("dotted", " x")


def test_running_text_of_ones_own(tmp_path: Path) -> None:
    words = " ".join(f"word{chr(97 + n % 26)}" for n in range(4000))
    (tmp_path / "book.txt").write_text(words)
    (tmp_path / "book.toml").write_text(
        'name = "book"\nfamily = "code"\n[source]\nfile = "book.txt"\n[text]\ncontext = 60\nfollow = 20\n'
    )
    loaded = load(find_spec(str(tmp_path / "book.toml")))
    assert len(loaded.entries) == 4000 // 84
    for item in loaded.items("search", 5):
        assert (item.metric, item.forced, item.form) == ("likelihood", "tokens", "tokens")
        assert [len(part.split()) for part in (item.context, item.question, item.answers[0])] == [60, 4, 20]
        assert item.context + item.question + item.answers[0] in words
    rows = [{"text": "a b c "} for _ in range(200)]
    text = 'name = "joined"\nfamily = "math"\n[source]\nfile = "rows.jsonl"\n[text]\ncontext = 60\nfollow = 20\n'
    assert len(load(find_spec(written(tmp_path, text + 'join = ""\n', rows))).entries) == 7
    assert load(find_spec(written(tmp_path, text, rows))).entries == ()


def test_the_example_of_the_readme_is_a_set(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (body,) = [block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[template]" in block]
    (tmp_path / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.toml").write_text(body)
    (item,) = load_set(str(tmp_path / "mine.toml"), split="confirm", n=1).items
    n = item.id.rsplit("/", 1)[1]
    assert item.context == f"The capital of Land {n} is Town {n}.\n"
    assert item.question + item.answers[0] == f"The capital of Land {n} is Town {n}"
    metrics = re.search(r"# ([a-z, ]+), or execute with a \[check\]", body)
    assert metrics
    assert metrics[1].split(", ") == list(GRADERS)


# -- templates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{a.__class__}",
        "{a[0]}",
        "{a!r}",
        "{a:>10}",
        "{a:{b}}",
        "{0}",
        "{}",
        "{a.b}",
        "{ a }",
        "{a",
        "a}",
        "{a!x}",
        "{{a}",
    ],
)
def test_templates_take_plain_names_only(text: str) -> None:
    with pytest.raises(ValueError, match=r"brace|conversion"):
        template.parse(text)


def test_what_is_inserted_is_not_read_again() -> None:
    one = template.parse("{{{a}}} and {b}{{c}}{a}")
    assert one.fields == ("a", "b")
    assert one.render({"a": "{b}", "b": "{a.__class__} {{}}"}) == "{{b}} and {a.__class__} {{}}{c}{b}"


@given(st.text(alphabet="{}ab._[]!:0 ", max_size=20))
def test_a_template_is_refused_or_writes_its_values_as_they_are(text: str) -> None:
    try:
        one = template.parse(text)
    except ValueError:
        return
    values = dict.fromkeys(one.fields, "{x.__class__}")
    assert all(name.isidentifier() for name in one.fields)
    assert one.render(values).count("{x.__class__}") >= len(one.fields)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (changed(('family = "retrieval"', 'famly = "retrieval"')), r"m line 2: unknown key 'famly'"),
        (changed(("retrieval", "retrival")), r"m line 2: unknown family 'retrival'; did you mean 'retrieval'"),
        (changed(('key = "id"', 'metric = "numbr"')), r"m line 3: unknown metric 'numbr'; did you mean 'number'"),
        (changed(('key = "id"', 'forced = "token"')), r"m line 3: unknown forced score 'token'; did you mean 'tokens'"),
        (changed(('key = "id"', "key = 3")), r"m line 3: key must be text, got 3"),
        (changed(('key = "id"', "max_new_tokens = 0")), r"m line 3: max_new_tokens must be a whole number from 1"),
        (changed(('key = "id"', "max_new_tokens = true")), r"m line 3: max_new_tokens must be a whole number"),
        (changed(('key = "id"', 'stop = "x"')), r"m line 3: stop must be a list of texts"),
        (changed(('file = "rows.jsonl"', 'fil = "rows.jsonl"')), r"m line 6: .*'fil'; did you mean 'file'"),
        (changed(('file = "rows.jsonl"', "")), r"m line 5: \[source\] needs hub \(a hub id\) or file"),
        (changed(('"squeeze"', '"squeze"')), r"m line 10: unknown step 'squeze'; did you mean 'squeeze'"),
        (changed(('land = "country"', "land = 3")), r"m line 9: land is a column, or a list"),
        (changed(("{short}", "{short.upper}")), r"m line 13: context: field {short.upper} is no plain name"),
        (changed((" {capital}", " {capital!r}")), r"m line 16: answer: field {capital} has a conversion"),
        (changed(("{short}", "{short")), r"m line 13: context: expected '}'"),
        (changed(('answer = ', 'anwser = ')), r"m line 16: unknown key .* 'anwser'; did you mean 'answer'"),
        (changed(('answer = " {capital}"', "")), r"m: \[template\] needs answers"),
        (changed(("[template]", "[template]\nanswers = ['x']")), r"m line 17: give answer or answers, not both"),
        (changed(('question = "The capital of {land}"\ncue = " is"', "")), r"m: \[template\] needs question or cue"),
        (changed(('name = "capitals"', 'name = "My Set/1"')), r"m line 1: name 'My Set/1': use small letters"),
        (changed(('name = "capitals"', "")), r"m: 'name' is missing"),
        (changed(('key = "id"', 'metric = "execute"')), r"m line 3: metric 'execute' and a \[check\]"),
        (PLAIN + "[text]\ncontext = 3\n", r"m line 12: template does not go with \[text\]"),
        (PLAIN + "[template]\n", r"m is not valid TOML: .*line 17"),
        (changed(('key = "id"', "check = 3")), r"m line 3: check is a table: write \[check\]"),
        (changed(("[columns]", "[colums]")), r"m line 8: unknown key 'colums'; did you mean 'columns'"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(text: str, pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=pattern):
        parse_spec(text, "m", tmp_path)


@pytest.mark.parametrize(
    ("row", "pattern"),
    [
        (
            {"id": 1, "country": "A", "text": "t"},
            r"rows\.jsonl line 2 has no column 'capital'\. It has id, ",
        ),
        ({"id": 1, "country": "A", "text": "t", "captal": "x"}, r"no column 'capital'; did you mean 'captal'"),
        ({"id": 1, "country": "A", "text": "t", "capital": None}, r"rows\.jsonl line 2: column 'capital' is empty"),
        ({"id": 1, "country": {"a": 1}, "text": "t", "capital": "x"}, r"line 2: column 'country' holds dict, not text"),
        ({"id": 1, "country": ["A"], "text": "t", "capital": "x"}, r"line 2: field 'land' of question is a list"),
    ],
)
def test_rows_that_do_not_fit_are_named_with_their_line(row: dict, pattern: str, tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN, [ROWS[0], row])
    with pytest.raises(ValueError, match=pattern):
        load(find_spec(path))


def test_a_gap_beyond_the_rows_that_are_asked_for_is_found_all_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN, [*ROWS, {"id": 99}])
    with pytest.raises(ValueError, match=r"rows\.jsonl line 41 has no column"):
        load_set(path, split="search", n=1)


def test_an_empty_answer_or_context_is_named_with_its_row(tmp_path: Path) -> None:
    path = written(tmp_path, changed((' {capital}"', '{capital}"')), [*ROWS, {**ROWS[0], "id": 99, "capital": ""}])
    with pytest.raises(ValueError, match=r"rows\.jsonl line 41: .*answers must hold at least one non-empty"):
        load(find_spec(path))


def test_a_question_without_a_cue_stays_behind(tmp_path: Path) -> None:
    path = written(tmp_path, changed(('cue = " is"\n', "")))
    with pytest.raises(ValueError, match=r"has no cue, so its question cannot go before compression; add"):
        load_set(path, split="search", n=1, query_aware=True)
