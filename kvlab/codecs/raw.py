"""No compression: tokens stay in the raw dtype of the cache. The baseline; the identity when raw is the model's own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Codec, Packed, Stream
from kvlab.kernels.formats import RAW, Format


@dataclass(frozen=True, slots=True)
class Raw(Codec):
    """Stores K or V as they are."""

    kind: ClassVar[str] = "raw"

    @property
    def label(self) -> str:
        return "raw"

    def check(self, head_dim: int, kv_heads: int, page_tokens: int) -> None:
        return None

    def streams(self, head_dim: int, page_tokens: int, raw: torch.dtype) -> dict[str, Stream]:
        return {"data": Stream(page_tokens, head_dim, raw)}

    def encode(self, x: Tensor) -> Packed:
        return {"data": x}

    def decode(self, packed: Packed, head_dim: int, dtype: torch.dtype) -> Tensor:
        return packed["data"].to(dtype)

    def scores(self, q: Tensor, packed: Packed) -> Tensor:
        return q @ packed["data"].to(q.dtype).mT

    def mix(self, p: Tensor, packed: Packed, head_dim: int) -> Tensor:
        return p @ packed["data"].to(p.dtype)

    def stored_as(self, head_dim: int) -> Format:
        return RAW
