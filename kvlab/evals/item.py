"""One question put to a model over a context, and a versioned, hashed set of them.

An item says what is prefilled, what is asked, and what the right answer is. It refuses to know about models, tokens,
caches and scores: the same item serves a local model and a remote endpoint.
"""

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

FAMILIES = ("retrieval", "math", "code")
SPLITS = ("search", "confirm", "replicate")
"""`search` chooses settings, `confirm` judges the finalists, `replicate` is for a second look at a claimed rise."""


FORCED = ("exact", "tokens")
"""What the teacher-forced pass scores: whether every gold token is the likeliest, or the share of those that are."""


def unknown(kind: str, value: object, known: tuple[str, ...] | list[str]) -> ValueError:
    """The error for a name that is not in a registry: the value, the nearest name, and all of them."""
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ValueError(f"unknown {kind} {value!r}{hint} Known: {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCheck:
    """How a generated function is tested: what stands `before` it, its name, and test source that runs after it.

    Plain text. Nothing here runs it.
    """

    before: str
    entry: str
    tests: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A context to prefill and compress, a question asked afterwards, and gold answers.

    `context + question + answers[0]` is the text as the model reads it, spaces and newlines included. With `choices`
    the item is multiple choice by length-normalised likelihood and every choice is written as it would follow the
    question. `cluster` names the source document or template: items of one cluster are not independent.

    Where the question asks for several things, `references` are all of them and `answers[0]` is their list in the order
    that the question states; without `references` the answers are alternatives. `depths` says where in the context what
    is asked for stands, from 0 to 1.

    `metric` names how a generated answer is compared (`kvlab.evals.grading`), `forced` what the teacher-forced pass
    scores; `check` holds the tests where the answer is code that has to run.
    """

    id: str
    task: str
    family: str
    context: str
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    cluster: str
    stop: tuple[str, ...] = ("\n",)
    max_new_tokens: int = 16
    metric: str = "exact"
    forced: str = "exact"
    check: CodeCheck | None = None
    references: tuple[str, ...] = ()
    depths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise unknown("family", self.family, FAMILIES)
        parts = self.id.rsplit("/", 3)
        if len(parts) != 4 or parts[0] != self.task or parts[1] not in SPLITS:
            raise ValueError(f"item id {self.id!r} must read {self.task}/<{'|'.join(SPLITS)}>/<seed>/<index>")
        if not self.context or not self.question:
            raise ValueError(f"item {self.id}: context and question must not be empty; the question ends in its cue")
        if not self.answers or not all(self.answers):
            raise ValueError(f"item {self.id}: answers must hold at least one non-empty string")
        if self.choices and self.answers[0] not in self.choices:
            raise ValueError(f"item {self.id}: answers[0]={self.answers[0]!r} is not among choices {self.choices}")
        if len(set(self.choices)) != len(self.choices) or len(self.choices) == 1 or not all(self.choices):
            raise ValueError(f"item {self.id}: choices must be two or more different strings, got {self.choices}")
        if self.forced not in FORCED:
            raise unknown("forced score", self.forced, FORCED)
        if self.forced == "tokens" and self.choices:
            raise ValueError(f"item {self.id}: choices are compared by likelihood; forced must be 'exact'")
        if self.metric == "likelihood" and self.forced != "tokens":
            raise ValueError(f"item {self.id}: running text is scored token by token; forced must be 'tokens'")
        if (self.metric == "execute") != (self.check is not None):
            raise ValueError(f"item {self.id}: metric 'execute' and a code check belong together")
        if not all(reference in self.answers[0] for reference in self.references):
            raise ValueError(f"item {self.id}: answers[0]={self.answers[0]!r} must list all of {self.references}")
        if not all(0.0 <= depth <= 1.0 for depth in self.depths):
            raise ValueError(f"item {self.id}: depths={self.depths} must lie in [0, 1]")
        if self.max_new_tokens < 1:
            raise ValueError(f"item {self.id}: max_new_tokens={self.max_new_tokens} must be at least 1")

    @property
    def split(self) -> str:
        """`search`, `confirm` or `replicate`, as written in the id."""
        return self.id.rsplit("/", 3)[1]

    @property
    def form(self) -> str:
        """`choice` where there are choices, `tokens` where the share of right tokens is the score, else `greedy`."""
        return "choice" if self.choices else "tokens" if self.forced == "tokens" else "greedy"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle
        from kvlab.show.item import document

        return bundle("item", document(asdict(self) | {"form": self.form, "split": self.split}))


@dataclass(frozen=True, slots=True)
class EvalSet:
    """An ordered, versioned set of items. A shorter run is a prefix of a longer one."""

    name: str
    version: int
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for item in self.items:
            if item.id in seen:
                raise ValueError(f"evaluation set {self.name!r} holds item {item.id!r} twice; ids must be unique")
            seen.add(item.id)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def families(self) -> tuple[str, ...]:
        """The families present, in the fixed order of FAMILIES."""
        present = {item.family for item in self.items}
        return tuple(family for family in FAMILIES if family in present)

    @property
    def sha256(self) -> str:
        """Hash over name, version and the canonical JSON of the items in order."""
        body = {"name": self.name, "version": self.version, "items": [_plain(item) for item in self.items]}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def head(self, n: int) -> "EvalSet":
        """The first `n` items of every family, order kept. `n` beyond the end keeps all; below 1 is an error."""
        if n < 1:
            raise ValueError(f"head({n}): at least one item per family is needed")
        taken: dict[str, int] = dict.fromkeys(FAMILIES, 0)
        kept = []
        for item in self.items:
            if taken[item.family] < n:
                taken[item.family] += 1
                kept.append(item)
        return EvalSet(self.name, self.version, tuple(kept))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle
        from kvlab.show.items import rows_of

        about = {"name": self.name, "version": self.version, "n": len(self), "sha256": self.sha256}
        return bundle("items", {"schema": "kvlab.items/1", **about, "tasks": rows_of(self.items)})


_LATER = {"metric": "exact", "forced": "exact", "check": None, "references": (), "depths": ()}


def _plain(item: Item) -> dict[str, Any]:
    """An item as plain data. Fields that came later are left out at their defaults, so that older hashes stay."""
    return {key: value for key, value in asdict(item).items() if key not in _LATER or value != _LATER[key]}
