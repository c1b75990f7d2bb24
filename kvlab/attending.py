"""Attending: one attention layer of a forward over the rows of a batch, in launches or row by row; then each takes its
new tokens in. Knows masks and positions, not where a cache keeps its rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.kernels import threads
from kvlab.kernels.dispatch import Impl
from kvlab.launching import Launch, attend_together, launch_groups
from kvlab.once import on_host, once
from kvlab.row import Row


class SeamError(RuntimeError):
    """The model did something between `Cache.update` and attention that a packed cache cannot follow."""


class AttentionCall(NamedTuple):
    """What one attention layer asks: queries [B, H, Q, D], K and V of the new tokens, and how to read them.

    `valid` [B, Q] is False for padding. `sink_logits` [H] and `softcap` are those of `kernels.attend`. `positions`
    [B or 1, Q] are what the model rotated the new keys by, None where it does not say.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    valid: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    positions: Tensor | None = None


def attend_rows(
    rows: Sequence[Row],
    call: AttentionCall,
    read_only: bool = False,
    impl: Impl | None = None,
    launches: dict[int, Launch] | None = None,
) -> Float[Tensor, "B H Q E"]:
    """Each row over its own store. Padding never enters a row; its outputs are zeros.

    Rows whose step can go together are one launch, for which `launches` remembers where their pages are. `impl` is by
    default what each row's pool was made with.
    """
    q = call.q
    if len(rows) == 1 and call.valid is None and q.device.type == "cpu" and (impl or rows[0].table.pool.impl) == "auto":
        # Decoding on a CPU: nothing to launch, no padding, and every operation less shows.
        if rows[0].centre is not None or rows[0].rotary is not None:
            _check_positions(rows[0], call.positions, 0, slice(None), q.shape[2])
        return _alone(rows[0], call, 0, slice(None), read_only, impl).unsqueeze(0)
    # All layers of a forward get the same masks and positions, and each row's length tells forwards apart.
    valid, positions = (None if x is None else on_host(x, rows[0].seen) for x in (call.valid, call.positions))
    real: list[slice | Tensor] = [slice(None)] * len(rows)
    if valid is not None:
        real = once(valid, rows[0].seen, lambda known: [_real(known, b) for b in range(len(rows))])
    for b, row in enumerate(rows):
        if row.centre is not None or row.rotary is not None:
            _check_positions(row, positions, b, real[b], q.shape[2])
    out: list[Tensor | None] = [None] * len(rows)
    for group in launch_groups(rows, [b for b, at in enumerate(real) if isinstance(at, slice)], q, impl):
        launch = Launch() if launches is None else launches.setdefault(group[0], Launch())
        served = _launched(launch, rows, group, call, read_only)
        if len(group) == len(rows):
            return served
        for b, one in zip(group, served, strict=True):
            out[b] = one
    for b, row in enumerate(rows):
        if out[b] is None:
            out[b] = _alone(row, call, b, real[b], read_only, impl)
    return out[0].unsqueeze(0) if len(out) == 1 else torch.stack(out)  # type: ignore[union-attr, arg-type]


def _real(valid: Tensor, b: int) -> slice | Tensor:
    """Where row b has real tokens."""
    return slice(None) if bool(valid[b].all()) else valid[b].nonzero().squeeze(1)


def _alone(
    row: Row, call: AttentionCall, b: int, real: slice | Tensor, read_only: bool, impl: Impl | None
) -> Float[Tensor, "H Q E"]:
    q, k, v = call.q.select(0, b), call.k.select(0, b), call.v.select(0, b)
    if isinstance(real, Tensor):
        padded, real = q.new_zeros(*q.shape[:2], v.shape[-1]), real.to(q.device)
        if not len(real):
            return padded
        q, k, v = q[:, real], k[:, real], v[:, real]
    with threads.for_size((row.kept + k.shape[1]) * k.shape[0] * k.shape[2], k.device):
        out, mass = row.attend(q, k, v, call.scale, call.softcap, call.sink_logits, not read_only, impl)
        if not read_only:
            row.commit(k, v, mass)
    return padded.index_copy(1, real, out) if isinstance(real, Tensor) else out


def _launched(
    launch: Launch, rows: Sequence[Row], group: list[int], call: AttentionCall, read_only: bool
) -> Float[Tensor, "G H 1 E"]:
    mine = [rows[b] for b in group]
    q, k, v = (x if len(group) == len(rows) else torch.stack([x[b] for b in group]) for x in (call.q, call.k, call.v))
    out, masses = attend_together(launch, mine, q, k, v, call.scale, call.softcap, call.sink_logits, not read_only)
    if not read_only:
        for i, (row, mass) in enumerate(zip(mine, masses, strict=True)):
            row.commit(k[i], v[i], mass)
    return out


def _check_positions(row: Row, positions: Tensor | None, b: int, real: slice | Tensor, new: int) -> None:
    """A centred row turns the centre to its own count of real tokens; the model must have turned keys to the same."""
    if positions is None or positions.ndim != 2:
        said = "no" if positions is None else f"{positions.ndim}-D"
        raise SeamError(
            f"rows that turn by position need 2-D position_ids at attention, the model passes {said} ones: leave keys "
            "uncentred, and take another scorer than expected attention"
        )
    got = positions[b if positions.shape[0] > 1 else 0][real]
    count = new if isinstance(real, slice) else len(real)
    if not torch.equal(got, torch.arange(row.seen, row.seen + count, device=got.device)):
        raise SeamError(
            f"row {b} takes its tokens {row.seen} to {row.seen + count - 1}, but position_ids say {got[0].item()} to "
            f"{got[-1].item()}: centred keys need position_ids that count real tokens from 0"
        )
