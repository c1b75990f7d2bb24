"""One run within its minutes: checks on many cores, then the table, then tuning where asked. No torch in this process.

Checks and the compiler's work for the timed cases are spread over processes, since compiling takes far longer than
running; timing is done in one process with the device to itself. The document is written after every answer.
"""

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.bench.kernels import cases, document
from kvlab.bench.kernels.cases import Case
from kvlab.bench.workers import Answer, cores, spread

# Processes that compile at once: each holds a context on the device.
MOST_PROCESSES = 12
# Of the minutes, kept back from the first phase so that something is timed.
_FIRST_SHARE = 0.5
# Before the end of the minutes no more jobs are begun, in seconds: the last one must end, and the table be printed.
_MARGIN_S = 25.0
_COMMAND = (sys.executable, "-m", "kvlab.bench.kernels.child")

Say = Callable[[str], None]


class Request(NamedTuple):
    """What was asked for. `only` is a regular expression over case names."""

    device: str
    out: Path | None = None
    minutes: float = 8.0
    only: str = ""
    tune: bool = False
    seed: int | None = None


class KernelBenchError(RuntimeError):
    """The run cannot begin."""


class Running:
    """The document while it grows."""

    def __init__(self, request: Request, say: Say) -> None:
        self.request, self.say = request, say
        self.seed = secrets.randbelow(2**31) if request.seed is None else request.seed
        self.began = time.monotonic()
        self.device: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.tuning: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []

    @property
    def end(self) -> float:
        return self.began + 60 * self.request.minutes - _MARGIN_S

    def answers(self, jobs: Sequence[dict[str, Any]], processes: int, until: float) -> Iterator[Answer]:
        """Answers of children on this device, with what was said about each."""
        command = (*_COMMAND, f"--device={self.request.device}", f"--seed={self.seed}", f"--until={until}")
        for done, answer in enumerate(spread(jobs, command, self._environment(), processes, until), start=1):
            what = answer.error or _said(answer.result or {})
            self.say(f"[{time.monotonic() - self.began:.0f} s, {done}/{len(jobs)}] {_name(answer.job)}: {what}")
            yield answer

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return kept | ({"TRITON_INTERPRET": "1"} if self.request.device == "cpu" else {})

    def document(self) -> dict[str, Any]:
        """All that is known so far."""
        rows = document.with_figures(self.rows, self.checks, self.device.get("copy_gb_s"))
        tuning = [row | {"gb_s": row["bytes"] / row["times"]["p50"] / 1e3} for row in self.tuning if row.get("times")]
        found = document.problems([*self.checks, *self.rows, *self.tuning])
        return {
            "schema": document.SCHEMA,
            "device": self.device,
            "seed": self.seed,
            "minutes": self.request.minutes,
            "seconds": time.monotonic() - self.began,
            "checks": self.checks,
            "rows": rows,
            "tuning": tuning + [row for row in self.tuning if not row.get("times")],
            "skipped": self.skipped,
            "problems": found,
            "ok": not found,
        }

    def save(self) -> dict[str, Any]:
        """The document, written where one was asked for: whole or not at all."""
        made = self.document()
        if self.request.out is not None:
            target = self.request.out / "kernels.json"
            part = target.with_suffix(".part")
            part.write_text(json.dumps(made, indent=1, allow_nan=False))
            part.replace(target)
        return made


def run(request: Request, say: Say) -> dict[str, Any]:
    """The whole document. Raises KernelBenchError where nothing can run."""
    if find_spec("triton") is None:
        raise KernelBenchError("triton is not installed: pip install 'kvlab[gpu]'")
    checks = [case for case in cases.checks(request.device) if _matches(case, request.only)]
    timed = cases.selected(cases.timed(request.device), request.only)
    tuned = cases.selected(cases.tuned(request.device), request.only) if request.tune else []
    if not (checks or timed or tuned):
        raise KernelBenchError(f"no case matches {request.only!r}: leave it out to run all")
    running = Running(request, say)
    try:
        if request.out is not None:
            request.out.mkdir(parents=True, exist_ok=True)
        running.save()
    except OSError as error:
        raise KernelBenchError(f"cannot write to {request.out}: {error}") from error
    running.device = _look(running)
    _first(running, checks, [] if request.tune else timed, tuned)
    if request.tune:
        _tuned(running, tuned)
    else:
        _timed(running, timed)
    return running.save()


def _look(running: Running) -> dict[str, Any]:
    """What the device is, and what it copies and launches at."""
    (answer,) = running.answers([{"do": "device"}], 1, running.end)
    if answer.result is None:
        raise KernelBenchError(f"device {running.request.device!r} cannot be used: {answer.error}")
    return answer.result


def _first(running: Running, checks: Sequence[Case], timed: Sequence[Case], tuned: Sequence[Case]) -> None:
    """Check small awkward cases; on a GPU let everything that will be timed compile beside them."""
    jobs: list[dict[str, Any]] = [{"do": "check", "case": case.name} for case in checks]
    if running.request.device == "cuda":
        jobs += [{"do": "warm", "case": case.name} for case in timed if case.kernel != "sdpa"]
        jobs += _tune_jobs(running, tuned, "warm")
    until = running.began + _FIRST_SHARE * (running.end - running.began)
    known = {case.name: case for case in (*checks, *timed, *tuned)}
    for answer in running.answers(jobs, min(MOST_PROCESSES, cores()), until):
        case = known[answer.job["case"]]
        if answer.job["do"] == "check":
            _take(running, running.checks, case, answer)
        elif answer.error and not answer.skipped:
            # The timed row will say it again, with its own name; nothing is lost here but time.
            running.say(f"warming {case.name} failed")
        running.save()


def _timed(running: Running, timed: Sequence[Case]) -> None:
    known = {case.name: case for case in timed}
    for answer in running.answers([{"do": "time", "case": name} for name in known], 1, running.end):
        _take(running, running.rows, known[answer.job["case"]], answer)
        running.save()


def _tuned(running: Running, tuned: Sequence[Case]) -> None:
    known = {case.name: case for case in tuned}
    for answer in running.answers(_tune_jobs(running, tuned, "tune"), 1, running.end):
        options = answer.job["options"]
        # Those in use are the child's to name; where it could not, they are still told from the others.
        _take(running, running.tuning, known[answer.job["case"]], answer, {"options": options, "in_use": not options})
        running.save()


def _tune_jobs(running: Running, tuned: Sequence[Case], do: str) -> list[dict[str, Any]]:
    """Every case with the options in use (none given), then with each other set; all cases before the next set."""
    sets = [None, *cases.options(running.request.device)]
    return [{"do": do, "case": case.name, "options": options} for options in sets for case in tuned]


def _take(running: Running, rows: list, case: Case, answer: Answer, extra: dict[str, Any] | None = None) -> None:
    """File an answer: a row, a row with its error, or a case that was not run."""
    if answer.skipped:
        running.skipped.append({"case": case.name, "reason": answer.error})
        return
    result = {"error": answer.error} if answer.result is None else answer.result
    if "skipped" in result:
        running.skipped.append({"case": case.name, "reason": result["skipped"]})
        return
    rows.append(document.row_of(case, (extra or {}) | result))


def _matches(case: Case, pattern: str) -> bool:
    return re.search(pattern, case.name) is not None


def _name(job: dict[str, Any]) -> str:
    options = job.get("options")
    return " ".join([job["do"], job.get("case", ""), *(f"{name}={x}" for name, x in (options or {}).items())]).strip()


def _said(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return result["skipped"]
    parts = []
    if (check := result.get("check")) is not None:
        parts.append(f"{'right' if check['ok'] else 'WRONG'}, {check['error']}")
    if times := result.get("times"):
        parts.append(f"{times['p50']:.1f} us, {result['bytes'] / times['p50'] / 1e3:.0f} GB/s")
    return ", ".join(parts) or "done"
