"""Which implementation of a kernel runs. Asking for what cannot run is an error; `auto` says what it chose."""

from typing import Literal

Impl = Literal["auto", "torch", "reference"]


def choose(impl: Impl, available: tuple[str, ...] = ("torch", "reference")) -> str:
    """The implementation that will run: the first available one for `auto`, else exactly the one asked for.

    Raises ValueError when `impl` is not available, naming what is.
    """
    if impl == "auto":
        return available[0]
    if impl not in available:
        raise ValueError(f"impl must be one of {('auto', *available)}, got {impl!r}: it cannot run here; use 'auto'")
    return impl
