"""How the bytes of one stream of pages are read back, as plain data for kernels. Knows no codec: codecs describe
themselves in these terms.

A stream has one or more tensors: "codes" (uint8), "scale" and "zero" (fp16), "exponent" (int8) or "data" (float).
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.kernels import affine
from kvlab.kernels.affine import Axis, Groups, Mode
from kvlab.kernels.hadamard import hadamard_reference

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Format(NamedTuple):
    """What stays the same for every page of a stream. Fields that `kind` does not use keep their defaults.

    `group` is in elements, never 0 for affine. `exponents` are log2 of static fp8 scales, one or one per KV head;
    empty means that each token has its own, in the stream "exponent".
    """

    kind: Literal["raw", "fp8", "affine"]
    bits: int = 16
    axis: Axis = "token"
    group: int = 0
    mode: Mode = "asymmetric"
    clip: float = 1.0
    fp8: Literal["e4m3", "e5m2"] = "e4m3"
    exponents: tuple[int, ...] = ()
    hadamard: bool = False

    @property
    def groups(self) -> Groups:
        """The affine fields, as the affine kernels take them. Raises ValueError for another kind."""
        if self.kind != "affine":
            raise ValueError(f"only an affine format has groups, got kind={self.kind!r}")
        return Groups(self.bits, self.axis, self.group, self.mode, self.clip)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors a stream of this format has."""
        if self.kind == "raw":
            return ("data",)
        if self.kind == "fp8":
            return ("codes",) if self.exponents else ("codes", "exponent")
        return ("codes", "scale", "zero") if self.mode == "asymmetric" else ("codes", "scale")


RAW = Format("raw")


def static_scale(fmt: Format, n_heads: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " N"]:
    """2**exponent of each KV head of a static fp8 stream. Raises ValueError when the exponents fit no such count."""
    if len(fmt.exponents) not in (1, n_heads):
        raise ValueError(f"fp8 exponents must be 1 or one per KV head ({n_heads}), got {len(fmt.exponents)}")
    exponents = torch.tensor(fmt.exponents, dtype=dtype, device=device)
    return exponents.exp2().expand(n_heads)


def stored_values(
    streams: Mapping[str, Tensor], fmt: Format, head_dim: int, dtype: torch.dtype
) -> Float[Tensor, "N T D"]:
    """What the bytes stand for, by definition, still rotated where the format rotates. Streams are [N, rows, width],
    N being the KV heads. Raises KeyError when a tensor of the format is missing.
    """
    if fmt.kind == "raw":
        return streams["data"].to(dtype)
    if fmt.kind == "affine":
        return affine.dequantize(streams["codes"], streams["scale"], streams.get("zero"), fmt.groups, head_dim, dtype)
    codes = streams["codes"]
    values = codes.view(FP8_DTYPES[fmt.fp8]).to(dtype)
    if not fmt.exponents:
        return values * streams["exponent"].to(dtype).exp2()
    return values * static_scale(fmt, codes.shape[0], dtype, codes.device).view(-1, 1, 1)


def restored_values(
    streams: Mapping[str, Tensor], fmt: Format, head_dim: int, dtype: torch.dtype
) -> Float[Tensor, "N T D"]:
    """`stored_values` rotated back: what was written, less the codec's error."""
    values = stored_values(streams, fmt, head_dim, dtype)
    return hadamard_reference(values) if fmt.hadamard else values
