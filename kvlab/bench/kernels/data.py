"""Random cache contents of any size on any device. What no kernel may read holds NaN, and lies in random order.

Stored bytes are drawn, not encoded: any codes with finite scales are a valid cache, and a large one is made in
milliseconds. Values come out near the standard normal distribution. Nothing is ever zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab.bench.kernels.cases import PAIRS, Shape
from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.codecs.base import Stream
from kvlab.kernels.formats import FP8_DTYPES, Format

_KINDS: dict[str, Callable[..., Codec]] = {"raw": Raw, "fp8": Fp8, "affine": Affine}
# Elements drawn at once, so that a large stream needs no second one beside it.
_AT_ONCE = 2**26


def codec(spec: dict[str, Any]) -> Codec:
    """A codec from its table entry."""
    return _KINDS[spec["kind"]](**{name: value for name, value in spec.items() if name != "kind"})


def codecs(pair: str) -> tuple[Codec, Codec]:
    """Codecs of keys and of values."""
    key, value = PAIRS[pair]
    return codec(key), codec(value)


class Pool(NamedTuple):
    """Pages of B x N heads: streams of K and of V, page ids, and tokens a head holds."""

    key: Format
    value: Format
    k: dict[str, Tensor]
    v: dict[str, Tensor]
    index: Tensor
    counts: Tensor
    token_bytes: float

    def rows(self, rows: slice) -> "Pool":
        """The same pages, fewer conversations."""
        return self._replace(index=self.index[rows], counts=self.counts[rows])


def pool(
    pair: str,
    shape: Shape,
    raw: torch.dtype,
    device: str,
    generator: torch.Generator,
    counts: Tensor | None = None,
    n_pages: int | None = None,
) -> Pool:
    """Pages for B x N heads of L tokens each, or of `counts` [B, N], in a pool with one page that nobody holds.

    That page, the slots beyond a count, and where a head has fewer pages than another its entries in the index, lead
    to NaN. With `n_pages` heads share that many pages: the same kernels, and next to no memory.
    """
    held = torch.full((shape.B, shape.N), shape.L, dtype=torch.int32) if counts is None else counts.to(torch.int32)
    used = -(-held.long() // shape.P)
    slots = max(1, int(used.max()))
    total = int(used.sum()) if n_pages is None else n_pages
    order = torch.randperm(total, generator=generator, device=device)
    index = torch.full((shape.B, shape.N, slots), total, dtype=torch.int32, device=device)
    real = torch.arange(slots).expand(shape.B, shape.N, slots) < used.unsqueeze(-1)
    places = torch.arange(int(used.sum()), device=device) % total
    index[real.to(device)] = order[places].to(torch.int32)
    formats = [kind.stored_as(shape.D) for kind in codecs(pair)]
    layouts = [kind.streams(shape.D, shape.P, raw) for kind in codecs(pair)]
    k, v = (_streams(layout, fmt, total, device, generator) for layout, fmt in zip(layouts, formats, strict=True))
    token_bytes = sum(stream.page_bytes for layout in layouts for stream in layout.values()) / shape.P
    made = Pool(formats[0], formats[1], k, v, index, held.to(device), token_bytes)
    if n_pages is None:
        _poison_tails(made, shape.P)
    return made


def _streams(
    layout: dict[str, Stream], fmt: Format, n_pages: int, device: str, generator: torch.Generator
) -> dict[str, Tensor]:
    made = {name: torch.empty(n_pages + 1, s.rows, s.width, dtype=s.dtype, device=device) for name, s in layout.items()}
    for name, stream in made.items():
        step = max(1, _AT_ONCE // (stream.shape[1] * stream.shape[2]))
        for part in stream[:n_pages].split(step):
            _fill(part, name, fmt, generator)
        poison(stream[n_pages:])
    if "zero" in made:
        # Codes about their middle, less a little: every group has a mean of its own.
        for zero, scale in zip(made["zero"][:n_pages].split(4096), made["scale"][:n_pages].split(4096), strict=True):
            zero.mul_(0.1).sub_(scale * ((2**fmt.bits - 1) / 2))
    return made


def _fill(part: Tensor, name: str, fmt: Format, generator: torch.Generator) -> None:
    """Random values for some pages of one stream, in place."""
    if name == "codes" and fmt.kind == "affine":
        part.random_(0, 256, generator=generator)
    elif name == "codes":
        drawn = torch.empty(part.shape, dtype=torch.float32, device=part.device).normal_(generator=generator)
        part.copy_(drawn.to(FP8_DTYPES[fmt.fp8]).view(torch.uint8))
    elif name == "exponent":
        part.random_(-1, 2, generator=generator)
    elif name == "scale":
        spread = 12**0.5 / 2**fmt.bits
        part.uniform_(0.75 * spread, 1.25 * spread, generator=generator)
    else:
        part.normal_(generator=generator)


def poison(part: Tensor) -> None:
    """All bits set: NaN in every float format, and codes and exponents that stand for nothing."""
    part.view(torch.uint8).fill_(0xFF) if part.dtype != torch.int8 else part.fill_(-1)


def _poison_tails(made: Pool, page: int) -> None:
    """Rows of a head's last page beyond its count; a row of several tokens only where none of them is held."""
    counts, index = made.counts.cpu(), made.index.cpu()
    if not bool((counts % page).any()):
        return
    for head, count in zip(index.flatten(0, 1).tolist(), counts.flatten().tolist(), strict=True):
        if count % page == 0:
            continue
        for stream in (*made.k.values(), *made.v.values()):
            poison(stream[head[count // page], -(-(count % page) * stream.shape[1] // page) :])


def summaries(made: Pool, shape: Shape, names: tuple[str, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Summary streams of one chunk a page: "min" below "max", or "mean". The page that nobody holds holds NaN."""
    pages = next(iter(made.k.values())).shape[0]
    middle = {"min": -1.0, "max": 1.0, "mean": 0.0}
    found = {}
    for name in names:
        stream = normal(pages, 1, shape.D, dtype=torch.float16, device=str(made.index.device), generator=generator)
        stream.mul_(0.2).add_(middle[name])
        poison(stream[-1:])
        found[name] = stream
    return found


def normal(*size: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    """Standard normal numbers."""
    return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)
