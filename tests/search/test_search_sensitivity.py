"""What layers lose alone, on scores by formula and on a real small model; and whether the sum is what a mix loses."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import standin
import torch
from scipy.stats import spearmanr
from standin import StandIn, harmed, items, luck
from tiny_folder import save_tiny

from kvlab import models
from kvlab.book import ScoreBook, StopFlag
from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet, Item
from kvlab.layer import LayerShape, ModelShape
from kvlab.memo import Memo
from kvlab.policies import Fraction, TopK
from kvlab.progress import Progress
from kvlab.runs import Run
from kvlab.search.mixing import Mixer
from kvlab.search.sensitivity import (
    ROLE,
    Formats,
    Sensitivity,
    UnmeasuredError,
    additivity,
    mean_kl,
    measure,
)
from kvlab.search.space import Space
from kvlab.search.workload import Workload
from kvlab.snapshot import SnapshotStore
from kvlab.subject import BASELINE, LocalSubject, snapshot_identity

LAYERS = 3
SHAPE = ModelShape((LayerShape(1, 64, 64),) * LAYERS, torch.float32)
FORMATS = Space(SHAPE, Workload(4096, 1), 10**9, "float16", ("none",)).formats()
ITEMS = items("search", 2)
BITS = (8, 4, 3, 2)
WEIGHT = (1.0, 30.0, 0.2)  # of the layers


def _lost(codec: Codec) -> float:
    return 0.0 if isinstance(codec, Raw) else 4.0**-codec.bits  # type: ignore[attr-defined]


def _kl(config: KVConfig, item: Item) -> float:
    """Adds up over layers; keys count four times; items of code twice."""
    whole = sum(WEIGHT[i] * (4 * _lost(config.at(i).key) + _lost(config.at(i).value)) for i in range(LAYERS))
    return whole * (2 if item.family == "code" else 1)


def _book(root: Any, kl: Any = _kl, memo: Memo | None = None, nll: Any = harmed) -> tuple[ScoreBook, StandIn]:
    subject = StandIn(SHAPE, nll, kl=kl)
    run = Run.create(root / "runs", "search", {"schema": "test"})
    return ScoreBook(run, subject, StopFlag(), Progress(1, quiet=True), memo), subject


def _table(root: Any) -> Sensitivity:
    return measure(_book(root)[0], ITEMS, FORMATS, range(LAYERS), 4)


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_every_layer_is_scored_alone_in_every_format_and_in_keys_and_values_apart(tmp_path) -> None:
    book, subject = _book(tmp_path)
    table = measure(book, ITEMS, FORMATS, range(LAYERS), 4)
    assert len({c for c, _ in subject.asked}) == LAYERS * 2 * len(BITS)
    assert len(subject.asked) == LAYERS * 2 * len(BITS) * len(ITEMS)
    assert subject.counters.prefills == len(ITEMS)
    balanced = (1 + 1 + 2) / 3  # each family counts the same
    for layer, weight in enumerate(WEIGHT):
        assert table.key_kl[layer] == pytest.approx([balanced * weight * 4 * 4.0**-b for b in BITS])
        assert table.value_kl[layer] == pytest.approx([balanced * weight * 4.0**-b for b in BITS])
    assert (table.items, table.items_sha256) == (2, ITEMS.sha256)


def test_a_probe_encodes_one_layer_and_leaves_all_else_uncompressed() -> None:
    for config in FORMATS.probes(range(LAYERS), 4):
        ((layer, key, value),) = config.overrides
        assert (key == Raw()) != (value == Raw())
        assert (config.key, config.value, config.budget) == (Raw(), Raw(), FORMATS.base.budget)
        others = [config.at(i) for i in range(LAYERS) if i != layer]
        assert all((x.key, x.value) == (Raw(), Raw()) for x in others)
        config.check(SHAPE)


def test_a_later_run_of_the_same_model_measures_nothing_again(tmp_path) -> None:
    facts = {"weights_sha256": "0" * 64}
    first = measure(_book(tmp_path, memo=Memo(tmp_path / "m", facts))[0], ITEMS, FORMATS, range(LAYERS), 4)
    book, subject = _book(tmp_path, memo=Memo(tmp_path / "m", facts))
    assert measure(book, ITEMS, FORMATS, range(LAYERS), 4) == first
    assert subject.asked == []
    assert book.remembered == LAYERS * 8 * len(ITEMS)
    other, asked = _book(tmp_path, memo=Memo(tmp_path / "m", {"weights_sha256": "1" * 64}))
    measure(other, ITEMS, FORMATS, range(LAYERS), 4)
    assert len(asked.asked) == LAYERS * 8 * len(ITEMS)


def test_a_layer_that_cannot_be_scored_is_named(tmp_path) -> None:
    def nll(config: KVConfig, item: Item) -> float:
        if config.overrides and config.overrides[0][0] == 1 and config.overrides[0][1] != Raw():
            raise MemoryError("no room")
        return harmed(config, item)

    with pytest.raises(UnmeasuredError, match="MemoryError: no room"):
        measure(_book(tmp_path, nll=nll)[0], ITEMS, FORMATS, range(LAYERS), 4)


def test_the_table_is_plain_data_for_a_heat_map(tmp_path) -> None:
    shown = json.loads(json.dumps(_table(tmp_path).to_dict(), allow_nan=False))
    assert shown["layers"] == [0, 1, 2]
    assert [len(shown["formats"][x]) for x in "KV"] == [4, 4]
    assert np.array(shown["kl"]["K"]).shape == np.array(shown["kl"]["V"]).shape == (LAYERS, 4)
    assert shown["items_per_family"] == 2


@pytest.mark.parametrize(("depth", "measured"), [(1, [2]), (2, [4, 2]), (4, [8, 4, 3, 2]), (9, [8, 4, 3, 2])])
def test_fewer_formats_are_measured_and_the_others_follow(tmp_path, depth, measured) -> None:
    """Here the law holds exactly, so the table is the same."""
    book, subject = _book(tmp_path)
    table = measure(book, ITEMS, FORMATS, range(LAYERS), depth)
    assert [FORMATS.keys[n].bits for n in FORMATS.measured(depth)] == measured  # type: ignore[attr-defined]
    assert len(subject.asked) == LAYERS * 2 * len(measured) * len(ITEMS)
    whole = _table(tmp_path)
    assert np.array(table.key_kl) == pytest.approx(np.array(whole.key_kl))
    assert np.array(table.value_kl) == pytest.approx(np.array(whole.value_kl))
    assert table.to_dict()["measured"] == [b in measured for b in BITS]


def test_between_two_measured_formats_the_line_goes_through_both(tmp_path) -> None:
    def kl(config: KVConfig, item: Item) -> float:
        ((_, key, value),) = config.overrides
        bits = (value if key == Raw() else key).bits  # type: ignore[union-attr]
        return {4: 0.02, 2: 0.5}[bits]

    table = measure(_book(tmp_path, kl)[0], ITEMS, FORMATS, range(LAYERS), 2)
    assert table.key_kl[0] == pytest.approx([0.02 / 4**4, 0.02, 0.1, 0.5])


# -- sums --------------------------------------------------------------------------------------------------------------


def test_the_prediction_is_the_sum_over_layers(tmp_path) -> None:
    table = _table(tmp_path)
    key, value = FORMATS.keys, FORMATS.values
    mixed = replace(FORMATS.base, key=key[1], value=value[3], overrides=((1, key[0], value[2]),))
    expected = (
        sum(table.key_kl[n][1] + table.value_kl[n][3] for n in (0, 2)) + table.key_kl[1][0] + table.value_kl[1][2]
    )
    assert table.predicted(mixed) == pytest.approx(expected)
    assert table.predicted(mixed) == pytest.approx(sum(_kl(mixed, i) for i in ITEMS.items) / len(ITEMS))


@pytest.mark.parametrize(
    "change",
    [
        {"recent_tokens": 32},
        {"budget": Fraction(0.5)},
        {"reader": TopK(fraction=0.5, chunk=16)},
        {"centring": "mean"},
        {"value": Fp8()},
        {"overrides": ((2, Affine(bits=4), Raw()),)},
    ],
    ids=lambda x: next(iter(x)),
)
def test_what_was_not_measured_is_not_predicted(tmp_path, change) -> None:
    uniform = replace(FORMATS.base, key=FORMATS.keys[1], value=FORMATS.values[1])
    table = _table(tmp_path)
    assert table.predicted(uniform) is not None
    by_chunk = Affine(bits=4, axis="channel", group=16)
    sparse = replace(uniform, key=by_chunk, reader=TopK(fraction=0.5, chunk=16, bound="codec"))
    assert table.predicted(sparse) is None  # and is not an error: such a reader takes such keys only
    assert table.predicted(replace(uniform, **change)) is None


def _searched(book: ScoreBook, n: int = 6) -> dict[str, KVConfig]:
    key, value = FORMATS.keys, FORMATS.values
    found = [
        replace(FORMATS.base, key=key[a], value=value[b], overrides=((1, key[c], value[c]),))
        for a, b, c in [(3, 3, 0), (2, 3, 1), (3, 2, 1), (1, 1, 0), (2, 2, 1), (1, 0, 2)][:n]
    ]
    book.ensure("search", items("search", 8).items, [BASELINE, *found])
    return {c.id: c for c in found}


def test_where_losses_add_up_the_agreement_is_complete(tmp_path) -> None:
    book, _ = _book(tmp_path)
    found = additivity(
        measure(book, ITEMS, FORMATS, range(LAYERS), 4), book, "search", items("search", 8), _searched(book)
    )
    assert found["n"] == len(found["pairs"]) == 6
    for pair in found["pairs"]:
        assert pair["same_items"] == pytest.approx(pair["predicted"])
    for which in ("same_items", "other_items"):
        assert found[which]["spearman"] == pytest.approx(1)
        assert found[which]["pearson_log"] == pytest.approx(1)
        assert found[which]["median_measured_over_predicted"] == pytest.approx(1)


def test_where_they_do_not_that_is_said(tmp_path) -> None:
    def kl(config: KVConfig, item: Item) -> float:
        """Of a whole config: something else, and three times as much on average."""
        return _kl(config, item) if len(config.overrides) and config.key == Raw() else 0.01 * 10 ** luck(config.id)

    book, _ = _book(tmp_path, kl)
    table = measure(book, ITEMS, FORMATS, range(LAYERS), 4)
    found = additivity(table, book, "search", items("search", 8), _searched(book))
    x, y = ([p[k] for p in found["pairs"]] for k in ("predicted", "same_items"))
    assert found["same_items"]["spearman"] == pytest.approx(spearmanr(x, y)[0])  # type: ignore[index]
    assert found["same_items"]["spearman"] < 0.9
    ratio = np.exp(np.median(np.log(y) - np.log(x)))
    assert found["same_items"]["median_measured_over_predicted"] == pytest.approx(ratio)


def test_two_configs_have_no_correlation(tmp_path) -> None:
    book, _ = _book(tmp_path)
    table = measure(book, ITEMS, FORMATS, range(LAYERS), 4)
    found = additivity(table, book, "search", items("search", 8), _searched(book, 2))
    assert (found["n"], found["same_items"], found["other_items"]) == (2, None, None)


# -- a real model ------------------------------------------------------------------------------------------------------


# Of a hundred tokens each: the default tasks spell out a thousand for a tokenizer of letters.
SHORT = EvalSet(
    "short",
    1,
    tuple(
        replace(
            i, context=f"the lamp of house {n} stood by the river, and {7 * n} boats lay on the sand. ", question="? "
        )
        for n, i in enumerate(items("search", 2, ("retrieval", "code")).items)
    ),
)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[Sensitivity, ScoreBook, Space]:
    root = tmp_path_factory.mktemp("real")
    loaded = models.load(str(save_tiny(root / "tiny", layers=3)), device="cpu")
    with torch.no_grad():
        for p in loaded.model.parameters():
            if p.ndim > 1:
                p.mul_(4)
    subject = LocalSubject(loaded, store=SnapshotStore(snapshot_identity(loaded)))
    space = Space(subject.shape, Workload(4096, 1), 10**9, "float16", ("none",))
    run = Run.create(root / "runs", "search", {"schema": "test"})
    book = ScoreBook(run, subject, StopFlag(), Progress(1, quiet=True))
    table = measure(book, SHORT.head(1), space.formats(), space.shape.compressed, 4)
    return table, book, space


def test_fewer_bits_lose_more_in_every_layer_of_a_real_model(real) -> None:
    table, book, _ = real
    for kl in (*table.key_kl, *table.value_kl):
        assert all(x >= 0 for x in kl)
        assert kl[0] < kl[1] < kl[3]
    assert book.subject.counters.prefills == 2
    assert {role for role, _, _ in book.rows} == {ROLE}


def test_a_solved_mix_loses_less_on_a_real_model_than_the_uniform_config_of_its_size(real) -> None:
    table, book, space = real
    mixer = Mixer(table, space.shape, space.workload)
    key, value = table.formats.keys, table.formats.values
    uniform = replace(table.formats.base, key=key[2], value=value[2])
    mixed = mixer.config(space.workload.bytes(uniform, space.shape))
    assert mixed is not None
    book.ensure("search", SHORT.items, [BASELINE, uniform, mixed])
    assert mixed != uniform
    assert mean_kl(book, "search", SHORT.items, mixed) < mean_kl(book, "search", SHORT.items, uniform)


def test_a_standin_needs_no_kl() -> None:
    (row,) = StandIn(SHAPE, harmed).score(ITEMS.items[:1], [KVConfig(key=Fp8())])
    assert row.kl == 0.0
    assert standin.items("search", 1).items[0].id == ITEMS.items[0].id
    assert isinstance(FORMATS, Formats)
