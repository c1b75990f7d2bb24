"""A finished sweep or search as an object: read from its run folder, shown as text, HTML or JSON. Knows result
documents only.

Nothing shown depends on a kernel's state, a network or the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Image
from matplotlib.figure import Figure

from kvlab.report import document as doc
from kvlab.report.figures.ink import png, svg
from kvlab.report.figures.tradeoff import alt
from kvlab.report.repeat import flip_floor
from kvlab.report.shown import result_document
from kvlab.runs import Run
from kvlab.sweep import figures
from kvlab.sweep.figures import TITLES

SCHEMAS = ("kvlab.sweep/1", "kvlab.search/1")
MIME = "application/vnd.kvlab.result+json"


@dataclass(frozen=True, slots=True)
class SweepRun:
    """`path` is the run folder, `result` its document: kvlab.sweep/1, or kvlab.search/1 of a search."""

    path: Path
    result: Mapping[str, Any]

    @classmethod
    def open(cls, run: str | Path, *, root: Path = Path("runs")) -> "SweepRun":
        """Read a finished one back. Raises IncompleteError for an unfinished one, ValueError for what is neither."""
        found = Run.open(run, root=root)
        result = doc.load(found)
        if result["schema"] not in SCHEMAS:
            raise ValueError(f"{found.path.name} holds {result['schema']}, not a sweep; see python -m kvlab.report")
        return cls(found.path, result)

    @property
    def table(self) -> pd.DataFrame:
        """One line per config: bytes at the workload and, per family, difference with 90 % interval and verdict."""
        return verdict_table(self.result)

    @property
    def likelihoods(self) -> pd.DataFrame:
        """One line per config of a sweep: per family, nats per answer token lost against the full cache, 90 % interval.

        They show losses that no answer shows; nothing is judged by them.
        """
        return likelihood_table(self.result)

    @property
    def toml(self) -> str:
        """The config to use, as settings that `KVConfig.from_toml` reads; "" where none is shown to hold."""
        chosen = doc.best(self.result)
        return chosen["toml"] if chosen else ""

    @property
    def code(self) -> int:
        """Exit code: 0 judged, 3 nothing fits the budget, 4 judged but for configs that could not be."""
        if self.result["schema"] == "kvlab.sweep/1":
            return 4 if self.result["failures"] else 0
        if any(t["state"] == "failed" for t in self.result["trials"]):
            return 4
        return 0 if self.result["finalists"] else 3

    @property
    def figure(self) -> Image:
        """Bytes against accuracy, as PNG with the figure in words as its alternative text."""
        data = (self.path / "figures" / "pareto.png").read_bytes()
        return Image(data=data, format="png", alt=alt(self.result))

    def losses(self) -> Image:
        """Nats lost by every config of a sweep, one column per family; also written to figures/losses.png and .svg."""
        return self._drawn("losses", figures.losses(self.result), self.likelihoods)

    def curves(self, x: str, hue: str, style: str) -> Image:
        """Losses along an axis of a sweep, such as `keep` or `read_bytes`, one line for each `hue` and `style`; also
        written to figures/curves.png and .svg."""
        return self._drawn("curves", figures.curves(self.result, x, hue, style), self.likelihoods)

    def _drawn(self, name: str, figure: Figure, twin: pd.DataFrame) -> Image:
        run = Run(self.path)
        data = png(figure)
        run.write_bytes(f"figures/{name}.png", data)
        run.write_bytes(f"figures/{name}.svg", svg(figure))
        return Image(data=data, format="png", alt=f"{TITLES[name]}\n{twin.to_string(index=False)}")

    def __repr__(self) -> str:
        table = self.table.to_string(index=False, justify="left")
        return "\n".join([*lines(self.result), "", table, "", *footnotes(self.result), f"run: {self.path}"])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        return bundle("result", result_document(self.result), json=self.result) | {"text/plain": repr(self)}


def verdict_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """Largest first, those of one size in the order asked, as text; differences in points against the full cache on
    the same items."""
    rows = []
    for entry in sorted(doc.judged(result), key=lambda e: -e["workload_bytes"]):
        cells = {f: _cell(pair) for f in doc.families(result) if (pair := entry["families"].get(f))}
        read = {"read a step": f"{entry['read_bytes'] / 1e9:.2f} GB"} if "read_bytes" in entry else {}
        rows.append(
            {
                "format": entry.get("format", entry["label"]),
                "at workload": f"{entry['workload_bytes'] / 1e9:.2f} GB",
                **read,
                "fits": "yes" if doc.fits(result, entry) else "no",
                "bits": f"{entry['workload_effective_bits']:.2f}",
                **cells,
                "verdict": entry["verdict"],
            }
        )
    return pd.DataFrame(rows)


def likelihood_table(result: Mapping[str, Any]) -> pd.DataFrame:
    """The same order; nats per answer token against the full cache, as text. Empty without forced answers."""
    rows = []
    for entry in sorted(doc.judged(result), key=lambda e: -e["workload_bytes"]):
        found = entry.get("likelihood") or {}
        cells = {f: _nats(found[f]) for f in doc.families(result) if f in found}
        if cells:
            bits = f"{entry['workload_effective_bits']:.2f}"
            rows.append({"format": entry.get("format", entry["label"]), "bits": bits, **cells})
    return pd.DataFrame(rows)


def lines(result: Mapping[str, Any]) -> list[str]:
    """Verdict and budget, one sentence each."""
    word, sentence = doc.headline(result)
    return [f"{word}  {sentence}", doc.budget_line(result)]


def footnotes(result: Mapping[str, Any]) -> list[str]:
    """What the table rests on."""
    margin, controls = result["margin"], result["controls"]
    positive = controls["positive"]
    missed = [family for family, found in positive["families"].items() if not found["failed"]]
    caught = f"missed on {', '.join(missed)}" if missed else "caught"
    return [
        f"margin {margin['value_points']:g} points, n = {margin['n']} a family: {margin['rule']}",
        f"controls: {flip_floor(controls['aa'])}; known bad {positive['label']}, {caught}",
        *(f"note: {note}" for note in doc.warnings(result)),
    ]


def _nats(found: Mapping[str, Any]) -> str:
    if not doc.finite(found.get("low")):
        return f"{found['dnll']:+.3f}"
    return f"{found['dnll']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _cell(pair: Mapping[str, Any]) -> str:
    if not doc.finite(pair.get("low")):
        return str(pair["verdict"])
    diff, low, high = (100 * pair[k] for k in ("diff", "low", "high"))
    needs = f", needs n = {pair['n_needed']:,}" if pair.get("n_needed") else ""
    return f"{diff:+.1f} [{low:+.1f}, {high:+.1f}] {pair['verdict']}{needs}"
