"""One decode step of one row, compiled, against attention by definition in float64."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.kernels.rowwise import PLAIN, Extras, Stored, attend_one, runs_compiled

pytest.importorskip("numba")

CODECS: dict[str, Codec] = {
    "raw": Raw(),
    "e4m3": Fp8(exponents=(-2,)),
    "e5m2": Fp8("e5m2"),
    "e4m3 dynamic": Fp8(scale="dynamic"),
    "e5m2 dynamic rotated": Fp8("e5m2", scale="dynamic", hadamard=True),
    "int8": Affine(bits=8, group=16),
    "int8 whole head": Affine(bits=8, group=0, mode="symmetric"),
    "int4": Affine(bits=4, group=16),
    "int4 whole head rotated": Affine(bits=4, group=0, mode="midrise", hadamard=True),
    "int3": Affine(bits=3, group=16, mode="symmetric", hadamard=True),
    "int2": Affine(bits=2, group=16),
    "int4 channel": Affine(bits=4, axis="channel", group=16),
    "int3 channel": Affine(bits=3, axis="channel", group=16, mode="midrise"),
    "int2 channel rotated": Affine(bits=2, axis="channel", group=16, mode="symmetric", hadamard=True),
    "int8 channel": Affine(bits=8, axis="channel", group=16, mode="symmetric"),
}
SCALE = 0.2


class Draw:
    """Random rows from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def stored(
        self,
        key: Codec,
        value: Codec,
        counts: tuple[int, ...],
        dims: tuple[int, int] = (64, 64),
        page: int = 16,
        raw: torch.dtype = torch.float16,
    ) -> Stored:
        """Pages in random order, some of them of nobody; what no token owns is poison."""
        heads, longest = len(counts), max(counts)
        per_head = -(-longest // page)
        spread = torch.randperm(heads * per_head + 3, generator=self.generator)
        index = spread[: heads * per_head].view(heads, per_head)
        streams = []
        for codec, dim in zip((key, value), dims, strict=True):
            x = self.normal(heads, per_head * page, dim) + self.normal(heads, 1, dim)
            named = {}
            for name, rows in codec.encode(x).items():
                rows = rows.to(raw) if name == "data" else rows
                rows = rows.reshape(heads * per_head, -1, rows.shape[-1])
                pool = torch.empty(len(spread), *rows.shape[1:], dtype=rows.dtype)
                pool.view(torch.uint8).fill_(0xFF)  # NaN in every float format
                pool[index.flatten()] = rows
                if rows.shape[1] == page:
                    for n, count in enumerate(counts):
                        for slot in range(count, per_head * page):
                            pool[index[n, slot // page], slot % page].view(torch.uint8).fill_(0xFF)
                named[name] = pool
            streams.append(named)
        formats = key.stored_as(dims[0]), value.stored_as(dims[1])
        return Stored(*streams, *formats, index, torch.tensor(counts), longest, page)

    def raw(self, heads: int, dims: tuple[int, int] = (64, 64), sizes: tuple[int, ...] = (4, 21)) -> list[Any]:
        """Sinks, a window that is only partly filled, and the new token."""
        parts: list[Any] = []
        for size in sizes:
            k, v = (self.normal(heads, size + 3, dim).half() for dim in dims)
            for x in (k, v):
                x[:, size:] = math.nan
            parts.append((k, v, size))
        return [*parts, (self.normal(heads, 1, dims[0]), self.normal(heads, 1, dims[1]), 1)]


def compare(q: Tensor, stored: Stored | None, raw: list[Any], extras: Extras = PLAIN) -> tuple[Tensor, Tensor]:
    got, mass = attend_one(q, stored, raw, SCALE, extras, mass=True, impl="numba")
    right, right_mass = attend_one(q.double(), stored, raw, SCALE, extras, mass=True, impl="reference")
    assert mass is not None
    assert right_mass is not None
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5 * max(1.0, float(right.abs().max())))
    torch.testing.assert_close(mass.double(), right_mass, rtol=1e-4, atol=1e-6)
    alone, none = attend_one(q, stored, raw, SCALE, extras, impl="numba")
    assert none is None
    assert torch.equal(alone, got)
    return got, mass


@pytest.mark.parametrize("key", CODECS, ids=str)
def test_every_format_of_keys(key: str) -> None:
    draw = Draw(1)
    compare(draw.normal(6, 64), draw.stored(CODECS[key], Raw(), (64, 64)), draw.raw(2))


@pytest.mark.parametrize("value", CODECS, ids=str)
def test_every_format_of_values(value: str) -> None:
    draw = Draw(2)
    compare(draw.normal(6, 64), draw.stored(Raw(), CODECS[value], (64, 64)), draw.raw(2))


@pytest.mark.parametrize("raw", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_raw_dtypes(raw: torch.dtype) -> None:
    draw = Draw(3)
    compare(draw.normal(4, 64), draw.stored(Raw(), Raw(), (48,), raw=raw), draw.raw(1))


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 64), (128, 256)], ids=str)
def test_head_dims_and_query_heads(dims: tuple[int, int], group: int) -> None:
    draw = Draw(4)
    codecs = Affine(bits=4, group=16, hadamard=True), Affine(bits=2, group=8, hadamard=True)
    compare(draw.normal(2 * group, dims[0]), draw.stored(*codecs, (32, 32), dims), draw.raw(2, dims))


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (64, 192), (80, 96)], ids=str)
@pytest.mark.parametrize(("counts", "page"), [((63, 63), 16), ((3, 22), 16), ((150, 149), 40), ((5, 0), 1)], ids=str)
def test_one_scale_for_a_head_dim(counts: tuple[int, ...], page: int, dims: tuple[int, int], group: int) -> None:
    """Codes of 4 bits that are multiplied as they lie, four tokens at a time, where the head dim allows it."""
    draw = Draw(11)
    codecs = Affine(bits=4, group=0), Affine(bits=4, group=0, mode="midrise", hadamard=True)
    compare(draw.normal(2 * group, dims[0]), draw.stored(*codecs, counts, dims, page), draw.raw(2, dims))


def test_chunks_of_codes_that_are_multiplied_as_they_lie() -> None:
    draw = Draw(12)
    codec = Affine(bits=4, group=0)
    stored, selected = draw.stored(codec, codec, (94, 75)), torch.tensor([[0, 2, 11], [1, 9, -1]])
    term = {"drift": draw.normal(6, 64) / 4, "trig": draw.normal(120, 64)}
    for extras in (Extras(**term), Extras(**term, selected=selected, chunk=8)):
        compare(draw.normal(6, 64), stored, draw.raw(2), extras)


@pytest.mark.parametrize("counts", [(1, 1), (63, 63), (64, 1), (0, 40), (17, 33)], ids=str)
@pytest.mark.parametrize("page", [1, 8, 16, 40])
def test_counts_and_pages(counts: tuple[int, ...], page: int) -> None:
    """Heads may differ, end within a page or hold nothing."""
    draw = Draw(5)
    compare(draw.normal(6, 64), draw.stored(Affine(bits=4), Fp8(scale="dynamic"), counts, page=page), draw.raw(2))


def test_nothing_encoded_and_one_key() -> None:
    draw = Draw(6)
    raw = draw.raw(2, sizes=())
    out, mass = compare(draw.normal(6, 64), None, raw)
    torch.testing.assert_close(out, raw[0][1].repeat_interleave(3, 0)[:, 0])
    assert mass.tolist() == [[1.0], [1.0]]
    compare(draw.normal(6, 64), None, draw.raw(2))


def test_no_key_at_all_gives_zeros() -> None:
    draw = Draw(6)
    k, v, _ = draw.raw(1, sizes=())[0]
    out, _ = attend_one(draw.normal(2, 64), None, [(k, v, 0)], SCALE, impl="numba")
    assert out.tolist() == [[0.0] * 64] * 2


def test_soft_cap_and_sink_logits() -> None:
    draw = Draw(7)
    stored, raw = draw.stored(Affine(bits=8), Raw(), (48, 48)), draw.raw(2)
    q, plain = 5 * draw.normal(6, 64), None
    for extras in (PLAIN, Extras(softcap=3.0), Extras(sink_logits=draw.normal(6) + 30), Extras(1.5, draw.normal(6))):
        out, mass = compare(q, stored, raw, extras)
        if plain is not None:
            assert not torch.allclose(out, plain, atol=1e-3)
        if extras.sink_logits is None:
            torch.testing.assert_close(mass.sum(1), torch.ones(2))
        else:
            assert (mass.sum(1) < 0.999).all()
        plain = out if plain is None else plain


@pytest.mark.parametrize("positions", ["by rank", "stored"])
def test_a_term_by_position(positions: str) -> None:
    draw = Draw(8)
    stored = draw.stored(Affine(bits=4), Raw(), (48, 20))
    if positions == "stored":
        at = torch.randint(0, 90, (*stored.key["codes"].shape[:2], 1), generator=draw.generator, dtype=torch.int32)
        stored = dataclasses.replace(stored, position=at)
    else:
        stored = dataclasses.replace(stored, first=4)
    extras = Extras(drift=draw.normal(6, 64) / 4, trig=draw.normal(90, 64))
    q, raw = draw.normal(6, 64), draw.raw(2)
    out, _ = compare(q, stored, raw, extras)
    assert not torch.allclose(out, compare(q, stored, raw)[0], atol=1e-2)
    compare(q, stored, raw, extras._replace(softcap=2.0))


@pytest.mark.parametrize(("page", "chunk"), [(16, 16), (16, 8), (48, 24)], ids=str)
def test_some_chunks_are_read(page: int, chunk: int) -> None:
    draw = Draw(9)
    stored, raw = draw.stored(Fp8(), Affine(bits=4), (94, 75), page=page), draw.raw(2)
    last = [94 // chunk, 75 // chunk]  # the last one is cut short
    selected = torch.tensor([[0, 2, last[0], -1], [1, last[1], -1, -1]], dtype=torch.int32)
    extras = Extras(selected=selected, chunk=chunk)
    q = draw.normal(6, 64)
    _, mass = compare(q, stored, raw, extras)
    read = torch.zeros(2, 94, dtype=torch.bool)
    for n, count in enumerate((94, 75)):
        for c in selected[n].tolist():
            read[n, max(c, 0) * chunk : min((c + 1) * chunk, count)] |= c >= 0
    assert torch.equal(mass[:, :94] > 0, read)
    every = torch.arange(-(-94 // chunk)).expand(2, -1)
    assert torch.equal(
        compare(q, stored, raw, Extras(selected=every, chunk=chunk))[0],
        attend_one(q, stored, raw, SCALE, Extras(selected=every, chunk=chunk), impl="numba")[0],
    )
    torch.testing.assert_close(
        compare(q, stored, raw, Extras(selected=every, chunk=chunk))[0], compare(q, stored, raw)[0]
    )


def test_far_logits_neither_overflow_nor_vanish() -> None:
    """Weights a hundred and a thousand below the best are zero, and the best is one."""
    k = torch.zeros(1, 4, 64)
    k[0, :, 0] = torch.tensor([0.0, -100.0, 1000.0, 999.0])
    v = torch.eye(4, 64).unsqueeze(0)
    q = torch.zeros(1, 64)
    q[0, 0] = 1.0
    out, _ = attend_one(q, None, [(k, v, 4)], 1.0, impl="numba")
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(out[0, :4], torch.tensor([0.0, 0.0, share, 1 - share]))


def test_not_a_number_stays_one() -> None:
    draw = Draw(10)
    k, v, _ = draw.raw(1, sizes=())[0]
    bad = k.clone()
    bad[0, 0, 3] = math.nan
    for parts in ([(bad, v, 1)], [(bad.half(), v.half(), 1)]):
        assert attend_one(draw.normal(2, 64), None, parts, SCALE, impl="numba")[0].isnan().all()
    scale = draw.stored(Affine(bits=4), Raw(), (16,))
    scale.key["scale"].fill_(math.nan)
    assert attend_one(draw.normal(2, 64), scale, [(k, v, 1)], SCALE, impl="numba")[0].isnan().all()


def test_fp16_bytes_mean_what_they_mean() -> None:
    """All 65,536 of them, subnormals and infinities included, as values of tokens that get all attention."""
    every = torch.arange(65536).to(torch.int32).to(torch.uint16).view(torch.float16)
    got = []
    for rows in every.view(1, -1, 256).split(1, dim=1):
        k = torch.zeros(1, 1, 64)
        got.append(attend_one(torch.zeros(1, 64), None, [(k, rows.contiguous(), 1)], 1.0, impl="numba")[0])
    assert torch.equal(torch.cat(got).flatten().nan_to_num(12345.0), every.float().nan_to_num(12345.0))


def test_what_runs_where() -> None:
    cpu = torch.device("cpu")
    assert runs_compiled("auto", cpu, torch.float32, torch.float16)
    assert not runs_compiled("auto", cpu, torch.float64, torch.float16)
    assert not runs_compiled("torch", cpu, torch.float32)
    assert not runs_compiled("auto", torch.device("meta"), torch.float32)
    with pytest.raises(ValueError, match=r"float32, got \['torch.float64'\]"):
        runs_compiled("numba", cpu, torch.float64)
    with pytest.raises(ValueError, match="numba kernels run on CPU"):
        runs_compiled("numba", torch.device("meta"), torch.float32)
