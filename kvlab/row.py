"""Row: one sequence in one layer. Holds raw sinks, the raw recent window and encoded pages; attends, observes, evicts,
encodes, in that order. Knows neither model nor transformers.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlab.centre import Centre, KeyTerm, Places, positions_of
from kvlab.codecs.base import Packed, to_raw
from kvlab.evicting import Known, Leaving, flush
from kvlab.kernels import attend as kernel
from kvlab.kernels.dispatch import Impl
from kvlab.kernels.pages_step import fold_mass
from kvlab.kernels.prompt import attend_prompt, prompt_mass, query_blocks
from kvlab.kernels.rope import Rotary
from kvlab.kernels.rowwise import runs_compiled
from kvlab.layer import LayerConfig, Occupancy
from kvlab.policies import ExpectedAttention
from kvlab.policies.base import Expected
from kvlab.policies.expected_attention import query_sums
from kvlab.reading import Reading, pages
from kvlab.selecting import Choice, Remembered, all_read, choose
from kvlab.stepping import Pinned, Single, attend_single, keeps_tokens
from kvlab.store import PagePool, PageTable


class Row:
    """Token order, and so causality, is the order tokens arrived in: sinks, then pages by position, then the window."""

    def __init__(
        self,
        config: LayerConfig,
        pool: PagePool,
        kv_heads: int,
        raw: torch.dtype,
        centre: Centre | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        if (centre is None) != (config.centring == "none"):
            raise ValueError(f"centring {config.centring!r} takes {'a' if centre is None else 'no'} centre of the keys")
        if config.tracks_queries and rotary is None:
            raise ValueError(f"scorer {config.scorer.kind!r} looks at queries before RoPE and needs a rotary embedding")
        self.config, self.centre = config, centre
        self.rotary = rotary if config.tracks_queries else None
        self._queries: Tensor | None = None  # sums of all queries so far, where they are tracked
        self.group: int | None = None  # how many heads share a budget, if any do: all, but in a joined row
        self.known: Known | None = None  # scores that other caches of the same prompt have taken of it
        self.raw = raw
        self.table = PageTable(pool, kv_heads)
        self.seen = 0
        self.sinks: tuple[Tensor, Tensor] | None = None
        self._window: tuple[Tensor, Tensor] | None = None  # preallocated; the first `n_window` tokens are real
        self._mass: Tensor | None = None
        self.n_window = 0
        self._pinned = Pinned()
        self._placed = False  # whether the new token's K and V are in the window already, where they do not count yet
        self._choice: Choice | None = None  # of the forward being served
        self._remembered: Remembered | None = None  # what the last block of queries read, while the pages stand

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def n_sinks(self) -> int:
        return 0 if self.sinks is None else self.sinks[0].shape[1]

    @property
    def kept(self) -> int:
        """Tokens the longest head holds."""
        return self.n_sinks + self.table.length + self.n_window

    @property
    def occupancy(self) -> list[Occupancy]:
        """Tokens held, for each KV head."""
        return [Occupancy(self.n_sinks, self.n_window, count) for count in self.table.counts]

    @property
    def nbytes(self) -> int:
        """Bytes of what is held: whole pages, raw tokens, their mass. Slack of preallocation is not in it."""
        raw = [*(self.sinks or ()), *self.window()]
        mass = [self._mass[:, : self.n_window]] if self._mass is not None else []
        pages = sum(len(head) for head in self.table.pages)
        sums = [self._queries] if self._queries is not None else []
        return pages * self.table.pool.page_bytes + sum(x.numel() * x.element_size() for x in [*raw, *mass, *sums])

    def storages(self) -> list[Tensor]:
        """Every tensor of this row that owns memory; pages belong to the pool."""
        single = [x for x in (self._mass, self._queries) if x is not None]
        return [*(self.sinks or ()), *(self._window or ()), *single]

    def fit(self) -> None:
        """Shrink the preallocated window to what it holds."""
        if self._window is not None:
            k, v = self.window()
            self._window = (k.clone(), v.clone())
        if self._mass is not None:
            self._mass = self._mass[:, : self.n_window].clone()

    def copy(self) -> "Row":
        """The same sequence, sharing no storage but the pool's growth."""
        twin = Row(self.config, self.table.pool, len(self.table.pages), self.raw, self.centre, self.rotary)
        twin.table = self.table.copy()
        twin.seen, twin.n_window, twin._remembered = self.seen, self.n_window, self._remembered
        twin.sinks = self.sinks and (self.sinks[0].clone(), self.sinks[1].clone())
        twin._window = self._window and (self._window[0].clone(), self._window[1].clone())
        twin._mass = None if self._mass is None else self._mass.clone()
        twin._queries = None if self._queries is None else self._queries.clone()
        return twin

    def split(self, parts: int) -> list["Row"]:
        """This row's heads dealt out to `parts` rows that take its place, over the same storage."""
        per_part = len(self.table.pages) // parts
        rows = []
        for start in range(0, len(self.table.pages), per_part):
            heads = slice(start, start + per_part)
            centre = self.centre and self.centre.heads(heads)
            row = Row(self.config, self.table.pool, per_part, self.raw, centre, self.rotary)
            row.table = self.table.heads(heads)
            row.seen, row.n_window = self.seen, self.n_window
            row.sinks = self.sinks and (self.sinks[0][heads], self.sinks[1][heads])
            row._window = self._window and (self._window[0][heads], self._window[1][heads])
            row._mass = None if self._mass is None else self._mass[heads]
            row._queries = None if self._queries is None else self._queries[heads]
            rows.append(row)
        return rows

    def release(self) -> None:
        """Give the pages back to the pool."""
        self.table.clear()

    # -- what is stored ------------------------------------------------------------------------------------------

    def window(self) -> tuple[Tensor, ...]:
        """Raw K and V of the recent tokens, or nothing before the first."""
        return () if self._window is None else tuple(x[:, : self.n_window] for x in self._window)

    def pages(self) -> tuple[Packed, Packed]:
        """Streams of K and of V for all encoded tokens."""
        return pages(self.table)

    def places(self) -> Places:
        """Where the encoded tokens stand, in the columns of `pages`. Columns past a head's count mean nothing."""
        if "position" in self.table.pool.layout and self.table.length:
            return self.table.gather(["position"])["position"][..., 0].long().clamp(0, self.seen - 1)
        return slice(self.n_sinks, self.n_sinks + self.table.length)

    def positions(self) -> Int[Tensor, "N T"]:
        """Positions of the encoded tokens, ascending. Columns past a head's count mean nothing."""
        return positions_of(self.places(), len(self.table.pages), self.table.device)

    def encoded_keys(self, key_dim: int, dtype: torch.dtype) -> Float[Tensor, "N T D"]:
        """Keys of all encoded tokens as they read back, the centre put back."""
        keys = self.config.key.decode(self.pages()[0], key_dim, dtype)[:, : self.table.length]
        return keys if self.centre is None else self.centre.put_back(keys, self.places(), self.seen)

    def dense(self, dtype: torch.dtype, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
        """Everything held, decoded, in token order: [N, kept, D] for K and V."""
        parts: list[tuple[Tensor, Tensor]] = [self.sinks] if self.sinks else []
        count = self.table.counts[0]
        if count:
            values = self.config.value.decode(self.pages()[1], value_dim, dtype)[:, :count]
            parts.append((self.encoded_keys(key_dim, dtype)[:, :count], values))
        if self._window is not None:
            parts.append((self._window[0][:, : self.n_window], self._window[1][:, : self.n_window]))
        return tuple(torch.cat([p[i].to(dtype) for p in parts], dim=1) for i in (0, 1))  # type: ignore[return-value]

    # -- attend and observe ------------------------------------------------------------------------------------------

    def attend(
        self,
        q: Float[Tensor, "H Q D"],
        k: Float[Tensor, "N Q D"],
        v: Float[Tensor, "N Q E"],
        scale: float,
        softcap: float | None = None,
        sink_logits: Float[Tensor, " H"] | None = None,
        observe: bool = True,
        impl: Impl | None = None,
    ) -> tuple[Float[Tensor, "H Q E"], Tensor | None]:
        """Attention of the new tokens over everything held and themselves; and the attention mass, if it is tracked.

        The mass is [N, stored + sinks + window + Q], in that column order. `impl` says how a lone token is served,
        by default the pool's.
        """
        served_by: Impl = impl or self.table.pool.impl
        n_queries, scorer = q.shape[1], self.config.scorer
        tracked = observe and self.config.tracks_mass
        weights = scorer.query_weights(n_queries).to(q.device) if tracked and not scorer.reads_selection else None
        if self.seen == 0:
            out = attend_prompt(q, k, v, scale, softcap, sink_logits)
            if observe and self.rotary is not None:
                return out, self.observed_queries(q, scale)
            if tracked and weights is None:
                return out, all_read(k.shape[0], k.shape[1], n_queries - 1, k.device)
            return out, None if weights is None else prompt_mass(q, k, scale, weights, softcap, sink_logits)
        # Compiled code has no gradient: where one is wanted, torch attends.
        lone = n_queries == 1 and not (q.requires_grad or k.requires_grad or v.requires_grad)
        compiled = lone and runs_compiled(served_by, q.device, q.dtype, self.raw)
        choice = self.select(q, observe, compiled)
        if compiled:
            held = (
                self._pinned.raw("sinks", self.sinks, self.n_sinks),
                self._pinned.raw("window", self._window, self.n_window),
            )
            slot = self._free_slot() if observe else None
            single = Single(q, scale, softcap, sink_logits, choice, self.centre, self.seen)
            stored = self._pinned.stored(self.config, self.table, self.n_sinks, (k.shape[2], v.shape[2]))
            served, mass = attend_single(single, stored, held, k, v, weights, -1 if slot is None else slot)
            self._placed = slot is not None
        else:
            served, mass = self._attend_blocks(q, k, v, scale, softcap, sink_logits, choice, weights)
        if observe and self.rotary is not None:
            mass = self.observed_queries(q, scale)
        if tracked and weights is None:
            mass = self.selected_mass(choice, n_queries)
        return served, mass

    def _free_slot(self) -> int | None:
        """Where the window will take the next token, if there is room and the token is to go there."""
        if self._window is None or self.n_sinks < self.config.sink_tokens or not keeps_tokens(self._window):
            return None
        return self.n_window if self.n_window < self._window[0].shape[1] else None

    def select(self, q: Float[Tensor, "H Q D"], observe: bool = True, compiled: bool = False) -> Choice | None:
        """The chunks of pages that new queries read; None where all are. `commit` remembers what is observed."""
        choice = choose(self.config, self.table, q, self.seen, self._remembered, self._key_term(), compiled)
        if observe:
            self._choice = choice
        return choice

    def observed_queries(self, q: Float[Tensor, "H Q D"], scale: float) -> Tensor | None:
        """Sums over the new queries, for scorers that look at queries before RoPE; None where none does."""
        return self.rotary and query_sums(q, self.seen, scale, self.rotary, len(self.table.pages))

    def selected_mass(self, choice: Choice | None, n_queries: int) -> Float[Tensor, "N T"]:
        """When each token was last read, counting the new queries, for scorers that go by selection."""
        columns = self.table.length + self.n_sinks + self.n_window + n_queries
        mass = all_read(len(self.table.pages), columns, self.seen + n_queries - 1, self.table.device)
        if choice is not None:
            mass[:, : self.table.length] = choice.last_read(self.seen, self.table.length)
        return mass

    def _attend_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
        choice: Choice | None,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `attend`, in plain torch and blocks of queries."""
        out, mass = [], None
        columns = self.table.length + self.n_sinks + self.n_window + q.shape[1]
        raw = [(part[0], part[1]) for part in (self.sinks, self.window(), (k, v)) if part]
        reading = Reading(self.config, self.table, raw, choice, self._key_term())
        for part in query_blocks(q.shape[1], q.shape[0] * columns):
            probs = reading.probabilities(q[:, part], part.start, scale, softcap, sink_logits)
            out.append(kernel.unfold_heads(reading.mix(probs), q.shape[0]))
            if weights is not None:
                seen = reading.spread(kernel.attention_mass(probs, weights[part]))
                mass = seen if mass is None else mass + seen
        return torch.cat(out, dim=1).to(q.dtype), mass

    def _key_term(self) -> KeyTerm | None:
        return None if self.centre is None else KeyTerm(self.centre, self.places(), self.seen)

    # -- evict and encode --------------------------------------------------------------------------------------------

    def commit(self, k: Float[Tensor, "N Q D"], v: Float[Tensor, "N Q E"], mass: Tensor | None = None) -> None:
        """Take in the tokens that `attend` has just served: fill the sinks, extend the window, flush what overflows."""
        n_new = k.shape[1]
        if n_new == 0:
            return
        # What is stored is a constant: a cache must not keep the graph of every forward alive.
        k, v, mass = (x if x is None or not x.requires_grad else x.detach() for x in (k, v, mass))  # type: ignore[assignment]
        if self.rotary is not None:
            self._fold_queries(mass)
        new_mass = self._fold_mass(mass, n_new)
        self.seen += n_new
        self._remembered, self._choice = None if self._choice is None else self._choice.last, None
        placed, self._placed = self._placed, False
        filled = min(self.config.sink_tokens - self.n_sinks, n_new)
        if filled:
            head = tuple(to_raw(x[:, :filled], self.raw) for x in (k, v))
            self.sinks = tuple(
                torch.cat([old, new], dim=1) if old is not None else new.clone()
                for old, new in zip(self.sinks or (None, None), head, strict=True)
            )  # type: ignore[assignment]
            k, v = k[:, filled:], v[:, filled:]
            new_mass = None if new_mass is None else new_mass[:, filled:]
        flushed = self.config.flush_tokens(self.n_window + k.shape[1], n_new)
        if flushed == 0 or self.config.scope == "model":  # which rows that share a budget `settle` together
            self._extend(k, v, new_mass, placed)
            return
        if placed and flushed <= self.n_window:  # all that leaves is in the window already, and so is the new token
            leaving = [x[:, :flushed].to(k.dtype, copy=True) for x in self.window()]
            gone = None if new_mass is None else self.window_mass()[:, :flushed].clone()
            self._extend(k, v, new_mass, placed)
            self.cut_window(flushed)
            self._flush(leaving[0], leaving[1], gone)
            return
        keys, values = (self._joined(i, x) for i, x in enumerate((k, v)))
        joined = None if new_mass is None else torch.cat([self.window_mass(), new_mass], dim=1)
        self.n_window = 0
        self._remembered = None  # chunks are about to move
        self._extend(keys[:, flushed:], values[:, flushed:], None if joined is None else joined[:, flushed:])
        self._flush(keys[:, :flushed], values[:, :flushed], None if joined is None else joined[:, :flushed])

    def _fold_mass(self, mass: Tensor | None, n_new: int) -> Tensor | None:
        """Add this forward's mass to that of pages and window; return the new tokens' own."""
        if not self.config.tracks_mass:
            return None
        if mass is None:
            raise ValueError("this config tracks attention mass: commit needs what attend or a snapshot observed")
        scorer, stored = self.config.scorer, self.table.length
        fold = scorer.fold
        if stored and n_new == 1 and not scorer.reads_selection and runs_compiled("auto", mass.device, mass.dtype):
            pages = self.table.pool.streams["mass"]
            fold_mass(pages, self.table.index(), self.table.counts, scorer.carry(n_new), mass)
        elif stored:
            old = self.table.gather(["mass"])["mass"][..., 0]
            self.table.write("mass", fold(old, mass[:, :stored], n_new).unsqueeze(-1))
        if self._mass is not None and self.n_window:
            at = stored + self.n_sinks
            window = self._mass[:, : self.n_window]
            window.copy_(fold(window, mass[:, at : at + self.n_window], n_new))
        return mass[:, mass.shape[1] - n_new :].float()

    def _fold_queries(self, sums: Tensor | None) -> None:
        if sums is None:
            raise ValueError("this config tracks queries: commit needs what attend or a snapshot observed")
        self._queries = sums.clone() if self._queries is None else self._queries + sums

    def expected(self) -> Expected | None:
        """The queries to come, where a scorer asks for them."""
        if self._queries is None or self.rotary is None or not isinstance(self.config.scorer, ExpectedAttention):
            return None
        return self.config.scorer.expect(self._queries, self.seen, self.rotary)

    def window_mass(self) -> Tensor:
        """Attention mass of the window's tokens; empty where none is tracked."""
        return torch.empty(0) if self._mass is None else self._mass[:, : self.n_window]

    def _joined(self, index: int, new: Tensor) -> Tensor:
        """Recent and new tokens in one, in the dtype of the new ones."""
        return new if not self.n_window else torch.cat([self.window()[index].to(new.dtype), new], dim=1)

    def _extend(self, k: Tensor, v: Tensor, mass: Tensor | None, placed: bool = False) -> None:
        """Append raw tokens to the window, growing its buffers page by page and never token by token.

        `placed` says that K and V are where they belong.
        """
        size = self.n_window + k.shape[1]
        if self._window is None:
            # A prompt's window is cut to size; the first decode step makes room for a page of steps.
            self._window = tuple(to_raw(x, self.raw).clone() for x in (k, v))  # type: ignore[assignment]
            self._mass = None if mass is None else mass.clone()
        else:
            room = size + self.config.page_tokens - 1
            if not placed:
                old_k, old_v = self._window
                self._window = (
                    _placed(old_k, to_raw(k, self.raw), self.n_window, room),
                    _placed(old_v, to_raw(v, self.raw), self.n_window, room),
                )
            if mass is not None and self._mass is not None:
                self._mass = _placed(self._mass, mass, self.n_window, room)
        self.n_window = size

    def _flush(self, k: Tensor, v: Tensor, mass: Tensor | None) -> None:
        """Send raw tokens into the pages; the window no longer has them."""
        new = k.shape[1]
        first = self.seen - self.n_window - new
        positions = torch.arange(first, first + new, device=k.device).expand(k.shape[0], -1)
        leaving, protected = Leaving(k, v, positions, mass), self.n_sinks + self.n_window
        more = self.centre, self.group, self.expected, self.known
        flush(self.config, self.table, leaving, protected, self.seen, self.raw, *more)

    def cut_window(self, count: int) -> None:
        """Let go of the first `count` tokens of the window; a prompt's room goes with them."""
        self._remembered = None  # chunks are about to move
        rest = slice(count, self.n_window)
        window = [x[:, rest].clone() for x in self._window or ()]
        mass = None if self._mass is None else self._mass[:, rest].clone()
        self.n_window -= count
        if count > self.config.page_tokens:
            self._window, self._mass = (window[0], window[1]), mass
            return
        for old, kept in zip([*(self._window or ()), self._mass], [*window, mass], strict=True):
            if old is not None and kept is not None:
                old[:, : self.n_window] = kept


def _placed(buffer: Tensor, new: Tensor, at: int, room: int) -> Tensor:
    """`new` written into `buffer` from `at` on; a buffer with space for `room` tokens if the old one has none."""
    if buffer.shape[1] < at + new.shape[1]:
        grown = buffer.new_empty(buffer.shape[0], room, *buffer.shape[2:])
        grown[:, :at] = buffer[:, :at]
        buffer = grown
    buffer[:, at : at + new.shape[1]] = new
    return buffer
