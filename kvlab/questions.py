"""Questions: items in tokens, rows of tokens beside each other, and what every score of a question says of it.

Knows a tokenizer's `encode` and sizes, no model.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.evals.subject import ItemScore
from kvlab.layer import ModelShape


@dataclass(frozen=True, slots=True)
class Question:
    """An item in tokens: what is compressed, what is asked, and each continuation to score, gold first."""

    item: Item
    context: tuple[int, ...]
    question: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def asked(self) -> str:
        """A name for question and gold answer within their context."""
        return hashlib.sha256(repr((self.question, self.continuations[0])).encode()).hexdigest()[:16]


def in_tokens(item: Item, encode: Callable[..., list[int]], query_aware: bool = False) -> Question:
    """The item as a model reads it; `query_aware` moves all but the question's last token before compression.

    Raises ValueError where a part of it gives no token.
    """
    context = encode(item.context)
    question = encode(item.question, add_special_tokens=False)
    if query_aware:
        context, question = context + question[:-1], question[-1:]
    choices = (item.answers[0], *(c for c in item.choices if c != item.answers[0]))
    continuations = tuple(tuple(encode(c, add_special_tokens=False)) for c in choices)
    if not context or not question or not all(continuations):
        raise ValueError(f"item {item.id}: context, question and answers must each give at least one token")
    return Question(item, tuple(context), tuple(question), continuations)


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, Q] with padding on the left, and which of them are real."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
    valid = torch.zeros(len(rows), width, dtype=torch.bool, device=device)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :] = torch.tensor(row, device=device)
        valid[b, width - len(row) :] = True
    return ids, valid


def scored(
    question: Question, config: KVConfig, shape: ModelShape, *, measured_bytes: int, **measured: Any
) -> ItemScore:
    """The row of a question under a config: what was measured, beside what is known of item and sizes."""
    item, tokens = question.item, len(question.context)
    return ItemScore(
        config_id=config.id,
        item_id=item.id,
        task=item.task,
        family=item.family,
        cluster=item.cluster,
        split=item.split,
        context_tokens=tokens,
        measured_bytes=measured_bytes,
        predicted_bytes=config.predicted_bytes(shape, tokens),
        raw16_bytes=shape.raw_bytes(tokens),
        **measured,
    )
