"""How long a call takes on a CUDA device: replays of its graph between two events, with nothing of its data in L2.

Between replays 256 MiB are read, not written: lines that were written would go back to memory while the call that is
timed runs, and be charged to it. The flush also keeps the device busy while the host enqueues the replay, so no gap of
the host falls between the events. Every call is timed by this one rule, peers included.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.bench.kernels.prepared import Call, Outputs, poison_all

REPLAYS = 100
FLUSH_BYTES = 256 * 2**20
COPY_BYTES = 4 * 2**30
_WARM_UP = 3


class Times(NamedTuple):
    """Percentiles of one call's time, in microseconds."""

    p10: float
    p50: float
    p90: float
    replays: int


def percentiles(microseconds: Sequence[float]) -> Times:
    """Nearest-rank percentiles. Raises ValueError without a value, or with one that is no time."""
    if not microseconds or not all(math.isfinite(t) and t > 0 for t in microseconds):
        raise ValueError(f"times must be positive and finite, got {list(microseconds)[:5]}")
    ranked = sorted(microseconds)
    p10, p50, p90 = (ranked[max(0, math.ceil(q * len(ranked)) - 1)] for q in (0.1, 0.5, 0.9))
    return Times(p10, p50, p90, len(ranked))


class Stopwatch:
    """Times calls on the current CUDA device. Holds the buffer that is read between replays."""

    def __init__(self) -> None:
        self._buffer = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self._sum = torch.empty((), device="cuda")

    def flush(self) -> None:
        """Replace what L2 holds."""
        torch.sum(self._buffer, dim=0, out=self._sum)

    def graph(self, call: Call) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """`call` as a CUDA graph, with the outputs its replays write. It has run before, so that nothing is compiled or
        set up while capturing.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            outputs = call()
        return captured, outputs

    def time(
        self, call: Call, clear: Callable[[Outputs], None] = poison_all, replays: int = REPLAYS
    ) -> tuple[Times, Outputs]:
        """Time `call` by replays of its graph; a host synchronisation inside it is an error of the capture.

        The outputs are those of one more replay after `clear`: what was timed can be checked.
        """
        captured, outputs = self.graph(call)
        times = self._between_events(captured.replay, replays)
        clear(outputs)
        captured.replay()
        torch.cuda.synchronize()
        return times, outputs

    def _between_events(self, once: Callable[[], object], replays: int) -> Times:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for start, end in marks:
            self.flush()
            start.record()
            once()
            end.record()
        torch.cuda.synchronize()
        return percentiles([start.elapsed_time(end) * 1e3 for start, end in marks])

    def copy_gb_s(self) -> float:
        """Bandwidth of a large copy on the device, bytes read plus bytes written, 1e9 to the GB."""
        free, _ = torch.cuda.mem_get_info()
        size = min(COPY_BYTES, free // 4)
        source: Tensor = torch.empty(size // 4, device="cuda").uniform_()
        target = torch.empty_like(source)
        times = self._between_events(lambda: target.copy_(source), 20)
        return 2 * source.numel() * 4 / times.p50 / 1e3

    def floor_us(self) -> float:
        """What a graph of one kernel with nothing to do costs: no call that is timed here can be quicker."""
        one = torch.zeros(1, device="cuda")
        return self.time(lambda: (one.add_(1),))[0].p50
