"""The generate pass: every item answered under every config by real decoding on a compressed cache, then graded.

All configs of an item, and all its samples, fork from one prefill and are written beside each other. Asks for
snapshots; does not say how they come about.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvlab.attach import Attachment
from kvlab.cache import KVCache
from kvlab.config import KVConfig
from kvlab.decoding import Decoder, Job, Written
from kvlab.evals import metrics
from kvlab.evals.execution import Runner, grade_all
from kvlab.evals.grading import Graded
from kvlab.evals.sampling import GREEDY, Sampling
from kvlab.evals.subject import ItemScore
from kvlab.layer import ModelShape
from kvlab.questions import Question, scored
from kvlab.snapshot import Snapshot

Snapshots = Callable[[Sequence[Question]], list[Snapshot]]


class Forks:
    """Caches of every question under every config, `samples` of each, numbered question by question."""

    def __init__(
        self,
        questions: Sequence[Question],
        configs: Sequence[KVConfig],
        snapshots: Snapshots,
        attachment: Attachment,
        samples: int = 1,
    ) -> None:
        self.questions, self.configs, self.samples = questions, configs, samples
        self.snapshots, self.attachment = snapshots, attachment
        self.sizes: dict[int, int] = {}
        self.seconds: dict[int, float] = {}

    @property
    def each(self) -> int:
        """Caches of one question."""
        return len(self.configs) * self.samples

    def pair(self, number: int) -> tuple[Question, KVConfig]:
        question, rest = divmod(number, self.each)
        return self.questions[question], self.configs[rest // self.samples]

    def __call__(self, numbers: Sequence[int]) -> list[KVCache]:
        """Fresh caches of these numbers; contexts that were not prefilled yet are, together."""
        asked = sorted({n // self.each for n in numbers})
        found = dict(zip(asked, self.snapshots([self.questions[n] for n in asked]), strict=True))
        return [self._fork(n, found[n // self.each]) for n in numbers]

    def _fork(self, number: int, snapshot: Snapshot) -> KVCache:
        begin = time.perf_counter()
        cache = snapshot.fork(self.pair(number)[1], self.attachment)
        self.sizes[number], self.seconds[number] = cache.nbytes, time.perf_counter() - begin
        return cache


def generated(
    decoder: Decoder, forks: Forks, shape: ModelShape, runner: Runner | None = None, sampling: Sampling = GREEDY
) -> Iterator[ItemScore]:
    """A row for every question and config, question by question, configs in order, over all samples.

    Rows come as soon as all before them are there. Programs that are ready at the same time go to `runner` together.
    """
    count = len(forks.questions) * forks.each
    jobs = [_job(*forks.pair(n), shape, sampling, n % forks.samples) for n in range(count)]
    done: dict[int, Written] = {}
    first = 0
    for number, written in decoder.write(jobs, forks):
        done[number] = written
        ready = first
        while ready < count and all(n in done for n in range(ready, ready + forks.each)):
            ready += forks.each
        numbers = range(first, ready)
        items = [forks.pair(n)[0].item for n in numbers]
        graded = dict(zip(numbers, grade_all(items, [done[n].text for n in numbers], runner), strict=True))
        for start in numbers[:: forks.samples]:
            same = range(start, start + forks.samples)
            seconds = sum(forks.seconds[n] + done[n].seconds for n in same)
            answers = [(done.pop(n), graded[n]) for n in same]
            yield _row(*forks.pair(start), shape, forks.sizes[start], seconds, answers)
        first = ready


def _job(question: Question, config: KVConfig, shape: ModelShape, sampling: Sampling, sample: int) -> Job:
    item = question.item
    after = len(question.question) + item.max_new_tokens
    held = config.predicted_bytes(shape, len(question.context), after)
    luck = sampling.luck(item.id, sample)
    return Job(question.question, item.stop, item.max_new_tokens, held, sampling, luck)


def _row(
    question: Question,
    config: KVConfig,
    shape: ModelShape,
    size: int,
    seconds: float,
    answers: Sequence[tuple[Written, Graded]],
) -> ItemScore:
    """One row over the samples of a question: means of scores, the first text, the commonest outcome."""
    written, graded = zip(*answers, strict=True)
    right = _mean([float(any(metrics.exact(w.text, a) for a in question.item.answers)) for w in written])
    marked = [g.benchmark for g in graded if g.benchmark is not None]
    return scored(
        question,
        config,
        shape,
        measured_bytes=size,
        mode="true",
        form="generate",
        score=_mean([g.score for g in graded]),
        exact=right,
        token_accuracy=right,
        nll=float("nan"),
        kl=None,
        top1=None,
        prediction=written[0].text,
        answer_tokens=round(_mean([w.tokens for w in written])),
        seconds=seconds,
        extracted=all(g.extracted for g in graded),
        benchmark=_mean(marked) if marked else None,
        outcome=Counter(g.outcome for g in graded).most_common(1)[0][0],
        implementation=written[0].cache.implementation,
        samples=len(answers) if len(answers) > 1 else None,
        right=sum(g.score == 1.0 for g in graded) if len(answers) > 1 else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
