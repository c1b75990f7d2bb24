"""The local Subject: a loaded model and its compressed caches, as the evaluation sees them.

The only bridge between engine and evaluation. Each item's context is prefilled once; every config forks its cache from
that snapshot, and all configs of an item are scored in one forward.
"""

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlab.attach import Attachment, Plan, attach, cache_kwarg, make_plan, shape_of
from kvlab.batching import Batcher
from kvlab.cache import KVCache
from kvlab.calibration import calibrated
from kvlab.centring import Centres
from kvlab.config import KVConfig
from kvlab.decoding import Decoder
from kvlab.evals import execution
from kvlab.evals.item import Item
from kvlab.evals.subject import ItemScore
from kvlab.generating import Forks, generated
from kvlab.models import Loaded
from kvlab.policies import Scorer
from kvlab.questions import Question, in_tokens, left_padded, scored
from kvlab.snapshot import Snapshot, SnapshotStore, take
from kvlab.stacked import StackedCache

BASELINE = KVConfig()
T = TypeVar("T")


@dataclass(slots=True)
class Counters:
    """What a subject has done. `prefills` equals distinct contexts when every snapshot was shared."""

    items: set[str] = field(default_factory=set)
    contexts: set[str] = field(default_factory=set)
    prefills: int = 0
    configs: set[str] = field(default_factory=set)
    item_scores: int = 0
    corrupt_snapshots: int = 0


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
        per_batch = max(1, self.batcher.most // max(1, len(configs) + 1))
        questions = [self._tokens(item) for item in items]
        with attach(self.model, BASELINE, plan=self.plan, centres=centres) as attachment:
            for start in range(0, len(questions), per_batch):
                yield from self._score_batch(questions[start : start + per_batch], configs, attachment, persist)

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
        snapshots = self._snapshots(questions, attachment)
        jobs: list[tuple[int, KVConfig, KVCache, float]] = []
        # Compressed once: caches are only read here, so all questions of a context share them.
        forks: dict[tuple[int, KVConfig], KVCache] = {}
        for n, snapshot in enumerate(snapshots):
            todo = list(configs)
            if questions[n].asked not in snapshot.references and BASELINE not in todo:
                todo.insert(0, BASELINE)
            for config in todo:
                start = time.perf_counter()
                key = id(snapshot), config
                if key not in forks:
                    forks[key] = snapshot.fork(config, attachment)
                jobs.append((n, config, forks[key], time.perf_counter() - start))
        logits, seconds = self._forced([(questions[n], cache) for n, _, cache, _ in jobs])
        grown: dict[str, Snapshot] = {}
        for (n, config, _, _), rows in zip(jobs, logits, strict=True):
            if config == BASELINE and questions[n].asked not in snapshots[n].references:
                snapshots[n].references[questions[n].asked] = _log_probs(rows[0])
                grown[self._key(questions[n])] = snapshots[n]
        for key, snapshot in grown.items():
            self.store.put(key, snapshot, on_disk=persist)
        for (n, config, cache, forked), rows in zip(jobs, logits, strict=True):
            if config in configs:
                self.counters.configs.add(config.id)
                self.counters.item_scores += 1
                yield self._row(questions[n], config, cache, rows, snapshots[n], forked + seconds)

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
            made = take(self.model, attachment, [contexts[key] for key in missing], self.scorers)
            for key, snapshot in zip(missing, made, strict=True):
                found[key] = snapshot
                self.store.put(key, snapshot, on_disk=False)
            self.counters.prefills += len(missing)
        self.counters.items.update(q.item.id for q in questions)
        self.counters.contexts.update(keys)
        self.counters.corrupt_snapshots = self.store.corrupt
        return [found[key] for key in keys]

    @torch.no_grad()
    def _forced(self, jobs: Sequence[tuple[Question, KVCache]]) -> tuple[list[list[Tensor]], float]:
        """Logits [A, V] of every continuation of every job; and seconds a job took on average.

        The caches are read, not written: all continuations of a job share one.
        """
        start = time.perf_counter()
        # A continuation's last token predicts nothing that is asked: it is not fed.
        rows = [(n, cache, q.question + c[:-1], len(c)) for n, (q, cache) in enumerate(jobs) for c in q.continuations]
        out: list[list[Tensor]] = [[] for _ in jobs]
        for chunk in _chunks(rows, self.batcher.most):
            ids, valid = left_padded([row[2] for row in chunk], self.model.device)
            asked = max(row[3] for row in chunk)
            logits = self._forward([row[1] for row in chunk], ids, valid, asked, read_only=True)
            for (n, _, _, length), row_logits in zip(chunk, logits, strict=True):
                out[n].append(row_logits[asked - length :])
        return out, (time.perf_counter() - start) / len(jobs)

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

    def _row(
        self,
        question: Question,
        config: KVConfig,
        cache: KVCache,
        logits: list[Tensor],
        snapshot: Snapshot,
        seconds: float,
    ) -> ItemScore:
        item, gold = question.item, torch.tensor(question.continuations[0], device=logits[0].device)
        logp = _log_probs(logits[0])
        best = logp.argmax(-1)
        hits = (best == gold).float()
        nll = -float(logp.gather(1, gold.unsqueeze(1)).mean())
        exact = float(hits.all())
        score, prediction = (float(hits.mean()) if item.forced == "tokens" else exact), self.tokenizer.decode(best)
        if item.choices:
            score, prediction = self._choose(question, logits)
        kl = top1 = None
        if config != BASELINE:
            reference = snapshot.references[question.asked]
            kl = max(0.0, float((reference.exp() * (reference - logp)).sum(-1).mean()))
            top1 = float((reference.argmax(-1) == best).float().mean())
        return scored(
            question,
            config,
            self.shape,
            measured_bytes=cache.nbytes,
            mode="forked",
            form=item.form,
            score=score,
            exact=exact,
            token_accuracy=float(hits.mean()),
            nll=nll,
            kl=kl,
            top1=top1,
            prediction=prediction,
            answer_tokens=len(gold),
            seconds=seconds,
        )

    def _choose(self, question: Question, logits: list[Tensor]) -> tuple[float, str]:
        """Length-normalised likelihood over the choices; the gold one comes first and loses ties."""
        means = []
        for ids, rows in zip(question.continuations, logits, strict=True):
            target = torch.tensor(ids, device=rows.device).unsqueeze(1)
            means.append(float(_log_probs(rows).gather(1, target).mean()))
        best = max(range(1, len(means)), key=means.__getitem__)
        chosen = 0 if means[0] > means[best] else best
        item = question.item
        return float(chosen == 0), (item.answers[0], *(c for c in item.choices if c != item.answers[0]))[chosen]

    # -- generate pass -------------------------------------------------------------------------------------------------

    def generate(
        self, items: Sequence[Item], configs: Sequence[KVConfig], *, runner: execution.Runner | None = None
    ) -> Iterator[ItemScore]:
        """Rows for every item and config from greedy decoding on the packed cache, item by item, configs in order.

        Each answer is cut at its stop strings. Generated code runs in `runner` only; without one, items that need it
        are a ValueError before anything is computed.
        """
        for config in configs:
            config.check(self.shape)
        execution.check_runnable(items, runner)
        questions = [self._tokens(item) for item in items]
        decoder = Decoder(self.model, self.tokenizer, self.batcher, stackable=self.plan.stackable)
        with attach(self.model, BASELINE, plan=self.plan, centres=self.centres(configs)) as attachment:
            forks = Forks(questions, configs, lambda asked: self._snapshots(asked, attachment), attachment)
            for row in generated(decoder, forks, self.shape, runner):
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


def _chunks(rows: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _log_probs(logits: Tensor) -> Tensor:
    """In float32 at least; a model in float64 keeps its precision."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def snapshot_identity(loaded: Loaded) -> str:
    """What K and V depend on besides the tokens."""
    parts = [loaded.weights_sha256, loaded.dtype, str(loaded.model.device.type)]
    return "|".join([*parts, torch.__version__, transformers.__version__])
