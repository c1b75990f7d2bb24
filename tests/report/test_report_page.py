import base64
import copy
import re
from html.parser import HTMLParser

import pytest

from kvlab.report import html
from kvlab.report.figures import flips_matrix, of_run
from kvlab.report.markdown import markdown
from kvlab.report.noise import bumps, told

EVIL = '<script>alert("x")</script>&'


class Reader(HTMLParser):
    """Collects tags and checks that they nest."""

    VOID = {"meta", "img", "source", "br"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def page(search):
    return html(search, of_run(search), {"python": "3.11"})


def test_the_page_needs_nothing_else(page):
    reader = read(page)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in reader.tags}
    sources = [attrs[k] for _, attrs in reader.tags for k in ("src", "href", "srcset") if k in attrs]
    names = ["pareto", "families", "flips", "budget"]
    assert len(sources) == 2 * len(names)  # one for each theme
    images = [attrs for tag, attrs in reader.tags if tag == "img"]
    assert len(images) == len(names)
    assert all(len(attrs["alt"]) > 40 for attrs in images)
    assert all(s.startswith("data:image/png;base64,") for s in sources)
    assert "http" not in re.sub(r"base64,[^\"]+", "", page)
    assert "url(" not in page
    for source in sources:
        assert base64.b64decode(source.split(",", 1)[1])[:4] == b"\x89PNG"
    assert not [name for _, attrs in reader.tags for name in attrs if name.startswith("on")]


def test_reading_order_and_access(page):
    reader = read(page)
    text = " ".join(reader.text)
    places = [
        text.index(t) for t in ("HOLDS", "Before and after", "Bytes against accuracy", "Accuracy against", "Controls")
    ]
    assert places == sorted(places)
    image = next(attrs for tag, attrs in reader.tags if tag == "img")
    assert "KV bytes at the workload against accuracy" in image["alt"]
    assert dict(reader.tags[0][1]) == {"lang": "en"}
    assert page.rindex("<summary>") < page.index("Provenance") < page.rindex("3.11")
    assert page.count("<details>") == page.count("</details>") >= 3
    assert "<details open" not in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<tr") - page.count("<thead>") >= 3 * 14  # every searched config and family is in a table


def test_everything_is_escaped(search):
    odd = copy.deepcopy(search)
    odd["notes"] = [EVIL]
    odd["run"] = odd["model"]["name"] = EVIL
    odd["finalists"][0]["label"] = EVIL
    odd["finalists"][0]["toml"] = EVIL
    odd["controls"]["positive"]["label"] = EVIL
    odd["margin"]["rule"] = EVIL
    page = html(odd, {"flips": flips_matrix(odd)}, {"argv": [EVIL]})
    assert "<script" not in page
    assert EVIL in "".join(read(page).text)


def test_a_partial_run_says_so_first(search):
    page = html({**search, "partial": "interrupted"}, {}, {})
    assert page.index("PARTIAL: the run is interrupted") < page.index("<h1>")
    assert "<title>PARTIAL, HOLDS: smollm2-135m, run</title>" in page
    assert "PARTIAL" not in html(search, {}, {})


def test_a_sweep_has_a_page_too(sweep):
    text = " ".join(read(html(sweep, {}, {})).text)
    assert "The smallest that holds is fp8_e4m3" in text
    assert "No budget set" in text


def test_markdown_says_the_same_in_the_same_order(search):
    text = markdown(search, {"flips": flips_matrix(search)}, {"python": "3.11"})
    lines = text.splitlines()
    assert lines[0] == "# smollm2-135m, run"
    assert lines[2].startswith("**HOLDS** K4V2 g32 at 5.66 GB")
    order = [lines.index(f"## {t}") for t in ("Before and after", "Accuracy against the baseline, per family", "Notes")]
    assert order == sorted(order)
    assert "| K4V2 g32 | retrieval | HOLDS | 128 |" in text
    assert "](figures/flips.png)" in text
    assert text.index("<summary>Provenance</summary>") > text.index("## Notes")


def test_markdown_escapes_what_would_be_markup(search):
    odd = copy.deepcopy(search)
    odd["notes"] = [f"a | b {EVIL} [link](x)"]
    odd["finalists"][0]["toml"] = "```\n# out"
    text = markdown(odd, {}, {"argv": [EVIL]})
    assert r"\<script\>" in text
    assert "<script" not in text.split("<details>")[0].replace(r"\<", "")
    assert r"a \| b" in text
    assert r"\[link\](x)" in text
    assert text.count("```") == 4  # settings and provenance, opened and closed


def test_what_falls_where_bytes_grow_is_said(search):
    odd = copy.deepcopy(search)
    odd["finalists"][0]["families"]["code"] |= {"diff": -0.09, "low": -0.12, "high": -0.05}
    odd["finalists"][1]["families"]["code"] |= {"diff": 0.0, "low": -0.02, "high": 0.02}
    odd["finalists"][2]["families"]["code"] |= {"diff": -0.01, "low": -0.06, "high": 0.03}
    found = [line for line in bumps(odd) if line.startswith("code")]
    assert found == [
        "code: K4V2 g32 scores 9.0 points below the smaller K4V2 g64: more than noise, the intervals do not overlap."
    ]
    odd["finalists"][0]["families"]["code"] |= {"high": -0.02}
    assert "within noise, the intervals overlap" in bumps(odd)[-1]
    odd["finalists"][0]["families"]["code"]["n"] = 1
    assert "one item gives no interval" in bumps(odd)[-1]
    assert bumps(odd)[-1] in html(odd, {}, {})


def test_many_falls_within_noise_are_counted(search):
    many = copy.deepcopy(search)
    one = many["finalists"][0]
    pairs = {f: p | {"low": -0.9, "high": 0.9} for f, p in one["families"].items()}
    many["finalists"] = [
        one
        | {
            "label": str(n),
            "workload_bytes": 10**9 + n,
            "families": {f: p | {"diff": -n / 100} for f, p in pairs.items()},
        }
        for n in range(5)
    ]
    assert len(bumps(many)) == 12
    assert told(many) == ["12 times a config scores below a smaller one: all within noise, their intervals overlap."]
    many["finalists"][4]["families"]["code"] |= {"low": -0.99, "high": -0.95}
    assert [line[:7] for line in told(many)] == ["code: 4", "11 time"]
