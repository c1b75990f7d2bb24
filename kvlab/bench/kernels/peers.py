"""The peer: torch's scaled dot product attention, one new token, K and V in 16 bit in one piece.

Every back end that runs is tried, with the query heads of a KV head as heads (`enable_gqa`) and as queries of one head
(the same numbers for a single token without a mask); the fastest one whose output is right is the peer.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab.bench.kernels.cases import Case
from kvlab.bench.kernels.data import normal
from kvlab.bench.kernels.prepared import TOLERANCE, Call, Check, Outputs, Place, Prepared, relative
from kvlab.bench.kernels.timing import Stopwatch

_BACKENDS = {
    "cuda": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
}


def prepare(case: Case, place: Place, stopwatch: Stopwatch | None) -> Prepared:
    """The fastest right way. Raises RuntimeError where none runs."""
    s, generator = case.shape, place.generator(case)
    q = normal(s.B, s.N * s.G, 1, s.D, dtype=place.compute, device=place.device, generator=generator)
    k, v = (
        normal(s.B, s.N, s.L + s.window, s.D, dtype=place.compute, device=place.device, generator=generator)
        for _ in range(2)
    )
    expected = _reference(q[:1], k[:1], v[:1])

    def check(outputs: Outputs) -> Check:
        error = relative(outputs[0][:1].reshape(expected.shape), expected)
        return Check(error, TOLERANCE[place.compute], str(expected.dtype).removeprefix("torch."))

    best: tuple[float, str, Call] | None = None
    for name, call in _ways(q, k, v, place.device):
        try:
            right = check(call()).ok
            took = stopwatch.time(call, replays=10)[0].p50 if right and stopwatch is not None else 0.0
        except RuntimeError:
            continue  # torch's way to say that a back end does not take these tensors, or not into a graph
        if right and (best is None or took < best[0]):
            best = (took, name, call)
    if best is None:
        raise RuntimeError(f"no back end of scaled_dot_product_attention is right at {case.name}")
    nbytes = sum(x.numel() * x.element_size() for x in (q, q, k, v))
    return Prepared(best[2], check, nbytes, best[1])


def _ways(q: Tensor, k: Tensor, v: Tensor, device: str) -> Iterator[tuple[str, Call]]:
    """(name, call) of every way there is."""
    b, heads, _, d = q.shape
    folded = q.view(b, k.shape[1], heads // k.shape[1], d)
    for backend in _BACKENDS[device]:
        for name, query in (("", q), (" folded", folded)):

            def call(backend=backend, query=query) -> Outputs:
                gqa = query.shape[1] != k.shape[1]
                with sdpa_kernel([backend]):
                    return (F.scaled_dot_product_attention(query, k, v, enable_gqa=gqa),)

            yield backend.name.lower().removesuffix("_attention") + name, call


def _reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by its definition, in float64 where that is small."""
    dtype = torch.float64 if k.numel() <= 2**26 else torch.float32
    group = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        one = slice(head // group, head // group + 1)
        logits = q[:, head : head + 1].to(dtype) @ k[:, one].to(dtype).mT / q.shape[-1] ** 0.5
        out.append(torch.softmax(logits, dim=-1) @ v[:, one].to(dtype))
    return torch.cat(out, dim=1)
