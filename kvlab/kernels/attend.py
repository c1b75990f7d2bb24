"""Softmax attention in pieces: logits in, probabilities and attention mass out. Knows nothing of how K is stored.

Rows are ordered query head major within a KV head: row g * Q + q of KV head n is query head n * G + g, token q.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def attend_reference(
    q: Float[Tensor, "H Q D"],
    k: Float[Tensor, "N T D"],
    v: Float[Tensor, "N T E"],
    scale: float,
    mask: Bool[Tensor, "*b Q T"] | None = None,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "H Q E"]:
    """Attention by its definition: one head at a time, K and V whole. `mask` is True where a key may be read."""
    group = q.shape[0] // k.shape[0]
    out = []
    for head in range(q.shape[0]):
        logits = q[head] @ k[head // group].mT * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            allowed = mask if mask.ndim == 2 else mask[head // group]
            logits = logits.masked_fill(~allowed, -torch.inf)
        if sink_logits is not None:
            logits = torch.cat([logits, sink_logits[head].to(logits.dtype).expand(logits.shape[0], 1)], dim=-1)
        probs = torch.softmax(logits, dim=-1)[:, : k.shape[1]]
        out.append(probs.nan_to_num(0.0) @ v[head // group])
    return torch.stack(out)


def fold_heads(x: Float[Tensor, "H Q D"], n_kv: int) -> Float[Tensor, "N R D"]:
    """Query heads of one KV head side by side: [H, Q, D] -> [N, G*Q, D]. Raises ValueError when N does not divide H."""
    if x.shape[0] % n_kv:
        raise ValueError(f"query heads must be a multiple of KV heads, got {x.shape[0]} query and {n_kv} KV heads")
    return x.reshape(n_kv, -1, x.shape[-1])


def unfold_heads(x: Float[Tensor, "N R D"], n_heads: int) -> Float[Tensor, "H Q D"]:
    """Inverse of `fold_heads`."""
    return x.reshape(n_heads, -1, x.shape[-1])


def probabilities(
    logits: Float[Tensor, "N R T"],
    forbidden: Bool[Tensor, "*n Q T"] | None,
    softcap: float | None,
    sink_logits: Float[Tensor, " H"] | None,
    n_queries: int,
) -> Float[Tensor, "N R T"]:
    """Softmax over T of scaled logits. `forbidden` is True where a key may not be read; a row with no key gives zeros.

    `sink_logits` is a learned logit per query head that takes probability and adds no value (GPT-OSS).
    """
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if forbidden is not None:
        grouped = logits.unflatten(1, (-1, n_queries))
        grouped = grouped.masked_fill(forbidden if forbidden.ndim == 2 else forbidden.unsqueeze(1), -torch.inf)
        logits = grouped.flatten(1, 2)
    if sink_logits is None:
        probs = torch.softmax(logits, dim=-1)
        return probs if forbidden is None else probs.nan_to_num(0.0)
    sink = sink_logits.to(logits.dtype).view(logits.shape[0], -1, 1).repeat_interleave(n_queries, dim=1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]


def attention_mass(probs: Float[Tensor, "N R T"], weights: Float[Tensor, " Q"]) -> Float[Tensor, "N T"]:
    """Weighted sum over queries of each key's attention probability, averaged over the G query heads of its KV head.

    The mean over the group is the vote rule for GQA: one kept set per KV head (SnapKV issue 22 asks for one).
    """
    grouped = probs.unflatten(1, (-1, weights.shape[0]))
    return torch.einsum("ngqt,q->nt", grouped, weights.to(probs.dtype)) / grouped.shape[1]


def causal_sdpa(
    q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B N Q D"], v: Float[Tensor, "B N Q E"], scale: float
) -> Float[Tensor, "B H Q E"]:
    """Plain causal attention of a block of new tokens over itself."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
