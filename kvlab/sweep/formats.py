"""Names of storage formats: a codec for keys, one for values, what is taken out of keys first. Knows no model, no
bytes, no scores.
"""

from typing import NamedTuple

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.layer import Centring


class Format(NamedTuple):
    """How K and V are stored; `centring` is what is taken out of keys before."""

    key: Codec
    value: Codec
    centring: Centring = "none"

    @property
    def page(self) -> int:
        """Tokens that a page must hold for it, 1 where any number will do."""
        return max(self.key.block_tokens, self.value.block_tokens)


_INT8 = Affine(bits=8, group=0, mode="symmetric")
_INT4, _INT4_HEAD = Affine(bits=4, group=32), Affine(bits=4, group=0)
_INT2 = Affine(bits=2, group=32)
_E4M3, _E5M2 = Fp8("e4m3"), Fp8("e5m2")
# Clip at the optimum of squared error for normal data, which a rotation makes of most heads.
_ROT4 = Affine(bits=4, group=0, mode="midrise", clip=0.92, hadamard=True)
_ROT3 = Affine(bits=3, group=0, mode="midrise", clip=0.8, hadamard=True)
_ROT2 = Affine(bits=2, group=0, mode="midrise", clip=0.6, hadamard=True)

FORMATS: dict[str, Format] = {
    "raw": Format(Raw(), Raw()),
    "fp8_e4m3": Format(_E4M3, _E4M3),
    "fp8_e5m2": Format(_E5M2, _E5M2),
    "int8": Format(_INT8, _INT8),
    "k8v4": Format(_INT8, _INT4),
    # one scale for 32 values of a token, for a whole head, for 32 tokens of a channel
    "int4": Format(_INT4, _INT4),
    "int4_g64": Format(_INT4_HEAD, _INT4_HEAD),
    "int4_channel": Format(Affine(bits=4, axis="channel", group=32), _INT4),
    "int4_rotated": Format(_ROT4, _ROT4),
    "int4_centred": Format(_INT4, _INT4, "mean"),
    "int4_centred_rotated": Format(_ROT4, _ROT4, "mean"),
    # keys never in fewer bits than values; all centred and rotated
    "k4v3": Format(_ROT4, _ROT3, "mean"),
    "k4v2": Format(_ROT4, _ROT2, "mean"),
    "k3v3": Format(_ROT3, _ROT3, "mean"),
    "k2v2": Format(_ROT2, _ROT2, "mean"),
    "int2": Format(_INT2, _INT2),
    # KIVI, arXiv 2402.02750
    "int2_channel": Format(Affine(bits=2, axis="channel", group=32), Affine(bits=2, group=32, clip=0.72)),
}
