"""Cases that write pages: tokens are encoded and appended, kept ones close up."""

import torch
from torch import Tensor

from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.data import codecs, normal, poison, pool
from kvlab.bench.kernels.prepared import Check, Outputs, Place, Prepared, differing
from kvlab.kernels.compact import compact
from kvlab.kernels.encode import append, encode
from kvlab.kernels.formats import Format


class _Side:
    """K or V: new tokens, the pages they go to, and one page that nobody holds."""

    def __init__(self, case: Case, place: Place, fmt: Format, layout, generator: torch.Generator) -> None:
        s = case.shape
        self.fmt = fmt
        self.x = normal(s.B, s.N, s.L, s.D, dtype=place.compute, device=place.device, generator=generator)
        pages = s.B * s.N * -(-s.L // s.P)
        self.streams = {
            name: torch.empty(pages + 1, stream.rows, stream.width, dtype=stream.dtype, device=place.device)
            for name, stream in layout.items()
        }
        order = torch.randperm(pages, generator=generator, device=place.device)
        self.index = order.to(torch.int32).view(s.B, s.N, -1)
        self.start = torch.zeros(s.B, s.N, dtype=torch.int32, device=place.device)

    def clear(self) -> None:
        for stream in self.streams.values():
            poison(stream)

    @property
    def nbytes(self) -> int:
        written = sum(x[1:].numel() * x.element_size() for x in self.streams.values())
        return self.x.numel() * self.x.element_size() + written + self.index.numel() * 4

    def written(self, row: int) -> dict[str, Tensor]:
        """What stands in the pages of one conversation: [N, rows, width] of each stream."""
        return {name: stream[self.index[row].long()].flatten(1, 2) for name, stream in self.streams.items()}

    def difference(self, row: int) -> float:
        """Largest share of bytes of a stream that differ from the definition, taken on the CPU in float32."""
        raw = self.streams["data"].dtype if self.fmt.kind == "raw" else self.x.dtype
        expected = encode(self.x[row : row + 1].cpu(), self.fmt, raw)
        written = self.written(row)
        rows = {name: want[0] for name, want in expected.items()}
        return max(differing(written[name][:, : want.shape[1]], want) for name, want in rows.items())

    def untouched(self) -> bool:
        """Whether the page that nobody holds is as it was."""
        last = self.index.numel()
        return all(bool((x[last:].view(torch.uint8) == 0xFF).all()) for x in self.streams.values())


def prepare_encode(case: Case, place: Place) -> Prepared:
    """Append L tokens to the empty pages of every head, keys and values."""
    generator = place.generator(case)
    layouts = [kind.streams(case.shape.D, case.shape.P, place.compute) for kind in codecs(case.pair)]
    formats = [kind.stored_as(case.shape.D) for kind in codecs(case.pair)]
    sides = [_Side(case, place, fmt, layout, generator) for fmt, layout in zip(formats, layouts, strict=True)]

    def clear(_: Outputs) -> None:
        for side in sides:
            side.clear()

    def run() -> Outputs:
        for side in sides:
            append(side.x, side.streams, side.fmt, side.index, side.start, impl="triton")
        return tuple(x for side in sides for x in side.streams.values())

    def check(outputs: Outputs) -> Check:
        rows = {0, case.shape.B - 1}
        error = max(side.difference(row) for side in sides for row in rows)
        if not all(side.untouched() for side in sides):
            error = 1.0
        return Check(error, 0.0, "the same bytes as torch on the CPU")

    clear(())
    return Prepared(run, check, sum(side.nbytes for side in sides), "triton", clear)


def prepare_compact(case: Case, place: Place) -> Prepared:
    """Every head closes up to half of its tokens, drawn at random: in place, or in other pages."""
    s, generator = case.shape, place.generator(case)
    made = pool(case.pair, s, place.compute, place.device, generator)
    streams = {f"k.{name}": x for name, x in made.k.items()} | {f"v.{name}": x for name, x in made.v.items()}
    order = torch.rand(s.B, s.N, s.L, generator=generator, device=place.device).argsort(-1)
    kept = order[..., : (s.L + 1) // 2].sort(-1).values.to(torch.int32)
    lengths = torch.full((s.B, s.N), kept.shape[-1], dtype=torch.int32, device=place.device)
    target = None
    if case.flag("others", False):
        # As many pages again, behind those that are read.
        streams = {name: torch.cat([x, torch.empty_like(x)]) for name, x in streams.items()}
        first = made.index.numel() + 1
        target = first + made.index[..., : -(-kept.shape[-1] // s.P)]
    before = {name: x.clone() for name, x in streams.items()}
    place_of = made.index if target is None else target

    def run() -> Outputs:
        compact(streams, made.index, kept, lengths, target=target, impl="triton")
        return ()

    def clear(_: Outputs) -> None:
        for name, x in streams.items():
            x.copy_(before[name])

    def check(_: Outputs) -> Check:
        error = 0.0
        for name, x in streams.items():
            for row in {0, s.B - 1}:
                old = before[name][made.index[row].long()].flatten(1, 2)
                want = old.gather(1, kept[row].long().unsqueeze(-1).expand(-1, -1, old.shape[-1]))
                error = max(error, differing(x[place_of[row].long()].flatten(1, 2)[:, : want.shape[1]], want))
            if not bool((x[made.index.numel()].view(torch.uint8) == 0xFF).all()):
                error = 1.0
        return Check(error, 0.0, "the same bytes as a gather by torch")

    moved = 2 * made.token_bytes * kept.numel() + 4 * kept.numel() + 4 * made.index.numel()
    return Prepared(run, check, int(moved), "triton", clear)
