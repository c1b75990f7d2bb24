"""Likelihood: what a teacher-forced pass reads out of the logits of a continuation, so that they need not be kept.

Knows tensors and items; nothing of caches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.evals.item import Item


class Read(NamedTuple):
    """One continuation of A tokens: log-probability of each of its own, the token that was likeliest in each place,
    and what the full cache would have said there: KL in nats and the share of equal likeliest tokens.
    """

    ids: Tensor
    logp: Tensor
    best: Tensor
    kl: float | None = None
    top1: float | None = None

    @property
    def mean(self) -> float:
        """Mean log-probability of a token."""
        return float(self.logp.mean())

    @property
    def hits(self) -> Tensor:
        return (self.best == self.ids).float()


def log_probs(logits: Tensor) -> Tensor:
    """In float32 at least; a model in float64 keeps its precision."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


class Reference(NamedTuple):
    """What the full cache says at A places, with all that each comparison with it needs."""

    logp: Tensor
    p: Tensor
    best: Tensor

    @classmethod
    def of(cls, logp: Tensor) -> "Reference":
        return cls(logp, logp.exp(), likeliest(logp))


def likeliest(logp: Tensor) -> Tensor:
    """The first of the likeliest tokens of each place. `max` takes a third of the time of `argmax`."""
    return logp.max(-1).indices


def read(logp: Tensor, ids: Sequence[int], reference: Reference | None = None) -> Read:
    """From log-probabilities [A, V], and those of the full cache where there is something to compare."""
    target = torch.tensor(ids, device=logp.device)
    best = likeliest(logp)
    kl = top1 = None
    if reference is not None:
        # Place by place: what is between the two passes stays in the processor's cache.
        kls = [p.dot(full - own) for p, full, own in zip(reference.p, reference.logp, logp, strict=True)]
        kl = max(0.0, float(torch.stack(kls).mean()))
        top1 = float((reference.best == best).float().mean())
    return Read(target, logp.gather(1, target.unsqueeze(1)).squeeze(1), best, kl, top1)


def choose(item: Item, reads: Sequence[Read]) -> tuple[float, str]:
    """Length-normalised likelihood over the choices: score and what was chosen. The gold one is first, loses ties."""
    means = [one.mean for one in reads]
    best = max(range(1, len(means)), key=means.__getitem__)
    chosen = 0 if means[0] > means[best] else best
    return float(chosen == 0), (item.answers[0], *(c for c in item.choices if c != item.answers[0]))[chosen]
