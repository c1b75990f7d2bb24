"""What is checked and what is timed, as plain tables; no torch. Names are stable: `--only` searches them.

Cases stand in order of importance, since a run ends when its minutes are over: one shape with every format first.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """B conversations of L stored tokens; N KV heads with G query heads each, of D channels; pages of P tokens.

    `window` raw tokens of a conversation stand beside its pages.
    """

    B: int
    L: int
    N: int = 8
    G: int = 4
    D: int = 128
    P: int = 16
    window: int = 64

    @property
    def label(self) -> str:
        length = f"{self.L // 1024}k" if self.L % 1024 == 0 else str(self.L)
        return f"B{self.B} L{length} N{self.N} G{self.G} D{self.D} P{self.P}"


class Case(NamedTuple):
    """One row of the table: a kernel, what is stored (a name in PAIRS), a shape, and the kernel's own arguments."""

    kernel: str
    pair: str
    shape: Shape
    variant: str = ""
    flags: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.kernel, self.pair, self.variant, self.shape.label) if part)

    def flag(self, name: str, default: Any) -> Any:
        return dict(self.flags).get(name, default)


_INT4 = {"kind": "affine", "bits": 4, "group": 32}
# (keys, values): codecs as their JSON. A group of 0 is the head dim.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "raw": ({"kind": "raw"}, {"kind": "raw"}),
    "fp8_e4m3": ({"kind": "fp8"}, {"kind": "fp8"}),
    "fp8_e5m2": ({"kind": "fp8", "format": "e5m2"}, {"kind": "fp8", "format": "e5m2"}),
    "fp8_dyn": ({"kind": "fp8", "scale": "dynamic"}, {"kind": "fp8", "scale": "dynamic", "format": "e5m2"}),
    "int8": (
        {"kind": "affine", "bits": 8, "group": 0, "mode": "symmetric"},
        {"kind": "affine", "bits": 8, "group": 0, "mode": "symmetric"},
    ),
    "int8g32": ({"kind": "affine", "bits": 8, "group": 32}, {"kind": "affine", "bits": 8, "group": 32}),
    "int4": (_INT4, _INT4),
    "int4mid": (
        {"kind": "affine", "bits": 4, "group": 0, "mode": "midrise"},
        {"kind": "affine", "bits": 4, "group": 0, "mode": "midrise"},
    ),
    "int4rot": (_INT4 | {"hadamard": True}, _INT4 | {"hadamard": True}),
    "K4ch_V4": ({"kind": "affine", "bits": 4, "axis": "channel", "group": 32}, _INT4),
    "K8_V4": ({"kind": "affine", "bits": 8, "group": 0, "mode": "symmetric"}, _INT4),
    "K4ch_V3": (
        {"kind": "affine", "bits": 4, "axis": "channel", "group": 64},
        {"kind": "affine", "bits": 3, "group": 64, "hadamard": True},
    ),
    "int3": ({"kind": "affine", "bits": 3, "group": 64}, {"kind": "affine", "bits": 3, "group": 64}),
    "int2": ({"kind": "affine", "bits": 2, "group": 32}, {"kind": "affine", "bits": 2, "group": 32}),
    "int2mid": (
        {"kind": "affine", "bits": 2, "group": 0, "mode": "midrise"},
        {"kind": "affine", "bits": 2, "group": 0, "mode": "midrise"},
    ),
    "K2ch_V2": (
        {"kind": "affine", "bits": 2, "axis": "channel", "group": 32},
        {"kind": "affine", "bits": 2, "group": 32},
    ),
}
# Share of the copy bandwidth that dense reading should reach on an H200 class device, by the pair's widest codes.
TARGETS: dict[int, float] = {16: 0.85, 8: 0.80, 4: 0.65, 2: 0.50}
SPARSE_SPEEDUP_TARGET = 5.0
MAIN_PAIRS = ("raw", "fp8_e4m3", "int8", "int4", "K4ch_V4", "int2")
MORE_PAIRS = ("int4mid", "int2mid", "K8_V4", "fp8_e5m2", "int4rot", "K4ch_V3", "int3", "fp8_dyn", "int8g32", "K2ch_V2")
assert set(MAIN_PAIRS) | set(MORE_PAIRS) == set(PAIRS)


def page_of(pair: str, at_least: int) -> int:
    """Tokens of a page: a channel group is one page."""
    groups: list[int] = [codec["group"] for codec in PAIRS.get(pair, ()) if codec.get("axis") == "channel"]
    return groups[0] if groups else at_least


def target_of(pair: str) -> float | None:
    """Target share of bandwidth for a pair; None where keys and values have no such class."""
    widest = max(_bits(codec) for codec in PAIRS[pair])
    return TARGETS.get(widest)


def _bits(codec: dict[str, Any]) -> int:
    return codec["bits"] if codec["kind"] == "affine" else {"raw": 16, "fp8": 8}[codec["kind"]]


def _paged(kernel: str, pair: str, shape: Shape, **extra: Any) -> Case:
    return Case(kernel, pair, shape._replace(P=page_of(pair, shape.P)), **extra)


def checks(device: str) -> list[Case]:
    """Small awkward cases. The interpreter multiplies no bf16 numbers, so those are for a GPU."""
    every = [*_decode_checks(), *_sparse_checks(), *_encode_checks(), *_compact_checks()]
    return [case for case in every if device == "cuda" or case.flag("dtype", "") != "bfloat16"]


def _decode_checks() -> Iterator[Case]:
    """Every format, ragged from no token to L; then what else a call may ask for, once each."""
    shapes = (
        Shape(2, 257, N=2, G=3, D=64, window=3),
        Shape(2, 63, N=1, G=7, D=128, window=17),
        Shape(1, 130, N=2, G=1, D=96, window=1),
        Shape(2, 96, N=2, G=4, D=80, window=5),
    )
    ragged = (("ragged", True),)
    for i, pair in enumerate(PAIRS):
        shape = shapes[i % 3] if pair in ("int2mid", "K2ch_V2", "K4ch_V3", "int3") else shapes[i % 4]
        shape = shape._replace(D=128 if pair in ("K4ch_V3", "int3") and shape.D == 96 else shape.D)
        yield _small("decode", pair, shape, "ragged", ragged)
    base = shapes[0]
    for dtype in ("float16", "bfloat16", "float32"):
        for pair in ("raw", "int4"):
            yield _small("decode", pair, base, f"ragged {dtype}", (*ragged, ("dtype", dtype)))
    yield _small("decode", "int4", base, "softcap", (("softcap", 30.0),))
    yield _small("decode", "fp8_e4m3", base, "sinks", (*ragged, ("sinks", True)))
    yield _small("decode", "int4rot", base, "centred", (*ragged, ("centred", True)))
    yield _small(
        "decode", "K4ch_V4", base, "centred softcap sinks", (("centred", True), ("softcap", 20.0), ("sinks", True))
    )
    yield _small("decode", "raw", base, "mass", (*ragged, ("mass", True)))
    yield _small("decode", "int4", base, "mass", (*ragged, ("mass", True)))
    yield _small("decode", "int8", Shape(3, 33, N=2, G=8, D=256, P=32), "", ())
    yield _small("decode", "int4", Shape(2, 2048, N=1, G=4, D=64, window=70), "long", ())
    yield _small("decode", "raw", Shape(2, 1, N=2, G=1, D=64, window=0), "one key", ())
    yield _small("decode", "int4", Shape(2, 16, N=2, G=1, D=64, window=1), "no window", (*ragged,))


def _sparse_checks() -> Iterator[Case]:
    shape, half = Shape(2, 257, N=2, G=3, D=64, window=3), ("fraction", 0.5)
    for pair in ("raw", "int4", "K4ch_V4", "fp8_dyn"):
        yield _small("sparse", pair, shape, "half ragged", (half, ("ragged", True)))
    yield _small("sparse", "int4", shape, "half with selection", (half, ("ragged", True), ("selection", True)))
    yield _small("sparse", "int2", shape, "half mass", (half, ("ragged", True), ("mass", True)))
    for pair, bound in (("int4", "minmax"), ("raw", "mean"), ("K4ch_V4", "codec"), ("K2ch_V2", "codec")):
        yield _small("scores", pair, shape, f"{bound} ragged", (("bound", bound), ("ragged", True)))
    for variant in ("share", "mass"):
        yield Case("select", "", Shape(3, 16 * 129, N=2, P=16), variant)
    for pair in ("raw", "int4", "int4rot", "K4ch_V3", "fp8_dyn"):
        yield _small("bounds", pair, shape, "ragged", (("ragged", True),))


def _small(kernel: str, pair: str, shape: Shape, variant: str, flags: tuple[tuple[str, Any], ...]) -> Case:
    """A case whose channel groups are full pages."""
    made = _paged(kernel, pair, shape, variant=variant, flags=flags)
    if not page_of(pair, 0):
        return made
    length = -(-shape.L // made.shape.P) * made.shape.P
    return made._replace(shape=made.shape._replace(L=length), flags=(*flags, ("whole", True)))


def _encode_checks() -> Iterator[Case]:
    for pair, length, dim in (("raw", 33, 64), ("fp8_e4m3", 33, 80), ("fp8_e5m2", 63, 64), ("fp8_dyn", 257, 96)):
        yield _paged("encode", pair, Shape(2, length, N=2, G=1, D=dim))
    for pair, length, dim in (("int8", 1, 64), ("int4", 63, 96), ("int4mid", 33, 80), ("int4rot", 33, 128)):
        yield _paged("encode", pair, Shape(2, length, N=2, G=1, D=dim))
    for pair, length, dim in (("K4ch_V4", 64, 64), ("int3", 31, 64), ("int2", 33, 256), ("int2mid", 16, 64)):
        yield _paged("encode", pair, Shape(2, length, N=2, G=1, D=dim))


def _compact_checks() -> Iterator[Case]:
    for pair, length in (("raw", 257), ("int4", 63), ("fp8_dyn", 33), ("int3", 1)):
        yield _paged("compact", pair, Shape(2, length, N=2, G=1, D=64), variant="in place")
    yield _paged("compact", "int8", Shape(2, 257, N=3, G=1, D=80), variant="to others", flags=(("others", True),))


def tuned(device: str) -> list[Case]:
    """What launch options are tried on: one big shape for each format that has options of its own."""
    shape = Shape(8, 65536) if device == "cuda" else Shape(2, 256, N=2, G=3, D=64, window=3)
    return [_paged("decode", pair, shape, variant="tune") for pair in (*MAIN_PAIRS, "int4mid", "int3")]


def options(device: str) -> list[dict[str, int]]:
    """Launch options to try beside those in use, most promising first; what a set leaves out stays as in use."""
    if device == "cpu":
        return [{"tile": 32, "warps": 4, "stages": 1}, {"splits": 3}]
    sets = [(64, 4, 3), (128, 4, 3), (128, 8, 3), (64, 4, 4), (128, 4, 2), (64, 4, 2), (128, 8, 2), (128, 4, 4)]
    sets += [(64, 8, 3), (32, 4, 4), (32, 2, 4), (64, 2, 3), (256, 8, 2), (64, 2, 4), (128, 8, 4), (64, 4, 5)]
    tiles: list[dict[str, int]] = [{"tile": tile, "warps": warps, "stages": stages} for tile, warps, stages in sets]
    return [*tiles[:8], {"splits": 8}, {"splits": 16}, {"splits": 32}, *tiles[8:]]


_HEADLINE = Shape(32, 32768)
_DENSE_SHAPES = (
    Shape(8, 131072),
    Shape(1, 131072),
    Shape(32, 32768, N=3, G=3, D=64),
    Shape(32, 131072),
    Shape(8, 32768),
    Shape(1, 32768),
    Shape(32, 4096),
    Shape(8, 4096),
    Shape(1, 4096),
)
_SPARSE = (("fraction", 1 / 8),)


def timed(device: str) -> list[Case]:
    """The table, most telling first. On the CPU its cases once each, tiny: nothing is timed there."""
    every = [case for part in (_headline(), _sparse(), _writing(), _grid()) for case in part]
    return every if device == "cuda" else list(dict.fromkeys(_tiny(case) for case in every))


def _tiny(case: Case) -> Case:
    s = case.shape
    page = min(s.P, 32) if page_of(case.pair, 0) == 0 else s.P
    return case._replace(shape=Shape(2, 4 * page, N=2, G=3, D=64, P=page, window=3))


def _headline() -> Iterator[Case]:
    """Every format on one shape that fills the chip, after the peer and with larger pages."""
    yield Case("sdpa", "", _HEADLINE)
    for pair in (*MAIN_PAIRS, *MORE_PAIRS):
        yield _paged("decode", pair, _HEADLINE)
    for pair in ("raw", "fp8_e4m3", "int4", "int2"):
        yield _paged("decode", pair, _HEADLINE._replace(P=64))
    yield _paged("decode", "int4", _HEADLINE, variant="mass", flags=(("mass", True),))


def _sparse() -> Iterator[Case]:
    """Reading 1/8 of the chunks: the attention alone, and with scores and selection in front of it."""
    for pair in ("raw", "int4"):
        yield _paged("sparse", pair, _HEADLINE, variant="1/8", flags=_SPARSE)
        yield _paged("sparse", pair, _HEADLINE._replace(P=64), variant="1/8", flags=_SPARSE)
        yield _paged("sparse", pair, _HEADLINE, variant="1/8 with selection", flags=(*_SPARSE, ("selection", True)))


def _writing() -> Iterator[Case]:
    for pair in ("raw", "fp8_e4m3", "int8", "int4", "int4rot", "K4ch_V4", "int2"):
        yield _paged("encode", pair, Shape(8, 16384))
    for pair in ("raw", "int4"):
        yield _paged("compact", pair, Shape(8, 32768), variant="in place")
        yield _paged("compact", pair, Shape(8, 32768), variant="to others", flags=(("others", True),))
    for pair, bound in (("int4", "minmax"), ("int4", "mean"), ("K4ch_V4", "codec")):
        yield _paged("scores", pair, _HEADLINE, variant=bound, flags=(("bound", bound),))
    for variant in ("share", "mass"):
        yield Case("select", "", _HEADLINE, variant)
    yield _paged("bounds", "int4", Shape(8, 32768))


def _grid() -> Iterator[Case]:
    for shape in _DENSE_SHAPES:
        yield Case("sdpa", "", shape)
        for pair in MAIN_PAIRS:
            yield _paged("decode", pair, shape)
        if shape.B * shape.L >= 2**20:
            yield _paged("sparse", "int4", shape, variant="1/8", flags=_SPARSE)


def known(device: str) -> dict[str, Case]:
    """Every case by its name."""
    return {case.name: case for case in (*checks(device), *timed(device), *tuned(device))}


def selected(cases: Sequence[Case], pattern: str) -> list[Case]:
    """Cases whose name matches the regular expression `pattern`, and what their speed-ups are taken against."""
    wanted = [case for case in cases if re.search(pattern, case.name)]
    shapes = {case.shape._replace(P=0) for case in wanted if case.kernel in ("decode", "sparse")}
    rivals = [
        case
        for case in cases
        if case.shape._replace(P=0) in shapes
        and (case.kernel == "sdpa" or (case.kernel == "decode" and case.pair == "raw" and not case.variant))
    ]
    return [case for case in cases if case in wanted or case in rivals]
