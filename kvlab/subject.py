"""The local Subject: a loaded model and its compressed caches, as the evaluation sees them.

The only bridge between engine and evaluation. Each item's context is prefilled once; every config forks its cache from
that snapshot, and all configs of an item are scored in one forward.
"""

import copy
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.attach import Attachment, Plan, attach, cache_kwarg, make_plan, shape_of
from kvlab.batching import Batcher, Need
from kvlab.cache import KVCache
from kvlab.calibration import calibrated
from kvlab.centring import Centres, Rotaries, find_rotaries
from kvlab.config import KVConfig
from kvlab.decoding import Decoder
from kvlab.evals import execution
from kvlab.evals.item import Item
from kvlab.evals.sampling import GREEDY, Sampling
from kvlab.evals.subject import ItemScore
from kvlab.generating import Forks, generated
from kvlab.likelihood import Read, Reference, choose, log_probs, read
from kvlab.models import Loaded
from kvlab.policies import Scorer
from kvlab.questions import Question, in_tokens, left_padded, scored
from kvlab.snapshot import Snapshot, SnapshotStore, take
from kvlab.stacked import StackedCache

BASELINE = KVConfig()


@dataclass(slots=True)
class Counters:
    """What a subject has done. `prefills` equals distinct contexts when every snapshot was shared."""

    items: set[str] = field(default_factory=set)
    contexts: set[str] = field(default_factory=set)
    prefills: int = 0
    configs: set[str] = field(default_factory=set)
    item_scores: int = 0
    corrupt_snapshots: int = 0


class _Job(NamedTuple):
    """A question under a config, and the cache to ask."""

    question: Question
    config: KVConfig
    snapshot: Snapshot
    cache: KVCache
    forked_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, medians over repeats: prompt to first token, and one decoded token."""

    ttft_s: float
    latency_s: float
    prompt_tokens: int
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.latency_s


class LocalSubject:
    """Scores items under configs on one model.

    `scorers` are observed in every prefill, so that any config using them can fork; `max_rows` bounds how many rows one
    forward takes, which memory may bound further. `query_aware` moves the question before compression.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        scorers: Sequence[Scorer] = (),
        store: SnapshotStore | None = None,
        max_rows: int | None = None,
        query_aware: bool = False,
        plan: Plan | None = None,
    ) -> None:
        self.loaded, self.name = loaded, loaded.name
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.plan = plan or make_plan(self.model)
        self.shape = shape_of(self.model)
        self.scorers = tuple(dict.fromkeys(s for s in scorers if s.stateful))
        self.store = store or SnapshotStore(snapshot_identity(loaded))
        self.batcher = Batcher(self.model, max_rows if self.plan.stackable else 1)
        self.query_aware = query_aware
        self.counters = Counters()
        self._centres: dict[str, Centres] = {}

    # -- score pass ------------------------------------------------------------------------------------------------

    def score(self, items: Sequence[Item], configs: Sequence[KVConfig], *, persist: bool = True) -> Iterator[ItemScore]:
        """Rows for every item and config, teacher-forced on the gold answer, item by item, configs in order.

        `persist=False` keeps snapshots in memory only, for items that will not be asked again. Raises ValueError for a
        config that does not fit the model, before anything is computed.
        """
        for config in configs:
            config.check(self.shape)
        centres = self.centres(configs)
        questions = [self._tokens(item) for item in items]
        groups, at_once = self._portions(questions, configs)
        with attach(self.model, BASELINE, plan=self.plan, centres=centres, rotaries=self.rotaries) as attachment:
            for start in range(0, len(questions), at_once):
                for group in groups:
                    yield from self._score_batch(questions[start : start + at_once], group, attachment, persist)

    def _portions(
        self, questions: Sequence[Question], configs: Sequence[KVConfig]
    ) -> tuple[list[Sequence[KVConfig]], int]:
        """Configs whose caches of the longest context fit into memory together, and how many items go with them."""
        longest = max((len(q.context) for q in questions), default=0)
        held = {c: Need(0, 0, c.predicted_bytes(self.shape, longest)) for c in configs}
        groups = list(self.batcher.portions(configs, held.__getitem__))
        if len(groups) != 1:
            return groups, 1
        item = Need(0, 0, sum(need.held for need in held.values()))
        most = self.batcher.most // (len(configs) + 1)  # rows of an item, that of the full cache among them
        return groups, self.batcher.count([item] * most) if most else 1

    @functools.cached_property
    def rotaries(self) -> Rotaries | None:
        """How each layer turns its keys, looked for once and not for every call; None where no scorer asks."""
        return find_rotaries(self.model) if any(s.reads_queries for s in self.scorers) else None

    def centres(self, configs: Sequence[KVConfig]) -> dict[str, Centres]:
        """What these configs take out of keys, by centring; measured or read from disk when first asked for.

        Raises CentringError where the model's keys cannot be centred.
        """
        missing = {c.centring for c in configs} - {"none", *self._centres}
        if missing:
            self._centres |= calibrated(self.loaded, missing)
        return self._centres

    def _tokens(self, item: Item) -> Question:
        return in_tokens(item, self.tokenizer.encode, self.query_aware)

    def _score_batch(
        self, questions: Sequence[Question], configs: Sequence[KVConfig], attachment: Attachment, persist: bool
    ) -> Iterator[ItemScore]:
        jobs: list[_Job] = []
        # Compressed once: caches are only read here, so all questions of a context share them.
        forks: dict[tuple[int, KVConfig], KVCache] = {}
        for question, snapshot in zip(questions, self._snapshots(questions, attachment), strict=True):
            todo = list(configs)
            if question.asked not in snapshot.references:
                # First, because all others are compared with it.
                todo = [BASELINE, *(c for c in configs if c != BASELINE)]
            for config in todo:
                start = time.perf_counter()
                key = id(snapshot), config
                if key not in forks:
                    forks[key] = snapshot.fork(config, attachment)
                jobs.append(_Job(question, config, snapshot, forks[key], time.perf_counter() - start))
        before = {id(job.snapshot): len(job.snapshot.references) for job in jobs}
        reads, seconds = self._forced(jobs)
        grown = {self._key(j.question): j.snapshot for j in jobs if len(j.snapshot.references) > before[id(j.snapshot)]}
        for key, snapshot in grown.items():
            self.store.put(key, snapshot, on_disk=persist)
        found = {(id(job.question), job.config): (job, read) for job, read in zip(jobs, reads, strict=True)}
        for question, config in itertools.product(questions, configs):
            self.counters.configs.add(config.id)
            self.counters.item_scores += 1
            job, read = found[(id(question), config)]
            yield self._row(job, read, seconds)

    def _key(self, question: Question) -> str:
        return self.store.key(question.context, self.scorers)

    def _snapshots(self, questions: Sequence[Question], attachment: Attachment) -> list[Snapshot]:
        """The snapshot of every question; equal contexts share one, and only what is nowhere yet is prefilled."""
        keys = [self._key(q) for q in questions]
        contexts = {key: q.context for key, q in zip(keys, questions, strict=True)}
        kept = {key: self.store.get(key, self.scorers) for key in contexts}
        found = {key: snapshot for key, snapshot in kept.items() if snapshot is not None}
        missing = [key for key in contexts if key not in found]
        if missing:

            def prefill(some: Sequence[str]) -> list[Snapshot]:
                return take(self.model, attachment, [contexts[key] for key in some], self.scorers)

            def need(key: str) -> Need:
                tokens = len(contexts[key])
                return Need(tokens, 0, 2 * BASELINE.predicted_bytes(self.shape, tokens))  # as recorded, and as kept

            for some, made in self.batcher.run(missing, need, prefill):
                for key, snapshot in zip(some, made, strict=True):
                    found[key] = snapshot
                    self.store.put(key, snapshot, on_disk=False)
            self.counters.prefills += len(missing)
        self.counters.items.update(q.item.id for q in questions)
        self.counters.contexts.update(keys)
        self.counters.corrupt_snapshots = self.store.corrupt
        return [found[key] for key in keys]

    @torch.no_grad()
    def _forced(self, jobs: Sequence[_Job]) -> tuple[list[list[Read]], float]:
        """What was read of every continuation of every job; and seconds a job took on average.

        The caches are read, not written: all continuations of a job share one. Logits are let go with their forward; of
        the full cache, log-probabilities of the gold answer stay with the snapshot.
        """
        start = time.perf_counter()
        rows = [(n, job, c) for n, job in enumerate(jobs) for c in job.question.continuations]

        def need(row: tuple[int, _Job, tuple[int, ...]]) -> Need:
            _, job, ids = row
            return Need(len(job.question.question) + len(ids) - 1, len(ids))

        out: list[list[Read]] = [[] for _ in jobs]
        for some, reads in self.batcher.run(rows, need, self._read):
            for (n, _, _), one in zip(some, reads, strict=True):
                out[n].append(one)
        return out, (time.perf_counter() - start) / len(jobs)

    def _read(self, rows: Sequence[tuple[int, _Job, tuple[int, ...]]]) -> list[Read]:
        """One forward over these continuations."""
        # A continuation's last token predicts nothing that is asked: it is not fed.
        ids, valid = left_padded([job.question.question + c[:-1] for _, job, c in rows], self.model.device)
        asked = max(len(c) for _, _, c in rows)
        logits = self._forward([job.cache for _, job, _ in rows], ids, valid, asked, read_only=True)
        out, full = [], {}
        for (_, job, continuation), row in zip(rows, logits, strict=True):
            logp = log_probs(row[asked - len(continuation) :])
            name, references = job.question.asked, job.snapshot.references
            gold = continuation is job.question.continuations[0]
            if gold and job.config == BASELINE and name not in references:
                references[name] = logp.clone()
            compared = gold and job.config != BASELINE
            if compared and id(job.question) not in full:
                full[id(job.question)] = Reference.of(references[name])
            out.append(read(logp, continuation, full[id(job.question)] if compared else None))
        return out

    def _forward(
        self,
        caches: Sequence[KVCache],
        ids: Int[Tensor, "B Q"],
        valid: Bool[Tensor, "B Q"],
        keep: int,
        read_only: bool = False,
    ) -> Float[Tensor, "B keep V"]:
        """Last `keep` logits of one forward over several caches, each going on from its own length."""
        if self.plan.stackable:
            stacked = StackedCache(caches, read_only)
            stacked.expect(None if bool(valid.all()) else valid)
            positions = stacked.positions(valid)
            return self.model(
                input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=keep, **{cache_kwarg(): stacked}
            ).logits
        (cache,) = caches
        if read_only:
            cache = copy.deepcopy(cache)
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=keep, **{cache_kwarg(): cache}).logits

    def _row(self, job: _Job, reads: Sequence[Read], seconds: float) -> ItemScore:
        question, item, gold = job.question, job.question.item, reads[0]
        exact, share = float(gold.hits.all()), float(gold.hits.mean())
        score, prediction = (share if item.forced == "tokens" else exact), self.tokenizer.decode(gold.best)
        if item.choices:
            score, prediction = choose(item, reads)
        return scored(
            question,
            job.config,
            self.shape,
            measured_bytes=job.cache.nbytes,
            mode="forked",
            form=item.form,
            score=score,
            exact=exact,
            token_accuracy=share,
            nll=-gold.mean,
            kl=gold.kl,
            top1=gold.top1,
            prediction=prediction,
            answer_tokens=len(gold.ids),
            seconds=job.forked_s + seconds,
        )

    # -- generate pass -------------------------------------------------------------------------------------------------

    def generate(
        self,
        items: Sequence[Item],
        configs: Sequence[KVConfig],
        *,
        runner: execution.Runner | None = None,
        sampling: Sampling = GREEDY,
    ) -> Iterator[ItemScore]:
        """Rows for every item and config from real decoding on the packed cache, item by item, configs in order.

        Each answer is cut at its stop strings. Generated code runs in `runner` only; without one, items that need it
        are a ValueError before anything is computed.
        """
        for config in configs:
            config.check(self.shape)
        execution.check_runnable(items, runner)
        questions = [self._tokens(item) for item in items]
        decoder = Decoder(self.model, self.tokenizer, self.batcher, stackable=self.plan.stackable)
        with attach(self.model, BASELINE, plan=self.plan, centres=self.centres(configs)) as attachment:
            forks = Forks(
                questions, configs, lambda asked: self._snapshots(asked, attachment), attachment, sampling.samples
            )
            for row in generated(decoder, forks, self.shape, runner, sampling):
                self.counters.configs.add(row.config_id)
                self.counters.item_scores += 1
                yield row

    # -- timing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def time(self, configs: Sequence[KVConfig], prompt: Sequence[int], steps: int, repeats: int = 3) -> list[Timing]:
        """Time to first token and per decoded token, of real prefill and decode, the configs taking turns."""
        taken: list[list[tuple[float, float]]] = [[] for _ in configs]
        ids = torch.tensor([list(prompt)], device=self.model.device)
        with attach(self.model, BASELINE, plan=self.plan, centres=self.centres(configs)) as attachment:
            for _, n in itertools.product(range(repeats), range(len(configs))):
                cache = attachment.cache(configs[n])
                begin = time.perf_counter()
                token = self._next(ids, cache)
                first = time.perf_counter()
                for _ in range(steps):
                    token = self._next(token, cache)
                taken[n].append((first - begin, (time.perf_counter() - first) / steps))
        middle = [[sorted(run[i] for run in runs)[len(runs) // 2] for i in (0, 1)] for runs in taken]
        return [Timing(ttft, latency, len(prompt), steps) for ttft, latency in middle]

    def _next(self, ids: Tensor, cache: KVCache) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_kwarg(): cache}).logits
        # .item() waits for the device, so that the clock is read after the work.
        return torch.tensor([[int(logits[0, -1].argmax().item())]], device=ids.device)


def snapshot_identity(loaded: Loaded) -> str:
    """What K and V depend on besides the tokens."""
    parts = [loaded.weights_sha256, loaded.dtype, str(loaded.model.device.type)]
    return "|".join([*parts, torch.__version__, transformers.__version__])
