"""Tokens into pages: quantize as a format says and write each stream where a page table points, in one call.

What is stored is defined by the torch path, in float32 on the CPU; the Triton path gives the same bits (see
`encode_triton`), and so does the one compiled for CPUs, where it serves the format. The caller owns the page table:
pages exist before they are written.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.kernels import affine, fp8
from kvlab.kernels.dispatch import Impl, choose, installed
from kvlab.kernels.formats import Format, static_scale
from kvlab.kernels.hadamard import hadamard
from kvlab.kernels.pack import packed_width


def encode(
    x: Float[Tensor, "B N T D"], fmt: Format, raw: torch.dtype, minus: Float[Tensor, "#B #N T D"] | None = None
) -> dict[str, Tensor]:
    """The streams of x - minus, each [B, N, rows, width]. `raw` is the dtype of uncompressed tokens."""
    if minus is not None or fmt.hadamard:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    if minus is not None:
        x = x - minus.to(x.dtype)
    if fmt.hadamard:
        x = hadamard(x)
    if fmt.kind == "raw":
        return {"data": _saturated(x, raw)}
    if fmt.kind == "affine":
        codes, scale, zero = affine.quantize(x, fmt.groups)
        return {"codes": codes, "scale": scale} | ({} if zero is None else {"zero": zero})
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if fmt.exponents:
        scale = static_scale(fmt, x.shape[1], x.dtype, x.device).view(-1, 1, 1)
        return {"codes": fp8.quantize(x, fmt.fp8, scale)}
    exponent = fp8.token_exponents(x, fmt.fp8)
    return {"codes": fp8.quantize(x, fmt.fp8, exponent.to(x.dtype).exp2()), "exponent": exponent}


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype) if limit < torch.finfo(x.dtype).max else x.to(dtype)


def append(
    x: Float[Tensor, "B N T D"],
    streams: Mapping[str, Tensor],
    fmt: Format,
    index: Int[Tensor, "B N M"],
    start: Int[Tensor, "B N"],
    lengths: Int[Tensor, "B N"] | None = None,
    *,
    minus: Float[Tensor, "#B #N T D"] | None = None,
    impl: Impl = "auto",
) -> None:
    """Write the first `lengths` tokens of each head (all T by default) to its slots from `start` on.

    Slot s lies in row s % P of page `index[b, n, s // P]` of every stream [pages, rows, width]. With groups along
    tokens (a page each), `start` and `lengths` are multiples of P. `minus` is taken off first, then the format's
    rotation applied. Raises ValueError where streams and x do not fit each other, or `impl` cannot run.
    """
    page = _check(x, streams, fmt)
    serve = ("numba", "triton", "torch") if compiles(fmt) else ("triton", "torch")
    how = choose(impl, ("torch",) if x.dtype == torch.float64 else serve, x.device)
    if how == "numba":
        from kvlab.kernels.encode_numba import append_numba

        append_numba(x if minus is None else x.float() - minus.float(), streams, fmt, index, start, lengths)
        return
    if how == "triton":
        from kvlab.kernels.encode_triton import append_triton

        append_triton(x, streams, fmt, index, start, lengths, minus)
        return
    raw = streams["data"].dtype if fmt.kind == "raw" else x.dtype
    for name, rows in encode(x, fmt, raw, minus).items():
        _scatter(streams[name], rows, index, start, lengths, page)


def compiles(fmt: Format) -> bool:
    """Whether there is a path compiled for CPUs for this format, and numba to compile it."""
    return fmt.kind == "affine" and fmt.axis == "token" and not fmt.hadamard and installed("numba")


def _check(x: Tensor, streams: Mapping[str, Tensor], fmt: Format) -> int:
    """Tokens per page, of streams that hold what the format names."""
    missing = [name for name in fmt.names if name not in streams]
    if missing:
        raise ValueError(f"a {fmt.kind} format writes {fmt.names}, got streams {tuple(streams)}: {missing} missing")
    body = streams[fmt.names[0]]
    page, head_dim = body.shape[1], x.shape[-1]
    width = packed_width(head_dim, fmt.bits) if fmt.kind == "affine" else head_dim
    if body.shape[2] != width:
        raise ValueError(f"pages of width {body.shape[2]} cannot hold heads of {head_dim}, which take {width}")
    if fmt.kind == "affine" and fmt.axis == "channel" and fmt.group != page:
        raise ValueError(f"a channel group must be one page, got group {fmt.group} and pages of {page} tokens")
    if fmt.kind == "affine" and fmt.axis == "channel" and x.shape[2] % page:
        raise ValueError(f"channel groups take whole pages of {page} tokens, got {x.shape[2]}")
    if fmt.kind == "affine" and fmt.axis == "token" and head_dim % fmt.group:
        raise ValueError(f"head dim must be a multiple of the group, got {head_dim} and group {fmt.group}")
    return page


def _scatter(stream: Tensor, rows: Tensor, index: Tensor, start: Tensor, lengths: Tensor | None, page: int) -> None:
    """Rows [B, N, R, width] to their places in [pages, rows, width]. On a GPU this waits for `lengths`."""
    per_page = stream.shape[1]
    order = torch.arange(rows.shape[2], device=rows.device)
    at = start.long().unsqueeze(-1) * per_page // page + order
    count = torch.full_like(start, rows.shape[2]) if lengths is None else lengths * per_page // page
    real = order < count.unsqueeze(-1)
    held = index.long().gather(-1, (at // per_page).clamp_max(index.shape[-1] - 1))
    stream.view(-1, stream.shape[2])[(held * per_page + at % per_page)[real]] = rows[real]
