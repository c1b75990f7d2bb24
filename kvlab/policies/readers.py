"""Readers: which stored tokens a decode step reads. They change no stored byte, only bytes read."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from kvlab.kernels.chunks import Bound, width_of


class Reader(ABC):
    """Subclasses are frozen dataclasses and final. `kind` is the name in JSON and in READERS."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for tables; empty when everything is read."""


@dataclass(frozen=True, slots=True)
class Dense(Reader):
    """Every stored token is read."""

    kind: ClassVar[str] = "dense"

    @property
    def label(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class TopK(Reader):
    """The best-scoring chunks of `chunk` stored tokens, a `fraction` of them or, if `count` is set, that many.

    Scores are an upper bound of q . k over the chunk ("minmax", Quest, arXiv 2406.10774, or "codec", the same taken
    from per-channel scales at no extra byte) or the chunk's mean key ("mean"), summed over the query heads of a KV
    head. The first and the last chunks are always read; the first `dense_layers` layers read everything; a selection
    serves `select_every` steps.
    """

    kind: ClassVar[str] = "top_k"
    fraction: float = 0.25
    count: int = 0
    chunk: int = 16
    bound: Bound = "minmax"
    dense_layers: int = 2
    select_every: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"top-k fraction must lie in (0, 1], got {self.fraction!r}: 0.25 reads a quarter")
        for name, least in (("count", 0), ("chunk", 1), ("dense_layers", 0), ("select_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"top-k {name} must be at least {least}, got {getattr(self, name)}")
        if self.bound not in ("minmax", "mean", "codec"):
            raise ValueError(f"top-k bound must be 'minmax', 'mean' or 'codec', got {self.bound!r}")

    @property
    def summaries(self) -> tuple[str, ...]:
        """What is kept of each chunk, one row of head dim in fp16 for each."""
        return {"minmax": ("min", "max"), "mean": ("mean",), "codec": ()}[self.bound]

    @property
    def share(self) -> dict[str, Any]:
        """How many chunks to select, as `kernels.chunks.select` takes it."""
        return {"k": self.count} if self.count else {"fraction": self.fraction}

    def chosen(self, chunks: int) -> int:
        """Of a head's `chunks`, how many a query reads: its first and last ones in any case."""
        return width_of(chunks, **self.share, forced_first=1, forced_last=1)

    @property
    def label(self) -> str:
        share = f"top {self.count}" if self.count else f"top {self.fraction * 100:.4g}%"
        parts = [share, f"c{self.chunk}"]
        parts += [self.bound] if self.bound != "minmax" else []
        parts += [f"every {self.select_every}"] if self.select_every > 1 else []
        return " ".join(parts)
