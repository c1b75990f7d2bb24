"""Group-wise affine quantization of K or V rows, and attention products taken straight from the codes.

A group shares one fp16 scale s and, when asymmetric, one fp16 zero z: x^ = s * (code - offset) + z. Groups lie along
the head dim of one token (axis "token", KIVI's value layout) or along G tokens of one channel (axis "channel", KIVI's
key layout, arXiv 2402.02750). Codes are computed against the *stored* fp16 scale and zero, so their rounding costs no
extra error. The products never build K or V: scales go on scores and probabilities after the matrix product.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvlab.kernels.dispatch import Impl, choose
from kvlab.kernels.pack import pack, unpack

Axis = Literal["token", "channel"]
Mode = Literal["asymmetric", "symmetric", "midrise"]
_FP16_MAX = 65504.0


class Groups(NamedTuple):
    """What stays the same for every page of a stream."""

    bits: int
    axis: Axis
    group: int
    mode: Mode
    clip: float

    @property
    def offset(self) -> float:
        """The code that stands for zero before the zero point is added."""
        return {"asymmetric": 0.0, "symmetric": 2.0 ** (self.bits - 1) - 1, "midrise": 2.0 ** (self.bits - 1) - 0.5}[
            self.mode
        ]


def _grouped(x: Tensor, spec: Groups) -> Tensor:
    """[*N, T, D] -> [*N, T, D/G, G] for token groups, [*N, T/G, D, G] for channel groups."""
    if spec.axis == "token":
        return x.unflatten(-1, (-1, spec.group))
    return x.unflatten(-2, (-1, spec.group)).transpose(-1, -2)


def _ungrouped(x: Tensor, spec: Groups) -> Tensor:
    return x.flatten(-2) if spec.axis == "token" else x.transpose(-1, -2).flatten(-3, -2)


def quantize(
    x: Float[Tensor, "*N T D"], spec: Groups
) -> tuple[UInt8[Tensor, "*N T W"], Float[Tensor, "*N S C"], Float[Tensor, "*N S C"] | None]:
    """Codes, fp16 scales and, when asymmetric, fp16 zeros. S x C is T x D/G (token) or T/G x D (channel).

    A group without range gets scale 0 and is returned exactly (to fp16) when asymmetric. Values beyond fp16 saturate.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    groups = _grouped(x.to(compute).clamp(-_FP16_MAX, _FP16_MAX), spec)
    top = 2**spec.bits - 1
    zero = None
    if spec.mode == "asymmetric":
        low, high = groups.amin(-1), groups.amax(-1)
        # Clipping shrinks the range about its middle, so a constant group keeps its value.
        middle, half = (low + high) / 2, (high - low) / 2 * spec.clip
        zero = (middle - half).half()
        # max(0): where rounding the zero up passes the top, the group is a constant to fp16.
        scale = ((middle + half - zero.to(compute)).clamp_min(0) / top).clamp_max(_FP16_MAX).half()
        shifted = groups - zero.to(compute).unsqueeze(-1)
    else:
        steps = spec.offset if spec.mode == "symmetric" else top / 2
        scale = (groups.abs().amax(-1) * spec.clip / steps).half()
        shifted = groups
    step = scale.to(compute).unsqueeze(-1)
    ratio = torch.where(step > 0, shifted / step.clamp_min(torch.finfo(compute).tiny), 0.0)
    codes = ratio.floor() + spec.offset + 0.5 if spec.mode == "midrise" else ratio.round() + spec.offset
    # A symmetric range has an odd number of levels: the code one below -qmax is never used.
    limit = 2 * spec.offset if spec.mode == "symmetric" else top
    return pack(_ungrouped(codes.clamp(0, limit).to(torch.uint8), spec), spec.bits), scale, zero


def dequantize(
    packed: UInt8[Tensor, "*N T W"],
    scale: Float[Tensor, "*N S C"],
    zero: Float[Tensor, "*N S C"] | None,
    spec: Groups,
    head_dim: int,
    dtype: torch.dtype,
) -> Float[Tensor, "*N T D"]:
    """x^ by its definition, in `dtype`."""
    groups = _grouped(unpack(packed, spec.bits, head_dim).to(dtype), spec)
    x = (groups - spec.offset) * scale.to(dtype).unsqueeze(-1)
    if zero is not None:
        x = x + zero.to(dtype).unsqueeze(-1)
    return _ungrouped(x, spec)


def scores(
    q: Float[Tensor, "*N R D"],
    packed: UInt8[Tensor, "*N T W"],
    scale: Float[Tensor, "*N S C"],
    zero: Float[Tensor, "*N S C"] | None,
    spec: Groups,
    impl: Impl = "auto",
) -> Float[Tensor, "*N R T"]:
    """q . k^ for every stored token, in q's dtype (float32 or float64). Not yet divided by sqrt(D)."""
    if choose(impl) == "reference":
        return q @ dequantize(packed, scale, zero, spec, q.shape[-1], q.dtype).mT
    codes = _codes(packed, spec, q.shape[-1], q.dtype)
    scale = scale.to(q.dtype)
    if spec.axis == "token":
        grouped = q.unflatten(-1, (-1, spec.group)).transpose(-2, -3)  # *N g R G
        part = grouped @ codes.unflatten(-1, (-1, spec.group)).movedim(-2, -3).mT  # *N g R T
        part = part * scale.mT.unsqueeze(-2)
        if zero is not None:
            part = part + zero.to(q.dtype).mT.unsqueeze(-2) * grouped.sum(-1, keepdim=True)
        return part.sum(-3)
    pages = codes.unflatten(-2, (-1, spec.group))  # *N p G D
    part = (q.unsqueeze(-3) * scale.unsqueeze(-2)) @ pages.mT  # *N p R G
    if zero is not None:
        part = part + (q @ zero.to(q.dtype).mT).mT.unsqueeze(-1)
    return part.transpose(-2, -3).flatten(-2)


def mix(
    p: Float[Tensor, "*N R T"],
    packed: UInt8[Tensor, "*N T W"],
    scale: Float[Tensor, "*N S C"],
    zero: Float[Tensor, "*N S C"] | None,
    spec: Groups,
    head_dim: int,
    impl: Impl = "auto",
) -> Float[Tensor, "*N R D"]:
    """sum over tokens of p * v^, in p's dtype."""
    if choose(impl) == "reference":
        return p @ dequantize(packed, scale, zero, spec, head_dim, p.dtype)
    codes = _codes(packed, spec, head_dim, p.dtype)
    scale = scale.to(p.dtype)
    if spec.axis == "token":
        weighted = p.unsqueeze(-3) * scale.mT.unsqueeze(-2)  # *N g R T
        out = weighted @ codes.unflatten(-1, (-1, spec.group)).movedim(-2, -3)  # *N g R G
        if zero is not None:
            out = out + (p @ zero.to(p.dtype)).mT.unsqueeze(-1)
        return out.transpose(-2, -3).flatten(-2)
    pages = codes.unflatten(-2, (-1, spec.group))  # *N p G D
    weights = p.unflatten(-1, (-1, spec.group)).transpose(-2, -3)  # *N p R G
    out = (weights @ pages) * scale.unsqueeze(-2)
    if zero is not None:
        out = out + weights.sum(-1, keepdim=True) * zero.to(p.dtype).unsqueeze(-2)
    return out.sum(-3)


def _codes(packed: Tensor, spec: Groups, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Codes less their offset, as floats. Small integers and halves: exact in float32."""
    codes = unpack(packed, spec.bits, head_dim).to(dtype)
    return codes - spec.offset if spec.offset else codes
