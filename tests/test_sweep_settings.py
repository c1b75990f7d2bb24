"""Parameters of a sweep: every type papermill may hand over, every mistake people make with it."""

import json
import math
from dataclasses import fields

import pytest

from kvlab.evals.item import FAMILIES
from kvlab.evals.sampling import Sampling
from kvlab.runs import config_hash
from kvlab.search.settings import Request, UsageError
from kvlab.sweep.formats import FORMATS
from kvlab.sweep.notebook import parameters
from kvlab.sweep.places import default_root, notebook_of
from kvlab.sweep.settings import SpotConfig, SweepConfig

CELL = "\n".join(f"{name} = {value!r}  # help" for name, value in SweepConfig().to_params().items())


@pytest.mark.parametrize(
    ("name", "given", "right"),
    [
        ("query_aware", "false", False),
        ("query_aware", "False", False),
        ("query_aware", "0", False),
        ("query_aware", 0, False),
        ("query_aware", "true", True),
        ("query_aware", True, True),
        ("items", "4", 4),
        ("items", 4.0, 4),
        ("items", "1_000", 1000),
        ("context", 131072, 131072),
        ("seed", "7", 7),
        ("budget_gb", "4", 4.0),
        ("budget_gb", 4, 4.0),
        ("budget_gb", "6GiB", 6.442450944),
        ("budget_gb", "800MB", 0.8),
        ("formats", "raw,fp8_e4m3", ("raw", "fp8_e4m3")),
        ("formats", "[raw, int8]", ("raw", "int8")),
        ("formats", '["raw", "int8"]', ("raw", "int8")),
        ("formats", "('int4', 'k8v4')", ("int4", "k8v4")),
        ("formats", ["raw", "int8"], ("raw", "int8")),
        ("formats", "int8", ("int8",)),
        ("families", " math , code ", ("math", "code")),
        ("out", "", ""),
        ("sets", "default, several", ("default", "several")),
        ("sets", "ruler@512,default", ("ruler@512", "default")),
        ("generate", "true", True),
    ],
)
def test_a_value_becomes_the_type_of_its_field(name, given, right):
    found = getattr(SweepConfig.from_params({name: given}), name)
    assert found == right
    assert type(found) is type(right)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"bitz": 4}, ["bitz", "did you mean 'items'"]),
        ({"fromats": "raw"}, ["fromats", "did you mean 'formats'"]),
        ({"Items": 4}, ["Items", "did you mean 'items'"]),
        ({"items": "four"}, ["items", "whole number", "'four'"]),
        ({"items": 4.5}, ["items", "whole number", "4.5"]),
        ({"items": True}, ["items", "whole number", "True"]),
        ({"items": [4]}, ["items", "list"]),
        ({"items": 1}, ["items", "at least 2"]),
        ({"items": math.nan}, ["items", "nan", "finite"]),
        ({"model": math.nan}, ["model", "nan", "finite"]),
        ({"model": 7}, ["model", "text", "7"]),
        ({"model": ""}, ["model", "empty"]),
        ({"budget_gb": math.inf}, ["budget_gb", "inf", "finite"]),
        ({"budget_gb": "nan"}, ["budget_gb", "nan"]),
        ({"budget_gb": "6 potatoes"}, ["budget_gb", "6 potatoes"]),
        ({"budget_gb": 0}, ["budget_gb", "positive"]),
        ({"budget_gb": -1.0}, ["budget_gb", "positive"]),
        ({"budget_gb": True}, ["budget_gb", "number"]),
        ({"context": 0}, ["context", "at least 1"]),
        ({"query_aware": "maybe"}, ["query_aware", "True or False", "maybe"]),
        ({"query_aware": None}, ["query_aware", "None"]),
        ({"formats": "fp8_e4m"}, ["fp8_e4m", "did you mean 'fp8_e4m3'"]),
        ({"formats": "[8,4]"}, ["format", "'8'"]),
        ({"formats": [8, 4]}, ["formats", "names separated by commas"]),
        ({"formats": ""}, ["at least one"]),
        ({"formats": "int8,int8"}, ["once"]),
        ({"families": "maths"}, ["maths", "did you mean 'math'"]),
    ],
)
def test_a_mistake_is_named_with_its_remedy(params, words):
    with pytest.raises(UsageError) as caught:
        SweepConfig.from_params(params)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_parameters_and_config_give_each_other():
    config = SweepConfig(formats=("int4",), families=("code",), items=9, query_aware=True, out="x")
    params = config.to_params()
    assert all(type(v) in (str, int, float, bool) for v in params.values())
    assert SweepConfig.from_params(params) == config
    assert SweepConfig.from_params(json.loads(json.dumps(params))) == config


def test_the_identity_tells_close_settings_apart_and_ignores_the_place():
    def hashed(**given):
        return config_hash(SweepConfig(**given).to_dict())

    different = [hashed(), hashed(budget_gb=0.125), hashed(budget_gb=0.12), hashed(seed=1), hashed(query_aware=True)]
    assert len(set(different)) == len(different)
    assert hashed(out="here") == hashed(out="there") == hashed()


def test_defaults_are_the_question_that_a_search_asks():
    config = SweepConfig()
    assert (config.budget_bytes, config.context, config.concurrency) == (6_000_000_000, 131072, 8)
    assert config.families == FAMILIES
    assert set(config.formats) <= set(FORMATS)


def test_a_search_in_a_notebook_takes_every_setting_of_the_command():
    assert {f.name for f in fields(Request)} - {"budget_bytes"} <= set(SpotConfig.names())
    assert SpotConfig().request() == Request(budget_bytes=6_000_000_000)
    params = {"budget_gb": "4GiB", "mode": "map", "layers": "uniform", "minutes": "2.5", "trials": 9, "items": "40"}
    params |= {"sets": "gsm8k", "families": "math", "generate": "true", "samples": 3, "temperature": "0.7", "seed": 2}
    config = SpotConfig.from_params(params)
    assert config.request() == Request(
        budget_bytes=4 << 30, mode="map", layers="uniform", minutes=2.5, trials=9, items=40, sets=("gsm8k",),
        families=("math",), generate=True, samples=3, temperature=0.7, seed=2,
    )  # fmt: skip
    assert SpotConfig.from_params(config.to_params()) == config


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"mode": "bets"}, "mode: unknown mode 'bets'; did you mean 'best'"),
        ({"minutes": 0}, "minutes must be a positive number"),
        ({"minutes": "inf"}, "minutes must be a number"),
        ({"generate": True}, "say how many with items"),
        ({"allow_code_exec": True}, "allow_code_exec runs generated code"),
        ({"trials": -1}, "trials must be at least 0"),
        ({"items": 1}, "items must be at least 2"),
        ({"sets": "gsm8k"}, "no items of family retrieval, code"),
        ({"formats": "int8"}, "unknown parameter 'formats'"),
    ],
)
def test_a_mistake_in_a_search_is_named_as_a_parameter(params, words):
    with pytest.raises(UsageError) as caught:
        SpotConfig.from_params(params)
    assert words in str(caught.value)
    assert "--" not in str(caught.value)


# -- the history of a notebook ---------------------------------------------------------------------------------------


def namespace(*cells, **values):
    return SweepConfig().to_params() | values | {"In": ["", *cells]}


def test_a_misspelt_injected_name_comes_back_to_be_refused():
    found = parameters(namespace("setup()", CELL, "# Parameters\nbitz = 4\n", bitz=4))
    assert found == SweepConfig().to_params() | {"bitz": 4}


def test_a_renamed_parameter_of_the_cell_itself_comes_back():
    assert "sede" in parameters(namespace(CELL.replace("seed", "sede"), sede=0))


def test_values_are_those_of_now_and_other_cells_do_not_matter():
    found = parameters(namespace(CELL, "x = 3", "seed = 5\ny = 2", "%time z = 1", x=3, y=2, seed=5))
    assert found == SweepConfig().to_params() | {"seed": 5}


def test_a_corrected_injection_replaces_the_misspelt_one():
    cells = (CELL, "# Parameters\nbitz = 4\n", "# Parameters\nitems = 4\n")
    assert parameters(namespace(*cells, bitz=4, items=4)) == SweepConfig().to_params() | {"items": 4}


def test_annotated_parameters_are_seen():
    assert parameters(namespace(CELL.replace("seed = 0", "seed: int = 0"))) == SweepConfig().to_params()


@pytest.mark.parametrize(
    ("given", "word"),
    [({}, "Jupyter"), ({"In": ["", "x = 1"]}, "parameter cell"), ({"In": ["", CELL]}, "no value any more")],
)
def test_without_parameter_cells_there_are_no_parameters(given, word):
    with pytest.raises(UsageError, match=word):
        parameters(given)


# -- places ------------------------------------------------------------------------------------------------------------


def test_notebook_and_runs_are_the_same_from_anywhere(tmp_path, monkeypatch):
    before = notebook_of("fp8"), default_root()
    for folder in (tmp_path, before[0].parent):
        monkeypatch.chdir(folder)
        assert (notebook_of("fp8"), default_root()) == before
    assert default_root() == before[0].parents[1] / "runs"


def test_an_unknown_sweep_names_the_nearest():
    with pytest.raises(ValueError, match="nearest is 'fp8'"):
        notebook_of("fp9")


def test_sets_and_families_have_to_fit():
    math = {"sets": "gsm8k", "families": "math"}
    config = SweepConfig.from_params(math | {"generate": True, "allow_code_exec": True})
    assert config.sets == ("gsm8k",)
    assert config.answers() == {"generate": True, "allow_code_exec": True, "sampling": Sampling()}
    assert config_hash(config.to_dict()) != config_hash(SweepConfig.from_params(math).to_dict())
    for params, words in (
        ({"sets": "gsm8k"}, "no items of family retrieval, code: pass families math"),
        ({"sets": "gsm8"}, "sets: unknown set 'gsm8'; did you mean 'gsm8k'"),
        ({"sets": ""}, "sets: name at least one set"),
        ({"allow_code_exec": True}, "pass generate True too"),
        ({"samples": 2, "temperature": 0.5}, "pass generate True too"),
        ({"samples": 2, "generate": True}, "samples, temperature:"),
    ):
        with pytest.raises(UsageError, match=words):
            SweepConfig.from_params(params)
