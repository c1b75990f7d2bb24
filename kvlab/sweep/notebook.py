"""The parameters of a notebook, strictly: also those that no cell knows. Reads the history of executed cells."""

import ast
from collections.abc import Mapping
from typing import Any

from kvlab.search.settings import UsageError
from kvlab.sweep.params import Params
from kvlab.sweep.settings import SweepConfig

# papermill begins the cell it injects with this line.
_INJECTED = "# Parameters"


def parameters(namespace: Mapping[str, Any], kind: type[Params] = SweepConfig) -> dict[str, Any]:
    """Every name that the notebook's parameter cells assign, with its value now. Pass `globals()`.

    The cells are the last one that assigns most parameters of `kind` and the last one papermill injected; they are
    found in the history of executed cells, so a misspelt name is returned too, for `from_params` of it to refuse.
    Names of other cells do not matter. Raises UsageError where no parameter cell has been run.
    """
    history = namespace.get("In")
    if history is None:
        raise UsageError("parameters() reads the history of a notebook; run it in Jupyter or with papermill")
    known = set(kind.names())
    own = injected = None
    for source in history:
        if source.lstrip().startswith(_INJECTED):
            injected = _assigned(source)
        elif len(known & set(names := _assigned(source))) > len(known) / 2:
            own = names
    if own is None:
        raise UsageError("no parameter cell has been run: run the cell tagged `parameters` first")
    wanted = [*own, *(injected or [])]
    gone = [name for name in wanted if name not in namespace]
    if gone:
        raise UsageError(f"parameters {', '.join(gone)} have no value any more: run the parameter cells again")
    return {name: namespace[name] for name in wanted}


def _assigned(source: str) -> list[str]:
    """Names assigned at the top level of a cell; none for what is not plain Python."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return []
    targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return [t.id for t in targets if isinstance(t, ast.Name)]
