"""The process that works on cases: checks them, warms the compiler's cache, times them. One line of JSON for each job.

A failure ends the process with its traceback, and the parent goes on with a new one: after an illegal access nothing
on a device can be trusted.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvlab.bench.kernels import cases, peers, reading, writing
from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.data import codecs
from kvlab.bench.kernels.prepared import Check, Place, Prepared, give_back, unwritten_is_nan
from kvlab.bench.kernels.timing import Stopwatch
from kvlab.kernels.paged import LaunchOptions

RUNNERS: dict[str, Callable[[Case, Place], Prepared]] = {
    "decode": reading.prepare_decode,
    "sparse": reading.prepare_sparse,
    "scores": reading.prepare_scores,
    "select": reading.prepare_select,
    "bounds": reading.prepare_bounds,
    "encode": writing.prepare_encode,
    "compact": writing.prepare_compact,
}


class Child:
    """What jobs share: the place, and on a GPU a stopwatch."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stopwatch: Stopwatch | None = None

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        """One job's result."""
        kinds = {"device": self.device, "check": self.check, "warm": self.warm, "time": self.time, "tune": self.tune}
        return kinds[job["do"]](job)

    def device(self, job: dict[str, Any]) -> dict[str, Any]:
        """What the figures were taken on. On the CPU there are none."""
        facts: dict[str, Any] = {"name": self.place.device, "torch": torch.__version__, "triton": _triton()}
        watch = self._watch()
        if watch is None:
            return facts
        chip = torch.cuda.get_device_properties(0)
        return facts | {
            "name": chip.name,
            "capability": f"{chip.major}.{chip.minor}",
            "multiprocessors": chip.multi_processor_count,
            "memory_bytes": chip.total_memory,
            "l2_bytes": chip.L2_cache_size,
            "cuda": torch.version.cuda,
            "copy_gb_s": watch.copy_gb_s(),
            "floor_us": watch.floor_us(),
        }

    def check(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a case once on fresh data and compare."""
        case = self._case(job)
        return _judged(self._prepare(case, None))[1]

    def warm(self, job: dict[str, Any]) -> dict[str, Any]:
        """Let a case that will be timed compile here, beside others."""
        case = self._case(job)
        give_back(self.place.device)
        place = self.place._replace(warm=True)
        if "options" in job:
            reading.prepare_decode(case, place, self._options(case, job)).run()
        else:
            RUNNERS[case.kernel](case, place).run()
        return {}

    def tune(self, job: dict[str, Any]) -> dict[str, Any]:
        """Time a case with launch options of the job's, where a set leaves some out with those in use."""
        case = self._case(job)
        options = self._options(case, job)
        give_back(self.place.device)
        label = " ".join(f"{name}={x}" for name, x in options._asdict().items() if x is not None)
        return {"label": label} | self._timed(reading.prepare_decode(case, self.place, options))

    def _options(self, case: Case, job: dict[str, Any]) -> LaunchOptions:
        from kvlab.kernels.paged_triton import launch_options, target_of

        key, value = (kind.stored_as(case.shape.D) for kind in codecs(case.pair))
        target = target_of(torch.device(self.place.device))
        return launch_options(key, value, case.shape.D, self.place.compute, target)._replace(**(job["options"] or {}))

    def time(self, job: dict[str, Any]) -> dict[str, Any]:
        """Check a case, and time it only if it is right."""
        return self._timed(self._prepare(self._case(job), self._watch()))

    def _timed(self, prepared: Prepared) -> dict[str, Any]:
        watch = self._watch()
        ok, row = _judged(prepared)
        row |= {"bytes": prepared.nbytes, "impl": prepared.impl, "times": None}
        if ok and watch is not None:
            times, outputs = watch.time(prepared.run, prepared.clear)
            # What was timed must be right too, not only the call before it.
            again = prepared.check(outputs)
            row |= {"times": times._asdict() if again.ok else None, "check": _plain(again)}
        return row

    def _case(self, job: dict[str, Any]) -> Case:
        return cases.known(self.place.device)[job["case"]]

    def _prepare(self, case: Case, watch: Stopwatch | None) -> Prepared:
        give_back(self.place.device)
        if case.kernel == "sdpa":
            return peers.prepare(case, self.place, watch)
        return RUNNERS[case.kernel](case, self.place)

    def _watch(self) -> Stopwatch | None:
        if self.stopwatch is None and self.place.device == "cuda":
            self.stopwatch = Stopwatch()
        return self.stopwatch


def _judged(prepared: Prepared) -> tuple[bool, dict[str, Any]]:
    with unwritten_is_nan():
        outputs = prepared.run()
    verdict = prepared.check(outputs)
    return verdict.ok, {"check": _plain(verdict)}


def _plain(check: Check) -> dict[str, Any]:
    """As JSON, which has no NaN."""
    return check._asdict() | {"error": check.error if math.isfinite(check.error) else None, "ok": check.ok}


def _triton() -> str:
    import triton

    return triton.__version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Jobs from stdin, answers on stdout. Stops in good order when the time is up."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.bench.kernels.child")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--until", type=float, required=True, help="time.monotonic() of the last moment to begin a job")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    child = Child(Place(options.device, options.seed))
    for job in json.load(sys.stdin):
        if time.monotonic() > options.until:
            break
        print(json.dumps(child.do(job)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
