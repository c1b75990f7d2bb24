"""Orthonormal Walsh-Hadamard transform along the head dim, in blocks of the largest power of two that divides it.

The transform is its own inverse. Applied to both sides of a dot product it leaves the product unchanged, which is why
keys may be stored rotated while queries are rotated on the way in.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.kernels.dispatch import Impl, choose


def block_of(head_dim: int) -> int:
    """Largest power of two dividing `head_dim`: 64 for 64, 16 for 80, 32 for 96."""
    return head_dim & -head_dim


def matrix(size: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "size size"]:
    """Sylvester's Hadamard matrix divided by sqrt(size), so that H @ H is the identity."""
    h = torch.ones(1, 1, dtype=dtype)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / size**0.5


def hadamard_reference(x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """Block-diagonal H applied to the last axis by its definition."""
    block = block_of(x.shape[-1])
    h = matrix(block, x.dtype).to(x.device)
    return (x.unflatten(-1, (-1, block)) @ h).flatten(-2)


def hadamard_torch(x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """The same in log2(block) butterfly steps."""
    block = block_of(x.shape[-1])
    y = x.unflatten(-1, (-1, block))
    half = 1
    while half < block:
        y = y.unflatten(-1, (-1, 2, half))
        y = torch.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], dim=-2).flatten(-3)
        half *= 2
    return y.flatten(-2) / block**0.5


def hadamard(x: Float[Tensor, "*N D"], impl: Impl = "auto") -> Float[Tensor, "*N D"]:
    """Rotate the last axis. Float in, same dtype out (QuaRot, arXiv 2404.00456, section 4)."""
    return hadamard_reference(x) if choose(impl) == "reference" else hadamard_torch(x)
