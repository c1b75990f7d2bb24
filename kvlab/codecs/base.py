"""What a codec is: how kept tokens of K or V are stored. Parameters are frozen fields; there is no state.

A codec turns `[N, T, D]` into named streams of shape `[N, rows, width]`. A stream has either one row per token or one
row per block of tokens; the page pool stores each stream in its own tensor and never looks inside.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.kernels.formats import Format

Packed = dict[str, Tensor]


class Stream(NamedTuple):
    """One tensor of a page: `rows` rows of `width` elements for every P tokens.

    A `derived` one sums up others: it is not moved with single tokens but written again.
    """

    rows: int
    width: int
    dtype: torch.dtype
    derived: bool = False

    @property
    def page_bytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize


class Codec(ABC):
    """Subclasses are frozen dataclasses and final. `kind` is the name in JSON and in CODECS."""

    kind: ClassVar[str]

    @property
    def block_tokens(self) -> int:
        """Tokens encoded together: 1 when each token stands alone, G when a group runs along tokens."""
        return 1

    @property
    def per_head(self) -> bool:
        """Whether KV heads are stored by different rules, so that heads of several layers cannot be encoded as one."""
        return False

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for tables, such as `int4` or `fp8_e4m3`."""

    @abstractmethod
    def check(self, head_dim: int, kv_heads: int, page_tokens: int) -> None:
        """Raise ValueError when this codec cannot store heads of this size, naming the value and the rule."""

    @abstractmethod
    def streams(self, head_dim: int, page_tokens: int, raw: torch.dtype) -> dict[str, Stream]:
        """Names and shapes of what one page of one head holds. `raw` is the dtype of uncompressed tokens."""

    @abstractmethod
    def encode(self, x: Float[Tensor, "N T D"]) -> Packed:
        """T divides by block_tokens. Deterministic; never writes to x."""

    @abstractmethod
    def decode(self, packed: Packed, head_dim: int, dtype: torch.dtype) -> Float[Tensor, "N T D"]:
        """What is read back, in `dtype`; decode(encode(x)) - x is the whole error."""

    @abstractmethod
    def scores(self, q: Float[Tensor, "N R D"], packed: Packed) -> Float[Tensor, "N R T"]:
        """q . k^ over the stored tokens, without building k^ where that is possible."""

    @abstractmethod
    def mix(self, p: Float[Tensor, "N R T"], packed: Packed, head_dim: int) -> Float[Tensor, "N R D"]:
        """sum of p * v^ over the stored tokens."""

    @abstractmethod
    def stored_as(self, head_dim: int) -> Format:
        """The same in terms that kernels know: how the streams are read back for heads of this size."""

    def effective_bits(self, head_dim: int, page_tokens: int, raw: torch.dtype) -> float:
        """Stored bits per element of a full page, scales and zeros included."""
        total = sum(s.page_bytes for s in self.streams(head_dim, page_tokens, raw).values())
        return total * 8 / (head_dim * page_tokens)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        about = {"schema": "kvlab.codec/1", "kind": self.kind, "label": self.label, "fields": own}
        return bundle(
            "codec", about | {"block_tokens": self.block_tokens, "sizes": [self._stored(d) for d in (64, 128)]}
        )

    def _stored(self, head_dim: int) -> dict[str, Any]:
        """Bytes of each stream a token and head, for full pages and raw tokens of 16 bit."""
        page = self.block_tokens if self.block_tokens > 1 else 16
        try:
            self.check(head_dim, len(getattr(self, "exponents", (0,))), page)
        except ValueError as error:
            return {"head_dim": head_dim, "refused": str(error), "streams": {}}
        streams = self.streams(head_dim, page, torch.float16)
        return {"head_dim": head_dim, "refused": "", "streams": {n: s.page_bytes / page for n, s in streams.items()}}


def widened(x: Tensor) -> Tensor:
    """In float32 at least: a rotation in 16 bit would lose more than many a codec does, and may overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def to_raw(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast for uncompressed storage; a narrower format saturates instead of overflowing to infinity."""
    if dtype == x.dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype) if limit < torch.finfo(x.dtype).max else x.to(dtype)
