"""Attention, kept tokens, answers and thresholds on a tiny model."""

import warnings

import pytest
import torch

from kvlab import KVConfig, explore
from kvlab.codecs import Affine
from kvlab.explore.answering import starts
from kvlab.explore.keeping import kept_of
from kvlab.policies import AttentionMass, Fraction, Recency, Tokens, TopK

SMALL = {"sink_tokens": 4, "recent_tokens": 16}


def test_a_window_keeps_sinks_and_the_latest(subject, item):
    text = item.context
    count = len(subject.tokenizer.encode(text))
    picture = explore.kept_tokens(
        subject, text, {"window": KVConfig(scorer=Recency(), budget=Tokens(64), **SMALL), "all": KVConfig()}, text[:40]
    )
    window, everything = (picture.table[picture.table["config"] == c] for c in ("window", "all"))
    assert set(window["kept"]) == {64}
    assert set(everything["kept"]) == {count}
    assert set(everything["marked_kept"]) == {1.0}
    # of the first forty characters, tokens all, the four sinks stay
    assert window["marked_kept"].to_numpy() == pytest.approx(4 / 40)
    assert window["bytes"].iloc[0] < everything["bytes"].iloc[0] / 2
    assert f"window keeps {64 / count:.0%}" in picture.alt


def test_what_is_kept_is_what_the_scores_say(subject, item):
    """H2O by hand: the tokens between sinks and window with the greatest attention mass, head by head."""
    seen = explore.trace(subject, item.context)
    count = len(seen.tokens)
    config = KVConfig(scorer=AttentionMass(), budget=Tokens(60), **SMALL)
    from kvlab.attach import attach
    from kvlab.snapshot import take
    from kvlab.subject import BASELINE

    with attach(subject.model, BASELINE, plan=subject.plan) as attachment:
        (snapshot,) = take(subject.model, attachment, [subject.tokenizer.encode(item.context)], [config.scorer])
        held = kept_of(snapshot.fork(config, attachment), count)
    for layer, mask in held.items():
        mass = seen.layers[layer].attention().mean(0).sum(0)
        middle = mass[4 : count - 16].argsort(descending=True)[: 60 - 20] + 4
        expected = {*range(4), *middle.tolist(), *range(count - 16, count)}
        assert set(mask[0].nonzero()[:, 0].tolist()) == expected


def test_shares_of_attention_add_up_and_name_the_sink(subject, item):
    seen = explore.trace(subject, item.context)
    table = explore.attention_shares(seen, sinks=4, recent=32, queries=16).table
    parts = table[["sinks", "recent", "heavy hitters", "rest"]]
    assert parts.sum(axis=1).to_numpy() == pytest.approx(1.0)
    probs = seen.layers[1].attention(slice(-16, None))
    assert table.loc[table["layer"] == 1, "sinks"].iloc[0] == pytest.approx(float(probs[..., :4].sum(-1).mean()))


def test_heavy_hitters_are_seen_from_afar(subject, item):
    """One token that all later queries look at is found; those that only their neighbours look at are not."""
    import dataclasses

    seen = explore.trace(subject, item.context)
    count = len(seen.tokens)
    q, k = torch.zeros(2, count, 64), torch.zeros(1, count, 64)
    q[..., 0], k[0, 50, 0] = 1.0, 60.0
    star = dataclasses.replace(seen.layers[0], q=q, k=k, scale=1.0)
    picture = explore.heavy_hitters(dataclasses.replace(seen, layers={0: star}), top=3)
    hit = picture.table.sort_values("share").iloc[-1]
    assert (hit["position"], hit["hitter"]) == (50, True)
    assert hit["share"] == pytest.approx(1.0, abs=1e-4)
    assert picture.table["hitter"].sum() == 3


def test_an_attention_map_names_layer_and_head(subject, item):
    seen = explore.trace(subject, item.context[:60])
    assert "layer 2, query head 1" in explore.attention_map(seen, 2, 1).alt
    with pytest.raises(ValueError, match="layer 9"):
        explore.attention_map(seen, 9)
    with pytest.raises(ValueError, match="head must lie"):
        explore.attention_map(seen, 0, 7)


def test_answers_of_the_full_cache_are_those_of_raw(subject, item):
    four = Affine(bits=4, group=32)
    table = explore.answers(subject, item, {"full": KVConfig(), "int4": KVConfig(key=four, value=four)}).table
    full, small = table.to_dict("records")
    assert full["kl"] == 0
    assert small["kl"] > 0
    assert small["bytes"] < full["bytes"] / 3
    assert full["share"] == pytest.approx(2.0, abs=0.2)  # a float32 model beside 16 bit


def test_an_answer_counts_when_the_text_begins_with_it(item):
    import dataclasses

    asked = dataclasses.replace(item, answers=(" 899",))
    assert starts(" 899. The king", asked)
    assert starts("899", asked)
    assert not starts("8990", asked)
    assert not starts("it is 899", asked)


def test_the_first_item_with_a_right_answer_is_chosen(item):
    class Knows:
        def score(self, items, configs):
            return [type("Row", (), {"exact": float(items[0].id.endswith("2"))})]

    import dataclasses

    items = [dataclasses.replace(item, id=f"{item.task}/search/0/{n}") for n in range(4)]
    assert explore.easy_item(Knows(), items) == (items[2], True)
    assert explore.easy_item(Knows(), items[:2]) == (items[0], False)
    with pytest.raises(ValueError, match="no item"):
        explore.easy_item(Knows(), [])


def test_a_higher_threshold_keeps_fewer_bytes(subject, item):
    picture = explore.thresholds(subject, item, quantiles=(0.0, 0.5, 0.9), chosen=0.5)
    sizes = picture.table["bytes"].tolist()
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 2
    assert picture.table["kl"].iloc[0] < 1e-3
    with pytest.raises(ValueError, match=r"0\.3 was not measured"):
        explore.threshold.curve(picture.table, "h2o", 0.3)


def test_nothing_drawn_is_on_its_way_out(subject, item):
    half = KVConfig(reader=TopK(fraction=0.5, dense_layers=0), recent_tokens=16)
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("error", kind)
        seen = explore.trace(subject, item.context)
        errors = explore.codec_errors(subject, seen, {"int4": KVConfig(key=Affine(bits=4, group=32))})
        read = explore.chunks_read(subject, item.context, item.question, {"half": half}, layer=1)
        pictures = [
            *(errors, explore.error_map(errors.table, "k_error"), explore.channels(seen, 1)),
            *(explore.attention_map(seen, 1), explore.attention_shares(seen), explore.heavy_hitters(seen)),
            *(explore.kept_tokens(subject, item.context, {"all": KVConfig()}), read.reading, read.scores),
            *(explore.answers(subject, item, {"full": KVConfig()}), explore.thresholds(subject, item, chosen=0.5)),
        ]
        assert {picture.png[:8] for picture in pictures} == {b"\x89PNG\r\n\x1a\n"}


def test_nothing_to_look_at_is_an_error(subject):
    with pytest.raises(ValueError, match="no config"):
        explore.kept_tokens(subject, "text", {})
    with pytest.raises(ValueError, match="does not contain"):
        explore.kept_tokens(subject, "some text", {"half": KVConfig(scorer=Recency(), budget=Fraction(0.5))}, "needle")
