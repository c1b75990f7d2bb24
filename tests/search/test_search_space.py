"""The space: whatever is sampled fits the budget and uses it, on heads of several widths."""

import dataclasses
import warnings
from typing import Any

import optuna
import pytest
import torch

from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import Dense, Fraction, Recency, TopK
from kvlab.search.space import KEY_AXES, SCHEMES, SCORERS, Space
from kvlab.search.workload import Workload

DIMS = (64, 80, 96, 128)
# Uncompressed, 8 conversations of 131072 tokens take 2.4 GB at head dim 64.
TOO_SMALL, NOT_BINDING = 10**5, 10**11
BUDGETS = (TOO_SMALL, 30 * 10**6, 100 * 10**6, 300 * 10**6, 600 * 10**6, 10**9, NOT_BINDING)
SAMPLES = 30
LAYERS, HEADS = 3, 3


def space(dim: int = 64, budget: int = 600 * 10**6, layers: int = LAYERS, context: int = 131072) -> Space:
    shape = ModelShape((LayerShape(HEADS, dim, dim),) * layers, torch.float32)
    return Space(shape, Workload(context, 8), budget, "float16")


def sampled(s: Space, n: int = SAMPLES, seed: int = 0) -> list[tuple[optuna.Trial, KVConfig | None]]:
    """Random trials of one study, which would refuse a domain that changes between trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    out = []
    for _ in range(n):
        trial = study.ask()
        out.append((trial, s.config(trial)))
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return out


def _bits(codec: Any, dim: int) -> float:
    return codec.bits if isinstance(codec, Affine) else {"fp8": 8, "raw": 16}[codec.kind]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_config_fits_the_budget_and_uses_it(dim, budget) -> None:
    s = space(dim, budget)
    raw = s.workload.bytes(s.build(Raw(), Raw()), s.shape)
    fitted = 0
    for trial, config in sampled(s):
        if config is None:
            assert budget == TOO_SMALL, trial.params  # nothing else here is too small for every scheme
            continue
        config.check(s.shape)
        used = s.workload.bytes(config, s.shape)
        assert used <= budget, config.label
        if config.budget.evicts:
            fitted += 1
            assert isinstance(config.budget, Fraction)
            assert used <= budget * trial.params["fill"]
            assert (config.budget.scope, config.budget.slope) == (
                trial.params.get("scope", "head"),
                trial.params.get("slope", 0.0),
            )
            plain = s.build(config.key, config.value, page_tokens=config.page_tokens)
            assert s.workload.bytes(plain, s.shape) > budget  # eviction only where it was needed
            assert used >= 0.6 * budget or config.budget.fraction < 0.01, config.label
    assert fitted or budget >= raw or budget == TOO_SMALL


@pytest.mark.parametrize("dim", DIMS)
def test_keys_never_take_fewer_bits_than_values(dim) -> None:
    for _, config in sampled(space(dim)):
        assert config is not None
        assert _bits(config.key, dim) >= _bits(config.value, dim)
        assert isinstance(config.key, type(config.value))


@pytest.mark.parametrize("dim", DIMS)
def test_every_config_really_stores_such_heads(dim) -> None:
    x = torch.randn(2, 64, dim, generator=torch.Generator().manual_seed(0))
    for codec in {c for _, config in sampled(space(dim)) if config for c in (config.key, config.value)}:
        assert codec.decode(codec.encode(x), dim, torch.float32).isfinite().all(), codec.label


def test_every_choice_is_reached_and_names_depend_on_choices() -> None:
    trials = sampled(space(), 200)
    assert {t.params["scheme"] for t, _ in trials} == set(SCHEMES)
    assert {t.params.get("k.axis") for t, _ in trials} == {*KEY_AXES, None}
    assert {t.params.get("evict") for t, _ in trials} == {*SCORERS, None}
    for trial, config in trials:
        assert config is not None
        names = set(trial.params)
        scheme = trial.params["scheme"]
        low_key = scheme.startswith(("k4", "k3", "k2"))
        assert ("k.axis" in names) == ("k.mode" in names) == low_key
        assert ("k.channel_group" in names) == (trial.params.get("k.axis") == "channel")
        assert ("k.group" in names) == (low_key and trial.params["k.axis"] != "channel")
        assert ("v.rotated" in names) == ("v.group" in names) == (low_key or scheme == "k8v4")
        assert ("evict" in names) == ("fill" in names) == config.budget.evicts != ("read" in names)
        assert ("scope" in names) == (trial.params.get("evict", "window") != "window")
        assert ("slope" in names) == (trial.params.get("scope", "model") != "model")
        assert ("k.centring" in names) == (low_key and trial.params["k.axis"] != "channel")
        assert config.centring == trial.params.get("k.centring", "none")
    assert {t.params.get("scope") for t, _ in trials} == {"head", "layer", "model", None}
    assert {c.centring for _, c in trials if c} == {"none", "mean"}
    assert len({c.id for _, c in trials if c}) > 100


def test_what_fits_may_read_sparsely_and_still_fits() -> None:
    s = space(budget=1200 * 10**6)  # 8 bits fit as they are; 16 do not
    sparse = 0
    for trial, config in sampled(s, 200):
        assert config is not None
        config.check(s.shape)
        read = trial.params.get("read", 1.0)
        if isinstance(config.reader, Dense):
            assert read > 7 / 8 or s.workload.bytes(s._sparse(config, read), s.shape) > s.budget
            continue
        sparse += 1
        assert isinstance(config.reader, TopK)
        assert not config.budget.evicts
        assert 0 < config.reader.fraction - read <= 1 / 8
        assert (config.reader.bound == "codec") == (config.key.block_tokens > 1)
        assert config.read_bytes(s.shape, 131072) < 0.99 * config.predicted_bytes(s.shape, 131072)
    assert sparse > 20


def test_layers_share_a_budget_only_where_they_are_alike() -> None:
    s = space()
    uneven = dataclasses.replace(s, shape=ModelShape((*s.shape.layers[:-1], LayerShape(HEADS, 96, 96)), torch.float32))
    sliding = dataclasses.replace(s, shape=ModelShape((*s.shape.layers, LayerShape(HEADS, 96, 96, 64)), torch.float32))
    assert (s.scopes[-1], uneven.scopes[-1], sliding.scopes[-1]) == ("model", "layer", "model")
    for some in (uneven, sliding):
        for _, config in sampled(some, 60):
            if config:
                config.check(some.shape)


def test_a_model_whose_keys_cannot_be_centred_is_not_asked_to() -> None:
    s = dataclasses.replace(space(), centrings=("none",))
    assert {c.centring for _, c in sampled(s, 100) if c} == {"none"}
    assert {p.get("k.centring") for p in s.first_trials()} == {"none", None}


def test_a_channel_group_is_one_page() -> None:
    channel = [c for t, c in sampled(space(), 200) if c and t.params.get("k.axis") == "channel"]
    assert {c.page_tokens for c in channel} == {32, 64}
    assert all(isinstance(c.key, Affine) and c.key.group == c.page_tokens for c in channel)


@pytest.mark.parametrize(("dim", "groups"), [(64, {32, 64}), (80, {0}), (96, {32, 0}), (128, {32, 64})])
def test_groups_that_do_not_divide_the_head_become_the_whole_head(dim, groups) -> None:
    values = [c.value for _, c in sampled(space(dim), 120) if c and isinstance(c.value, Affine) and c.value.bits < 8]
    assert {v.group for v in values} == groups


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("budget", [30 * 10**6, 300 * 10**6, NOT_BINDING])
def test_first_trials_use_every_name_they_give_and_fit(dim, budget) -> None:
    s = space(dim, budget)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    asked = s.first_trials()
    for params in asked:
        study.enqueue_trial(params)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # optuna only warns about a value outside a domain
        for params in asked:
            trial = study.ask()
            config = s.config(trial)
            assert config is not None
            assert s.workload.bytes(config, s.shape) <= budget
            unused = set(params) - set(trial.params)
            assert unused <= ({"read"} if config.budget.evicts else {"evict", "scope", "slope", "fill"})
            assert set(trial.params) <= set(params)
            assert isinstance(config.reader, Dense)
            assert all(trial.params[k] == v for k, v in params.items() if k in trial.params)
            seen.add(config.id)
    assert len(seen) == len(asked)


def test_params_that_a_trial_leaves_out_are_drawn() -> None:
    """A trial asked first may name less than its branch has; the sampler then fills in."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"scheme": "k4v2"})
    trial = study.ask()
    assert space().config(trial) is not None
    assert trial.params["k.axis"] in KEY_AXES


# -- anchors, control --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_anchors_and_control_fit_the_model_whatever_the_budget(dim, budget) -> None:
    s = space(dim, budget)
    anchors = s.anchors()
    raw = s.workload.bytes(anchors["raw"], s.shape)
    exact = LAYERS * HEADS * 2 * dim * 2 * 131072 * 8
    assert exact <= raw <= 1.001 * exact  # the last page is not full
    binding = raw > budget
    assert list(anchors)[:4] == ["raw", "fp8", "int8", "int4"]
    assert ("window" in anchors) == (binding and budget > TOO_SMALL)
    for config in (*anchors.values(), s.control()):
        config.check(s.shape)
        assert (config.sink_tokens, config.recent_tokens, config.raw_dtype) == (4, 16, "float16")
    if "window" in anchors:
        used = s.workload.bytes(anchors["window"], s.shape)
        assert budget >= used
        assert used > 0.9 * budget or budget < 10**8
        assert isinstance(anchors["window"].scorer, Recency)
    sizes = [s.workload.bytes(anchors[n], s.shape) for n in ("raw", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert s.workload.bytes(s.control(), s.shape) < sizes[-1] / 2


def test_anchors_are_the_same_configs_as_the_plain_trials() -> None:
    """So that nothing is scored twice under two ids."""
    s = space(budget=NOT_BINDING)
    dense = [(t.params["scheme"], c) for t, c in sampled(s, 90) if c and isinstance(c.reader, Dense)]
    plain = {scheme: c for scheme, c in dense if scheme in ("raw", "fp8", "k8v8")}
    anchors = s.anchors()
    assert [plain[k].id for k in ("raw", "fp8", "k8v8")] == [anchors[k].id for k in ("raw", "fp8", "int8")]
    assert (anchors["fp8"].key, anchors["fp8"].value) == (Fp8(), Fp8())


def test_nothing_fits_a_budget_below_the_sinks_and_the_window() -> None:
    s = space(budget=TOO_SMALL)
    assert all(config is None for _, config in sampled(s, 30))
    assert "window" not in s.anchors()


# -- identity ----------------------------------------------------------------------------------------------------------


def test_the_hash_tells_spaces_apart() -> None:
    base = space()
    others = [
        space(budget=600 * 10**6 + 1),
        space(dim=128),
        space(layers=2),
        space(context=131071),
        dataclasses.replace(base, raw_dtype="bfloat16"),
        dataclasses.replace(base, centrings=("none",)),
        dataclasses.replace(base, workload=Workload(131072, 7)),
        dataclasses.replace(base, shape=ModelShape(base.shape.layers, torch.bfloat16)),
        dataclasses.replace(
            base, shape=ModelShape((*base.shape.layers[:-1], LayerShape(HEADS, 64, 64, window=512)), torch.float32)
        ),
    ]
    assert len({s.hash for s in (base, *others)}) == len(others) + 1
    assert space().hash == base.hash


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SCHEMES", ("raw", "fp8")),
        ("RECENT_TOKENS", 32),
        ("TOKEN_GROUPS", (32,)),
        ("SCORERS", {}),
        ("READ", (0.5, 2.0)),
    ],
)
def test_the_hash_changes_with_the_settings_of_the_space(monkeypatch, name, value) -> None:
    before = space().hash
    monkeypatch.setattr(f"kvlab.search.space.{name}", value)
    assert space().hash != before


@pytest.mark.parametrize(("dim", "budget"), [(64, 600 * 10**6), (80, 10**9), (64, 10**13)])
def test_first_configs_are_those_of_the_first_trials(dim, budget) -> None:
    s = space(dim, budget)
    configs = s.first_configs()
    assert 5 <= len(configs) <= len(s.first_trials())
    assert {c.budget.evicts for c in configs} >= {budget < 10**13}
    assert all(s.workload.bytes(c, s.shape) <= budget for c in configs)
