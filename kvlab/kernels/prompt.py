"""Attention of a first prompt over itself, and the attention mass its tokens gather; in blocks of queries."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.kernels.attend import attention_mass, causal_sdpa, fold_heads, probabilities, unfold_heads

# Most logits held at once by one attention call, in elements: 256 MiB of float32.
LOGITS_AT_ONCE = 2**26


def query_blocks(n_queries: int, logits_per_query: int) -> Iterator[slice]:
    """Slices of queries whose logits fit the bound."""
    size = max(1, LOGITS_AT_ONCE // logits_per_query)
    for start in range(0, n_queries, size):
        yield slice(start, min(start + size, n_queries))


def _prompt_probabilities(
    q: Tensor, k: Tensor, part: slice, scale: float, softcap: float | None, sink_logits: Tensor | None
) -> Float[Tensor, "N R T"]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    folded = fold_heads(q[:, part].to(dtype) * scale, k.shape[0])
    rank = torch.arange(k.shape[1], device=k.device)
    return probabilities(
        folded @ k.to(dtype).mT, rank > rank[part].unsqueeze(1), softcap, sink_logits, part.stop - part.start
    )


def attend_prompt(
    q: Float[Tensor, "H Q D"],
    k: Float[Tensor, "N Q D"],
    v: Float[Tensor, "N Q E"],
    scale: float,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "H Q E"]:
    """Causal attention of a first prompt over itself, by SDPA where that knows all that is asked."""
    if softcap is None and sink_logits is None:
        return causal_sdpa(q[None], k[None], v[None], scale)[0]
    out = []
    for part in query_blocks(q.shape[1], q.shape[0] * k.shape[1]):
        probs = _prompt_probabilities(q, k, part, scale, softcap, sink_logits)
        out.append(unfold_heads(probs @ v.to(probs.dtype), q.shape[0]))
    return torch.cat(out, dim=1).to(q.dtype)


def prompt_mass(
    q: Float[Tensor, "H Q D"],
    k: Float[Tensor, "N Q D"],
    scale: float,
    weights: Float[Tensor, " Q"],
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "N Q"]:
    """Attention mass of a first prompt on its own tokens. Queries of weight zero at its start are not computed."""
    mass = torch.zeros(k.shape[:2], device=k.device, dtype=torch.promote_types(k.dtype, torch.float32))
    first = int(weights.nonzero()[0])
    for part in query_blocks(q.shape[1] - first, q.shape[0] * k.shape[1]):
        part = slice(part.start + first, part.stop + first)
        probs = _prompt_probabilities(q, k, part, scale, softcap, sink_logits)
        mass += attention_mass(probs, weights[part])
    return mass
