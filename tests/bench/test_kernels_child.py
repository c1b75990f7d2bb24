"""What a child makes of a job, in triton's interpreter: right kernels pass, and each way to be wrong is seen."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

from kvlab.bench.kernels import cases, child, data, peers, prepared, reading, writing  # noqa: E402
from kvlab.bench.kernels.cases import PAIRS, Case, Shape  # noqa: E402
from kvlab.bench.kernels.child import RUNNERS, Child  # noqa: E402
from kvlab.bench.kernels.prepared import Check, Place, differing, relative, unwritten_is_nan  # noqa: E402
from kvlab.bench.kernels.timing import percentiles  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PLACE = Place("cpu", 7)
SMALL = Shape(2, 33, N=2, G=1, D=64, P=16, window=2)


def judged(case: Case) -> Check:
    made = RUNNERS[case.kernel](case, PLACE)
    with unwritten_is_nan():
        outputs = made.run()
    return made.check(outputs)


@pytest.mark.parametrize(
    "case",
    [
        Case("decode", "int4", SMALL, "", (("ragged", True),)),
        Case("sparse", "raw", SMALL, "", (("fraction", 0.5), ("selection", True))),
        Case("scores", "int4", SMALL, "", (("bound", "minmax"), ("ragged", True))),
        Case("select", "", Shape(2, 160, N=2), "share"),
        Case("bounds", "int8", SMALL, "", (("ragged", True),)),
        Case("encode", "int4", SMALL),
        Case("compact", "fp8_dyn", SMALL),
    ],
    ids=lambda case: case.kernel,
)
def test_a_right_kernel_passes(case) -> None:
    found = judged(case)
    assert found.ok
    assert found.error <= found.tolerance


def spoiled(monkeypatch, module, name: str, spoil) -> None:
    """Let `module.name` run, then change what it did, or what it returns."""
    right = getattr(module, name)

    def wrong(*arguments, impl="auto", **named):
        made = right(*arguments, impl=impl, **named)
        return spoil(made, *arguments) if impl == "triton" else made

    monkeypatch.setattr(module, name, wrong)


DECODE = Case("decode", "raw", SMALL)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda made, *_: made._replace(out=made.out * 1.01),
        lambda made, *_: made._replace(out=made.out.roll(1, dims=1)),
        lambda made, *_: made._replace(lse=made.lse + 0.1),
        lambda made, *_: made._replace(out=made.out.index_fill(2, torch.tensor([3]), float("nan"))),
        lambda made, *_: made._replace(out=torch.empty_like(made.out)),
    ],
    ids=["scale", "heads", "lse", "nan", "unwritten"],
)
def test_a_wrong_decode_is_seen(monkeypatch, spoil) -> None:
    spoiled(monkeypatch, reading, "decode", spoil)
    assert not judged(DECODE).ok


def test_a_left_out_page_is_seen(monkeypatch) -> None:
    right = reading.decode

    def wrong(q, pages, *rest, impl, **named):
        counts = pages.counts - 1 if impl == "triton" else pages.counts
        return right(q, pages._replace(counts=counts), *rest, impl=impl, **named)

    monkeypatch.setattr(reading, "decode", wrong)
    assert not judged(DECODE).ok


def test_wrong_mass_is_seen(monkeypatch) -> None:
    case = DECODE._replace(flags=(("mass", True),))
    assert judged(case).ok
    spoiled(monkeypatch, reading, "decode", lambda made, *_: made._replace(mass=made.mass.roll(1, dims=2)))
    assert not judged(case).ok


def one_byte(_, x, streams, *rest) -> None:
    streams["codes"].view(-1)[: 64 * 16 * 4].bitwise_xor_(1)


def beyond(_, x, streams, *rest) -> None:
    streams["codes"][-1, 0, 0] = 1


@pytest.mark.parametrize("spoil", [one_byte, beyond], ids=["a byte", "a page that nobody holds"])
def test_a_wrong_append_is_seen(monkeypatch, spoil) -> None:
    spoiled(monkeypatch, writing, "append", spoil)
    assert not judged(Case("encode", "int8", SMALL)).ok


def test_a_wrong_compaction_is_seen(monkeypatch) -> None:
    def swap(_, streams, index, *rest) -> None:
        data_of = streams["v.data"]
        data_of[index[0, 0, 0].long(), [0, 1]] = data_of[index[0, 0, 0].long(), [1, 0]].clone()

    case = Case("compact", "raw", SMALL)
    assert judged(case).ok
    spoiled(monkeypatch, writing, "compact", swap)
    assert not judged(case).ok


def test_a_wrong_selection_is_seen(monkeypatch) -> None:
    case = Case("sparse", "raw", SMALL, "", (("fraction", 0.4), ("selection", True)))
    assert judged(case).ok
    # Another choice that is decoded rightly: only the selection is wrong.
    spoiled(monkeypatch, reading.chunks, "select", lambda made, *_: torch.where(made == 0, 1, made).sort(-1).values)
    assert not judged(case).ok


def test_jobs_are_answered_as_json_has_it() -> None:
    worker = Child(PLACE)
    facts = worker.do({"do": "device"})
    assert facts["name"] == "cpu"
    assert set(facts) == {"name", "torch", "triton"}
    name = next(case.name for case in cases.timed("cpu") if case.kernel == "decode" and case.pair == "int2")
    row = worker.do({"do": "time", "case": name})
    assert row["check"]["ok"]
    assert (row["impl"], row["times"]) == ("triton", None)
    assert row["bytes"] > 0
    assert worker.do({"do": "warm", "case": name}) == {}


def test_tuning_changes_the_options_it_names(monkeypatch) -> None:
    used = []
    right = reading.decode

    def noted(*arguments, options, impl, **named):
        used.append(options) if impl == "triton" else None
        return right(*arguments, options=options, impl=impl, **named)

    monkeypatch.setattr(reading, "decode", noted)
    worker, name = Child(PLACE), cases.tuned("cpu")[0].name
    row = worker.do({"do": "tune", "case": name, "options": {"tile": 32, "splits": 3}})
    in_use = worker.do({"do": "tune", "case": name, "options": None})
    assert row["check"]["ok"]
    assert in_use["check"]["ok"]
    assert (used[0].tile, used[0].splits) == (32, 3)
    assert "tile=32" in row["label"]
    assert "splits=3" in row["label"]
    assert used[0]._replace(tile=used[1].tile, splits=None) == used[1]


def test_the_peer_is_right_and_counted_with_its_window() -> None:
    case = Case("sdpa", "", SMALL)
    made = peers.prepare(case, PLACE, None)
    (out,) = made.run()
    assert made.check((out,)).ok
    assert not made.check((out * 1.01,)).ok
    assert made.nbytes == 2 * (2 * 2 * 2 * 64 + 2 * 2 * 2 * 35 * 64)


def test_decode_counts_what_must_move() -> None:
    """2 x 2 heads of 32 tokens: 64 + 8 bytes for each K and V, 2 page ids, 2 raw tokens, q and out in fp16."""
    shape = SMALL._replace(L=32)
    made = reading.prepare_decode(Case("decode", "int8g32", shape), PLACE)
    assert made.nbytes == 4 * 32 * 2 * (64 + 8) + 4 * 2 * 4 + 2 * 4 * 2 * 64 * 2 + 2 * 2 * 2 * 64 * 2
    half = reading.prepare_decode(Case("sparse", "int8g32", shape, "", (("fraction", 0.5),)), PLACE)
    assert made.nbytes - half.nbytes == 4 * 16 * 2 * (64 + 8) + 4 * 4


@pytest.mark.parametrize("pair", PAIRS)
def test_drawn_pages_are_a_cache_with_nan_around_it(pair) -> None:
    from kvlab.kernels.formats import restored_values

    shape = Shape(2, 128, N=2, G=1, D=64, P=cases.page_of(pair, 16))
    generator = torch.Generator().manual_seed(3)
    made = data.pool(pair, shape, torch.float16, "cpu", generator, torch.tensor([[128, 0], [64, 128]]))
    for held, fmt in ((made.k, made.key), (made.v, made.value)):
        rows = {name: x[made.index[0, 0].long()].flatten(0, 1).unsqueeze(0) for name, x in held.items()}
        values = restored_values(rows, fmt, 64, torch.float64)
        assert 0.7 < float(values.std()) < 1.5
        assert all(bool((x[-1].contiguous().view(torch.uint8) == 0xFF).all()) for x in held.values())
    assert made.index[0, 1].eq(made.index.max()).all()
    assert made.index[1, 0, 64 // shape.P :].eq(made.index.max()).all()
    used = torch.cat([made.index[0, 0], made.index[1, 0, : 64 // shape.P], made.index[1, 1]])
    assert len(set(used.tolist())) == len(used)


def test_slots_beyond_a_count_hold_nan() -> None:
    generator = torch.Generator().manual_seed(3)
    made = data.pool("raw", SMALL, torch.float16, "cpu", generator, torch.tensor([[33, 33], [33, 20]]))
    last = made.k["data"][int(made.index[1, 1, 1])]
    assert last[:4].isfinite().all()
    assert last[4:].isnan().all()


def test_a_warm_pool_is_small_and_indexed_alike() -> None:
    generator = torch.Generator().manual_seed(3)
    shape = SMALL._replace(L=4096)
    made = data.pool("int4", shape, torch.float16, "cpu", generator, n_pages=8)
    assert made.k["codes"].shape[0] == 9
    assert made.index.shape == (2, 2, 256)
    assert int(made.index.max()) == 7


def test_fresh_memory_is_nan_only_inside() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with unwritten_is_nan():
        assert torch.empty(64).isnan().all()
        assert torch.empty(8, dtype=torch.int32).eq(torch.iinfo(torch.int32).max).all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_measures_of_difference() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative(one * 1.1, one) == pytest.approx(0.1)
    assert relative(torch.tensor([0.5, 0.0]), torch.zeros(2)) == 0.5
    assert not Check(relative(one * float("nan"), one), 1.0, "").ok
    assert differing(torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8)) == 0.5
    assert differing(torch.zeros(2), torch.zeros(3)) == 1.0
    assert differing(torch.tensor([0.0]), torch.tensor([-0.0])) == 0.25


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([float(t) for t in range(100, 0, -1)]) == (10.0, 50.0, 90.0, 100)
    assert percentiles([3.0]) == (3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="finite"):
        percentiles([1.0, float("nan")])
    with pytest.raises(ValueError, match="positive"):
        percentiles([])


def test_the_child_needs_neither_transformers_nor_what_else_a_gpu_image_lacks() -> None:
    code = (
        "import sys, kvlab.bench.kernels.child\n"
        "bad = {'transformers', 'datasets', 'optuna', 'gguf', 'tyro', 'rich', 'pandas'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_an_answer_without_a_number_says_null() -> None:
    assert child._plain(Check(float("nan"), 1.0, "x")) == {
        "error": None,
        "tolerance": 1.0,
        "reference": "x",
        "ok": False,
    }


def test_poison_is_nan_in_every_float() -> None:
    tensors = tuple(torch.ones(4, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    prepared.poison_all(tensors)
    assert all(bool(x.isnan().all()) for x in tensors)
