"""Run a sweep notebook from outside: papermill in a thread, a place for the output, the truth about how it ended.

papermill marks cells of a killed kernel as completed, so its metadata decides nothing here: a sweep has succeeded when
its notebook shows a result and that result's run folder says done.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import nbformat
import papermill
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from kvlab.runs import Run, write_whole
from kvlab.sweep.result import MIME, SweepRun

# Errors of a cell that mean a request which cannot be carried out, not a run that broke.
_USAGE = {
    "ModelError", "NoSpaceError", "NotCausalLMError", "NotFetchedError", "UnknownModelError", "UnsupportedModelError",
    "SandboxUnavailable", "UsageError", "WrongHashError",
}  # fmt: skip
_STOPPED = {"Interrupted", "KeyboardInterrupt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a notebook ended: exit code `code`; `run` for a sweep that is done; `why` for one that is not."""

    code: int
    notebook: Path
    html: Path | None = None
    run: SweepRun | None = None
    why: str = ""


def execute(notebook: Path, params: Mapping[str, Any], root: Path, *, html: bool = True) -> Outcome:
    """Run `notebook` with `params`. While it runs its output lies under `root`; once done, in its run folder."""
    root.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")[:-3] + "Z"
    draft = root / f"{notebook.stem}-{stamp}.ipynb"
    code, why = _papermill(notebook, draft, params)
    if code:
        return Outcome(code=code, notebook=draft, why=why)
    done = nbformat.read(draft, as_version=4)
    run, why = shown(done)
    if run is None:
        return Outcome(code=1, notebook=draft, why=why)
    final = Run(run.path).write_bytes("notebook.ipynb", draft.read_bytes())
    draft.unlink()
    page = None
    if html:
        page = final.with_suffix(".html")
        write_whole(page, to_html(done).encode())
    return Outcome(code=run.code, notebook=final, html=page, run=run)


def shown(notebook: nbformat.NotebookNode) -> tuple[SweepRun | None, str]:
    """The finished sweep that an executed notebook shows last, or None and why there is none."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if any(cell.execution_count is None for cell in code):
        return None, "some cells were never run"
    results = [o["data"][MIME] for cell in code for o in cell.outputs if MIME in o.get("data", {})]
    if not results:
        return None, "the notebook shows no result"
    run = Run.open(results[-1]["run"])
    if not run.is_complete():
        return None, f"run {run.path.name} is {run.state()}"
    return SweepRun.open(run.path), ""


def to_html(notebook: nbformat.NotebookNode) -> str:
    """The notebook as one page that asks nothing of any network: figures inside, no script from elsewhere."""
    # The classic template keeps the alternative text of images, which the default one drops.
    exporter = HTMLExporter(
        template_name="classic", require_js_url="", mathjax_url="", jquery_url="", mermaid_js_url=""
    )
    # Controls would be drawn by a script from elsewhere; whatever has controls has a picture beside them.
    still = nbformat.from_dict(notebook)
    still.metadata.pop("widgets", None)
    for cell in still.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    body, _ = exporter.from_notebook_node(still)
    return body


def _papermill(notebook: Path, out: Path, params: Mapping[str, Any]) -> tuple[int, str]:
    """Exit code and reason. papermill runs in a thread, because its own Ctrl-C handling kills the kernel unsaved."""
    kernels: list[int] = []

    class Noted(AsyncKernelManager):
        async def start_kernel(self, *args: Any, **kwargs: Any) -> Any:
            started = await super().start_kernel(*args, **kwargs)
            kernels.append(self.provisioner.pid)  # type: ignore[union-attr]
            return started

    work = {
        "parameters": dict(params),
        "progress_bar": False,
        "kernel_manager_class": Noted,
        # Without this ipykernel warns about its ports on every start.
        "config": Config({"KernelManager": {"transport_encryption": "required"}}),
    }
    with _interrupts(kernels) as asked, ThreadPoolExecutor(1) as pool:
        future = pool.submit(papermill.execute_notebook, str(notebook), str(out), **work)
        try:
            future.result()
        except PapermillExecutionError as error:
            stopped = error.ename in _STOPPED
            return 130 if stopped else 2 if error.ename in _USAGE else 1, f"{error.ename}: {error.evalue}".rstrip(": ")
        except (DeadKernelError, CellTimeoutError, RuntimeError, OSError) as error:
            return 130 if asked else 1, f"{type(error).__name__}: {error}".strip()
    return 0, ""


@contextlib.contextmanager
def _interrupts(kernels: list[int]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the kernels, which save and stop. Yields the signals seen so far."""
    seen: list[int] = []

    def passed_on(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if not kernels:
            raise KeyboardInterrupt
        print("stopping after the current items; once more to stop at once", file=sys.stderr)
        for pid in kernels:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    before = {number: signal.signal(number, passed_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
