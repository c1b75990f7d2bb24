"""Once: what a tensor says that all layers of a forward are given, read back from its device once and not per layer.

A layer that asks a GPU for a mask or a position waits for all that was queued before. What was read rides on the tensor
itself, and goes with it.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_ATTRIBUTE = "_kvlab_once"


def once(x: Tensor, about: Hashable, read: Callable[[Tensor], T]) -> T:
    """read(x), kept until x is written to or `about` is another. What is read must not hold x, which would be a cycle.

    Inference tensors do not count writes: there `about` has to tell one forward from the next.
    """
    key = (None if x.is_inference() else x._version, about)
    kept: tuple[Any, T] | None = getattr(x, _ATTRIBUTE, None)
    if kept is None or kept[0] != key:
        kept = (key, read(x))
        setattr(x, _ATTRIBUTE, kept)
    return kept[1]


def on_host(x: Tensor, about: Hashable) -> Tensor:
    """x on the CPU; `about` as in `once`."""
    return x if x.device.type == "cpu" else once(x, about, torch.Tensor.cpu)
