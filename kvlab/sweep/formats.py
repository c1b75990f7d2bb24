"""Names of storage formats: each a codec for keys and one for values. Knows no model, no bytes, no scores."""

from kvlab.codecs import Affine, Codec, Fp8, Raw

_INT8 = Affine(bits=8, group=0, mode="symmetric")
_INT4 = Affine(bits=4, group=32)
_INT2 = Affine(bits=2, group=32)
_E4M3 = Fp8("e4m3")
_E5M2 = Fp8("e5m2")
# Clip at the optimum of squared error for normal data, which a rotation makes of most heads.
_INT4_ROTATED = Affine(bits=4, group=0, mode="midrise", clip=0.92, hadamard=True)

FORMATS: dict[str, tuple[Codec, Codec]] = {
    "raw": (Raw(), Raw()),
    "fp8_e4m3": (_E4M3, _E4M3),
    "fp8_e5m2": (_E5M2, _E5M2),
    "int8": (_INT8, _INT8),
    "k8v4": (_INT8, _INT4),
    "int4": (_INT4, _INT4),
    "int4_rotated": (_INT4_ROTATED, _INT4_ROTATED),
    "int2": (_INT2, _INT2),
}
