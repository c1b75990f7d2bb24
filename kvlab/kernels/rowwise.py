"""One decode step of one row: attention of a single query per head over encoded pages and raw tokens, read in place.

`attend_one` is the dispatcher. The reference gathers and decodes everything and attends by definition. The fast way is
compiled (`rowwise_numba`, CPU) and touches each stored byte once.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.kernels.attend import attention_mass, probabilities
from kvlab.kernels.dispatch import Impl, choose
from kvlab.kernels.formats import Format, restored_values

if TYPE_CHECKING:
    from kvlab.kernels.rowwise_arrays import Record

IMPLS = ("numba", "reference")
_RAW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Raw = tuple[Float[Tensor, "N _ D"], Float[Tensor, "N _ E"], int]  # K, V, how many tokens are real


@dataclass(frozen=True, eq=False)
class Stored:
    """The encoded tokens of one row: streams of K and V by name, each [pages, rows, width], and where they lie.

    Head n holds `counts[n]` tokens (the most of all is `longest`) in the pages `index[n]`, `page_tokens` in each. A
    token's position is in `position` [pages, P, 1] or, without one, `first` more than its rank.
    """

    key: Mapping[str, Tensor]
    value: Mapping[str, Tensor]
    key_format: Format
    value_format: Format
    index: Int[Tensor, "N M"]
    counts: Int[Tensor, " N"]
    longest: int
    page_tokens: int
    position: Tensor | None = None
    first: int = 0

    @functools.cached_property
    def record(self) -> "Record":
        """The same for compiled code, made once."""
        from kvlab.kernels.rowwise_arrays import record_of

        return record_of(self)


class Extras(NamedTuple):
    """What attention may ask for besides: see `kernels.attend` for the first two.

    `drift` [H, D] . `trig` [T, D] at a stored token's position is added to its scaled logit. `selected` [N, S] are the
    chunks of `chunk` stored tokens to read, negative ones being padding; `chunk` divides the page.
    """

    softcap: float | None = None
    sink_logits: Float[Tensor, " H"] | None = None
    drift: Float[Tensor, "H D"] | None = None
    trig: Float[Tensor, "T D"] | None = None
    selected: Int[Tensor, "N S"] | None = None
    chunk: int = 0


PLAIN = Extras()


@functools.cache  # asked in every layer of every step
def runs_compiled(impl: Impl, device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether the compiled step serves tensors of these dtypes on this device; otherwise the caller has its own way.

    Raises ValueError when "numba" is asked for and cannot run, naming what is in the way.
    """
    fits = all(dtype in _RAW_DTYPES for dtype in dtypes)
    if impl == "numba" and not fits:
        raise ValueError(f"impl='numba' computes in float32, got {[str(d) for d in dtypes]}: use impl='torch'")
    if not fits or impl not in ("auto", "numba"):
        return False
    return choose(impl, ("numba", "torch"), device) == "numba"


def attend_one(
    q: Float[Tensor, "H D"],
    stored: Stored | None,
    raw: Sequence[Raw],
    scale: float,
    extras: Extras = PLAIN,
    mass: bool = False,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "H E"], Float[Tensor, "N C"] | None]:
    """Attention of one query for each head over `stored` and then `raw`, (K, V, count) of sinks, window and new tokens.

    Returns float32 outputs and, if `mass`, for each KV head the mean probability over its query heads of every column:
    the longest head's stored tokens, then the raw ones. Heads that read no key give zeros.
    """
    if choose(impl, IMPLS, q.device) == "reference":
        return _attend_reference(q, stored, raw, scale, extras, mass)
    return _attend_numba(q, stored, raw, scale, extras, mass)


def _attend_reference(
    q: Tensor, stored: Stored | None, raw: Sequence[Raw], scale: float, extras: Extras, mass: bool
) -> tuple[Tensor, Tensor | None]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    n_heads = raw[0][0].shape[0]
    grouped = q.to(dtype).view(n_heads, -1, q.shape[1]) * scale
    parts = [(k[:, :count].to(dtype), v[:, :count].to(dtype)) for k, v, count in raw]
    keys, values = (torch.cat([p[i] for p in parts], dim=1) for i in (0, 1))
    logits = grouped @ keys.mT
    forbidden = torch.zeros(n_heads, 1, logits.shape[2], dtype=torch.bool, device=q.device)
    if stored is not None and stored.longest:
        k, v = (_gathered(stored, streams, fmt, dim, dtype) for streams, fmt, dim in (
            (stored.key, stored.key_format, q.shape[1]), (stored.value, stored.value_format, values.shape[2])
        ))  # fmt: skip
        held = grouped @ k.mT
        if extras.drift is not None and extras.trig is not None:
            drift = extras.drift.to(dtype).view(n_heads, -1, q.shape[1])
            held = held + drift @ extras.trig.to(dtype)[_positions(stored)].mT
        logits = torch.cat([held, logits], dim=2)
        forbidden = torch.cat([~_readable(stored, extras, k.shape[1]).unsqueeze(1), forbidden], dim=2)
        values = torch.cat([v, values], dim=1)
    probs = probabilities(logits, forbidden, extras.softcap, extras.sink_logits, 1)
    return (probs @ values).flatten(0, 1), attention_mass(probs, torch.ones(1, dtype=dtype)) if mass else None


def _gathered(stored: Stored, streams: Mapping[str, Tensor], fmt: Format, dim: int, dtype: torch.dtype) -> Tensor:
    """[N, longest, D]."""
    named = {name: streams[name][stored.index.long()].flatten(1, 2) for name in fmt.names}
    return restored_values(named, fmt, dim, dtype)[:, : stored.longest].nan_to_num(0.0)


def _positions(stored: Stored) -> Tensor:
    rank = torch.arange(stored.longest, device=stored.index.device)
    if stored.position is None:
        return (rank + stored.first).expand(stored.index.shape[0], -1)
    return stored.position[stored.index.long()].flatten(1, 3)[:, : len(rank)].long()


def _readable(stored: Stored, extras: Extras, length: int) -> Tensor:
    """[N, length], True where a token is held and its chunk is to be read."""
    rank = torch.arange(length, device=stored.index.device)
    held = rank < stored.counts.unsqueeze(1)
    if extras.selected is None:
        return held
    return held & (rank // extras.chunk == extras.selected.unsqueeze(2)).any(1)


def _attend_numba(
    q: Tensor, stored: Stored | None, raw: Sequence[Raw], scale: float, extras: Extras, mass: bool
) -> tuple[Tensor, Tensor | None]:
    from kvlab.kernels import rowwise_arrays

    parts = [(rowwise_arrays.part(k, count), rowwise_arrays.part(v, count)) for k, v, count in raw]
    return rowwise_arrays.step(q, stored, parts, (raw[0][0].shape[0], raw[0][1].shape[2]), scale, extras, mass)
