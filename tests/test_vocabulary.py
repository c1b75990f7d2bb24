"""The words people already use: what they mean, what they demand, what is refused, and no key ever shown."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import AttentionMass, Fraction, Recency, Threshold, TopK, WindowAttention
from kvlab.vocabulary import DTYPES, Secret, ServerSettings, Settings, build, ratio, read, write

SHAPE = ModelShape((LayerShape(3, 64, 64),) * 30, torch.bfloat16)
SMALL_HEADS = ModelShape((LayerShape(2, 80, 80),) * 2, torch.bfloat16)
KEY = "sk-do-not-show-4711"


def cache(**words: object) -> str:
    return json.dumps({"kv_cache": words})


@pytest.mark.parametrize(
    ("dtype", "key", "value"),
    [
        ("auto", Raw(), Raw()),
        ("fp8", Fp8("e4m3"), Fp8("e4m3")),
        ("fp8_e4m3", Fp8("e4m3"), Fp8("e4m3")),
        ("fp8_e5m2", Fp8("e5m2"), Fp8("e5m2")),
        ("int8", Affine(bits=8, group=0, mode="symmetric"), Affine(bits=8, group=0, mode="symmetric")),
        ("int4", Affine(bits=4, group=32), Affine(bits=4, group=32)),
        ("int2", Affine(bits=2, axis="channel", group=32), Affine(bits=2, group=32, clip=0.72)),
    ],
)
def test_what_each_dtype_stands_for(dtype: str, key: object, value: object) -> None:
    settings = read(f'[kv_cache]\ndtype = "{dtype}"', SHAPE)
    assert (settings.config.key, settings.config.value) == (key, value)
    assert settings.config.budget.evicts is False
    settings.config.check(SHAPE)


def test_an_empty_document_is_the_raw_cache() -> None:
    assert read("") == Settings(config=KVConfig())
    assert read("[kv_cache]") == read("{}") == Settings()


def test_a_threshold_evicts_by_the_attention_of_the_last_queries() -> None:
    config = read("[kv_cache]\ndtype = 'fp8'\neviction_threshold = 0.25").config
    assert (config.scorer, config.budget) == (WindowAttention(window=32), Threshold(0.25))
    assert not read("[kv_cache]\neviction_threshold = 0").config.budget.evicts


@pytest.mark.parametrize(
    ("dtype", "said", "reader"),
    [
        ("int4", 0.25, TopK(fraction=0.25)),
        ("fp8", 64, TopK(count=64)),
        ("auto", 1.0, TopK(fraction=1.0)),
        ("int2", 0.5, TopK(fraction=0.5, chunk=32, bound="codec")),
    ],
)
def test_sparse_top_k_reads_some_pages_of_all_that_are_stored(dtype: str, said: float, reader: TopK) -> None:
    text = cache(dtype=dtype, sparse_top_k=said)
    config = read(text, SHAPE).config
    assert config.reader == reader
    assert not config.budget.evicts
    assert read(write(config, SHAPE), SHAPE).config == config
    assert config.read_bytes(SHAPE, 8192) < config.predicted_bytes(SHAPE, 8192) or said == 1.0


def test_toml_json_and_files_say_the_same(tmp_path: Path) -> None:
    text = '[kv_cache]\ndtype = "int4"\nmax_context_length = 4096\n[server]\nbase_url = "http://localhost:8000/v1"\n'
    as_json = {
        "kv_cache": {"dtype": "int4", "max_context_length": 4096},
        "server": {"base_url": "http://localhost:8000/v1"},
    }
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "a.json").write_text(json.dumps(as_json))
    expected = Settings(
        config=build("int4"), server=ServerSettings(base_url="http://localhost:8000/v1"), max_context_length=4096
    )
    for source in (text, json.dumps(as_json), tmp_path / "a.toml", tmp_path / "a.json"):
        assert read(source) == expected


def test_a_file_name_as_text_is_no_file() -> None:
    with pytest.raises(ValueError, match=r"pass pathlib\.Path"):
        read("settings.toml")


def test_the_native_form_is_read_too() -> None:
    config = KVConfig(key=Affine(bits=3, group=16), scorer=AttentionMass(0.9), budget=Fraction(0.3))
    assert read(config.to_toml(), SHAPE).config == config
    assert read("[workload]\ncontext = 8\n" + config.to_toml()).config == config
    both = config.to_toml() + "\n[kv_cache]\nmax_context_length = 100\n"
    assert read(both) == Settings(config=config, max_context_length=100)


def test_two_tables_that_say_how_to_store_are_refused() -> None:
    with pytest.raises(ValueError, match="both say how to store"):
        read(KVConfig().to_toml() + "\n[kv_cache]\ndtype = 'int4'\n")


# -- the checked demand ----------------------------------------------------------------------------------------------


def test_a_demand_that_is_met_passes() -> None:
    settings = read("[kv_cache]\ndtype = 'int4'\ncompression_ratio = 3.1\nmax_context_length = 8192", SHAPE)
    assert settings.compression_ratio == 3.1
    assert ratio(settings.config, SHAPE, 8192) >= 3.1


def test_four_bits_are_not_four_times() -> None:
    # 32 bytes of codes and 8 of scales and zeros against 128: 3.2, less the raw sinks and recent tokens.
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        read("[kv_cache]\ndtype = 'int4'\ncompression_ratio = 4\nmax_context_length = 8192", SHAPE)
    message = str(error.value)
    here, there = ratio(build("int4"), SHAPE, 8192), ratio(build("int2"), SHAPE, 8192)
    assert 3.1 < here < 3.2
    assert "compression_ratio 4 is not met at 8192 tokens: int4 g32 reaches 3.14" in message
    assert f"dtype 'int2' reaches {int(there * 100) / 100:.2f}" in message


def test_a_demand_nobody_meets_names_the_most() -> None:
    with pytest.raises(
        ValueError, match=r"reaches 1\.98\. The most is 5\.\d\d with dtype 'int2'; an eviction_threshold"
    ):
        read(cache(dtype="fp8", compression_ratio=50, max_context_length=8192), SHAPE)


def test_a_demand_depends_on_the_context() -> None:
    text = cache(dtype="fp8", compression_ratio=1.9)
    assert read(text, SHAPE, context=4096).compression_ratio == 1.9
    with pytest.raises(ValueError, match="at 100 tokens"):
        read(text, SHAPE, context=100)
    with pytest.raises(ValueError, match="give max_context_length, or pass context"):
        read(text, SHAPE)
    read(text)  # unchecked without a model; `check` does it later
    with pytest.raises(ValueError, match="exceeds max_context_length 50"):
        read(cache(max_context_length=50), SHAPE, context=51)


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    threshold=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    demand=st.floats(1, 30),
    context=st.integers(1, 5000),
)
def test_what_passes_is_reached_and_what_is_promised_passes(
    dtype: str, threshold: float, demand: float, context: int
) -> None:
    text = cache(dtype=dtype, eviction_threshold=threshold, compression_ratio=demand, max_context_length=context)
    config = build(dtype, threshold, SHAPE)
    if ratio(config, SHAPE, context) >= demand:
        assert read(text, SHAPE).config == config
        return
    with pytest.raises(ValueError, match="is not met") as error:
        read(text, SHAPE)
    most = float(str(error.value).split("most is ")[1].split()[0])
    assert most <= max(ratio(build(d, threshold, SHAPE), SHAPE, context) for d in DTYPES)


def test_heads_that_32_does_not_divide_share_one_scale() -> None:
    for dtype in DTYPES:
        read(cache(dtype=dtype), SMALL_HEADS).config.check(SMALL_HEADS)
    assert read(cache(dtype="int4"), SMALL_HEADS).config.value == Affine(bits=4, group=0)


def test_a_config_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the group, got 80 and group 32"):
        read(KVConfig(key=Affine(bits=4)).to_toml(), SMALL_HEADS)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (cache(dtpye="int4"), ["unknown key 'dtpye' in [kv_cache]", "'dtype'"]),
        (cache(max_context=5), ["unknown key 'max_context'", "'max_context_length'"]),
        (cache(dtype="int5"), ["got 'int5'", "the nearest is 'int"]),
        (cache(dtype="FP8"), ["got 'FP8'", "fp8"]),
        (cache(dtype=8), ["dtype must be one of", "got 8"]),
        (cache(sparse_top_k=0), ["sparse_top_k must be an integer of at least 1, got 0"]),
        (cache(sparse_top_k=-3), ["sparse_top_k must be an integer of at least 1, got -3"]),
        (cache(sparse_top_k=0.0), ["sparse_top_k is a share in (0, 1]", "got 0.0", "0.25 reads a quarter"]),
        (cache(sparse_top_k=1.5), ["sparse_top_k is a share in (0, 1]", "whole number of pages", "got 1.5"]),
        (cache(sparse_top_k=True), ["sparse_top_k must be a finite number, got True"]),
        (cache(sparse_top_k="0.5"), ["sparse_top_k must be a finite number, got '0.5'"]),
        ("[kv_cache]\nsparse_top_k = nan", ["sparse_top_k must be a finite number, got nan"]),
        (KVConfig().to_toml() + "[kv_cache]\nsparse_top_k = 4", ["both say how to store and read"]),
        (cache(eviction_threshold=1), ["[0, 1)", "1.0"]),
        (cache(eviction_threshold=-0.1), ["[0, 1)", "-0.1"]),
        (cache(eviction_threshold="0.5"), ["eviction_threshold must be a finite number, got '0.5'"]),
        (cache(eviction_threshold=True), ["eviction_threshold must be a finite number, got True"]),
        ("[kv_cache]\neviction_threshold = nan", ["eviction_threshold must be a finite number, got nan"]),
        ("[kv_cache]\ncompression_ratio = inf", ["compression_ratio must be a finite number, got inf"]),
        (cache(compression_ratio=float("nan")), ["NaN is no value"]),
        (cache(compression_ratio=0.25), ["at least 1, got 0.25", "4.0 asks for a quarter"]),
        (cache(compression_ratio=-2), ["at least 1, got -2.0"]),
        (cache(max_context_length=0), ["max_context_length must be an integer of at least 1, got 0"]),
        (cache(max_context_length=4096.0), ["max_context_length must be an integer", "4096.0"]),
        (cache(max_context_length=None), ["max_context_length must be an integer", "None"]),
        (cache(policy="lru"), ["unknown key 'policy' in [kv_cache]", "sessions", "nearest is"]),
        (cache(max_session_idle_seconds=60), ["'max_session_idle_seconds'", "sessions", "nearest is"]),
        ("[kv_cache.guard]\nwarn_at_percent = 75", ["unknown key 'guard'", "sessions", "nearest is"]),
        ("[lru]\nmax_entries = 5", ["unknown key 'lru' in the document", "sessions"]),
        ("[kv_cach]\n", ["unknown key 'kv_cach' in the document", "'kv_cache'"]),
        ("kv_cache = 4", ["[kv_cache] must be a table, got int"]),
        ("server = 'x'", ["[server] must be a table, got str"]),
        ("[server]\nbase_uri = 'http://x'", ["unknown key 'base_uri' in [server]", "'base_url'"]),
        ("[server]\nbase_url = 'localhost:8000'", ["base_url", "http://"]),
        ("[server]\nmodel_id = ''", ["model_id", "not empty"]),
        ("[kv_config]\nsink_token = 4", ["unknown key 'sink_token'", "'sink_tokens'"]),
        ("[kv_cache", ["not valid TOML"]),
        ('{"kv_cache": ', ["not valid JSON", "line 1"]),
    ],
)
def test_what_means_nothing_is_refused_by_name(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked below
        read(text)
    assert [w for w in words if w not in str(error.value)] == []


# -- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_never_shown() -> None:
    settings = read(f"[server]\nbase_url = 'https://host/v1'\napi_key = '{KEY}'\nmodel_id = 'm'")
    server = settings.server
    assert server is not None
    assert server.api_key is not None
    assert server.api_key.reveal() == KEY
    assert (server.base_url, server.model_id) == ("https://host/v1", "m")
    shown = [repr(settings), str(settings), f"{server.api_key}", repr(dataclasses.asdict(settings)), f"{settings!r:>5}"]
    shown.append(json.dumps(dataclasses.asdict(settings), default=repr))
    assert not [text for text in shown if KEY in text]
    with pytest.raises(TypeError):
        json.dumps(dataclasses.asdict(server))
    with pytest.raises(TypeError, match="not written to files"):
        pickle.dumps(server.api_key)
    assert copy.deepcopy(settings) == settings
    assert Secret("a") != Secret("b")


@pytest.mark.parametrize(
    "text",
    [
        f"[server]\napi_kye = '{KEY}'",
        f"[server]\napi_key = ['{KEY}']",
        f"[server]\napi_key = '{KEY}'\nbase_url = '{KEY}'",
        f"[server]\napi_key = '{KEY}",
        f'{{"server": {{"api_key": "{KEY}", }}',
    ],
)
def test_errors_do_not_show_the_key(text: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - about what is not in it
        read(text)
    assert KEY not in str(error.value)
    assert KEY not in repr(vars(error.value))
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


# -- writing ---------------------------------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from(DTYPES),
    threshold=st.just(0.0) | st.floats(0, 1, exclude_max=True),
    share=st.none() | st.integers(1, 500) | st.floats(0, 1, exclude_min=True),
)
def test_what_is_written_reads_back(dtype: str, threshold: float, share: float | None) -> None:
    for shape in (None, SHAPE, SMALL_HEADS):
        config = build(dtype, threshold, shape, share)
        assert read(write(config, shape), shape).config == config


def test_written_words() -> None:
    assert write(build("fp8", 0.5)) == '[kv_cache]\ndtype = "fp8_e4m3"\neviction_threshold = 0.5\n'
    assert write(build("int4", sparse_top_k=64)) == '[kv_cache]\ndtype = "int4"\nsparse_top_k = 64\n'
    assert write(build("int8", sparse_top_k=0.25)) == '[kv_cache]\ndtype = "int8"\nsparse_top_k = 0.25\n'
    assert write(KVConfig()) == '[kv_cache]\ndtype = "auto"\n'


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (KVConfig(key=Affine(bits=3, group=16), value=Fp8()), ["key=Affine(bits=3"]),
        (dataclasses.replace(build("int4"), recent_tokens=128), ["recent_tokens=128"]),
        (dataclasses.replace(build("int8", 0.5), scorer=Recency()), ["scorer=Recency()"]),
        (KVConfig(reader=TopK(bound="mean")), ["reader=TopK("]),
        (KVConfig(budget=Fraction(0.5)), ["budget=Fraction("]),
        (dataclasses.replace(build("int8"), overrides=((0, Raw(), Raw()),)), ["overrides="]),
    ],
)
def test_what_the_words_cannot_say_is_named(config: KVConfig, words: list[str]) -> None:
    with pytest.raises(ValueError, match="has no words for") as error:
        write(config)
    assert [w for w in [*words, "to_toml()"] if w not in str(error.value)] == []
    assert str(error.value).count("=") <= 12  # only what differs from the closest setting
