"""Summaries of chunks kept in pages beside their keys, and scores of chunks where they lie.

The arithmetic is that of `chunks`; this file finds the rows. Streams are those of K: the format's own, "min" and "max"
or "mean" [pages, P / chunk, D] in fp16. A chunk lies within one page.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.kernels import chunks
from kvlab.kernels.chunks import Bound, Bounds
from kvlab.kernels.dispatch import Impl, choose
from kvlab.kernels.formats import Format, stored_values
from kvlab.kernels.hadamard import hadamard


def summarise(
    streams: Mapping[str, Tensor],
    fmt: Format,
    index: Int[Tensor, "B N M"],
    start: Int[Tensor, "B N"],
    counts: Int[Tensor, "B N"],
    tokens: int,
    chunk: int,
    *,
    added: Float[Tensor, "#B #N T D"] | None = None,
    impl: Impl = "auto",
) -> None:
    """Write "min" and "max", or "mean", of every chunk that holds a token of slots start .. counts - 1.

    Over the keys as they are read back, rotation undone; `added[b, n, t]` is put back on the key of slot start + t, and
    `start` is a multiple of the chunk then. `tokens` is no less than any counts - start: it sizes the launch. Raises
    ValueError when the chunk does not divide a page or no summary stream is given.
    """
    page, names = _check(streams, fmt, chunk)
    if choose(impl, ("triton", "torch"), index.device) == "triton":
        from kvlab.kernels.chunks_triton import summarise_triton

        summarise_triton(streams, fmt, index, start, counts, tokens, chunk, added, page, names)
        return
    head_dim, per_page = streams[names[0]].shape[2], page // chunk
    B, N, M = index.shape
    for b in range(B):
        held = {name: streams[name][index[b].long()].flatten(1, 2) for name in fmt.names}
        keys = stored_values(held, fmt, head_dim, torch.float32)
        keys = hadamard(keys) if fmt.hadamard else keys
        if added is not None:
            at = torch.arange(M * page, device=index.device) - start[b].long().unsqueeze(-1)
            rows = added.expand(B, N, -1, -1)[b].to(keys.dtype)
            real = (at >= 0) & (at < rows.shape[1])
            rows = rows.gather(1, at.clamp(0, rows.shape[1] - 1).unsqueeze(-1).expand(-1, -1, head_dim))
            keys = keys + torch.where(real.unsqueeze(-1), rows, 0.0)
        made = (chunks.means(keys, chunk, counts[b]),) if names == ("mean",) else chunks.bounds(keys, chunk, counts[b])
        order = torch.arange(M * per_page, device=index.device)
        new = (order >= start[b].unsqueeze(-1) // chunk) & (order * chunk < counts[b].unsqueeze(-1))
        new &= (start[b] < counts[b]).unsqueeze(-1)
        at = index[b].long().gather(1, (order // per_page).expand(N, -1)) * per_page + order % per_page
        for name, rows in zip(names, made, strict=True):
            streams[name].view(-1, head_dim)[at[new]] = rows[new]


def _check(streams: Mapping[str, Tensor], fmt: Format, chunk: int) -> tuple[int, tuple[str, ...]]:
    """Tokens per page and the names of the summary streams."""
    page = streams[fmt.names[0]].shape[1]
    if page % chunk:
        raise ValueError(f"a chunk must divide a page, got chunks of {chunk} and pages of {page} tokens")
    names = ("mean",) if "mean" in streams else ("min", "max")
    missing = [name for name in names if name not in streams]
    if missing:
        raise ValueError(f"give a stream 'mean', or 'min' and 'max', got {tuple(streams)}")
    if streams[names[0]].shape[1] != page // chunk:
        raise ValueError(f"{names[0]!r} must have {page // chunk} rows a page, got {streams[names[0]].shape[1]}")
    return page, names


def scores(
    q: Float[Tensor, "B H Q D"],
    streams: Mapping[str, Tensor],
    fmt: Format,
    index: Int[Tensor, "B N M"],
    counts: Int[Tensor, "B N"],
    chunk: int,
    bound: Bound,
    *,
    scale: float = 1.0,
    impl: Impl = "auto",
) -> Float[Tensor, "B N Q C"]:
    """Scores of every chunk in float32, -inf beyond `counts` tokens; C is the chunks of M pages.

    See `chunks.bound_scores` and `chunks.mean_scores`; times `scale`. "codec" needs per-channel codes and chunks of a
    whole page, and rotates the queries where the codec rotates keys.
    """
    page = streams[fmt.names[0]].shape[1]
    if page % chunk:
        raise ValueError(f"a chunk must divide a page, got chunks of {chunk} and pages of {page} tokens")
    if bound == "codec" and (fmt.axis != "channel" or fmt.kind != "affine" or chunk != page):
        raise ValueError(
            f"'codec' bounds need channel codes and chunks of a page, got {fmt.kind} by {fmt.axis}, chunks of {chunk} "
            f"in pages of {page}: use 'minmax' or 'mean'"
        )
    available = ("torch",) if q.dtype == torch.float64 else ("triton", "torch")
    if choose(impl, available, q.device) == "triton":
        from kvlab.kernels.chunks_triton import scores_triton

        return scores_triton(q, streams, fmt, index, counts, chunk, bound, scale, page)
    at = index.long()
    n_chunks = (counts + chunk - 1) // chunk
    if bound == "mean":
        return chunks.mean_scores(q, streams["mean"][at].flatten(2, 3), n_chunks) * scale
    if bound == "minmax":
        held = Bounds(streams["min"][at].flatten(2, 3), streams["max"][at].flatten(2, 3))
        return chunks.bound_scores(q, held, n_chunks) * scale
    zero = streams["zero"][at].flatten(2, 3) if "zero" in fmt.names else None
    held = chunks.codec_bounds(streams["scale"][at].flatten(2, 3), zero, fmt.groups)
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    return chunks.bound_scores(hadamard(wide) if fmt.hadamard else wide, held, n_chunks) * scale
