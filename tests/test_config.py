"""KVConfig: identity, two text forms, and what it refuses."""

import copy
import dataclasses
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from variants import ALL_BUDGETS, ALL_CODECS, ALL_SCORERS, PAGE

from kvlab.bench.bytes import CONFIGS as BENCH
from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import AttentionMass, Fraction, Recency, Threshold, Tokens, WindowAttention

SHAPE = ModelShape((LayerShape(2, 64, 64), LayerShape(2, 64, 64, window=32), LayerShape(2, 64, 64)), torch.bfloat16)

codecs = st.sampled_from(ALL_CODECS) | st.builds(
    Affine,
    bits=st.sampled_from([8, 4, 3, 2]),
    group=st.integers(0, 256),
    clip=st.floats(0, 1, exclude_min=True),
    hadamard=st.booleans(),
)
scorers = st.sampled_from(ALL_SCORERS) | st.builds(AttentionMass, decay=st.floats(0, 1, exclude_min=True))
budgets = (
    st.sampled_from(ALL_BUDGETS)
    | st.builds(Tokens, tokens=st.integers(1, 10**9))
    | st.builds(Fraction, fraction=st.floats(0, 1, exclude_min=True))
    | st.builds(Threshold, quantile=st.floats(0, 1, exclude_max=True))
)
configs = st.builds(
    KVConfig,
    key=codecs,
    value=codecs,
    scorer=scorers,
    budget=budgets,
    sink_tokens=st.integers(0, 200),
    recent_tokens=st.integers(0, 4096),
    page_tokens=st.just(PAGE),
    overrides=st.dictionaries(st.integers(0, 90), st.tuples(codecs, codecs), max_size=3).map(
        lambda d: tuple((layer, k, v) for layer, (k, v) in d.items())
    ),
    raw_dtype=st.sampled_from(["auto", "float16", "bfloat16", "float32", "float64"]),
)


@given(config=configs)
def test_both_text_forms_give_the_same_config_back(config: KVConfig) -> None:
    for again in (KVConfig.from_json(config.to_json()), KVConfig.from_toml(config.to_toml())):
        assert again == config
        assert hash(again) == hash(config)
        assert again.id == config.id
    assert len(config.id) == 12
    assert config.label


@given(config=configs)
def test_json_is_canonical_and_strict(config: KVConfig) -> None:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    data = json.loads(config.to_json(), parse_constant=no_constants)
    assert json.dumps(data, sort_keys=True, separators=(",", ":")) == config.to_json()


@given(a=configs, b=configs)
def test_the_id_follows_equality(a: KVConfig, b: KVConfig) -> None:
    assert (a == b) == (a.id == b.id)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (KVConfig(budget=Fraction(1)), KVConfig(budget=Fraction(1.0))),  # type: ignore[arg-type]
        (KVConfig(budget=Threshold(0)), KVConfig(budget=Threshold(-0.0))),  # type: ignore[arg-type]
        (KVConfig(key=Affine(clip=1)), KVConfig(key=Affine(clip=1.0))),  # type: ignore[arg-type]
        (
            KVConfig(overrides=((2, Raw(), Fp8()), (0, Fp8(), Raw()))),
            KVConfig(overrides=((0, Fp8(), Raw()), (2, Raw(), Fp8()))),
        ),
    ],
    ids=["int fraction", "minus zero", "int clip", "order of overrides"],
)
def test_equal_settings_have_one_id(a: KVConfig, b: KVConfig) -> None:
    assert a == b
    assert a.id == b.id


def test_the_id_is_the_same_in_every_process() -> None:
    code = (
        "from kvlab.config import KVConfig; from kvlab.codecs import Affine, Fp8;"
        "from kvlab.policies import Fraction, AttentionMass;"
        "print(KVConfig().id, KVConfig(key=Affine(bits=4), value=Fp8('e5m2'), scorer=AttentionMass(0.9),"
        " budget=Fraction(0.25), overrides=((3, Fp8(), Affine(bits=2)),)).id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    here = KVConfig(
        key=Affine(bits=4),
        value=Fp8("e5m2"),
        scorer=AttentionMass(0.9),
        budget=Fraction(0.25),
        overrides=((3, Fp8(), Affine(bits=2)),),
    )
    assert done.stdout.split() == [KVConfig().id, here.id]
    # Ids name rows of finished runs: a change of format must be seen here and in the changelog.
    assert KVConfig().id == "ad8057b4061f"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"sink_token": 4}, ["unknown key 'sink_token'", "did you mean 'sink_tokens'"]),
        ({"zzz": 4}, ["unknown key 'zzz'", "known keys are"]),
        ({"key": {"kind": "afine"}}, ["unknown kind 'afine'", "did you mean 'affine'"]),
        ({"key": {"kind": "affine", "bit": 4}}, ["unknown key 'bit'", "did you mean 'bits'"]),
        ({"key": {"kind": ["affine"]}}, ["unknown kind ['affine']"]),
        ({"key": "int4"}, ["key must be a table with a 'kind'", "'int4'"]),
        ({"key": {"kind": "affine", "bits": True}}, ["key.bits must be int, got True"]),
        ({"key": {"kind": "affine", "bits": 4.0}}, ["key.bits must be int, got 4.0"]),
        ({"key": {"kind": "affine", "bits": "4"}}, ["key.bits must be int, got '4'"]),
        ({"key": {"kind": "affine", "hadamard": 1}}, ["key.hadamard must be bool, got 1"]),
        ({"key": {"kind": "fp8", "exponents": [0.5]}}, ["key.exponents must be int, got 0.5"]),
        ({"key": {"kind": "fp8", "exponents": 3}}, ["key.exponents must be", "got 3"]),
        (
            {"budget": {"kind": "fraction", "fraction": float("nan")}},
            ["budget.fraction must be a finite number, got nan"],
        ),
        (
            {"budget": {"kind": "fraction", "fraction": float("inf")}},
            ["budget.fraction must be a finite number, got inf"],
        ),
        ({"budget": {"kind": "tokens", "tokens": True}}, ["budget.tokens must be int, got True"]),
        ({"sink_tokens": True}, ["sink_tokens must be an integer", "True"]),
        ({"sink_tokens": 4.0}, ["sink_tokens must be an integer", "4.0"]),
        ({"recent_tokens": -1}, ["recent_tokens must be an integer of at least 0, got -1"]),
        ({"page_tokens": 0}, ["page_tokens must be an integer of at least 1, got 0"]),
        ({"raw_dtype": "fp16"}, ["raw_dtype must be", "float16", "'fp16'"]),
        ({"overrides": [[0, {"kind": "raw"}]]}, ["overrides[0] must be", "layer, key, value"]),
        ({"overrides": 3}, ["overrides must be", "got 3"]),
        ({"overrides": [["x", {"kind": "raw"}, {"kind": "raw"}]]}, ["layer", "'x'"]),
        ({"overrides": [[True, {"kind": "raw"}, {"kind": "raw"}]]}, ["layer", "True"]),
        ({"overrides": [[-1, {"kind": "raw"}, {"kind": "raw"}]]}, ["layer", "-1"]),
        ({"overrides": [[0, {"kind": "raw"}, {"kind": "rav"}]]}, ["unknown kind 'rav' in overrides[0].value"]),
        ({"overrides": [[1, {"kind": "raw"}, {"kind": "raw"}]] * 2}, ["each layer once", "[1, 1]"]),
        ({"key": {"kind": "affine", "axis": "channel", "group": 32}}, ["one page", "set page_tokens=32"]),
    ],
)
def test_wrong_settings_are_refused_by_name(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        KVConfig.from_dict(data)
    assert [w for w in words if w not in str(error.value)] == []


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: KVConfig(budget=Tokens(True)), "budget.tokens must be int, got True"),
        (lambda: KVConfig(budget=Fraction(True)), "budget.fraction must be float, got True"),
        (lambda: KVConfig(scorer=WindowAttention(True, 1)), "scorer.window must be int, got True"),
        (lambda: KVConfig(overrides=((0, Raw()),)), "layer, key, value"),  # type: ignore[arg-type]
        (lambda: KVConfig(overrides=((0, Raw(), Recency()),)), "value"),  # type: ignore[arg-type]
        (lambda: KVConfig(key=Recency()), "key must be a Codec"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused_in_python_too(make, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize("text", ["[1]", "3", '"x"', "null", "{", ""])
def test_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - two parsers, one class
        KVConfig.from_json(text)


@pytest.mark.parametrize(
    "text", ["", "x = 1", "kv_config = 3", "[[kv_config]]\nsink_tokens = 1", "[kv_config]\nsink_tokens = nan"]
)
def test_toml_without_a_config_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"kv_config|sink_tokens"):
        KVConfig.from_toml(text)


def test_other_tables_are_left_alone() -> None:
    assert KVConfig.from_toml("[workload]\ncontext = 5\n" + KVConfig().to_toml()) == KVConfig()


def test_labels_tell_settings_apart() -> None:
    values = [Raw(), Affine(bits=4), Fp8("e5m2")]
    grid = [KVConfig(key=k, value=v, page_tokens=PAGE) for k, v in itertools.product(ALL_CODECS, values)]
    grid += [KVConfig(scorer=s, budget=b) for s, b in itertools.product(ALL_SCORERS, ALL_BUDGETS) if b.evicts]
    labels: dict[str, KVConfig] = {}
    for config in grid:
        other = labels.setdefault(config.label, config)
        assert other == config, config.label


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (KVConfig(), "raw"),
        (KVConfig(key=Affine(bits=4), value=Affine(bits=4)), "int4 g32"),
        (KVConfig(key=Affine(bits=8, group=0), value=Affine(bits=4)), "K int8 V int4 g32"),
        (KVConfig(key=Fp8(), value=Fp8(), scorer=AttentionMass(), budget=Fraction(0.5)), "fp8_e4m3 + h2o 50%"),
        (KVConfig(budget=Tokens(512)), "raw + window 512 tok"),
        (KVConfig(scorer=WindowAttention(), budget=Threshold(0.4)), "raw + snapkv w32 q0.4"),
    ],
)
def test_labels_a_person_can_read(config: KVConfig, label: str) -> None:
    assert config.label == label


def test_check_names_layer_stream_and_rule() -> None:
    odd = ModelShape((LayerShape(2, 64, 64), LayerShape(2, 80, 80)), torch.float32)
    with pytest.raises(ValueError, match=r"layer 1, K as int4 g32: head dim .* got 80 and group 32"):
        KVConfig(key=Affine(bits=4)).check(odd)
    with pytest.raises(ValueError, match=r"override for layer 1: the layers that can be compressed are \[0, 2\]"):
        KVConfig(overrides=((1, Raw(), Raw()),)).check(SHAPE)
    with pytest.raises(ValueError, match=r"layer 0, V as fp8_e4m3.*one per KV head \(2\), got 3"):
        KVConfig(value=Fp8(exponents=(0, 0, 1))).check(SHAPE)
    KVConfig(key=Affine(bits=4), overrides=((2, Fp8(), Raw()),)).check(SHAPE)


def test_overrides_reach_their_layer_only() -> None:
    config = KVConfig(key=Fp8(), overrides=((2, Affine(bits=4), Raw()),))
    assert (config.at(0).key, config.at(2).key, config.at(2).value) == (Fp8(), Affine(bits=4), Raw())


def test_bytes_of_four_bits_with_scale_and_zero_in_groups_of_32() -> None:
    # 32 bytes of codes + 2 groups x (scale + zero) x 2 bytes = 40 bytes per token and head, for each of K and V.
    shape = ModelShape((LayerShape(2, 64, 64),) * 2, torch.float16)
    config = KVConfig(key=Affine(bits=4), value=Affine(bits=4), sink_tokens=0, recent_tokens=0, page_tokens=1)
    assert shape.raw_bytes(33) == 33_792
    assert config.predicted_bytes(shape, 1) == 2 * 2 * 2 * 40
    assert config.predicted_bytes(shape, 33) == 10_560
    assert config.predicted_bytes(shape, 1, 32) == 10_560
    assert config.effective_bits(shape, 33) == pytest.approx(5.0)
    with_recent = KVConfig(key=Affine(bits=4), value=Affine(bits=4), sink_tokens=0, recent_tokens=16, page_tokens=1)
    expected = 2 * 2 * 2 * (17 * 40 + 16 * 128)
    assert with_recent.predicted_bytes(shape, 33) == with_recent.predicted_bytes(shape, 1, 32) == expected
    # Neither a budget of a quarter nor of 1 / 3.3 of fp16 is met: the ratio is 3.2.
    assert pytest.approx(3.2) == 33_792 / 10_560
    assert not 10_560 <= 33_792 / 3.3


@pytest.mark.parametrize("config", BENCH, ids=lambda c: c.label)
def test_bytes_by_stream_add_up(config: KVConfig) -> None:
    shape = ModelShape((LayerShape(1, 64, 64), LayerShape(1, 64, 64, window=32), LayerShape(1, 64, 64)), torch.float16)
    if config.budget.evicts and getattr(config.budget, "scope", "") == "model":
        shape = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float16)
    overrides = tuple((2 if layer else 0, k, v) for layer, k, v in config.overrides)
    config = dataclasses.replace(config, overrides=overrides)
    for prefill, decoded in ((1, 0), (33, 0), (257, 40)):
        found = config.bytes_by_stream(shape, prefill, decoded)
        assert sum(found.values()) == config.predicted_bytes(shape, prefill, decoded)
        assert all(count > 0 for count in found.values())


def test_every_stream_has_its_name() -> None:
    shape = ModelShape((LayerShape(1, 64, 64),), torch.float16)
    config = KVConfig(key=Affine(bits=4), value=Affine(bits=8), sink_tokens=4, recent_tokens=16, page_tokens=16)
    # 33 tokens: 4 sinks, 16 recent, 13 in one page of 16; keys 32, values 64, scale and zero of two groups 8 bytes each
    assert config.bytes_by_stream(shape, 33) == {
        "K": 512, "V": 1024, "scales": 256, "raw sinks": 4 * 256, "raw window": 16 * 256,
    }  # fmt: skip


def test_page_slack_is_counted() -> None:
    shape = ModelShape((LayerShape(1, 64, 64),), torch.float16)
    config = KVConfig(key=Affine(bits=4), value=Affine(bits=4), sink_tokens=0, recent_tokens=0, page_tokens=16)
    assert config.predicted_bytes(shape, 17) == 2 * 16 * 80


def test_positions_and_mass_are_counted_only_where_they_exist() -> None:
    shape = ModelShape((LayerShape(1, 64, 64),), torch.float16)
    base = {"sink_tokens": 0, "recent_tokens": 8, "page_tokens": 1}
    plain = KVConfig(**base).predicted_bytes(shape, 40)
    kept = KVConfig(budget=Tokens(1000), **base).predicted_bytes(shape, 40)
    tracked = KVConfig(scorer=AttentionMass(), budget=Tokens(1000), **base).predicted_bytes(shape, 40)
    assert kept - plain == 32 * 4  # int32 position of each encoded token
    assert tracked - kept == 40 * 4  # float32 mass of each token that is not a sink


def test_sliding_layers_count_what_transformers_keeps_there() -> None:
    one = ModelShape((LayerShape(2, 64, 64, window=32),), torch.bfloat16)
    assert KVConfig().predicted_bytes(one, 1000) == 31 * 2 * 128 * 2
    assert one.raw_bytes(1000) == 31 * 2 * 128 * 2
    assert KVConfig().predicted_bytes(one, 10) == 10 * 2 * 128 * 2


def test_raw_is_sixteen_effective_bits_in_sixteen_bit() -> None:
    shape = ModelShape((LayerShape(3, 64, 64),) * 30, torch.bfloat16)
    assert shape.raw_bytes(1) == 23_040
    assert KVConfig(page_tokens=1).effective_bits(shape, 4096) == 16.0
    assert KVConfig(page_tokens=1).effective_bits(ModelShape(shape.layers, torch.float32), 4096) == 32.0
    with pytest.raises(ValueError, match="tokens"):
        KVConfig().effective_bits(shape, 0)


def test_the_id_is_made_once_and_belongs_to_one_object(monkeypatch) -> None:
    config = KVConfig(key=Fp8())
    made = config.id
    other = dataclasses.replace(config, sink_tokens=8)
    assert other.id != made
    assert other.id == KVConfig(key=Fp8(), sink_tokens=8).id
    assert copy.deepcopy(config) == config
    assert hash(KVConfig(key=Fp8())) == hash(config)  # one that remembers and one that does not
    assert made not in repr(config)
    monkeypatch.setattr(KVConfig, "to_json", lambda self: pytest.fail("made again"))
    assert config.id == made
