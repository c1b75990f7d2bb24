"""What a sweep compares: every combination once, each built as its name says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import Dense, Fraction, TopK, Unlimited
from kvlab.search.settings import UsageError
from kvlab.search.space import Space
from kvlab.search.workload import Workload
from kvlab.sweep.arms import EVICTERS, Arm, arms
from kvlab.sweep.catalog import SWEEPS
from kvlab.sweep.formats import FORMATS
from kvlab.sweep.settings import SweepConfig, config_of

SHAPE = ModelShape((LayerShape(3, 64, 64, None),) * 4, "float32")
SPACE = Space(SHAPE, Workload(4096, 2), 1 << 30, "float16")


def names(**given):
    return [arm.name for arm in arms(SweepConfig(**given))]


def test_formats_alone_are_named_as_they_are():
    assert names(formats=("raw", "int8")) == ["raw", "int8"]


def test_every_way_to_keep_meets_every_way_to_read():
    got = names(
        formats=("raw",), scorers=("window", "h2o"), keep=(1.0, 0.5), scopes=("head", "layer"), read=(1.0, 0.25)
    )
    kept = ["raw", "raw + window 50%", "raw + h2o 50%", "raw + h2o 50% layer"]
    assert got == [name for k in kept for name in (k, f"{k} + read 25% c16")]


def test_one_share_of_everything_stands_once_whatever_the_axes():
    assert names(formats=("int8",), scorers=tuple(EVICTERS), scopes=("head", "model"), chunks=(8, 16)) == ["int8"]


@given(
    formats=st.lists(st.sampled_from(list(FORMATS)), min_size=1, max_size=3, unique=True),
    scorers=st.lists(st.sampled_from(list(EVICTERS)), min_size=1, max_size=3, unique=True),
    keep=st.lists(st.sampled_from([1.0, 0.75, 0.5, 0.125]), min_size=1, unique=True),
    scopes=st.lists(st.sampled_from(["head", "layer", "model"]), min_size=1, unique=True),
    read=st.lists(st.sampled_from([1.0, 0.5, 0.0625]), min_size=1, unique=True),
    bounds=st.lists(st.sampled_from(["minmax", "mean"]), min_size=1, unique=True),
)
def test_names_tell_arms_apart_as_configs_do(**axes):
    # A reader that leaves the first layers alone makes layers differ, which one budget for all of them forbids.
    made = [
        arm
        for arm in arms(SweepConfig(chunks=(32,), **{k: tuple(v) for k, v in axes.items()}))
        if arm.read == 1 or arm.scope != "model"
    ]
    built = {arm.name: arm.build(SPACE) for arm in made}
    assert len(built) == len(made) == len(set(built.values()))
    for arm in made:
        config = built[arm.name]
        config.check(SHAPE)
        assert (config.key, config.value, config.centring) == FORMATS[arm.format]
        assert config.budget == (Fraction(arm.keep, scope=arm.scope) if arm.keep < 1 else Unlimited())
        assert arm.keep == 1 or config.scorer == EVICTERS[arm.scorer]
        read = TopK(fraction=arm.read, chunk=arm.chunk, bound=arm.bound) if arm.read < 1 else Dense()
        assert config.reader == read
        assert config.raw_dtype == "float16"
        assert arm.axes()["keep"] == arm.keep
        assert ("scorer" in arm.axes()) == (arm.keep < 1)
        assert ("chunk" in arm.axes()) == (arm.read < 1)


@pytest.mark.parametrize("name", [n for n, s in SWEEPS.items() if not s.search])
def test_the_defaults_of_every_sweep_build(name):
    config = config_of(name, {})
    assert isinstance(config, SweepConfig)
    made = arms(config)
    assert 4 <= len(made) <= 40
    for arm in made:
        arm.build(SPACE).check(SHAPE)


def test_what_does_not_go_together_is_said():
    with pytest.raises(ValueError, match="whole channel groups"):
        Arm(format="int4_channel", read=0.5, chunk=16).build(SPACE)
    with pytest.raises(ValueError, match="per-channel keys"):
        Arm(format="int8", read=0.5, chunk=32, bound="codec").build(SPACE)
    assert Arm(format="int4_channel", read=0.5, chunk=32, bound="codec").build(SPACE).page_tokens == 32


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep": "1.5"}, "share to keep must lie in (0, 1], got 1.5"),
        ({"read": "0"}, "share to read must lie in (0, 1], got 0"),
        ({"keep": "half"}, "keep must be shares such as"),
        ({"keep": "0.5,50%"}, "name every share to keep once"),
        ({"scorers": "h20"}, "did you mean 'h2o'"),
        ({"scopes": "heads"}, "did you mean 'head'"),
        ({"bounds": "minmaxx"}, "did you mean 'minmax'"),
        ({"chunks": "16,x"}, "chunks must be whole numbers"),
        ({"chunks": "0"}, "chunk size must be at least 1"),
        ({"scorers": ""}, "name every scorer once and at least one"),
    ],
)
def test_mistakes_on_an_axis_are_named(given, words):
    with pytest.raises(UsageError) as caught:
        config_of("eviction", given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("0.5,0.25", (0.5, 0.25)),
        ("50%, 25%", (0.5, 0.25)),
        ("[0.5, 0.25]", (0.5, 0.25)),
        (0.5, (0.5,)),
        ([0.5, "25%"], (0.5, 0.25)),
        (1, (1.0,)),
    ],
)
def test_shares_are_read_in_every_form_they_come_in(given, right):
    found = config_of("eviction", {"keep": given})
    assert isinstance(found, SweepConfig)
    assert found.keep == right
    assert SweepConfig.from_params(found.to_params()) == found
