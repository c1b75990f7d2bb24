"""Instances of everything in the registries, so that a new codec, scorer or budget is tested by being registered.

Switches (bool and Literal fields) are enumerated from the class itself; numbers take their default and what is listed
under NUMBERS. Combinations a class refuses are left out.
"""

import dataclasses
import itertools
import typing
from dataclasses import fields
from typing import Any

from kvlab.codecs import CODECS, Codec
from kvlab.config import KVConfig
from kvlab.policies import BUDGETS, READERS, SCORERS, Budget, Fraction, Reader, Scorer, Threshold, Tokens
from kvlab.policies.base import Scope

NUMBERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "affine": {"bits": (8, 4, 3, 2), "group": (16, 0)},
    "fp8": {"exponents": ((0,), (-2,))},
    "attention_mass": {"decay": (1.0, 0.9)},
    "expected_attention": {"horizon": (4,)},
    "window_attention": {"window": (3, 32), "pool": (1, 5)},
    "tokens": {"tokens": (1, 20, 1000), "scope": ("head",)},
    "fraction": {"fraction": (0.1, 0.5, 1.0), "scope": ("head",)},
    "threshold": {"quantile": (0.0, 0.4, 0.9), "scope": ("head",)},
    "top_k": {"fraction": (0.3, 1.0), "count": (0, 3), "chunk": (16, 4), "dense_layers": (0,), "select_every": (1, 3)},
}
PAGE = 16


def _choices(kind: str, name: str, annotation: Any, default: Any) -> tuple[Any, ...]:
    if name in NUMBERS.get(kind, {}):
        return NUMBERS[kind][name]
    if annotation is bool:
        return (False, True)
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else (default,)


def instances(kind: str, cls: type) -> list[Any]:
    """Every instance of `cls` its switches and NUMBERS give."""
    hints = typing.get_type_hints(cls)
    own = fields(cls)
    made = []
    for values in itertools.product(*(_choices(kind, f.name, hints[f.name], f.default) for f in own)):
        try:
            made.append(cls(**dict(zip((f.name for f in own), values, strict=True))))
        except ValueError:
            continue
    assert made, f"{kind} refuses every combination"
    return made


ALL_CODECS: list[Codec] = [codec for kind, cls in CODECS.items() for codec in instances(kind, cls)]
ALL_SCORERS: list[Scorer] = [scorer for kind, cls in SCORERS.items() for scorer in instances(kind, cls)]
EVEN_BUDGETS: list[Budget] = [budget for kind, cls in BUDGETS.items() for budget in instances(kind, cls)]
# Heads that share a budget: one number of each kind, and one that leaves a head its last page.
SHARED_BUDGETS: list[Budget] = [
    dataclasses.replace(budget, scope=scope, floor=floor)
    for budget in (Tokens(45), Fraction(0.5), Threshold(0.4), Tokens(1))
    for scope in typing.get_args(Scope)
    for floor in (0.0, 0.5)
    if scope != "head" and (floor or budget != Tokens(1))
]
ALL_BUDGETS = EVEN_BUDGETS + SHARED_BUDGETS
ALL_READERS: list[Reader] = [reader for kind, cls in READERS.items() for reader in instances(kind, cls)]
# One of each kind of layout: what the store and the rows see differently.
SOME_CODECS: list[Codec] = [
    next(c for c in ALL_CODECS if repr(c) == text) if text else next(c for c in ALL_CODECS if c.kind == kind)
    for kind, text in [
        *((kind, "") for kind in CODECS),
        ("fp8", "Fp8(format='e5m2', scale='dynamic', exponents=(0,), hadamard=True)"),
        ("affine", "Affine(bits=4, axis='channel', group=16, mode='asymmetric', clip=1.0, hadamard=False)"),
        ("affine", "Affine(bits=3, axis='token', group=0, mode='midrise', clip=1.0, hadamard=True)"),
        ("affine", "Affine(bits=2, axis='channel', group=16, mode='symmetric', clip=1.0, hadamard=True)"),
    ]
]


def readers_of(key: Codec, value: Codec, page_tokens: int = PAGE) -> list[Reader]:
    """The readers that such pages allow, at least the dense one."""
    allowed = []
    for reader in ALL_READERS:
        try:
            KVConfig(key=key, value=value, reader=reader, page_tokens=page_tokens)
        except ValueError:
            continue
        allowed.append(reader)
    return allowed


def fits(codec: Codec, head_dim: int, kv_heads: int = 2, page_tokens: int = PAGE) -> bool:
    """Whether the codec says that it can store such heads."""
    try:
        codec.check(head_dim, kv_heads, page_tokens)
    except ValueError:
        return False
    return True


def name_of(thing: Any) -> str:
    """A test id."""
    values = ",".join(f"{f.name}={getattr(thing, f.name)}" for f in fields(thing))
    return f"{thing.kind}({values})"
