"""Cases that read pages: decode attention over all of them, or over the chunks that a query selects."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.data import Pool, normal, poison, pool, summaries
from kvlab.bench.kernels.prepared import TOLERANCE, Check, Outputs, Place, Prepared, relative
from kvlab.kernels import chunk_pages, chunks
from kvlab.kernels.paged import Centring, Chosen, Decoded, Fresh, LaunchOptions, Pages, decode

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# Queries are this much longer than keys: attention then has peaks, and a page that is left out shows.
_SHARP = 2.0
# Attention mass is written in fp16, tile by tile.
_MASS_TOLERANCE = 4e-3
# Heads of a conversation whose reference is taken in one go; of larger cases the first and the last conversation.
_EVERY = 2**22
_SINKS = 4


class _Inputs:
    """All arguments of one decode call but the chunks it reads."""

    def __init__(self, case: Case, place: Place, options: LaunchOptions | None) -> None:
        s, self.generator = case.shape, place.generator(case)
        self.case, self.device, self.options = case, place.device, options
        self.dtype = _DTYPES[case.flag("dtype", str(place.compute).removeprefix("torch."))]
        # Pages are 16 bit also where queries are not.
        stored = place.compute if self.dtype == torch.float32 else self.dtype
        counts = ragged(case, self.generator) if case.flag("ragged", False) else None
        self.pool = pool(case.pair, s, stored, place.device, self.generator, counts, 64 if place.warm else None)
        heads = s.N * s.G
        self.q = self.drawn(s.B, heads, s.D) * _SHARP
        k, v = (self.drawn(s.B, s.N, max(1, s.window), s.D) for _ in range(2))
        self.raw = Fresh(k, v, torch.full((s.B,), s.window, dtype=torch.int32, device=place.device))
        if counts is not None:
            self.raw.counts[0] = min(1, s.window)
            for tensor in (k, v):
                poison(tensor[0, :, 1:])
        self.sink_logits = self.drawn(heads, dtype=torch.float32) if case.flag("sinks", False) else None
        self.centring = None
        if case.flag("centred", False):
            drift = self.drawn(s.B, heads, s.D, dtype=torch.float32) * 0.1
            self.centring = Centring(drift, self.drawn(s.L + _SINKS, s.D, dtype=torch.float32))

    def drawn(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return normal(*size, dtype=dtype or self.dtype, device=self.device, generator=self.generator)

    def call(self, chosen: Chosen | None) -> Decoded:
        """The kernel."""
        return self._decode(self.pool, self.q, self.raw, self.sink_logits, self.centring, chosen, "triton")

    def reference(self, rows: slice, chosen: Chosen | None) -> Decoded:
        """The same for some conversations, by definition and in float64."""
        sinks = None if self.sink_logits is None else self.sink_logits.double()
        centring = self.centring and Centring(self.centring.drift[rows].double(), self.centring.trig.double())
        raw = Fresh(self.raw.k[rows].double(), self.raw.v[rows].double(), self.raw.counts[rows])
        chosen = chosen and chosen._replace(chunks=chosen.chunks[rows])
        return self._decode(self.pool.rows(rows), self.q[rows].double(), raw, sinks, centring, chosen, "reference")

    def _decode(self, held: Pool, q, raw, sink_logits, centring, chosen, impl) -> Decoded:
        s, case = self.case.shape, self.case
        pages = Pages(held.k, held.v, held.index, held.counts, s.P, None, _SINKS)
        return decode(
            q, pages, held.key, held.value, raw, s.D**-0.5, softcap=case.flag("softcap", None), centring=centring,
            sink_logits=sink_logits, chosen=chosen, mass=case.flag("mass", False), options=self.options, impl=impl,
        )  # fmt: skip

    def nbytes(self, chosen: Chosen | None) -> int:
        """Stored tokens that are read, their page ids, raw tokens, queries and outputs."""
        s, used = self.case.shape, int(self.pool.counts.sum())
        if chosen is not None:
            used = int((chosen.chunks >= 0).sum()) * chosen.tokens
        small = (self.q, self.q, self.raw.k, self.raw.v)
        mass = 4 * s.B * s.N * (self.pool.index.shape[-1] * s.P + s.window) if self.case.flag("mass", False) else 0
        moved = used * self.pool.token_bytes + used // s.P * 4 + mass
        return int(moved) + sum(x.numel() * x.element_size() for x in small)


def prepare_decode(case: Case, place: Place, options: LaunchOptions | None = None) -> Prepared:
    """Attention of one new token per conversation over its pages and its raw tokens; of chunks given beforehand where
    the case has a fraction.
    """
    inputs = _Inputs(case, place, options)
    chosen = _chosen(inputs.pool, case, inputs.generator) if case.flag("fraction", 0) else None
    return Prepared(
        lambda: _outputs(inputs.call(chosen)),
        lambda outputs: _check(inputs, outputs, chosen),
        inputs.nbytes(chosen),
        "triton",
    )


def prepare_sparse(case: Case, place: Place) -> Prepared:
    """Sparse attention: of chunks given beforehand, or with the scores and the selection in front of it."""
    if not case.flag("selection", False):
        return prepare_decode(case, place)
    s, inputs = case.shape, _Inputs(case, place, None)
    streams = inputs.pool.k | summaries(inputs.pool, s, ("min", "max"), inputs.generator)
    held, fraction = inputs.pool, case.flag("fraction", 0.0)
    n_chunks = -(-held.counts // s.P)

    def scored() -> Tensor:
        query = inputs.q.unsqueeze(2)
        return chunk_pages.scores(
            query, streams, held.key, held.index, held.counts, s.P, "minmax", impl="triton"
        ).squeeze(2)

    def run() -> Outputs:
        slots = chunks.select(scored(), n_chunks, fraction=fraction, impl="triton")
        return (*_outputs(inputs.call(Chosen(slots, s.P))), slots)

    def check(outputs: Outputs) -> Check:
        *decoded, slots = outputs
        found = _check(inputs, tuple(decoded), Chosen(slots, s.P))
        # Of the scores it was given; these have a case of their own.
        expected = chunks.select(scored(), n_chunks, fraction=fraction, impl="torch")
        return found if torch.equal(slots, expected) else found._replace(error=1.0)

    read = inputs.nbytes(_chosen(inputs.pool, case, inputs.generator))
    summary = 4 * s.D * int(n_chunks.sum())
    return Prepared(run, check, read + summary, "triton")


def _outputs(decoded: Decoded) -> Outputs:
    return tuple(x for x in decoded if x is not None)


def _check(inputs: _Inputs, outputs: Outputs, chosen: Chosen | None) -> Check:
    """The worst of output, log-sum-exp and mass, against float64; nothing may be NaN anywhere."""
    s = inputs.case.shape
    # Codes are multiplied out in fp16 whatever the queries are.
    base = max(TOLERANCE[inputs.dtype], 0.0 if inputs.case.pair == "raw" else TOLERANCE[torch.float16])
    tolerances = (base, base, max(base, _MASS_TOLERANCE))
    parts = [slice(None)] if s.B * s.N * s.L <= _EVERY // s.D else [slice(0, 1), slice(s.B - 1, s.B)]
    worst = Check(0.0, base, "float64")
    for rows in parts:
        wanted = _outputs(inputs.reference(rows, chosen))
        for out, want, tolerance in zip(outputs, wanted, tolerances, strict=False):
            error = relative(*finite_pair(out[rows], want))
            if not error / tolerance <= worst.error / worst.tolerance:
                worst = Check(error, tolerance, "float64")
    clean = not any(bool(x.isnan().any()) for x in outputs)
    return worst if clean else worst._replace(error=float("nan"))


def finite_pair(out: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zero where both are the same infinity; where only one is infinite it stays."""
    same = (out == want) & ~want.isfinite()
    return out.double().masked_fill(same, 0.0), want.double().masked_fill(same, 0.0)


def ragged(case: Case, generator: torch.Generator) -> Tensor:
    """Counts from none to L, in whole pages where groups run along tokens."""
    s = case.shape
    counts = torch.randint(0, s.L + 1, (s.B, s.N), generator=generator, device=generator.device).cpu()
    counts[0, 0], counts[-1, -1] = 0, s.L
    return counts // s.P * s.P if case.flag("whole", False) else counts


def _chosen(made: Pool, case: Case, generator: torch.Generator) -> Chosen:
    """Random chunks of a page: each head's share of those it has, ascending; -1 behind them."""
    page, fraction = case.shape.P, case.flag("fraction", 1.0)
    n_chunks, slots = -(-made.counts // page), made.index.shape[-1]
    order = torch.rand(*n_chunks.shape, slots, generator=generator, device=n_chunks.device)
    order = order.masked_fill(torch.arange(slots, device=order.device) >= n_chunks.unsqueeze(-1), 2.0).argsort(-1)
    width = max(1, round(slots * fraction))
    wanted = (n_chunks * fraction).round().clamp(0, width).unsqueeze(-1)
    kept = order[..., :width].masked_fill(torch.arange(width, device=order.device) >= wanted, slots)
    kept = kept.sort(-1).values
    return Chosen(kept.masked_fill(kept == slots, -1).to(torch.int32), page)


def prepare_scores(case: Case, place: Place) -> Prepared:
    """Scores of every chunk of a page, from summaries or from the codec's own scales."""
    s, inputs, bound = case.shape, _Inputs(case, place, None), case.flag("bound", "minmax")
    names = {"minmax": ("min", "max"), "mean": ("mean",), "codec": ()}[bound]
    streams, held = inputs.pool.k | summaries(inputs.pool, s, names, inputs.generator), inputs.pool

    def scores(q: Tensor, part: Pool, impl: Any) -> Tensor:
        return chunk_pages.scores(q.unsqueeze(2), streams, part.key, part.index, part.counts, s.P, bound, impl=impl)

    def check(outputs: Outputs) -> Check:
        errors = []
        for row in {0, s.B - 1}:
            part = slice(row, row + 1)
            want = scores(inputs.q[part].double(), held.rows(part), "torch")
            errors.append(relative(*finite_pair(outputs[0][part], want)))
        return Check(max(errors, key=lambda e: (e != e, e)), TOLERANCE[torch.float32], "float64")

    read = sum(streams[name][0].numel() * streams[name].element_size() for name in names or _scales(held))
    pages = int((-(-held.counts // s.P)).sum())
    nbytes = pages * (read + 4 + 4) + inputs.q.numel() * inputs.q.element_size()
    return Prepared(lambda: (scores(inputs.q, held, "triton"),), check, nbytes, "triton")


def _scales(held: Pool) -> tuple[str, ...]:
    return tuple(name for name in held.key.names if name != "codes")


def prepare_select(case: Case, place: Place) -> Prepared:
    """A share of the chunks by their scores, or the fewest that reach a share of the weight."""
    s, generator = case.shape, place.generator(case)
    scores = normal(s.B, s.N, s.L // s.P, dtype=torch.float32, device=place.device, generator=generator)
    counts = torch.full((s.B, s.N), s.L // s.P, dtype=torch.int32, device=place.device)
    counts[0, 0] = min(3, s.L // s.P)
    width = max(3, s.L // s.P // 8)
    ways: dict[str, Callable[[Any], Tensor]] = {
        "share": lambda impl: chunks.select(scores, counts, fraction=1 / 8, impl=impl),
        "mass": lambda impl: chunks.select_mass(scores, counts, p=0.5, width=width, impl=impl),
    }
    way = ways[case.variant]

    def check(outputs: Outputs) -> Check:
        wrong = float((outputs[0] != way("torch")).double().mean())
        # Weights that add up to p within a rounding may end a list one chunk earlier or later.
        return Check(wrong, 0.0 if case.variant == "share" else 1e-3, "the same slots as torch")

    nbytes = 4 * (scores.numel() + counts.numel() + s.B * s.N * width)
    return Prepared(lambda: (way("triton"),), check, nbytes, "triton")


def prepare_bounds(case: Case, place: Place) -> Prepared:
    """Least and greatest key of every chunk, over the keys as they are read back."""
    s, inputs = case.shape, _Inputs(case, place, None)
    held, made = inputs.pool, summaries(inputs.pool, s, ("min", "max"), inputs.generator)
    start = torch.zeros_like(held.counts)

    def summarise(part: Pool, into: dict[str, Tensor], impl: Any) -> None:
        first = start[: part.counts.shape[0]]
        chunk_pages.summarise(held.k | into, held.key, part.index, first, part.counts, s.L, s.P, impl=impl)

    def run() -> Outputs:
        summarise(held, made, "triton")
        return tuple(made.values())

    def check(outputs: Outputs) -> Check:
        errors = []
        for row in {0, s.B - 1}:
            part = held.rows(slice(row, row + 1))
            want = {name: x.clone() for name, x in made.items()}
            summarise(part, want, "torch")
            held_pages = torch.arange(part.index.shape[-1], device=part.index.device) * s.P < part.counts[0].unsqueeze(
                -1
            )
            ids = part.index[0].long()[held_pages]
            errors += [relative(made[name][ids], want[name][ids]) for name in made]
        return Check(max(errors, key=lambda e: (e != e, e)), 1e-3, "torch in float32")

    key_bytes = sum(x[0].numel() * x.element_size() for x in held.k.values())
    pages = held.index.numel()
    return Prepared(run, check, pages * (key_bytes + 2 * 2 * s.D + 4), "triton")
