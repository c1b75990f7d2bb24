"""Small tensors on one thread. A parallel region costs microseconds on an idle machine and milliseconds on a busy one,
where its threads wait for each other; attention over a short row has dozens of them in every layer.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# 2 cores, 3 heads of 64, 225 tokens, 10 configs: 3.4 s with one thread against 91 s with two beside three other
# processes. Above this size a second thread pays.
SMALL_ELEMENTS = 2**19


def for_size(elements: int, device: torch.device) -> AbstractContextManager[None]:
    """One intra-op thread inside, if the largest operand on the CPU has few `elements`; the setting is put back."""
    if elements > SMALL_ELEMENTS or device.type != "cpu" or (before := torch.get_num_threads()) == 1:
        return nullcontext()
    return _one(before)


@contextmanager
def _one(before: int) -> Iterator[None]:
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
