"""One case, ready to run: what is called, what its outputs are judged by, and the bytes it must move."""

import gc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.data import poison

Outputs = tuple[Tensor, ...]
Call = Callable[[], Outputs]


class Check(NamedTuple):
    """`error` is |out - reference| / |reference| over everything compared, or the share of bytes that differ."""

    error: float
    tolerance: float
    reference: str

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # NaN is not


def poison_all(outputs: Outputs) -> None:
    """What a call must write holds NaN before it."""
    for output in outputs:
        poison(output)


class Prepared(NamedTuple):
    """`run` makes one call without a host synchronisation. `nbytes`: inputs read once, outputs written once.

    `clear` puts everything as it must be before a call whose outputs are checked, given those of an earlier one.
    """

    run: Call
    check: Callable[[Outputs], Check]
    nbytes: int
    impl: str
    clear: Callable[[Outputs], None] = poison_all


class Place(NamedTuple):
    """Where cases run, and with what numbers. `warm`: only so that what it needs gets compiled, on few pages."""

    device: str
    seed: int
    warm: bool = False

    @property
    def compute(self) -> torch.dtype:
        """What queries and raw tokens are: bf16 as models are, fp16 where the interpreter has no bf16 product."""
        return torch.bfloat16 if self.device == "cuda" else torch.float16

    def generator(self, case: Case) -> torch.Generator:
        """Fresh numbers for each case, the same whenever it runs alone."""
        return torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(case.name.encode()))


# Beside each other: what one operand's rounding to 8 bits of mantissa may cost, and to 11.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def relative(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference| in float64, NaN where either holds one; |out| where the reference is zero."""
    size = reference.double().norm()
    return float((out.double() - reference.double()).norm() / torch.where(size == 0, 1.0, size))


def differing(out: Tensor, reference: Tensor) -> float:
    """Share of bytes that differ."""
    a, b = (x.contiguous().view(torch.uint8) for x in (out, reference))
    if a.shape != b.shape:
        return 1.0
    return float((a != b.to(a.device)).double().mean())


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fresh memory holds NaN, or the greatest integer: what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its switch is a property of the module
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def give_back(device: str) -> None:
    """Return freed memory to the device, for the next case and for other processes."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
