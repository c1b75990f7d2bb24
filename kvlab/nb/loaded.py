"""A run read back from its folder, finished or not: tables, figure, rows. Needs no kernel that has seen it before."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pandas as pd
from IPython.display import Image

from kvlab.nb.sketch import alt as sketch_alt
from kvlab.nb.sketch import sketch
from kvlab.report import document as doc
from kvlab.report.figures.ink import png
from kvlab.report.figures.tradeoff import alt, pareto
from kvlab.report.frames import readable, tables
from kvlab.report.shown import labels_of, result_document
from kvlab.runs import Run
from kvlab.show import result as shown
from kvlab.sweep.places import default_root

if TYPE_CHECKING:
    from kvlab.config import KVConfig


@dataclass(frozen=True, slots=True, eq=False)
class LoadedRun:
    """`run` is the folder, `result` its document, summed up from the rows where it has none."""

    run: Run
    result: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def state(self) -> str:
        return self.run.state()

    @property
    def table(self) -> pd.DataFrame:
        """The baseline and every judged config as text: bytes, paired differences with intervals and n, verdict."""
        document = self._document()
        return pd.DataFrame(shown.rows(document), columns=shown.header(document))

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The numbers behind the report, by name."""
        return tables(self.result)

    def readable(self, name: str) -> pd.DataFrame:
        """One of `tables` as text, with units."""
        return readable(name, self.tables[name])

    @property
    def rows(self) -> pd.DataFrame:
        """Every item row."""
        return self.run.rows()

    def config(self, name: str) -> "KVConfig":
        """A config that the run scored, by id, beginning of an id, or label, ready to be attached or scored again."""
        # Configs need torch, which looking at a run does not.
        from kvlab.recorded import named

        return named(self.run, name)

    @property
    def figure(self) -> Image:
        """Bytes against accuracy as PNG with alternative text; before there is a result, what was scored so far."""
        data, words = picture(self.run, self.result)
        return Image(data=data, format="png", alt=words)

    def __repr__(self) -> str:
        return shown.text(self._document())

    def _document(self) -> dict[str, Any]:
        scored = self.result["schema"] == "kvlab.rows/1"
        return result_document(self.result, labels_of(self.run) if scored else {})

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        return bundle("result", self._document(), json=self.result)


def load(run: str | Path | Run, *, root: Path | None = None) -> LoadedRun:
    """Read a run back by path, or by a unique beginning of its name or hash under `root`, by default the session's.

    A run that is not done is read as far as it has got and says so everywhere. Raises FileNotFoundError naming the
    nearest run, ValueError for an ambiguous name, an edited config or a result of an unknown schema.
    """
    found = run if isinstance(run, Run) else Run.open(run, root=default_root() if root is None else root)
    return LoadedRun(found, doc.load(found, partial=True))


def picture(run: Run, result: Mapping[str, Any]) -> tuple[bytes, str]:
    """PNG and words of a run's figure: of its result, else of its rows. Whatever style the kernel has, the same."""
    with mpl.rc_context():
        mpl.rcdefaults()
        if doc.families(result):
            return png(pareto(result)), alt(result)
        scored, labels = result.get("scored") or [], labels_of(run)
        return png(sketch(scored, labels)), sketch_alt(scored, labels)
