"""How objects look: well formed, escaped, small, the same twice, without network, and with the right numbers."""

import json
import re
import socket

import pytest
import showing
from showing import HOSTILE, Page

from kvlab import show
from kvlab.nb.loaded import load
from kvlab.show import bundle, drawing, words
from kvlab.show.page import STYLE


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    root = tmp_path_factory.mktemp("examples")
    made = showing.examples(root)
    return {**made, "result": load(made["run"]), "partial": load(made["run failed"])}


@pytest.fixture(scope="module")
def bundles(examples):
    return {name: x._repr_mimebundle_() for name, x in examples.items()}


def named(bundle):
    return next(mime for mime in bundle if mime.startswith("application/vnd.kvlab."))


def test_every_kind_is_shown_here(bundles):
    shown = {named(b).removeprefix("application/vnd.kvlab.").removesuffix("+json") for b in bundles.values()}
    assert shown | {"session"} == set(show.KINDS)


def test_html_is_well_formed_and_small(bundles):
    for name, b in bundles.items():
        page = Page(b["text/html"])
        assert page.faults == [], name
        assert len(b["text/html"].encode()) < 20_000, name
        assert page.words.strip(), name


def test_no_script_no_address_no_event(bundles):
    allowed = {"style", "pre", "div", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "svg",
               "path", "i"}  # fmt: skip
    for name, b in bundles.items():
        page = Page(b["text/html"])
        assert {tag for tag, _ in page.tags} <= allowed, name
        attributes = {key for _, attrs in page.tags for key in attrs}
        assert not {a for a in attributes if a.startswith("on") or a in ("src", "href", "id", "srcset")}, name
        styles = " ".join(v or "" for _, attrs in page.tags for k, v in attrs.items() if k == "style") + STYLE
        assert "url(" not in styles
        assert "@import" not in styles
        assert not re.search(r"https?://", b["text/html"]), name


def test_hostile_names_stay_text(bundles):
    for name in ("item", "items", "score", "run", "result", "study"):
        page = Page(bundles[name]["text/html"])
        assert "script" not in {tag for tag, _ in page.tags}
        assert '<script>alert("x")' in page.words, name
    for name, b in bundles.items():
        for text in (b["text/plain"], b["text/html"]):
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text), name


def test_the_same_twice_without_address_or_identity(examples, bundles):
    for name, x in examples.items():
        assert x._repr_mimebundle_() == bundles[name]
        whole = json.dumps(bundles[name])
        assert not re.search(r"0x[0-9a-f]{6,}", whole), name
        assert not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-", whole), name


def test_json_is_strict_and_says_its_schema(bundles):
    for name, b in bundles.items():
        document = json.loads(json.dumps(b[named(b)], allow_nan=False))
        assert re.fullmatch(r"kvlab\.[a-z]+/\d", document["schema"]), name
    assert bundles["score decoded"]["application/vnd.kvlab.score+json"]["nll"] is None


def test_the_text_goes_along_hidden_by_the_style_only(bundles):
    for name, b in bundles.items():
        page = b["text/html"]
        assert '<pre class="kvlab-text">' in page
        assert ".kvlab-text{display:none}" in page
        # without its style the body hides itself and the text shows
        assert '<div class="kvlab-show" style="display:none">' in page
        words_of_pre = Page(page[page.index("<pre") : page.index("</pre>") + 6]).words
        assert words_of_pre == b["text/plain"], name


def test_no_socket_is_opened(examples, monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a repr opened a socket")

    monkeypatch.setattr(socket, "socket", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    for x in examples.values():
        x._repr_mimebundle_()


def test_a_study_behind_a_network_is_not_asked(examples, monkeypatch):
    board = examples["study"]
    far = type(board.storage)("postgresql://u@h/d", None, None)
    monkeypatch.setattr(board, "storage", far)
    shown = board._repr_mimebundle_()
    assert "would ask the network" in shown["text/plain"]
    assert Page(shown["text/html"]).faults == []


def test_themes_come_from_jupyter_with_fallbacks(bundles):
    page = bundles["cache"]["text/html"]
    for variable in re.findall(r"var\(--jp-[a-z0-9-]+(.)", page):
        assert variable == ",", "a Jupyter colour without a fallback is no colour elsewhere"
    assert '[data-jp-theme-light="false"] .kvlab-show' in page


def test_every_rule_of_the_style_is_scoped():
    for selectors in re.findall(r"([^{}]+)\{", STYLE):
        for selector in selectors.split(","):
            assert ".kvlab-show" in selector or selector == ".kvlab-text", selector


def test_pictures_have_words(bundles):
    pictures = [attrs for b in bundles.values() for tag, attrs in Page(b["text/html"]).tags if tag == "svg"]
    assert len(pictures) >= 4
    assert all(p["role"] == "img" and p["aria-label"] for p in pictures)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_config_says_what_differs_first(bundles):
    found = bundles["config"]["application/vnd.kvlab.config+json"]
    assert list(found["changed"]) == ["key", "value", "scorer", "budget", "recent_tokens", "raw_dtype"]
    assert found["id"] == showing.EVICTING.id
    assert type(showing.EVICTING).from_toml(found["toml"]) == showing.EVICTING
    assert found["id"] in bundles["config"]["text/plain"]
    page = Page(bundles["config"]["text/html"]).words
    assert page.index("recent_tokens") < page.index("sink_tokens") < page.index("[kv_config]")
    assert bundles["config default"]["application/vnd.kvlab.config+json"]["changed"] == {}
    assert "nothing is compressed" in bundles["config default"]["text/plain"]


def test_layers_of_one_format_share_a_line(bundles):
    assert "layers 0, 6, 12, 18" in bundles["config mixed"]["text/plain"]
    assert len(bundles["config mixed"]["text/plain"].splitlines()) == 5


def test_a_codec_counts_scales(bundles):
    sizes = bundles["codec"]["application/vnd.kvlab.codec+json"]["sizes"]
    # int4 in groups of 32: half a byte a value, and a 16-bit scale and zero for 32 of them
    assert sizes[0] == {"head_dim": 64, "refused": "", "streams": {"codes": 32.0, "scale": 4.0, "zero": 4.0}}
    assert "5.000" in bundles["codec"]["text/plain"]


def test_an_item_is_cut_in_the_middle_and_counted():
    long = showing.item(text="x" * 100_000)
    document = long._repr_mimebundle_()["application/vnd.kvlab.item+json"]
    assert document["context_characters"] == len(long.context) > 4_000_000
    assert len(document["context"]) < 3000
    assert document["context"].endswith(long.context[-1000:])


def test_a_score_is_one_item_and_says_so(bundles):
    page = Page(bundles["score"]["text/html"]).words
    assert "without an interval" in page
    assert "4.00 bits a value" in page
    assert "– nats a token" in bundles["score decoded"]["text/plain"]


def test_a_result_has_intervals_pairs_flags(bundles):
    text = bundles["result"]["text/plain"]
    assert "retrieval, n=64" in text
    assert "-20.0 [-25.0, -15.0]" in text
    assert "-1.0 [-6.0, +4.0] ⚑" in text  # covers 0
    assert "-15.0] ⚑" not in text  # does not
    assert "! small n: 64 items a family" in text
    assert "60.0 [48.0, 71.0]" in text
    assert "k-bad" in bundles["result"]["text/html"]


def test_many_items_and_clear_intervals_are_not_flagged(tmp_path):
    big = showing.result(n=200)
    big["configs"] = [c for c in big["configs"] if c["verdict"] == "WORSE"]
    run = showing.run(tmp_path, document=big, rows=1000)
    text = run._repr_mimebundle_()["text/plain"]
    assert "⚑" not in text
    assert "! " not in text
    assert "3,000" in text  # rows of a thousand items under three configs


def test_a_config_over_the_budget_never_leads(bundles):
    text = bundles["result"]["text/plain"]
    assert text.startswith("WORSE")
    assert re.search(r"6\.50 GB\s+no ", text)


def test_an_unfinished_run_is_marked(bundles):
    for form in ("text/plain", "text/html"):
        assert "PARTIAL: the run is failed" in bundles["partial"][form]
    assert "int8" in bundles["partial"]["text/plain"]  # by name, not by id
    assert "no result yet" in bundles["run failed"]["text/html"]


def test_a_study_counts_and_never_calls_the_infeasible_best(bundles):
    document = bundles["study"]["application/vnd.kvlab.study+json"]
    assert (document["trials"]["complete"], document["trials"]["fail"], document["duplicates"]) == (8, 2, 1)
    assert all(row["violation"] <= 0 for row in document["feasible"])
    assert [row["value"] for row in document["feasible"]] == sorted(row["value"] for row in document["feasible"])
    assert "8 complete" in bundles["study"]["text/plain"]
    assert "2 fail, 2 waiting; 1 of them duplicates" in bundles["study"]["text/plain"]


# -- large ones --------------------------------------------------------------------------------------------------------


def large_cache(layers, bins=48):
    """A document of a cache with many layers, no two alike."""
    streams = ["K", "V", "scales", "positions", "raw sinks", "raw window", "page slack"]
    per_layer = [
        {"layer": i, "bytes": {s: 10**6 + 7919 * i * (n + 1) % 10**6 for n, s in enumerate(streams)}}
        for i in range(layers)
    ]
    total = {s: sum(x["bytes"][s] for x in per_layer) for s in streams}
    return {
        "schema": "kvlab.cache/1", "label": "int4", "config_id": "ab" * 6, "implementation": "torch", "form": "packed",
        "dtype": "bfloat16", "device": "cuda:0", "layers": layers, "compressed_layers": layers, "kv_heads": 8,
        "head_dim": 128, "rows": 1, "tokens": 131072, "nbytes": sum(total.values()), "preallocated_bytes": 10**6,
        "raw16_bytes": 10**10, "effective_bits": 4.5, "ratio": 3.5, "streams": total, "per_layer": per_layer,
        "kept": {"share": 0.4, "tokens": 131072, "layers": list(range(layers)),
                 "bins": [[(i * 31 + j * 17) % 5 / 4 for j in range(bins)] for i in range(layers)]},
        "sessions": [{"budget_bytes": 6 * 10**9, "sessions": 3}],
    }  # fmt: skip


@pytest.mark.parametrize("layers", [1, 64, 65, 256])
def test_a_large_cache_stays_small(layers):
    page = bundle("cache", large_cache(layers))["text/html"]
    assert len(page.encode()) < 20_000
    assert Page(page).faults == []
    assert ("mean of" in page) == (layers > 64)


def test_a_result_of_very_many_configs_stays_small(tmp_path):
    made = load(showing.run(tmp_path, document=showing.result(HOSTILE * 4, configs=400)))
    page = made._repr_mimebundle_()["text/html"]
    assert len(page.encode()) < 20_000
    assert "... 376 more" in page
    assert len(made.result["configs"]) == 400


def test_a_config_of_very_many_layers_stays_small():
    many = type(showing.MIXED)(overrides=tuple((i, *showing.MIXED.overrides[i % 30][1:]) for i in range(200)))
    page = many._repr_mimebundle_()["text/html"]
    assert len(page.encode()) < 20_000
    assert "has all" in page  # where the rest of the TOML is


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_bars_are_as_high_as_their_share():
    picture = drawing.bars({"a": [1.0, 3.0], "b": [1.0, 1.0]}, {"a": "#000", "b": "#111"}, "x")
    # four is full height, 80: a of the first bar is 20, b stands on it
    assert "M160 80v-20" in picture
    assert "M160 60v-20" in picture
    assert "M480 80v-60" in picture
    assert "M480 20v-20" in picture


def test_a_map_shows_little_as_something_and_nothing_as_nothing():
    picture = drawing.shares([[0.0, 0.01, 1.0, 1.0]], "x")
    assert "M1 4h1" in picture
    assert "M2 4h2" in picture
    assert "M0" not in picture
    assert picture.count("<path") == 2


def test_groups_are_means():
    assert drawing.group([1.0, 3.0, 5.0], 2) == [2.0, 5.0]
    assert drawing.group([1.0, 3.0], 2) == [1.0, 3.0]


@pytest.mark.parametrize(("numbers", "text"), [([0, 1, 2, 3, 7], "0-3, 7"), ([], ""), ([5], "5"), ([3, 1, 2], "1-3")])
def test_ranges(numbers, text):
    assert words.ranges(numbers) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (6e9, "6.00 GB"), (None, "unknown")])
def test_sizes(count, text):
    assert words.size(count) == text


def test_colours_are_seaborns_for_the_colour_blind():
    sns = pytest.importorskip("seaborn")
    assert set(drawing.COLOURS) == set(sns.color_palette("colorblind").as_hex())
