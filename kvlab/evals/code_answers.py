"""A generated answer as a whole program: its body alone, the full function again, Markdown fences, helpers, tabs.

Sources are parsed, never run. The five shapes in which models answer (and what they add around the code) are one
function each; a text in which none is found is a failed extraction. This file refuses to know sandboxes.
"""

import ast
import re
import warnings
from collections.abc import Iterator

from kvlab.evals.item import CodeCheck

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FIRST_CODE = re.compile(r"^(?:from|import|def|async def|class|@)\s?\S", re.MULTILINE)
# What may stand at the top level of an answer. Calls, prints and words of prose there are left out: they are no part
# of a function, and a word of prose that parses as a name would fail a right answer.
_KEPT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
_INDENT = "    "


def program(check: CodeCheck, text: str) -> str | None:
    """Source that defines what `check` tests, without its tests; None where the text holds no such code."""
    for piece in _pieces(check, text):
        found = _whole(check, piece) if _defines(check.entry, piece) else _body(check, piece)
        if found is not None:
            return found
    return None


def _pieces(check: CodeCheck, text: str) -> Iterator[str]:
    """Fenced blocks, those that define the function first; then the text before a fence, or all of it."""
    text = text.replace("\r\n", "\n")
    blocks = [found.group(1) for found in _FENCED.finditer(text)]
    yield from sorted(blocks, key=lambda block: not _defines(check.entry, block))
    yield text.partition("```")[0]


def _defines(entry: str, code: str) -> bool:
    """Whether a line at the left margin defines the function; without a name, whether it defines anything."""
    name = re.escape(entry) if entry else r"\w+"
    return re.search(rf"^(?:(?:async )?def {name}\b|{name}\s*=)", code, re.MULTILINE) is not None


def _whole(check: CodeCheck, code: str) -> str | None:
    """The full function, from the first line that is code. Imports and helpers of the prompt stay in front."""
    start = _FIRST_CODE.search(code)
    code = code[start.start() :] if start and start.start() < _first_definition(check.entry, code) else code
    return _longest(check, check.before, code) or _longest(check, check.before, _leading_tabs_out(code))


def _first_definition(entry: str, code: str) -> int:
    name = re.escape(entry) if entry else r"\w+"
    found = re.search(rf"^(?:(?:async )?def {name}\b|{name}\s*=)", code, re.MULTILINE)
    return found.end() if found else 0


def _body(check: CodeCheck, code: str) -> str | None:
    """The body alone, indented as it is, its first line not, or not at all."""
    if not check.entry or not code.strip():
        return None
    lines = code.strip("\n").split("\n")
    first = next(line for line in lines if line.strip())
    variants = []
    if first[0].isspace():
        variants.append("\n".join(lines))
    else:
        variants.append(_INDENT + "\n".join(lines))
        variants.append("\n".join(_INDENT + line if line.strip() else line for line in lines))
    found = [_longest(check, check.before, v) for way in variants for v in (way, _leading_tabs_out(way))]
    return max((source for source in found if source), key=lambda source: source.count("\n"), default=None)


def _leading_tabs_out(code: str) -> str:
    """Tabs that indent become four spaces each; tabs inside a line stay."""
    return re.sub(r"^[ \t]+", lambda m: m.group().replace("\t", _INDENT), code, flags=re.MULTILINE)


def _longest(check: CodeCheck, before: str, code: str) -> str | None:
    """`before` and the most lines of `code` that parse together and give the function a body."""
    lines = code.strip("\n").split("\n")
    for count in range(len(lines), 0, -1):
        source = (before.rstrip("\n") + "\n" if before else "") + "\n".join(lines[:count]) + "\n"
        tree = _parsed(source)
        if tree is not None and _complete(tree, check.entry):
            return _definitions_only(source, tree)
    return None


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of a model's escapes is nobody's concern here
            return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None  # all of them mean: this text is no Python


def _complete(tree: ast.Module, entry: str) -> bool:
    """Whether the last definition of the function does more than document itself."""
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (not entry or node.name == entry):
            return len(node.body) > 1 or not _is_docstring(node.body[0])
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == entry for t in node.targets):
            return True
    return not entry and any(isinstance(node, _KEPT) for node in tree.body)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _definitions_only(source: str, tree: ast.Module) -> str:
    """The source without top-level statements that define nothing."""
    gone: set[int] = set()
    for node in tree.body:
        if not isinstance(node, _KEPT):
            gone.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "".join(f"{line}\n" for n, line in enumerate(source.split("\n")[:-1], start=1) if n not in gone)
