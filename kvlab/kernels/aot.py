"""What a Triton kernel is compiled for ahead of time: one value per specialisation, as the launcher would ask for it.

Plain data; needs no triton. Each `*_triton.py` beside this file has `aot_variants() -> list[AotVariant]`.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class AotVariant(NamedTuple):
    """One (kernel, constants, types) that a launch in the field would compile.

    `jit` is the `triton.jit` function; `signature` gives every argument in order its Triton type ("*u8", "i32",
    "constexpr"); `constexprs` the constants' values; `options` num_warps and num_stages. `divisible` names the
    arguments that are multiples of 16: pointers to fresh tensors are, and without it no load is wide.
    """

    kernel: str
    variant: str
    jit: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]
    divisible: tuple[str, ...] = ()

    @property
    def attrs(self) -> dict[tuple[int, ...], list[list[str | int]]]:
        """`divisible` as ASTSource takes it."""
        names = list(self.signature)
        return {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}


def variant_of(
    jit: Any,
    variant: str,
    types: Mapping[str, str],
    constexprs: dict[str, Any],
    options: dict[str, int],
    aligned: Collection[str] = (),
) -> AotVariant:
    """Spelled out from the kernel's own argument names: `types` of what is no constant; more may be given.

    Every pointer counts as divisible, and the integers named in `aligned`.
    """
    signature = {n: "constexpr" if n in constexprs else types[n] for n in jit.arg_names}
    divisible = tuple(n for n, kind in signature.items() if kind.startswith("*") or n in aligned)
    return AotVariant(jit.__name__.strip("_"), variant, jit, signature, constexprs, options, divisible)
