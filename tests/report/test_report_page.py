import base64
import copy
import re
from html.parser import HTMLParser

import pytest

from kvlab.report import html, pareto

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
def page(search, drawn):
    return html(search, {"pareto": drawn, "pareto-dark": pareto(search, dark=True)}, {"python": "3.11"})


def test_the_page_needs_nothing_else(page):
    reader = read(page)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in reader.tags}
    sources = [attrs[k] for _, attrs in reader.tags for k in ("src", "href", "srcset") if k in attrs]
    assert len(sources) == 2
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
    page = html(odd, {"pareto": pareto(odd)}, {"argv": [EVIL]})
    assert "<script" not in page
    assert EVIL in "".join(read(page).text)


def test_a_partial_run_says_so_first(search):
    page = html({**search, "partial": "interrupted"}, {}, {})
    assert page.index("PARTIAL: the run is interrupted") < page.index("<h1>")
    assert "<title>PARTIAL, HOLDS: smollm2-135m, run</title>" in page
    assert "PARTIAL" not in html(search, {}, {})


def test_a_sweep_has_a_page_too(sweep):
    text = " ".join(read(html(sweep, {"pareto": pareto(sweep)}, {})).text)
    assert "The smallest that holds is fp8_e4m3" in text
    assert "No budget set" in text
