"""Which chunks are read, against attention counted by hand."""

import pytest
import torch

from kvlab import KVConfig, explore
from kvlab.codecs import Affine
from kvlab.policies import TopK

HALF = KVConfig(reader=TopK(fraction=0.5, dense_layers=0), recent_tokens=16)


@pytest.fixture(scope="module")
def read(subject, item):
    return explore.chunks_read(subject, item.context, item.question, {"half": HALF, "mean": _mean()}, layer=1)


def _mean():
    return KVConfig(reader=TopK(fraction=0.5, dense_layers=2, bound="mean"), recent_tokens=16)


def test_layers_that_read_everything_are_left_out(read):
    table = read.reading.table
    assert set(table.loc[table["config"] == "half", "layer"]) == {0, 1, 2, 3}
    assert set(table.loc[table["config"] == "mean", "layer"]) == {2, 3}


def test_shares_are_shares_and_bytes_are_the_configs(subject, item, read):
    table = read.reading.table
    tokens = len(subject.tokenizer.encode(item.context))
    chunks = -(-(tokens - 4 - 16) // 16)
    assert set(table["chunks"]) == {chunks}
    assert set(table["read"]) == {-(-chunks // 2)}
    for column in ("recall", "captured", "chance", "reached"):
        assert table[column].between(0, 1).all()
    assert (table["reached"] >= table["captured"] - 1e-6).all()
    row = table[table["config"] == "half"].iloc[0]
    assert row["stored"] == HALF.predicted_bytes(subject.shape, tokens)
    assert row["read_bytes"] == HALF.read_bytes(subject.shape, tokens) < row["stored"]


def test_attention_on_chunks_is_that_of_the_model(subject, item, read):
    """The last query over context and question, chunk by chunk, from a trace of both in one prompt."""
    whole = explore.trace(subject, item.context + item.question)
    probs = whole.layers[1].attention(slice(-1, None)).mean(0)[0]
    part = read.scores.table
    assert len(part) == part["chunk"].nunique()  # one KV head
    for chunk in (0, 3):
        own = probs[4 + 16 * chunk : 4 + 16 * (chunk + 1)].sum()
        assert part.loc[part["chunk"] == chunk, "attention"].iloc[0] == pytest.approx(float(own), rel=1e-5)


def test_the_first_and_the_last_chunk_are_read(read):
    part = read.scores.table
    assert part["read"].iloc[0]
    assert part["read"].iloc[-1]


def test_a_reader_that_knows_finds_what_matters(subject, item, read):
    """Reading by bounds finds more of the best chunks than reading at random would, on average over layers."""
    own = read.reading.table[read.reading.table["config"] == "half"]
    assert own["recall"].mean() > own["chance"].mean()


def test_the_codecs_own_bounds_cost_no_bytes(subject, item):
    channel = Affine(bits=4, axis="channel", group=16)
    configs = {
        bound: KVConfig(key=channel, value=Affine(group=32), reader=TopK(fraction=0.5, dense_layers=0, bound=bound))
        for bound in ("codec", "minmax")
    }
    table = explore.chunks_read(subject, item.context, item.question, configs).reading.table
    sizes = table.groupby("config")["stored"].first()
    assert sizes["codec"] < sizes["minmax"]


def test_what_reads_everything_is_refused(subject, item):
    with pytest.raises(ValueError, match="dense reads everything"):
        explore.chunks_read(subject, item.context, item.question, {"dense": KVConfig()})
    with pytest.raises(ValueError, match="too few chunks"):
        explore.chunks_read(subject, item.context[:30], item.question, {"half": HALF})
    with pytest.raises(ValueError, match="layer 0 reads everything"):
        explore.chunks_read(subject, item.context, item.question, {"mean": _mean()}, layer=0)


def test_looking_leaves_the_cache_as_it_was(subject):
    from kvlab.attach import attach, cache_kwarg
    from kvlab.explore.tracing import watched

    with attach(subject.model, KVConfig(), plan=subject.plan) as kv:
        cache = kv.cache()
        with watched(cache) as calls:
            subject.model(torch.tensor([[5, 6, 7]]), use_cache=True, **{cache_kwarg(): cache})
        assert [len(c) for c in calls.values()] == [1, 1, 1, 1]
        subject.model(torch.tensor([[8]]), use_cache=True, **{cache_kwarg(): cache})
        assert [len(c) for c in calls.values()] == [1, 1, 1, 1]
        assert all("attend" not in vars(layer) for layer in cache.layers)
