"""An executed notebook that arrives on stdin, as papermill pipes it: the result it shows last, and how it ended.

papermill marks cells of a killed kernel as completed, so a cell without an execution count was never run. Knows JSON
only, so that nothing of Jupyter is needed to read it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.report.document import check

MIME = "application/vnd.kvlab.result+json"


class FailedNotebookError(RuntimeError):
    """The notebook did not run to its end, or shows no result."""


def result_of(text: str) -> dict[str, Any]:
    """The result document of an executed notebook.

    Raises ValueError for what is no notebook, FailedNotebookError naming the cell that failed or was never run.
    """
    try:
        notebook = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"stdin is no notebook ({error}): pipe `papermill NOTEBOOK </dev/null` into this") from None
    if not isinstance(notebook, Mapping) or not isinstance(notebook.get("cells"), list):
        raise ValueError("stdin is JSON but no notebook: it has no cells")
    cells = [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]
    for n, cell in enumerate(cells, start=1):
        failed = next((o for o in cell.get("outputs", []) if o.get("output_type") == "error"), None)
        if failed is not None:
            raise FailedNotebookError(f"code cell {n} failed: {failed.get('ename')}: {failed.get('evalue')}")
        if cell.get("execution_count") is None:
            raise FailedNotebookError(f"code cell {n} was never run: the kernel was stopped, or died, before it")
    shown = list(_results(cells))
    if not shown:
        raise FailedNotebookError("the notebook ran to its end but shows no result")
    return check(shown[-1], "the notebook")


def _results(cells: list[Mapping]) -> Iterator[Any]:
    for cell in cells:
        for output in cell.get("outputs", []):
            if MIME in (output.get("data") or {}):
                yield output["data"][MIME]
