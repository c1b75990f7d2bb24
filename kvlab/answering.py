"""Scores of real decoding where answers are judged, and of the teacher-forced pass everywhere else.

A search is steered by likelihoods, which say more with few items. What is claimed of a config may rest on the answers
it writes: with this in front of a subject, items of the confirmation are decoded, read and graded.
"""

import contextlib
from collections.abc import Iterator, Sequence

from kvlab.config import KVConfig
from kvlab.evals.execution import Runner, gradable
from kvlab.evals.item import Item
from kvlab.evals.sampling import GREEDY, Sampling
from kvlab.evals.subject import ItemScore
from kvlab.evals.summary import by_task, extraction_note, pass_note
from kvlab.sandbox.running import Sandbox
from kvlab.subject import Counters, LocalSubject

JUDGED = ("confirm", "replicate")


class Answering:
    """A subject whose `score` decodes items of the splits that are judged.

    Multiple choice and running text are scored by likelihood all the same, and so is code without a `runner`: nothing
    runs that was not allowed to.
    """

    def __init__(self, subject: LocalSubject, runner: Runner | None = None, sampling: Sampling = GREEDY) -> None:
        self.subject, self.runner, self.sampling = subject, runner, sampling

    @property
    def counters(self) -> Counters:
        return self.subject.counters

    def decodes(self, item: Item) -> bool:
        """Whether the item is answered by real decoding here."""
        return item.split in JUDGED and gradable(item, self.runner)

    def score(self, items: Sequence[Item], configs: Sequence[KVConfig], *, persist: bool = True) -> Iterator[ItemScore]:
        """Rows for every item and config: forced ones first, then decoded ones; item by item, configs in order."""
        for config in configs:
            config.check(self.subject.shape)
        decoded = [item for item in items if self.decodes(item)]
        forced = [item for item in items if not self.decodes(item)]
        if forced:
            yield from self.subject.score(forced, configs, persist=persist)
        if decoded:
            yield from self.subject.generate(decoded, configs, runner=self.runner, sampling=self.sampling)


@contextlib.contextmanager
def scoring(
    subject: LocalSubject, *, generate: bool, allow_code_exec: bool = False, sampling: Sampling = GREEDY
) -> Iterator["LocalSubject | Answering"]:
    """What gives rows: the teacher-forced pass, or decoded answers, their code in a sandbox where that is allowed.

    Raises SandboxUnavailable where code may run and the machine lacks what isolation needs.
    """
    if not generate:
        yield subject
    elif not allow_code_exec:
        yield Answering(subject, sampling=sampling)
    else:
        with Sandbox() as sandbox:
            yield Answering(subject, sandbox.run, sampling)


def notes(items: Sequence[Item], arms: Sequence[tuple[str, Sequence[ItemScore]]], allow_code_exec: bool) -> list[str]:
    """What a reader must know of how answers were scored; `arms` are label and rows, the uncompressed cache first."""
    tasks = [(label, by_task(rows)) for label, rows in arms]
    failed, passed = extraction_note(tasks), pass_note(tasks)
    code = sorted({item.task for item in items if item.metric == "execute"})
    forced = f"{', '.join(code)}: nothing was run; scored by the likelihood of the canonical solutions, token by token"
    said = [note for note in (failed, passed) if note is not None]
    return [*said, *([forced] if code and not allow_code_exec else [])]
