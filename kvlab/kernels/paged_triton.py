"""Host side of the Triton decode kernels: formats to constants, how a launch fills the device, what to compile ahead.

A launch allocates its scratch and starts two to four kernels; nothing is read back, and grids depend on shapes only.
"""

# Constants arrive as plain values; the checker takes them for `tl.constexpr`.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels import splitk_triton as kernels
from kvlab.kernels.aot import AotVariant, variant_of
from kvlab.kernels.formats import RAW, Format
from kvlab.kernels.hadamard import block_of
from kvlab.kernels.paged import Centring, Chosen, Decoded, Fresh, LaunchOptions, Pages

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_ASSUMED_PROCESSORS = 8  # of the interpreter: few, so that tests see several tiles to a split


class Target(NamedTuple):
    """What of a device decides how kernels are compiled and launched."""

    backend: str  # "cuda", "hip", or "interpreter"
    processors: int

    @property
    def ptx(self) -> bool:
        return self.backend == "cuda"

    @property
    def narrowest(self) -> int:
        """Columns of the narrowest tensor-core tile: query heads are padded to it."""
        return 16 if self.backend == "hip" else 8


@functools.cache
def target_of(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("interpreter", _ASSUMED_PROCESSORS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Target("hip" if torch.version.hip else "cuda", processors)


# Tile, warps and stages by the bits of the wider stream. A tile of keys and values is multiplied out in registers, so
# wide tiles cost occupancy. The compiler shares the stages between page ids and what lies behind them: 3, 5 and 7 keep
# one, two and three tiles in flight, and even numbers no more than the odd one below.
_BY_BITS: dict[int, LaunchOptions] = {
    2: LaunchOptions(128, 4, 5),
    3: LaunchOptions(64, 4, 3),
    4: LaunchOptions(64, 4, 5),
    8: LaunchOptions(64, 4, 5),
    16: LaunchOptions(64, 4, 3),
    32: LaunchOptions(32, 4, 3),
}
# Programs per multiprocessor that a launch aims for, and the fewest tiles worth a split.
_PROGRAMS_EACH = 6
_TILES_EACH = 4
_FRESH_TILE = 32
_PARTS_AT_ONCE = 8  # of `merge`


def launch_options(
    key: Format, value: Format, head_dim: int, raw: torch.dtype, target: Target, centred: bool = False
) -> LaunchOptions:
    """The defaults for these formats on this target."""
    bits = max(f.bits if f.kind != "raw" else 8 * raw.itemsize for f in (key, value))
    options = _BY_BITS[bits]
    if bits <= 8 and all(f.kind == "affine" and f.axis == "token" and f.group == head_dim for f in (key, value)):
        # One 16-bit scale a token is too narrow to be copied ahead; in wide tiles each thread reads fewer of them.
        options = LaunchOptions(128, 4, 3)
    if centred:  # a float32 row of the trig table is read for each token
        options = options._replace(tile=max(32, options.tile // 2), stages=3)
    elif head_dim > 128:
        options = options._replace(tile=max(32, options.tile // 2), stages=5)
    elif head_dim <= 64 and bits == 16:
        options = options._replace(warps=8)  # with four, triton 3.6 spills on sm_80
    if target.backend == "hip":
        options = options._replace(tile=min(64, options.tile), stages=2)
    return options


def candidates() -> list[LaunchOptions]:
    """What is worth timing where the defaults are to be replaced."""
    shapes = [(32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8)]
    return [LaunchOptions(tile, warps, stages) for tile, warps in shapes for stages in (3, 5, 7)]


def splits_for(pairs: int, tokens: int, tile: int, target: Target) -> int:
    """How many programs share one head's tokens: enough to fill the device, none with too little to do."""
    tiles = -(-tokens // tile)
    wanted = -(-_PROGRAMS_EACH * target.processors // pairs)
    return max(1, min(wanted, tiles // _TILES_EACH, 128))


def _power(n: int) -> int:
    return triton.next_power_of_2(n)


def stream_constants(
    fmt: Format, dim: int, page_tokens: int, tile: int, chunk: int, raw: torch.dtype, compute: torch.dtype
) -> dict[str, Any]:
    """What `tiles_triton.tile` needs to know of a stream, without the K_ or V_ before its names."""
    planes = {2: 4, 3: 4, 4: 2}.get(fmt.bits, 1)
    share = dim // planes
    width = max(16, _power(share))
    whole, channel = width * planes, fmt.axis == "channel" and fmt.kind == "affine"
    unit = min(page_tokens, tile, chunk or page_tokens) if channel else 1
    words = fmt.kind == "fp8" or (fmt.kind == "affine" and fmt.bits != 3)
    # Columns that lie side by side and share a scale: all, a whole plane, or a power of two within a plane.
    cols = 1
    if fmt.kind == "affine" and not channel:
        common = math.gcd(share, fmt.group)
        cols = whole if fmt.group == dim else width if fmt.group % share == 0 else common & -common
    return {
        "KIND": fmt.kind,
        "BITS": fmt.bits,
        "MODE": fmt.fp8 if fmt.kind == "fp8" else fmt.mode,
        "GROUP": fmt.group,
        "CHANNEL": channel,
        "ROW": dim if fmt.kind == "raw" else dim * fmt.bits // 8 // (4 if words else 1),
        "WIDTH": width,
        "PLANES": planes,
        "UNIT": unit,
        "COLS": cols,
        "DTYPE": _TYPES[raw if fmt.kind == "raw" else compute],
    }


def _constants(
    key: Format, value: Format, dims: tuple[int, int, int, int], raw: torch.dtype, page_tokens: int, chunk: int,
    options: LaunchOptions, target: Target,
) -> dict[str, Any]:  # fmt: skip
    """Every constexpr of `split`. `dims` are N, G, D, E."""
    n_heads, group, dim, high = dims
    compute = options.compute or torch.float16
    k, v = (
        stream_constants(fmt, size, page_tokens, options.tile, chunk, raw, compute)
        for fmt, size in ((key, dim), (value, high))
    )
    return {
        **{f"K_{name}": x for name, x in k.items()},
        **{f"V_{name}": x for name, x in v.items()},
        "N": n_heads,
        "G": group,
        "GP": max(target.narrowest, _power(group)),
        "D": dim,
        "DP": max(16, _power(dim)),
        "E": high,
        "EP": max(16, _power(high)),
        "PAGE": page_tokens,
        "CHUNK": chunk,
        "TILE": options.tile,
        "FRESH_TILE": min(_FRESH_TILE, options.tile),
        "DRIFT_PRECISION": "tf32x3" if target.backend == "cuda" else "ieee",
        "PTX": target.ptx and compute == torch.float16,
    }


@functools.cache
def _factors(fmt: Format, n_heads: int, device: torch.device) -> Tensor | None:
    """What a static fp8 stream's numbers as the kernel reads them still lack, per KV head; kept, since making it copies
    to the device.
    """
    if fmt.kind != "fp8":
        return None
    # e4m3 is read as 2**-8 of itself, unless its own exponents are multiplied in.
    short = 8 if fmt.fp8 == "e4m3" else 0
    if not fmt.exponents:
        return None
    exponents = [e + short for e in fmt.exponents] * (n_heads if len(fmt.exponents) == 1 else 1)
    return torch.tensor(exponents, dtype=torch.float32, device=device).exp2()


def _words(held: Mapping[str, Tensor], fmt: Format) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """data, scale and zero of a stream as the kernel takes them. Raises ValueError where codes fill no whole words."""
    if fmt.kind == "raw":
        return held["data"], None, None
    codes = held["codes"]
    if fmt.kind == "fp8" or fmt.bits != 3:
        if codes.shape[2] % 4:
            raise ValueError(f"a token's codes must fill whole words of 4 bytes for triton, got {codes.shape[2]} bytes")
        codes = codes.view(torch.int32)
    scale = held.get("exponent") if fmt.kind == "fp8" and not fmt.exponents else held.get("scale")
    return codes, scale, held.get("zero") if fmt.mode == "asymmetric" else None


def _rotation(dim: int) -> tuple[int, int, float]:
    """Block, its butterfly steps and its root."""
    block = block_of(dim)
    return block, block.bit_length() - 1, math.sqrt(block)


def _rotated(q: Tensor, fmt: Format) -> Tensor:
    """q as the stored keys are: turned where they are."""
    if not fmt.hadamard:
        return q
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dim = q.shape[-1]
    kernels.rotate_rows[(q.shape[0] * q.shape[1],)](q, out, dim, _power(dim), *_rotation(dim), num_warps=1)
    return out


def _merge_warps(high: int) -> int:
    return 4 if high > 128 else 2


class _Scratch(NamedTuple):
    """What the kernels of one launch pass on."""

    acc: Tensor
    ml: Tensor
    stash: Tensor | None
    tops: Tensor | None


def _scratch(pairs: int, splits: int, group: int, high: int, stashed: tuple[int, int] | None, like: Tensor) -> _Scratch:
    """`stashed` is tokens and tiles whose probabilities are kept."""
    empty = functools.partial(torch.empty, device=like.device)
    stash, tops = None, None
    if stashed is not None:
        stash, tops = empty(pairs, stashed[0], group, dtype=torch.float16), empty(pairs, stashed[1], group)
    return _Scratch(empty(pairs, splits + 1, group, high), empty(pairs, splits + 1, group, 2), stash, tops)


def launch(
    q: Tensor, pages: Pages, key: Format, value: Format, raw: Fresh, scale: float, softcap: float | None,
    sink_logits: Tensor | None, centring: Centring | None, chosen: Chosen | None, mass: bool,
    options: LaunchOptions | None,
) -> Decoded:  # fmt: skip
    """`paged.decode` on the device of q."""
    rows, heads, dim = q.shape
    n_heads, high, window = pages.index.shape[1], raw.v.shape[3], raw.k.shape[2]
    group, pairs = heads // n_heads, rows * n_heads
    target = target_of(q.device)
    options = options or launch_options(key, value, dim, raw.k.dtype, target, centring is not None)
    chunk = chosen.tokens if chosen is not None else 0
    reach = chosen.chunks.shape[2] * chunk if chosen is not None else pages.index.shape[2] * pages.page_tokens
    splits = options.splits or splits_for(pairs, reach, options.tile, target)
    constants = _constants(
        key, value, (n_heads, group, dim, high), raw.k.dtype, pages.page_tokens, chunk, options, target
    )
    page_tiles, fresh_tiles = -(-reach // options.tile), -(-window // constants["FRESH_TILE"])
    q = q.contiguous()
    stashed = page_tiles * options.tile + fresh_tiles * constants["FRESH_TILE"]
    held = _scratch(pairs, splits, group, high, (stashed, page_tiles + fresh_tiles) if mass else None, q)
    index, counts = pages.index.contiguous(), pages.counts.contiguous()
    raw_k, raw_v = (x if x.stride(3) == 1 else x.contiguous() for x in (raw.k, raw.v))
    chunks = chosen.chunks.contiguous() if chosen is not None else None
    k, k_scale, k_zero = _words(pages.k, key)
    v, v_scale, v_zero = _words(pages.v, value)
    kernels.split[(pairs, splits + 1)](
        q, _rotated(q, key), index, counts, chunks,
        pages.position if centring is not None else None,
        centring.drift.contiguous() if centring is not None else None,
        centring.trig.contiguous() if centring is not None else None,
        k, k_scale, k_zero, _factors(key, n_heads, q.device), v, v_scale, v_zero, raw_k, raw_v, raw.counts,
        held.acc, held.ml, held.stash, held.tops,
        float(scale), softcap and float(softcap), splits, pages.index.shape[2],
        chosen.chunks.shape[2] if chosen is not None else 0, pages.first, window,
        *raw_k.stride()[:3], *raw_v.stride()[:3],
        **constants, num_warps=options.warps, num_stages=options.stages,
    )  # fmt: skip
    out = torch.empty(rows, heads, high, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    kernels.merge[(rows * heads,)](
        held.acc, held.ml, sink_logits, _factors(value, n_heads, q.device), out, lse, splits,
        n_heads, group, high, constants["EP"], _power(splits + 1), min(_PARTS_AT_ONCE, _power(splits)),
        *(_rotation(high) if value.hadamard else (0, 0, 1.0)), num_warps=_merge_warps(high),
    )  # fmt: skip
    if not mass:
        return Decoded(out, lse, None)
    # Zeros: keys that no program reads keep theirs.
    masses = torch.zeros(rows, n_heads, pages.index.shape[2] * pages.page_tokens + window, device=q.device)
    kernels.masses[(pairs, page_tiles - (-window // options.tile))](
        held.stash, held.tops, lse, counts, chunks, raw.counts, masses,
        pages.index.shape[2], chosen.chunks.shape[2] if chosen is not None else 0, window,
        n_heads, group, constants["GP"], pages.page_tokens, chunk, options.tile,
        constants["FRESH_TILE"], num_warps=2,
    )  # fmt: skip
    return Decoded(out, lse, masses)


def _types(constants: Mapping[str, Any], raw: str, extras: frozenset[str]) -> dict[str, str]:
    """Triton types of `split`'s arguments; those of an absent stream or option are constants None."""
    types = dict.fromkeys(("index", "counts", "raw_counts"), "*i32")
    types |= dict.fromkeys(("q", "raw_k", "raw_v"), f"*{raw}") | dict.fromkeys(("acc_out", "ml_out"), "*fp32")
    for side in ("K", "V"):
        kind, low = constants[f"{side}_KIND"], side.lower()
        words = "*u8" if constants[f"{side}_BITS"] == 3 else "*i32"
        types[low] = f"*{raw}" if kind == "raw" else words
        if kind == "affine":
            types[f"{low}_scale"] = "*fp16"
            types |= {f"{low}_zero": "*fp16"} if constants[f"{side}_MODE"] == "asymmetric" else {}
        elif kind == "fp8" and f"{low}_exponents" in extras:
            types[f"{low}_scale"] = "*i8"
    if constants["K_KIND"] == "fp8" and "k_exponents" not in extras:
        types["k_factor"] = "*fp32"
    types["q_pages"] = "*fp32" if "rotated" in extras else f"*{raw}"
    types |= {"selected": "*i32"} if constants["CHUNK"] else {}
    types |= {"drift": "*fp32", "trig": "*fp32", "position": "*i32"} if "drift" in extras else {}
    types |= {"stash": "*fp16", "tops": "*fp32"} if "mass" in extras else {}
    types |= {"scale": "fp32"} | ({"softcap": "fp32"} if "softcap" in extras else {})
    names = ("splits", "pages_wide", "chunks_wide", "first", "window")
    return types | dict.fromkeys((*names, *(f"stride_{v}{x}" for v in "kv" for x in "bnr")), "i32")


class _Compiled(NamedTuple):
    """One launch to compile ahead."""

    key: Format
    value: Format
    dim: int = 128
    page: int = 16
    group: int = 4
    extras: frozenset[str] = frozenset()
    chunk: int = 0


def _split_variant(name: str, case: _Compiled, target: Target) -> AotVariant:
    raw = torch.bfloat16
    options = launch_options(case.key, case.value, case.dim, raw, target, "drift" in case.extras)
    dims = (8, case.group, case.dim, case.dim)
    constants = _constants(case.key, case.value, dims, raw, case.page, case.chunk, options, target)
    types = _types(constants, "bf16", case.extras)
    absent = {n: None for n in kernels.split.arg_names if n not in types and n not in constants}
    strides = [f"stride_{v}{x}" for v in "kv" for x in "bnr"]
    launched = {"num_warps": options.warps, "num_stages": options.stages}
    return variant_of(kernels.split, name, types, constants | absent, launched, strides)


def aot_variants(backend: str = "cuda") -> list[AotVariant]:
    """Formats a search tries, as a bfloat16 model launches them, on an H200 or MI300X."""
    target = Target(backend, 132)
    int4, mid4 = Format("affine", 4, group=32), Format("affine", 4, group=128, mode="midrise", hadamard=True)
    int8, int2 = Format("affine", 8, group=128, mode="symmetric"), Format("affine", 2, group=32)
    int3 = Format("affine", 3, group=32)
    e4m3, e5m2 = Format("fp8", 8, exponents=(0,)), Format("fp8", 8, fp8="e5m2", exponents=(0,))
    dynamic, kivi4 = Format("fp8", 8), Format("affine", 4, "channel", 32)
    kivi2 = Format("affine", 2, "channel", 32)
    everything = frozenset({"drift", "mass", "softcap"})
    cases = {
        "raw": _Compiled(RAW, RAW),
        "raw p64 g8": _Compiled(RAW, RAW, page=64, group=8),
        "raw D64": _Compiled(RAW, RAW, 64, group=3),
        "raw D256": _Compiled(RAW, RAW, 256),
        "e4m3": _Compiled(e4m3, e4m3),
        "e5m2": _Compiled(e5m2, e5m2),
        "e4m3 dynamic": _Compiled(dynamic, dynamic, extras=frozenset({"k_exponents", "v_exponents"})),
        "int8": _Compiled(int8, int8),
        "int8 D64": _Compiled(int8._replace(group=64), int8._replace(group=64), 64, group=3),
        "K8V4 g32": _Compiled(int8, int4),
        "int4 g32": _Compiled(int4, int4),
        "int4 g32 D64": _Compiled(int4, int4, 64, group=3),
        "int4 g32 D256": _Compiled(int4, int4, 256),
        "int4 g16 D80": _Compiled(int4._replace(group=16), int4._replace(group=16), 80),
        "int4 mid rot": _Compiled(mid4, mid4, extras=frozenset({"rotated"})),
        "int4 kivi p32": _Compiled(kivi4, int4, page=32),
        "int4 g32 sparse": _Compiled(int4, int4, chunk=16),
        "int4 g32 drift mass softcap": _Compiled(int4, int4, extras=everything),
        "int3 g32": _Compiled(int3, int3),
        "int2 g32": _Compiled(int2, int2),
        "int2 kivi p32": _Compiled(kivi2, int2, page=32),
    }
    return [_split_variant(name, case, target) for name, case in cases.items()] + _small_variants(target)


def _small_variants(target: Target) -> list[AotVariant]:
    """The kernels around `split`."""
    sizes = dict.fromkeys(("splits", "pages_wide", "chunks_wide", "window"), "i32")
    types = sizes | dict.fromkeys(("acc", "ml", "lse", "tops", "v_factor"), "*fp32") | {"stash": "*fp16"}
    types |= dict.fromkeys(("counts", "raw_counts", "selected"), "*i32") | {"out": "*bf16", "sinks": "*bf16"}
    found, two = [], {"num_warps": 2, "num_stages": 1}
    for dim, turned in ((128, False), (128, True), (80, True), (256, True)):
        fixed = {"N": 8, "G": 4, "E": dim, "EP": _power(dim), "PARTS": 32, "AT_ONCE": _PARTS_AT_ONCE}
        fixed |= dict(zip(("BLOCK", "STEPS", "ROOT"), _rotation(dim) if turned else (0, 0, 1.0), strict=True))
        fixed |= {"sinks": None, "v_factor": None} if turned else {}
        launched = {"num_warps": _merge_warps(dim), "num_stages": 1}
        found.append(variant_of(kernels.merge, f"D{dim}{' rot' if turned else ''}", types, fixed, launched))
    fixed = {"N": 8, "G": 4, "GP": target.narrowest, "PAGE": 16, "CHUNK": 16, "TILE": 128, "FRESH_TILE": 32}
    found.append(variant_of(kernels.masses, "sparse", types | {"out": "*fp32"}, fixed, two))
    for dim in (80, 128):
        fixed = {"WIDTH": dim, "SIZE": _power(dim)}
        fixed |= dict(zip(("BLOCK", "STEPS", "ROOT"), _rotation(dim), strict=True))
        found.append(
            variant_of(kernels.rotate_rows, f"D{dim}", {"x": "*bf16", "out": "*fp32"}, fixed, {"num_warps": 1})
        )
    return found
