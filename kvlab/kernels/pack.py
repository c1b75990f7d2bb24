"""b-bit codes <-> bytes, packed along the head dim in split planes.

At 4 bits byte j holds channel j in its low nibble and channel j + D/2 in its high nibble, so that unpacking is two
whole-row operations and no shuffle. 2 bits splits D in four the same way. 3 bits is a 2-bit plane followed by a 1-bit
plane, so no code straddles a byte. A token always owns whole bytes: odd token counts need no care.
"""

import torch
from jaxtyping import UInt8
from torch import Tensor

BITS = (2, 3, 4, 8)
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def packed_width(head_dim: int, bits: int) -> int:
    """Bytes one token's codes take. Raises ValueError when D codes of `bits` do not fill whole bytes."""
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got {bits}")
    per_byte = 8 // min(_PLANES[bits])
    if head_dim % per_byte:
        raise ValueError(
            f"head dim must be a multiple of {per_byte} for {bits}-bit codes, got {head_dim}: "
            "choose 8 bits, fp8 or raw for this model"
        )
    return head_dim * bits // 8


def pack(codes: UInt8[Tensor, "*N T D"], bits: int) -> UInt8[Tensor, "*N T W"]:
    """Pack unsigned codes in [0, 2**bits) along D. Raises ValueError as `packed_width` does."""
    packed_width(codes.shape[-1], bits)
    if bits == 8:
        return codes
    planes = []
    shift = 0
    for plane in _PLANES[bits]:
        field = (codes >> shift) & (2**plane - 1)
        parts = field.chunk(8 // plane, dim=-1)
        byte = parts[0].clone()
        for i, part in enumerate(parts[1:], start=1):
            byte |= part << (i * plane)
        planes.append(byte)
        shift += plane
    return torch.cat(planes, dim=-1) if len(planes) > 1 else planes[0]


def unpack(packed: UInt8[Tensor, "*N T W"], bits: int, head_dim: int) -> UInt8[Tensor, "*N T D"]:
    """Inverse of `pack`."""
    if bits == 8:
        return packed
    codes, start, shift = None, 0, 0
    for plane in _PLANES[bits]:
        width = head_dim * plane // 8
        byte = packed[..., start : start + width]
        mask = 2**plane - 1
        field = torch.cat([(byte >> (i * plane)) & mask for i in range(8 // plane)], dim=-1)
        codes = field if codes is None else codes | (field << shift)
        start, shift = start + width, shift + plane
    assert codes is not None
    return codes
