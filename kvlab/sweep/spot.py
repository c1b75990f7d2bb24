"""The search for the best cache under a budget, from a notebook: the steps and files of `python -m kvlab.search`.

An unfinished run of the same request is gone on with; no item is scored twice.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

from kvlab.progress import Progress
from kvlab.report.files import write
from kvlab.runs import Run, listing
from kvlab.search import engine
from kvlab.search.engine import Session
from kvlab.search.settings import UsageError, writable
from kvlab.sweep.kernel import telling
from kvlab.sweep.places import default_root
from kvlab.sweep.result import SweepRun
from kvlab.sweep.settings import SpotConfig


def run_search(
    config: SpotConfig, *, quiet: bool = False, show: Callable[[Run, int], Progress] | None = None
) -> SweepRun:
    """Search, confirm, and write run folder and report; sweet_spot.toml in it holds a winner's settings.

    Raises UsageError, before the model is loaded, where the run could not be written; ModelError and BrokenBaseline
    for the model; Interrupted, with everything saved, when asked to stop. `show` gives what shows the progress of so
    many units, by default lines on stderr.
    """
    root = Path(config.out).expanduser() if config.out else default_root()
    writable(root)
    session = engine.open_session(config.request())
    if not config.memo:
        session.memo = None
    run = _unfinished(session, root) or engine.start(session, root)
    with telling() as stream:
        print(f"run: {run.path}\n{engine.forecast(run)}", file=stream)
        lines = partial(_lines, stream, quiet)
        engine.execute(session, run, show=show or lines)
    write(run)
    return SweepRun.open(run.path)


def _lines(stream: TextIO, quiet: bool, run: Run, planned: int) -> Progress:
    return Progress(planned, quiet=quiet, stream=stream)


def _unfinished(session: Session, root: Path) -> Run | None:
    """The newest interrupted or failed search that asked the same of the same model, items and versions."""
    names = listing(root)["name"] if root.is_dir() else []
    for name in reversed([n for n in names if f"-{engine.SLUG}-" in n]):
        run = Run.open(root / name)
        if run.state() not in ("interrupted", "failed") or run.config["request"] != session.request.to_dict():
            continue
        try:
            engine.check_resumable(session, run)
        except UsageError:
            continue  # its scores would not compare
        return run
    return None
