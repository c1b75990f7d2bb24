"""Rows that take lone tokens by compiled code against rows that take them in torch."""

import pytest
import torch
from rows import Sequence, make_row

from kvlab.attach import attach
from kvlab.codecs import Affine, Fp8
from kvlab.config import KVConfig
from kvlab.policies import (
    AttentionMass,
    Fraction,
    LastSelected,
    Recency,
    Threshold,
    Tokens,
    TopK,
    WindowAttention,
)
from kvlab.row import Row

pytest.importorskip("numba")

HEADS, GROUP, DIM, SCALE = 2, 3, 64, 0.2
INT4 = Affine(bits=4, hadamard=True)
CONFIGS = {
    "raw": KVConfig(),
    "raw bf16": KVConfig(raw_dtype="bfloat16", sink_tokens=0, recent_tokens=3, page_tokens=4),
    "int4": KVConfig(key=INT4, value=INT4, raw_dtype="float16", recent_tokens=8),
    "fp8": KVConfig(key=Fp8(), value=Fp8(scale="dynamic"), recent_tokens=0, page_tokens=8),
    "channel": KVConfig(key=Affine(bits=2, axis="channel", group=16), value=INT4, recent_tokens=8),
    "mass": KVConfig(key=INT4, value=INT4, scorer=AttentionMass(0.9), budget=Fraction(0.5), recent_tokens=8),
    "window": KVConfig(key=Fp8(), value=INT4, scorer=WindowAttention(8), budget=Tokens(40), recent_tokens=8),
    "threshold": KVConfig(value=INT4, scorer=Recency(), budget=Threshold(0.3), recent_tokens=8),
    "sparse": KVConfig(
        key=INT4, value=INT4, reader=TopK(fraction=0.3, chunk=8, dense_layers=0, select_every=3), recent_tokens=8
    ),
    "sparse and evicting": KVConfig(
        key=INT4,
        value=INT4,
        reader=TopK(fraction=0.5, dense_layers=0),
        scorer=LastSelected(),
        budget=Tokens(64),
        recent_tokens=8,
    ),
    "centred": KVConfig(key=INT4, value=INT4, centring="mean", recent_tokens=8),
    "centred and evicting": KVConfig(
        key=INT4, value=INT4, centring="mean", scorer=AttentionMass(), budget=Fraction(0.5), recent_tokens=8
    ),
    "centred and sparse": KVConfig(
        key=INT4, centring="mean", reader=TopK(fraction=0.3, bound="mean", dense_layers=0), recent_tokens=8
    ),
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_lone_tokens_are_served_alike(name: str, softcap: float | None, monkeypatch) -> None:
    """Outputs and everything held, over a prompt, steps, a second turn and more steps."""
    config, parts = CONFIGS[name], [90, *[1] * 40, 7, *[1] * 20]
    sequence = Sequence(sum(parts), HEADS, HEADS * GROUP, DIM, seed=5, dtype=torch.float32)
    sinks = sequence.sink_logits() if softcap else None
    by_name = {impl: make_row(config, HEADS, DIM, torch.float32) for impl in ("numba", "torch")}
    for q, k, v in sequence.forwards(parts):
        served = {}
        for impl, row in by_name.items():
            with monkeypatch.context() as patch:
                if impl == "numba" and q.shape[1] == 1:  # torch must not be asked
                    patch.setattr(Row, "_attend_blocks", None)
                served[impl] = row.attend(q, k, v, SCALE, softcap, sinks, impl=impl)
        torch.testing.assert_close(served["numba"][0], served["torch"][0], rtol=1e-4, atol=1e-5)
        masses = [mass for _, mass in served.values()]
        if masses[1] is not None:
            torch.testing.assert_close(*masses, rtol=1e-4, atol=1e-6)
        for impl, row in by_name.items():
            row.commit(k, v, served[impl][1])
    one, two = by_name.values()
    assert one.occupancy == two.occupancy
    assert one.nbytes == two.nbytes
    assert torch.equal(one.positions(), two.positions())
    for mine, theirs in zip(one.window(), two.window(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("raw", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("strided", [False, True])
def test_the_window_takes_a_token_as_attention_left_it(raw: str, strided: bool) -> None:
    """Written at the step and counted at the commit, saturated, whatever memory the window lies in."""
    config = KVConfig(raw_dtype=raw, sink_tokens=2, recent_tokens=64)
    row = make_row(config, HEADS, DIM, getattr(torch, raw))
    sequence = Sequence(40, HEADS, HEADS * GROUP, DIM, seed=8, dtype=torch.float32)
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, (q, k, v) in enumerate(sequence.forwards([20, *[1] * 20])):
        k, v = k.clone(), v.clone()
        k[0, 0, :3] = torch.tensor([1e6, -3e38, 65519.0])
        if strided and step == 5 and row._window is not None:
            row._window = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in row._window)  # type: ignore[assignment]
        if step:
            before = [x.clone() for x in row.window()]
            row.attend(q, k + 1, v + 1, SCALE, observe=False, impl="numba")  # only looked at
            if step % 3:  # else taken in without a look
                row.attend(q, k, v, SCALE, impl="numba")
            assert all(torch.equal(a, b) for a, b in zip(before, row.window(), strict=True))
        row.commit(k, v)
        taken.append((k, v))
    dtype = getattr(torch, raw)
    limit = torch.finfo(dtype).max
    for i, held in enumerate(row.window()):
        right = torch.cat([pair[i] for pair in taken], dim=1)[:, 2:].clamp(-limit, limit).to(dtype)
        assert torch.equal(held, right)


def test_pages_that_move_are_looked_up_anew() -> None:
    """A row keeps views of its pages; another row of the pool grows it, and `fit` packs it."""
    config = KVConfig(key=INT4, value=INT4, recent_tokens=0, sink_tokens=0)
    sequence = Sequence(400, HEADS, HEADS * GROUP, DIM, seed=6, dtype=torch.float32)
    first, *more = sequence.forwards([33, 1, 1, 1, 200, 1])
    row = make_row(config, HEADS, DIM, torch.float32)
    other = Row(row.config, row.table.pool, HEADS, row.raw)
    row.commit(*first[1:])
    before = row.table.pool.moves

    def step(index: int) -> None:
        q, k, v = more[index]
        torch.testing.assert_close(
            row.attend(q, k, v, SCALE, impl="numba")[0], row.attend(q, k, v, SCALE, impl="torch")[0]
        )

    step(0)
    other.commit(*more[3][1:])
    assert row.table.pool.moves > before
    step(1)
    other.release()
    row.table.pool.fit([row.table])
    step(2)
    for stream in row.table.pool.streams.values():
        assert stream.shape[0] == row.table.pool.used_pages


def test_gradients_still_flow() -> None:
    row = make_row(KVConfig(), HEADS, DIM, torch.float32)
    sequence = Sequence(8, HEADS, HEADS * GROUP, DIM, seed=7, dtype=torch.float32)
    prompt, (q, k, v) = sequence.forwards([7, 1])
    row.commit(*prompt[1:])
    q = q.clone().requires_grad_()
    row.attend(q, k, v, SCALE)[0].sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_a_cache_says_what_serves_it(tiny_model) -> None:
    model = tiny_model("llama3", torch.float32)
    with attach(model) as kv, torch.no_grad():
        cache = kv.cache()
        assert cache.implementation == "none"
        for ids in ([[5, 6, 7]], [[8]]):
            model(input_ids=torch.tensor(ids), past_key_values=cache)
        assert cache.implementation == "numba"
    with attach(model.double()) as kv, torch.no_grad():
        cache = kv.cache()
        model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache)
        assert cache.implementation == "torch"
