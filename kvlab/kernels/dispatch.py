"""Which implementation of a kernel runs. Asking for what cannot run is an error; `auto` says what it chose.

"triton" and "numba" are optional extras, so a kernel's module imports them inside its function, after `choose`.
"""

import functools
import importlib.util
import os
from typing import Literal

import torch

Impl = Literal["auto", "triton", "numba", "torch", "reference"]
CPU = torch.device("cpu")
_EXTRAS = {"triton": "pip install 'kvlab[gpu]'", "numba": "pip install 'kvlab[cpu]'"}


@functools.cache
def installed(name: str) -> bool:
    """Whether an optional module could be imported."""
    return importlib.util.find_spec(name) is not None


def interpreted() -> bool:
    """Whether triton kernels run in triton's interpreter, on CPU tensors: triton's own switch, read at its import."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _obstacle(name: str, device: torch.device) -> str | None:
    """Why `name` cannot run on tensors of `device`, with the way out; None where it can."""
    if name in _EXTRAS and not installed(name):
        return f"{name} is not installed: {_EXTRAS[name]}"
    if name == "triton" and device.type == "cpu" and not interpreted():
        return "triton runs on the CPU only in its interpreter: set TRITON_INTERPRET=1 before Python starts"
    if name == "triton" and device.type not in ("cpu", "cuda"):
        return f"triton kernels run on CUDA or ROCm devices, got {device.type!r}: use impl='torch'"
    if name == "numba" and device.type != "cpu":
        return f"numba kernels run on CPU tensors, got {device.type!r}: use impl='auto'"
    return None


def choose(impl: Impl, available: tuple[str, ...] = ("torch", "reference"), device: torch.device = CPU) -> str:
    """The implementation that will run: for `auto` the first available one that is at home on `device`, else exactly
    the one asked for. Triton is at home on GPUs; its interpreter runs only where "triton" is asked for.

    Raises ValueError when `impl` is not available or cannot run on tensors of `device`, saying what would help.
    """
    if impl == "auto":
        at_home = (n for n in available if not (n == "triton" and device.type == "cpu"))
        return next(n for n in at_home if _obstacle(n, device) is None)
    if impl not in available:
        raise ValueError(f"impl must be one of {('auto', *available)}, got {impl!r}: it cannot run here; use 'auto'")
    obstacle = _obstacle(impl, device)
    if obstacle is not None:
        raise ValueError(f"impl={impl!r} cannot run: {obstacle}")
    return impl


def on_pages(impl: Impl, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """What writes, moves and reads pages on `device` where `impl` was asked for: "triton", or "torch".

    Triton computes in float32, so float64 is for torch; numba attends to single tokens and leaves pages to torch.
    Raises ValueError as `choose` does.
    """
    available = ("torch",) if dtype == torch.float64 else ("triton", "torch")
    return "torch" if impl == "numba" else choose(impl, available, device)
