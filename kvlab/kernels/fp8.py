"""Elements of one byte, e4m3 or e5m2, with a power-of-two scale that is given or chosen per token.

Values saturate before the cast, since builds of torch disagree on whether the cast itself gives NaN, infinity or the
largest value. NaN stays NaN.
"""

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from kvlab.kernels.formats import FP8_DTYPES

LARGEST_EXPONENT = 120


def quantize(
    x: Float[Tensor, "*N T D"], fp8: str, scale: Float[Tensor, "*#N #T #D"] | float
) -> UInt8[Tensor, "*N T D"]:
    """The bits of x / scale, to nearest even. Computed in x's dtype, float32 or wider."""
    dtype = FP8_DTYPES[fp8]
    limit = torch.finfo(dtype).max
    return (x / scale).clamp(-limit, limit).to(dtype).view(torch.uint8)


def token_exponents(x: Float[Tensor, "*N T D"], fp8: str) -> Int8[Tensor, "*N T 1"]:
    """log2 of the least power of two that brings each token into range, in [-120, 120]; 0 for a token of zeros."""
    limits = torch.finfo(x.dtype)
    peak = x.abs().amax(-1, keepdim=True).clamp_max(limits.max)
    # frexp and not log2, which may round up to the next integer, or from just above one down to it.
    mantissa, exponent = torch.frexp((peak / torch.finfo(FP8_DTYPES[fp8]).max).clamp_min(2.0**-LARGEST_EXPONENT))
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return torch.where(peak > 0, exponent, 0).to(torch.int8)
