"""Affine integers of 8, 4, 3 or 2 bits: groups along the token or channel axis, three zero rules, optional rotation."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Codec, Packed, Stream, widened
from kvlab.kernels import affine
from kvlab.kernels.affine import Axis, Groups, Mode
from kvlab.kernels.formats import Format
from kvlab.kernels.hadamard import hadamard
from kvlab.kernels.pack import BITS, packed_width


@dataclass(frozen=True, slots=True)
class Affine(Codec):
    """`group` elements share a scale: along D of one token, or along `group` tokens of one channel.

    `group=0` means the whole head dim (token axis only). `clip` shrinks the range, in (0, 1]. Sources: KIVI
    (arXiv 2402.02750) for the axes, QuaRot (2404.00456) for rotation and clip.
    """

    kind: ClassVar[str] = "affine"
    bits: int = 4
    axis: Axis = "token"
    group: int = 32
    mode: Mode = "asymmetric"
    clip: float = 1.0
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, got {self.bits!r}")
        if self.axis not in ("token", "channel"):
            raise ValueError(f"axis must be 'token' or 'channel', got {self.axis!r}")
        if self.mode not in ("asymmetric", "symmetric", "midrise"):
            raise ValueError(f"mode must be 'asymmetric', 'symmetric' or 'midrise', got {self.mode!r}")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip must lie in (0, 1], got {self.clip!r}: 1 keeps the whole range")
        if self.group < 0 or (self.group == 0 and self.axis == "channel"):
            raise ValueError(f"group must be positive for axis={self.axis!r}, got {self.group}")

    @property
    def block_tokens(self) -> int:
        return self.group if self.axis == "channel" else 1

    @property
    def label(self) -> str:
        parts = [f"int{self.bits}"]
        parts += ["ch"] if self.axis == "channel" else []
        parts += [f"g{self.group}"] if self.group else []
        parts += [{"asymmetric": "", "symmetric": "sym", "midrise": "mid"}[self.mode]]
        parts += [f"c{self.clip:g}"] if self.clip != 1 else []
        parts += ["rot"] if self.hadamard else []
        return " ".join(p for p in parts if p)

    def _spec(self, head_dim: int) -> Groups:
        return Groups(self.bits, self.axis, self.group or head_dim, self.mode, self.clip)

    def check(self, head_dim: int, kv_heads: int, page_tokens: int) -> None:
        packed_width(head_dim, self.bits)
        if self.axis == "token" and head_dim % (self.group or head_dim):
            raise ValueError(f"head dim must be a multiple of the group, got {head_dim} and group {self.group}")
        if self.axis == "channel" and self.group != page_tokens:
            raise ValueError(f"a channel group must be one page, got group {self.group} and page_tokens {page_tokens}")

    def streams(self, head_dim: int, page_tokens: int, raw: torch.dtype) -> dict[str, Stream]:
        rows, width = (page_tokens, head_dim // (self.group or head_dim))
        if self.axis == "channel":
            rows, width = page_tokens // self.group, head_dim
        streams = {
            "codes": Stream(page_tokens, packed_width(head_dim, self.bits), torch.uint8),
            "scale": Stream(rows, width, torch.float16),
        }
        if self.mode == "asymmetric":
            streams["zero"] = Stream(rows, width, torch.float16)
        return streams

    def encode(self, x: Tensor) -> Packed:
        x = hadamard(widened(x)) if self.hadamard else x
        codes, scale, zero = affine.quantize(x, self._spec(x.shape[-1]))
        return {"codes": codes, "scale": scale} | ({} if zero is None else {"zero": zero})

    def decode(self, packed: Packed, head_dim: int, dtype: torch.dtype) -> Tensor:
        spec, compute = self._spec(head_dim), torch.promote_types(dtype, torch.float32)
        x = affine.dequantize(packed["codes"], packed["scale"], packed.get("zero"), spec, head_dim, compute)
        return (hadamard(x) if self.hadamard else x).to(dtype)

    def scores(self, q: Tensor, packed: Packed) -> Tensor:
        q = hadamard(q) if self.hadamard else q
        return affine.scores(q, packed["codes"], packed["scale"], packed.get("zero"), self._spec(q.shape[-1]))

    def mix(self, p: Tensor, packed: Packed, head_dim: int) -> Tensor:
        spec = self._spec(head_dim)
        out = affine.mix(p, packed["codes"], packed["scale"], packed.get("zero"), spec, head_dim)
        return hadamard(out) if self.hadamard else out

    def stored_as(self, head_dim: int) -> Format:
        return Format("affine", **self._spec(head_dim)._asdict(), hadamard=self.hadamard)
