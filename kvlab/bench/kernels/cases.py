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


def checks() -> list[Case]:
    """Small awkward cases, the same everywhere."""
    return list(_encode_checks())


def _encode_checks() -> Iterator[Case]:
    for pair, length, dim in (("raw", 33, 64), ("fp8_e4m3", 33, 80), ("fp8_e5m2", 63, 64), ("fp8_dyn", 257, 96)):
        yield _paged("encode", pair, Shape(2, length, N=2, G=1, D=dim))
    for pair, length, dim in (("int8", 1, 64), ("int4", 63, 96), ("int4mid", 33, 80), ("int4rot", 33, 128)):
        yield _paged("encode", pair, Shape(2, length, N=2, G=1, D=dim))
    for pair, length, dim in (("K4ch_V4", 64, 64), ("int3", 31, 64), ("int2", 33, 256), ("int2mid", 16, 64)):
        yield _paged("encode", pair, Shape(2, length, N=2, G=1, D=dim))


def tuned(device: str) -> list[Case]:
    """What launch options are tried on: one big shape for every format."""
    return []


def options(device: str) -> list[dict[str, int]]:
    """Launch options to try beside those in use."""
    return []


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
        yield _paged("compact", pair, Shape(8, 32768))
    yield _paged("scores", "int4", _HEADLINE, variant="minmax")
    yield _paged("scores", "int4", _HEADLINE, variant="mean")
    yield _paged("scores", "K4ch_V4", _HEADLINE, variant="codec")
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
    return {case.name: case for case in (*checks(), *timed(device), *tuned(device))}


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
