"""The generate pass: every item answered under every config by real decoding on a compressed cache, then graded.

All configs of an item fork from one prefill, and all of them are written beside each other. Asks for snapshots; does
not say how they come about.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from kvlab.attach import Attachment
from kvlab.cache import KVCache
from kvlab.config import KVConfig
from kvlab.decoding import Decoder, Job, Written
from kvlab.evals import metrics
from kvlab.evals.execution import Runner, grade_all
from kvlab.evals.grading import Graded
from kvlab.evals.subject import ItemScore
from kvlab.layer import ModelShape
from kvlab.questions import Question, scored
from kvlab.snapshot import Snapshot

Snapshots = Callable[[Sequence[Question]], list[Snapshot]]


class Forks:
    """Caches of every question under every config, numbered question by question. A snapshot is let go after the last
    config has forked from it.
    """

    def __init__(
        self, questions: Sequence[Question], configs: Sequence[KVConfig], snapshots: Snapshots, attachment: Attachment
    ) -> None:
        self.questions, self.configs = questions, configs
        self.snapshots, self.attachment = snapshots, attachment
        self.sizes: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        self._held: dict[int, Snapshot] = {}

    def pair(self, number: int) -> tuple[Question, KVConfig]:
        question, config = divmod(number, len(self.configs))
        return self.questions[question], self.configs[config]

    def __call__(self, numbers: Sequence[int]) -> list[KVCache]:
        """Fresh caches of these numbers; contexts that were not prefilled yet are, together."""
        wanted = {n // len(self.configs) for n in numbers}
        missing = sorted(wanted - self._held.keys())
        self._held |= dict(zip(missing, self.snapshots([self.questions[n] for n in missing]), strict=True))
        caches = [self._fork(n) for n in numbers]
        last = max(numbers)
        self._held = {n: s for n, s in self._held.items() if (n + 1) * len(self.configs) - 1 > last}
        return caches

    def _fork(self, number: int) -> KVCache:
        begin = time.perf_counter()
        cache = self._held[number // len(self.configs)].fork(self.pair(number)[1], self.attachment)
        self.sizes[number], self.seconds[number] = cache.nbytes, time.perf_counter() - begin
        return cache


def generated(decoder: Decoder, forks: Forks, shape: ModelShape, runner: Runner | None = None) -> Iterator[ItemScore]:
    """A row for every question and config, question by question, configs in order.

    Rows come as soon as all before them are there. Programs that are ready at the same time go to `runner` together.
    """
    jobs = [_job(question, config, shape) for question in forks.questions for config in forks.configs]
    done: dict[int, Written] = {}
    first, each = 0, len(forks.configs)
    for number, written in decoder.write(jobs, forks):
        done[number] = written
        ready = first
        while ready < len(jobs) and all(n in done for n in range(ready, ready + each)):
            ready += each
        numbers = range(first, ready)
        pairs, texts = [forks.pair(n) for n in numbers], [done[n].text for n in numbers]
        graded = grade_all([question.item for question, _ in pairs], texts, runner)
        for n, (question, config), found in zip(numbers, pairs, graded, strict=True):
            yield _row(question, config, shape, forks.sizes[n], forks.seconds[n], done.pop(n), found)
        first = ready


def _job(question: Question, config: KVConfig, shape: ModelShape) -> Job:
    item = question.item
    after = len(question.question) + item.max_new_tokens
    held = config.predicted_bytes(shape, len(question.context), after)
    return Job(question.question, item.stop, item.max_new_tokens, held)


def _row(
    question: Question,
    config: KVConfig,
    shape: ModelShape,
    size: int,
    forked: float,
    written: Written,
    found: Graded,
) -> ItemScore:
    right = float(any(metrics.exact(written.text, a) for a in question.item.answers))
    return scored(
        question,
        config,
        shape,
        measured_bytes=size,
        mode="true",
        form="generate",
        score=found.score,
        exact=right,
        token_accuracy=right,
        nll=float("nan"),
        kl=None,
        top1=None,
        prediction=written.text,
        answer_tokens=written.tokens,
        seconds=forked + written.seconds,
        extracted=found.extracted,
        benchmark=found.benchmark,
        outcome=found.outcome,
        implementation=written.cache.implementation,
    )
