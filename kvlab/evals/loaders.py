"""Public question sets as items: GSM8K and CRUXEval, by hub id or from a local JSON Lines file.

What can be compressed is in the context (examples, the story, the function); what is asked comes after it. Worked
examples are our own, so that no training split is needed. This file refuses to know scores and models.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.evals.item import SPLITS, EvalSet, Item, unknown

Row = Mapping[str, Any]

GSM8K_EXAMPLES = (
    (
        "A shelf holds 4 rows of 6 jars. Nine of the jars are empty.",
        "How many jars are full?",
        "There are 4 * 6 = 24 jars.\nSo 24 - 9 = 15 jars are full.",
        "15",
    ),
    (
        "Nora reads 12 pages on each of 5 days and 20 pages on Saturday.",
        "How many pages does she read in all?",
        "On the 5 days she reads 12 * 5 = 60 pages.\nWith Saturday she reads 60 + 20 = 80 pages.",
        "80",
    ),
    (
        "A coat costs $90. It is sold for a third less.",
        "How many dollars does a buyer pay?",
        "A third of 90 is 90 / 3 = 30 dollars.\nThe buyer pays 90 - 30 = 60 dollars.",
        "60",
    ),
)
CRUXEVAL_EXAMPLES = (
    ("def f(a, b):\n    return a[::-1] + b", "'abc', 'x'", "'cbax'"),
    (
        "def f(nums):\n    kept = [n for n in nums if n % 2 == 0]\n    kept.append(len(nums))\n    return kept",
        "[3, 4, 8]",
        "[4, 8, 3]",
    ),
    ("def f(text):\n    return {c: text.count(c) for c in text}", "'noon'", "{'n': 2, 'o': 2}"),
)


@dataclass(frozen=True, slots=True)
class Loader:
    """Where a set lives on the hub, the columns it must have, and how a row becomes the parts of an item."""

    family: str
    hub_id: str
    subset: str | None
    hub_split: str
    columns: tuple[str, ...]
    key: Callable[[Row], str]
    parts: Callable[[Row], tuple[str, str, tuple[str, ...]]]
    stop: tuple[str, ...]
    max_new_tokens: int


def gsm8k_parts(row: Row) -> tuple[str, str, tuple[str, ...]]:
    """Examples and the story; its last sentence as the question; the worked answer and the bare number as gold."""
    shown = "".join(
        f"Question: {story} {ask}\nAnswer: {working}\n#### {value}\n" for story, ask, working, value in GSM8K_EXAMPLES
    )
    text = " ".join(str(row["question"]).split())
    story, ask = split_last_sentence(text)
    working = re.sub(r"<<[^<>]*>>", "", str(row["answer"])).strip()
    value = working.rpartition("####")[2].strip()
    lead = f" {story}" if story else ""
    return f"{shown}Question:{lead}", f" {ask}\nAnswer:", (f" {working}", f" {value}")


def split_last_sentence(text: str) -> tuple[str, str]:
    """All sentences but the last, and the last one. A full stop inside a number ends no sentence."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"')]?(?= +[A-Z$\d\"'])", text)]
    place = ends[-1] if ends else 0
    return text[:place].strip(), text[place:].strip()


def cruxeval_parts(row: Row) -> tuple[str, str, tuple[str, ...]]:
    """Examples and the function; the call as an unfinished assertion; the output as gold."""
    shown = "".join(f"{code}\nassert f({given}) == {output}\n" for code, given, output in CRUXEVAL_EXAMPLES)
    code = str(row["code"]).strip("\n")
    return f"{shown}{code}", f"\nassert f({row['input']}) ==", (f" {row['output']}",)


LOADERS = {
    "gsm8k": Loader(
        "math", "openai/gsm8k", "main", "test", ("question", "answer"),
        lambda row: str(row["question"]), gsm8k_parts, ("\nQuestion:",), 256,
    ),
    "cruxeval": Loader(
        "code", "cruxeval-org/cruxeval", None, "test", ("id", "code", "input", "output"),
        lambda row: str(row["id"]), cruxeval_parts, ("\n",), 64,
    ),
}  # fmt: skip


def split_of(task: str, key: str) -> str:
    """The split of a source row, by the first 32 bits u of sha256: search u < .35, confirm u < .85, else replicate."""
    u = int(hashlib.sha256(f"{task}|{key}".encode()).hexdigest()[:8], 16) / 2**32
    return "search" if u < 0.35 else "confirm" if u < 0.85 else "replicate"


def load_set(name: str, source: str | None = None, *, split: str, n: int, seed: int = 0) -> EvalSet:
    """`n` items of a public set; `source` is a hub id or a `.jsonl` file, by default the set's own hub id.

    The split depends on the row alone, the order on the seed, so a smaller `n` gives a prefix. Rows with the same key
    are taken once. Raises ValueError when the source cannot be read, lacks a column, or holds fewer than `n` rows.
    """
    if name not in LOADERS:
        raise unknown("public set", name, list(LOADERS))
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if n < 1:
        raise ValueError(f"n={n} items: at least 1 is needed")
    loader = LOADERS[name]
    where = source or loader.hub_id
    found: dict[str, tuple[int, Row]] = {}
    for index, row in enumerate(_rows(loader, where)):
        missing = [column for column in loader.columns if row.get(column) is None]
        if missing:
            raise ValueError(f"row {index} of {where} lacks {', '.join(missing)}; {name} needs {loader.columns}")
        if split_of(name, loader.key(row)) == split:
            found.setdefault(loader.key(row), (index, row))
    if len(found) < n:
        raise ValueError(f"{where} has {len(found)} rows in split {split!r}, {n} were asked for; ask for fewer")
    order = sorted(found, key=lambda key: hashlib.sha256(f"{name}|{split}|{seed}|{key}".encode()).hexdigest())
    items = tuple(_item(name, loader, split, seed, *found[key]) for key in order[:n])
    return EvalSet(f"{name}/{split}/{seed}", 1, items)


def _item(name: str, loader: Loader, split: str, seed: int, index: int, row: Row) -> Item:
    context, question, answers = loader.parts(row)
    return Item(
        id=f"{name}/{split}/{seed}/{index}",
        task=name,
        family=loader.family,
        context=context,
        question=question,
        answers=answers,
        cluster=f"{name}-{index}",
        stop=loader.stop,
        max_new_tokens=loader.max_new_tokens,
    )


def _rows(loader: Loader, where: str) -> Iterator[Row]:
    """Rows of a hub set or a local file. `datasets` is imported here: it is heavy and most runs need none of it."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    path = Path(where).expanduser()
    looks_local = where.endswith((".jsonl", ".json", ".gz")) or where.startswith((".", "/", "~"))
    if looks_local and not path.is_file():
        raise ValueError(f"no file {where!r}; pass a .jsonl file or a hub id such as {loader.hub_id}")
    try:
        if looks_local:
            loaded = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        else:
            loaded = datasets.load_dataset(where, loader.subset, split=loader.hub_split)
        for row in loaded:
            yield dict(row)
    except (OSError, ValueError, DatasetGenerationError) as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise ValueError(
            f"cannot read {where!r}: {type(error).__name__}: {lines[0]}. Check the id, the network, or pass a local "
            ".jsonl file"
        ) from error
