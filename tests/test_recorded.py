"""Configs on record: every row's config can be had again, from its first score on, and none is taken for another."""

import json

import pytest
import standin
import torch
from standin import StandIn, harmed, items

from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.layer import LayerShape, ModelShape
from kvlab.nb import load
from kvlab.policies import Fraction
from kvlab.recorded import named, recorded
from kvlab.runs import Run
from kvlab.subject import BASELINE

SHAPE = ModelShape((LayerShape(1, 64, 64),) * 2, torch.float32)
ITEMS = items("search", 2, ("math",)).items
MIXED = KVConfig(key=Affine(bits=4), overrides=((1, Affine(bits=8), Fp8()),), budget=Fraction(0.5))
TWINS = KVConfig(key=Fp8(), value=Fp8()), KVConfig(key=Fp8(), value=Fp8(), sink_tokens=8)


def broken(config: KVConfig, item: object) -> float:
    raise ArithmeticError("overflow")


@pytest.fixture
def run(tmp_path) -> Run:
    book = standin.book(tmp_path, StandIn(SHAPE, harmed))
    book.ensure("search", ITEMS, [BASELINE, MIXED])
    book.ensure("confirm", ITEMS, TWINS)
    return book.run


def test_every_row_has_its_config(run) -> None:
    found = recorded(run)
    assert set(run.rows()["config_id"]) == set(found)
    assert found == {c.id: c for c in (BASELINE, MIXED, *TWINS)}


def test_what_failed_and_what_came_before_a_resume_stay_on_record(run, tmp_path) -> None:
    again = standin.book(tmp_path, StandIn(SHAPE, broken), Run.open(run.path))
    again.ensure("search", ITEMS, [bad := KVConfig(key=Affine(bits=2))])
    assert again.failures.keys() == {bad.id}
    assert recorded(run).keys() == {c.id for c in (BASELINE, MIXED, *TWINS, bad)}


def test_a_config_is_on_record_before_its_first_row(tmp_path) -> None:
    book = standin.book(tmp_path, StandIn(SHAPE, lambda config, item: standin.luck(len(recorded(book.run)))))
    book.ensure("search", ITEMS, [BASELINE])
    nlls = {row.nll for row in book.rows.values()}
    assert nlls == {standin.luck(1)}


def test_a_config_is_named_by_id_its_beginning_or_its_label(run) -> None:
    for name in (MIXED.id, MIXED.id[:5], MIXED.label):
        assert named(run, name) == MIXED
        assert load(run).config(name) == MIXED
    with pytest.raises(ValueError, match=f"'fp8_e4m3' is 2 configs .*{TWINS[0].id}, {TWINS[1].id}"):
        named(run, "fp8_e4m3")
    with pytest.raises(ValueError, match="scored no config 'rwa'; nearest is 'raw'"):
        named(run, "rwa")
    with pytest.raises(ValueError, match="no config"):
        named(run, MIXED.id[:3])


def test_an_edited_config_is_not_taken_for_the_one_that_was_scored(run) -> None:
    path = run.path / "configs.json"
    told = json.loads(path.read_text())
    told["configs"][MIXED.id]["config"]["sink_tokens"] = 5
    path.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=f"config {MIXED.id} in .* was edited after the run"):
        recorded(run)


def test_a_run_without_a_record_has_no_config(tmp_path) -> None:
    run = Run.create(tmp_path, "search", {"schema": "test"})
    assert recorded(run) == {}
    with pytest.raises(ValueError, match="it has no config on record"):
        named(run, "int8")
