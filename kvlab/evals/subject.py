"""What the evaluation asks of a model, and the row it gets back for one item under one config.

A subject may be a local model with real compressed caches or a remote endpoint. This file refuses to know which: it
holds the row, the protocol, and the check that a row is well formed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from kvlab.evals.item import FAMILIES, SPLITS, Item, unknown

MODES = ("forked", "true")
"""`forked`: scored on a compressed copy of one full prefill. `true`: compression acted during real decoding."""
FORMS = ("greedy", "choice", "tokens", "generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScore:
    """One item under one config. Rows of two configs are paired by `item_id`.

    `score` is the task metric in [0, 1]; `exact` is 1.0 where the argmax hits every token of answers[0] under teacher
    forcing; `nll` is nats per answer token of answers[0] (NaN is allowed in form `generate` only, where nothing is
    forced); `kl` (nats) and `top1` compare with the full cache at the
    answer positions and are None where the row is the full cache itself. Bytes are those of the cache right after the
    context: measured over storages, predicted by the config, and what 16-bit storage would take. `implementation` is
    what computed attention over the cache: torch, numba or triton.

    Of generated answers: `extracted` says whether an answer could be read out of the text at all, `benchmark` is the
    score by the benchmark's own rule where that differs, `outcome` what a run of generated code ended in. Where several
    were drawn, `samples` of which `right` are right, `score` is the mean of theirs.
    """

    config_id: str
    item_id: str
    task: str
    family: str
    cluster: str
    split: str
    mode: str
    form: str
    score: float
    exact: float
    token_accuracy: float
    nll: float
    kl: float | None
    top1: float | None
    prediction: str
    context_tokens: int
    answer_tokens: int
    measured_bytes: int
    predicted_bytes: int
    raw16_bytes: int
    seconds: float
    implementation: str = "torch"
    extracted: bool | None = None
    benchmark: float | None = None
    outcome: str | None = None
    samples: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("family", self.family, FAMILIES),
            ("split", self.split, SPLITS),
            ("mode", self.mode, MODES),
            ("form", self.form, FORMS),
        ):
            if value not in known:
                raise unknown(kind, value, known)
        for name, value in (("score", self.score), ("exact", self.exact), ("token_accuracy", self.token_accuracy)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"item {self.item_id}: {name}={value} must lie in [0, 1]")
        if self.form != "generate" and not math.isfinite(self.nll):
            raise ValueError(f"item {self.item_id}: nll={self.nll} is not finite; the logits are broken")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        return bundle("score", {"schema": "kvlab.score/1", **asdict(self)})


@runtime_checkable
class Subject(Protocol):
    """A model as the evaluation sees it.

    A config is any frozen, hashable object with `.id` (12 hex digits), `.label` and `.to_toml()`.
    """

    name: str

    def score(self, items: Sequence[Item], configs: Sequence[Any]) -> Iterator[ItemScore]:
        """Teacher-forced rows for every item and config; each item's context is prefilled once."""
        ...

    def generate(self, items: Sequence[Item], configs: Sequence[Any]) -> Iterator[ItemScore]:
        """Rows from real decoding, for every item and config."""
        ...
