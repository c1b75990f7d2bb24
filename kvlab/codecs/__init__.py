"""F1: how a kept token is stored. One codec per file; adding one is that file and one line in CODECS."""

from kvlab.codecs.affine import Affine
from kvlab.codecs.base import Codec, Packed, Stream
from kvlab.codecs.fp8 import Fp8
from kvlab.codecs.raw import Raw

CODECS: dict[str, type[Codec]] = {"raw": Raw, "fp8": Fp8, "affine": Affine}

__all__ = ["CODECS", "Affine", "Codec", "Fp8", "Packed", "Raw", "Stream"]
