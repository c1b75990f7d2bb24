"""Decoding: answers written token by token, many rows at once, each on a compressed cache of its own.

A row that has ended leaves the batch and a waiting one takes its place, so no forward is spent on what is done. What a
row gets does not depend on its company. Knows caches, tokens and stop strings; nothing of items and their scores.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab.batching import Batcher, Need
from kvlab.cache import KVCache, cache_kwarg
from kvlab.evals.metrics import cut
from kvlab.evals.sampling import GREEDY, Sampling
from kvlab.questions import left_padded
from kvlab.stacked import StackedCache

_JOIN_SHARE = 4


class Job(NamedTuple):
    """One answer to write: the tokens that ask for it, where its text is cut, how many tokens it may take, the bytes
    its cache will hold in the end, and how its tokens are chosen, by which luck.
    """

    prompt: tuple[int, ...]
    stop: tuple[str, ...]
    most: int
    held: int
    sampling: Sampling = GREEDY
    luck: str = ""


class Written(NamedTuple):
    """An answer: text before its stop string, tokens drawn for it, its cache, and its share of the seconds."""

    text: str
    tokens: int
    cache: KVCache
    seconds: float


Fork = Callable[[Sequence[int]], list[KVCache]]


@dataclass(slots=True, eq=False)
class _Row:
    number: int
    job: Job
    cache: KVCache
    drawn: list[int] = field(default_factory=list)
    text: str = ""
    seconds: float = 0.0
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.job.luck)

    def chosen(self, logits: Tensor, likeliest: int) -> int:
        sampling = self.job.sampling
        return draw(logits, sampling, self.draws.random()) if sampling.temperature else likeliest


def draw(logits: Tensor, sampling: Sampling, luck: float) -> int:
    """The token at `luck`, a number in [0, 1), of the distribution over logits [V], likeliest tokens first."""
    wide = logits.detach().to("cpu", torch.float64) / sampling.temperature
    share, order = torch.softmax(wide, dim=-1).sort(descending=True, stable=True)
    upto = share.cumsum(0)
    kept = int(torch.searchsorted(upto, torch.tensor(sampling.top_p * float(upto[-1]), dtype=upto.dtype))) + 1
    upto = upto[: min(kept, len(upto))]
    at = torch.searchsorted(upto, torch.tensor(luck * float(upto[-1]), dtype=upto.dtype), right=True)
    return int(order[min(int(at), len(upto) - 1)])


class Decoder:
    """A model that writes, as many answers at once as `batcher` has room for; without `stackable` one by one."""

    def __init__(self, model: Any, tokenizer: Any, batcher: Batcher, *, stackable: bool) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.batcher, self.stackable = batcher, stackable
        ends = model.generation_config.eos_token_id
        self.ends = set(ends) if isinstance(ends, list) else {ends} if ends is not None else set()

    @torch.no_grad()
    def write(self, jobs: Sequence[Job], fork: Fork) -> Iterator[tuple[int, Written]]:
        """Each job's number with its answer, as they end. `fork` gives fresh caches for the jobs of these numbers.

        Where memory runs out, the open answers are begun again, half as many at once: a forward that broke off has
        left their caches between two layers.
        """
        waiting, active, full = deque(range(len(jobs))), list[_Row](), 0
        stack: StackedCache | KVCache | None = None
        while waiting or active:
            numbers = self._joining(jobs, waiting, len(active), full)
            try:
                if numbers:
                    rows = [_Row(n, jobs[n], c) for n, c in zip(numbers, fork(numbers), strict=True)]
                    going = self._step(rows, self._stack(rows), [row.job.prompt for row in rows])
                else:
                    rows, stack = active, stack or self._stack(active)
                    going = self._step(rows, stack, [row.drawn[-1:] for row in rows])
            except (RuntimeError, MemoryError) as error:
                if not self.batcher.fewer(len(active) + len(numbers), error):
                    raise
                waiting.extendleft(sorted([*numbers, *(row.number for row in active)], reverse=True))
                rows, active, stack = [], [], None
                continue
            ended = [row for row in rows if row not in going]
            if numbers or ended:
                active, stack = [*active, *going] if numbers else going, None
            full = len(active) if numbers else full
            for row in ended:
                yield row.number, Written(row.text, len(row.drawn), row.cache, row.seconds)

    def _joining(self, jobs: Sequence[Job], waiting: deque[int], active: int, full: int) -> list[int]:
        """Who joins now. Several at a time, because each joining is a forward of its own."""
        if not waiting or (active and full - active < max(1, full // _JOIN_SHARE)):
            return []
        needs = [Need(len(jobs[n].prompt), 1, jobs[n].held) for n in list(waiting)[: self.batcher.most]]
        return [waiting.popleft() for _ in range(self.batcher.count(needs, active))]

    def _stack(self, rows: Sequence[_Row]) -> StackedCache | KVCache:
        return StackedCache([row.cache for row in rows]) if self.stackable else rows[0].cache

    def _step(self, rows: Sequence[_Row], stack: StackedCache | KVCache, tokens: Sequence[Sequence[int]]) -> list[_Row]:
        """One forward, one token more for each row; those that go on."""
        begin = time.perf_counter()
        ids, valid = left_padded(tokens, self.model.device)
        logits = self._forward(stack, ids, valid)
        tokens_of = zip(rows, logits, logits.argmax(-1).tolist(), strict=True)
        going = [row for row, own, likeliest in tokens_of if self._goes_on(row, row.chosen(own, likeliest))]
        share = (time.perf_counter() - begin) / len(rows)
        for row in rows:
            row.seconds += share
        return going

    def _forward(self, stack: StackedCache | KVCache, ids: Tensor, valid: Tensor) -> Tensor:
        """Logits [B, V] after the last token."""
        more: dict[str, Any] = {cache_kwarg(): stack}
        if isinstance(stack, StackedCache):
            stack.expect(None if bool(valid.all()) else valid)
            more["position_ids"] = stack.positions(valid)
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **more).logits[:, -1]

    def _goes_on(self, row: _Row, token: int) -> bool:
        """Take the token in; whether the answer is still open."""
        if token in self.ends:
            return False
        row.drawn.append(token)
        whole = self.tokenizer.decode(row.drawn)
        row.text = cut(whole, row.job.stop)
        return row.text == whole and len(row.drawn) < row.job.most
