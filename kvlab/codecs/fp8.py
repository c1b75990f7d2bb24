"""FP8: e4m3 or e5m2 elements with a power-of-two scale.

Static scales come from the config, one exponent for all KV heads or one each (calibrated, `calibrated_exponents`);
dynamic ones are chosen per token and stored as one signed byte. Within range the relative error does not depend on the
scale, so a static scale costs nothing; out of range values saturate here, before the cast, since builds of torch
disagree on whether the cast itself gives NaN, infinity or the largest value.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.codecs.base import Codec, Packed, Stream, widened
from kvlab.kernels import fp8
from kvlab.kernels.formats import FP8_DTYPES as DTYPES
from kvlab.kernels.formats import Format
from kvlab.kernels.hadamard import hadamard


@dataclass(frozen=True, slots=True)
class Fp8(Codec):
    """`exponents` are log2 of the static scale: stored = x / 2**exponent. Length 1, or one per KV head."""

    kind: ClassVar[str] = "fp8"
    format: Literal["e4m3", "e5m2"] = "e4m3"
    scale: Literal["static", "dynamic"] = "static"
    exponents: tuple[int, ...] = (0,)
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise ValueError(f"fp8 format must be one of {tuple(DTYPES)}, got {self.format!r}")
        if self.scale not in ("static", "dynamic"):
            raise ValueError(f"fp8 scale must be 'static' or 'dynamic', got {self.scale!r}")
        object.__setattr__(self, "exponents", tuple(self.exponents))
        if not self.exponents or any(not -120 <= e <= 120 for e in self.exponents):
            raise ValueError(f"fp8 exponents must be integers in [-120, 120], at least one, got {self.exponents}")
        if self.scale == "dynamic" and self.exponents != (0,):
            raise ValueError(f"fp8 exponents belong to scale='static', got {self.exponents} with scale='dynamic'")

    @property
    def per_head(self) -> bool:
        return len(self.exponents) > 1

    @property
    def label(self) -> str:
        parts = [f"fp8_{self.format}"]
        parts += ["dyn"] if self.scale == "dynamic" else []
        parts += [f"x2^{','.join(map(str, self.exponents))}"] if self.exponents != (0,) else []
        parts += ["rot"] if self.hadamard else []
        return " ".join(parts)

    def check(self, head_dim: int, kv_heads: int, page_tokens: int) -> None:
        if len(self.exponents) not in (1, kv_heads):
            raise ValueError(
                f"fp8 exponents must be 1 or one per KV head ({kv_heads}), got {len(self.exponents)}: {self.exponents}"
            )

    def streams(self, head_dim: int, page_tokens: int, raw: torch.dtype) -> dict[str, Stream]:
        # Bytes, not float8: torch has no index_copy for float8, and the kernels read bits.
        streams = {"codes": Stream(page_tokens, head_dim, torch.uint8)}
        if self.scale == "dynamic":
            streams["exponent"] = Stream(page_tokens, 1, torch.int8)
        return streams

    def _rotated(self, x: Tensor) -> Tensor:
        """What the codes are made from, in float32 or wider."""
        return hadamard(widened(x)) if self.hadamard else widened(x)

    def _static(self, like: Tensor) -> Tensor:
        return torch.tensor(self.exponents, dtype=torch.float32, device=like.device).exp2().view(-1, 1, 1)

    def encode(self, x: Float[Tensor, "N T D"]) -> Packed:
        x = self._rotated(x)
        if self.scale == "static":
            return {"codes": fp8.quantize(x, self.format, self._static(x).to(x.dtype))}
        exponent = fp8.token_exponents(x, self.format)
        return {"codes": fp8.quantize(x, self.format, exponent.to(x.dtype).exp2()), "exponent": exponent}

    def clipped(self, x: Float[Tensor, "N T D"]) -> int:
        """How many values lie beyond the largest finite code, the rule being |x| / scale > max."""
        if self.scale == "dynamic":
            return 0
        x = self._rotated(x)
        return int(((x / self._static(x)).abs() > torch.finfo(DTYPES[self.format]).max).sum())

    def _values(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Stored elements before any scale."""
        return packed["codes"].view(DTYPES[self.format]).to(dtype)

    def _scale(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """[N or 1, T or 1, 1]."""
        if self.scale == "static":
            return self._static(packed["codes"]).to(dtype)
        return packed["exponent"].to(dtype).exp2()

    def decode(self, packed: Packed, head_dim: int, dtype: torch.dtype) -> Tensor:
        compute = torch.promote_types(dtype, torch.float32)
        x = self._values(packed, compute) * self._scale(packed, compute)
        return (hadamard(x) if self.hadamard else x).to(dtype)

    def scores(self, q: Tensor, packed: Packed) -> Tensor:
        q = hadamard(q) if self.hadamard else q
        return (q @ self._values(packed, q.dtype).mT) * self._scale(packed, q.dtype).mT

    def mix(self, p: Tensor, packed: Packed, head_dim: int) -> Tensor:
        out = (p * self._scale(packed, p.dtype).mT) @ self._values(packed, p.dtype)
        return hadamard(out) if self.hadamard else out

    def stored_as(self, head_dim: int) -> Format:
        exponents = self.exponents if self.scale == "static" else ()
        return Format("fp8", 8, fp8=self.format, exponents=exponents, hadamard=self.hadamard)


def calibrated_exponents(x: Float[Tensor, "N T D"], format: str = "e4m3") -> tuple[int, ...]:
    """Per-head exponents so that the largest |x| of each head fits: ceil(log2(absmax / max)), never negative zeros."""
    peak = x.abs().float().amax((-1, -2)).clamp_min(2.0**-100)
    return tuple(int(e) for e in (peak / torch.finfo(DTYPES[format]).max).log2().ceil().clamp(-120, 120))
