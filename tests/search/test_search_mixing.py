"""Formats by layer: bytes to the byte, the least predicted loss by exhaustion, and what the multipliers do."""

import itertools
from dataclasses import replace

import optuna
import pytest
import torch

from kvlab.codecs import Affine, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.layer import LayerShape, ModelShape
from kvlab.policies import Recency, Unlimited
from kvlab.search.mixing import Mixer
from kvlab.search.sensitivity import Sensitivity
from kvlab.search.space import MIX_CONTRAST, MIX_KEYS, MIXED, SCHEMES, Space
from kvlab.search.workload import Workload

ALIKE = (LayerShape(2, 64, 64),) * 4
WEIGHTS = (1.0, 40.0, 0.3, 2.0, 5.0, 0.1)
CONTEXT, ROWS = 1000, 3
SHAPES = {
    "alike": ALIKE,
    "uneven": (LayerShape(2, 64, 64), LayerShape(1, 128, 64), LayerShape(4, 64, 128), LayerShape(2, 64, 64)),
    "sliding": (LayerShape(2, 64, 64), LayerShape(2, 64, 64, 128), *ALIKE[:2], LayerShape(2, 64, 64, 32)),
}


def _space(layers: tuple[LayerShape, ...] = ALIKE, budget: int = 10**9) -> Space:
    return Space(ModelShape(layers, torch.float32), Workload(CONTEXT, ROWS), budget, "float16", ("none",))


def _mixer(space: Space, values: float = 0.2) -> Mixer:
    """Losses fall by 4 a bit; layers differ by their weights."""
    layers = space.shape.compressed
    bits = (8, 4, 3, 2)
    table = Sensitivity(
        formats=space.formats(),
        layers=tuple(layers),
        key_kl=tuple(tuple(WEIGHTS[i] * 4.0**-b for b in bits) for i in layers),
        value_kl=tuple(tuple(WEIGHTS[i] * values * 4.0**-b for b in bits) for i in layers),
        items=1,
        items_sha256="",
        depth=4,
    )
    return Mixer(table, space.shape, space.workload)


def _bits(config: KVConfig, stream: str, layers: list[int]) -> list[int]:
    return [getattr(config.at(i), stream).bits for i in layers]


def _ends(space: Space, mixer: Mixer) -> tuple[int, int]:
    most = mixer.config(10**12)
    assert most is not None
    return (space.workload.bytes(c, space.shape) for c in (mixer.smallest(), most))  # type: ignore[return-value]


@pytest.mark.parametrize("name", SHAPES)
def test_a_mix_fits_its_budget_to_the_byte(name) -> None:
    space = _space(SHAPES[name])
    mixer = _mixer(space)
    low, high = _ends(space, mixer)
    assert mixer.config(low - 1) is None
    for n in range(12):
        budget = low + (high - low) * n // 11
        config = mixer.config(budget)
        assert config is not None
        config.check(space.shape)
        used = space.workload.bytes(config, space.shape)
        assert used <= budget
        # All that a budget is needed for, and not a byte less.
        assert mixer.config(used) == config
        assert mixer.config(used - 1) != config
        assert KVConfig.from_toml(config.to_toml()) == config


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_no_other_choice_of_formats_loses_less_in_these_bytes(name, share) -> None:
    space = _space(SHAPES[name][: 3 if name == "sliding" else 2])
    mixer = _mixer(space)
    low, high = _ends(space, mixer)
    budget = int(low + share * (high - low))
    config = mixer.config(budget)
    assert config is not None
    formats, table = mixer.table.formats, mixer.table
    least = float("inf")
    for pairs in itertools.product(mixer.pairs, repeat=len(table.layers)):
        overrides = tuple((i, *p) for i, p in zip(table.layers, pairs, strict=True))
        other = replace(formats.base, overrides=overrides)
        if space.workload.bytes(other, space.shape) <= budget:
            least = min(least, table.predicted(other) or 0.0)
    assert table.predicted(config) == pytest.approx(least)


def test_sensitive_layers_get_the_bits() -> None:
    space = _space()
    mixer = _mixer(space)
    low, high = _ends(space, mixer)
    config = mixer.config((low + high) // 2)
    assert config is not None
    keys = _bits(config, "key", [0, 1, 2, 3])
    assert keys[1] == max(keys) > min(keys) == keys[2]


def test_a_heavier_key_gets_bits_from_values() -> None:
    space = _space()
    mixer = _mixer(space, values=1.0)
    low, high = _ends(space, mixer)

    def held(stream: str, keys: float) -> int:
        config = mixer.config(int(low + 0.4 * (high - low)), keys=keys)
        assert config is not None
        return sum(_bits(config, stream, [0, 1, 2, 3]))

    assert held("key", 4.0) > held("key", 0.25)
    assert held("value", 4.0) < held("value", 0.25)


def test_contrast_says_how_far_layers_are_told_apart() -> None:
    space = _space()
    mixer = _mixer(space, values=1.0)
    low, high = _ends(space, mixer)
    spreads = []
    for contrast in (0.0, 0.5, 1.0, 1.5):
        config = mixer.config(int(low + 0.4 * (high - low)), contrast=contrast)
        assert config is not None
        bits = [sum(pair) for pair in zip(*(_bits(config, s, [0, 1, 2, 3]) for s in ("key", "value")), strict=True)]
        spreads.append(max(bits) - min(bits))
    assert spreads == sorted(spreads)
    assert spreads[0] <= 2 < spreads[2] <= spreads[3]


def test_more_bits_never_count_as_more_loss() -> None:
    """Where a few items say that 3 bits lose less than 4, that is their noise."""
    space = _space(ALIKE[:1])
    mixer = _mixer(space)
    noisy = replace(mixer.table, key_kl=((0.0, 0.5, 0.1, 0.9),))
    assert Mixer(noisy, space.shape, space.workload)._damages(1.0, 1.0)[0] == pytest.approx(
        [k + v for k in (0.0, 0.5, 0.5, 0.9) for v in noisy.value_kl[0]]
    )


def test_one_choice_everywhere_is_the_plain_config() -> None:
    """So that it is no other config than the one the plain schemes make."""
    space = _space()
    smallest = _mixer(space).smallest()
    low = Affine(bits=2, group=64, mode="midrise", clip=0.6, hadamard=True)
    assert smallest.overrides == ()
    assert smallest.id == space.build(low, low).id


def test_the_commonest_formats_are_written_once() -> None:
    space = _space()
    mixer = _mixer(space)
    low, high = _ends(space, mixer)
    for n in range(12):
        config = mixer.config(low + (high - low) * n // 11)
        assert config is not None
        pairs = [(config.at(i).key, config.at(i).value) for i in range(4)]
        assert all((k, v) != (config.key, config.value) for _, k, v in config.overrides)
        assert pairs.count((config.key, config.value)) == max(pairs.count(p) for p in pairs)


# -- in the space ------------------------------------------------------------------------------------------------------


def _sampled(space: Space, n: int, **fixed: str) -> list[tuple[optuna.Trial, KVConfig | None]]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    out = []
    for _ in range(n):
        study.enqueue_trial(fixed)
        trial = study.ask()
        out.append((trial, space.config(trial)))
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return out


def test_a_space_without_sensitivities_mixes_nothing_and_its_hash_is_the_same() -> None:
    plain = _space()
    mixing = replace(plain, mixer=_mixer(plain))
    assert (plain.schemes, mixing.schemes) == (SCHEMES, (*SCHEMES, MIXED))
    assert all(not c.overrides for _, c in _sampled(plain, 30) if c)
    # What a run is resumed by must be known before anything is measured.
    assert plain.hash != _space(ALIKE[:3]).hash
    assert all(p["scheme"] != MIXED for p in plain.first_trials())
    assert [p["mix.fill"] for p in mixing.first_trials() if p["scheme"] == MIXED] == [1.0, 0.85, 0.7]


@pytest.mark.parametrize("share", [0.08, 0.14, 0.2, 0.3, 1.5])
def test_a_mixed_trial_fits_the_budget_and_evicts_only_where_it_must(share) -> None:
    raw = _space().workload.bytes(_space().build(Raw(), Raw()), _space().shape)
    space = _space(budget=int(share * raw))
    space = replace(space, mixer=_mixer(space))
    least = space.workload.bytes(space.mixer.smallest(), space.shape)  # type: ignore[union-attr]
    for trial, config in _sampled(space, 8, scheme=MIXED):
        assert set(trial.params) == {"scheme", "mix.keys", "mix.contrast", "mix.fill"}
        assert MIX_KEYS[0] <= trial.params["mix.keys"] <= MIX_KEYS[1]
        assert MIX_CONTRAST[0] <= trial.params["mix.contrast"] <= MIX_CONTRAST[1]
        assert config is not None
        config.check(space.shape)
        used = space.workload.bytes(config, space.shape)
        assert used <= space.budget * trial.params["mix.fill"]
        assert (config.budget == Unlimited()) == (least <= int(space.budget * trial.params["mix.fill"]))
        assert config.scorer == Recency()


@pytest.mark.parametrize("budget", [100_000, 10**6, 10**9])
def test_sizes_cover_what_the_budget_allows_down_to_less_than_two_bits(budget) -> None:
    space = _space(budget=budget)
    space = replace(space, mixer=_mixer(space))
    raw = space.workload.bytes(space.build(Raw(), Raw()), space.shape)
    two = space.workload.bytes(space.mixer.smallest(), space.shape)  # type: ignore[union-attr]
    assert space.largest == min(budget, raw)
    assert 0 < space.least_share * space.largest <= two / 2
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    sizes = []
    for _ in range(30):
        trial = study.ask()
        sized = space.sized(trial)
        config = sized.config(trial)
        sizes.append(sized.budget)
        if config is not None:
            assert space.workload.bytes(config, space.shape) <= sized.budget <= space.largest
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert max(sizes) > 1.8 * min(sizes)


@pytest.mark.parametrize("budget", [10**6, 10**9])
def test_spread_trials_hold_every_scheme_at_its_own_size_and_mixes_at_several(budget) -> None:
    space = _space(budget=budget)
    space = replace(space, mixer=_mixer(space))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trials = space.spread_trials()
    for params in trials:
        study.enqueue_trial(params)
    seen = set()
    for params in trials:
        trial = study.ask()
        config = space.sized(trial).config(trial)
        assert trial.params["size"] == params["size"]
        assert config is not None
        used = space.workload.bytes(config, space.shape)
        assert used <= space.largest
        if params["size"] < 1 and params["scheme"] != MIXED:
            assert not config.budget.evicts  # its own size, so nothing has to go
        seen.add(config.id)
    assert sum(p["scheme"] == MIXED for p in trials) == 5
    assert len(seen) >= len(trials) - 1 or budget < 10**9


def test_formats_of_odd_heads_are_still_formats() -> None:
    for dim in (80, 96, 128):
        space = _space((LayerShape(3, dim, dim),) * 2)
        for probe in space.formats().probes(space.shape.compressed, 4):
            probe.check(space.shape)
    assert Fp8() not in _space().formats().keys
