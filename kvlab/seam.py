"""The two functions transformers calls for every attention layer while kvlab is attached: attention, and its mask."""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.attending import AttentionCall, SeamError
from kvlab.cache import Handle
from kvlab.kernels.attend import attend_reference
from kvlab.once import once
from kvlab.stacked import StackedLayer

# What models pass along that changes nothing here. Anything else that is set is refused, not ignored.
_HARMLESS = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "num_items_in_batch",
    "position_embeddings",
}


def _scale(module: torch.nn.Module, query: Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls for every attention layer while kvlab is attached.

    With a handle, packed attention over that layer's rows; without one, plain dense attention. Takes [B, H, Q, D],
    returns [B, Q, H, E]. Raises SeamError for arguments it would have to ignore.
    """
    handle = Handle.of(key, kwargs)
    strange = [k for k, v in kwargs.items() if v is not None and v is not False and k not in _HARMLESS]
    if strange or dropout or kwargs.get("output_attentions"):
        what = strange or (["dropout"] if dropout else ["output_attentions"])
        raise SeamError(f"{type(module).__name__} passes {what} to attention, which a compressed cache cannot honour")
    scale = _scale(module, query, scaling)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if handle is None:
        if attention_mask is None or attention_mask.ndim == 2:
            attention_mask = _causal(query, key, attention_mask, sliding_window) if causal else None
        return _dense(module, query, key, value, attention_mask, scale, softcap, s_aux), None
    if sliding_window is not None:
        raise SeamError(f"{type(module).__name__} slides a window over a layer that was to be compressed whole")
    if not causal:
        raise SeamError(f"{type(module).__name__} reads later tokens, which a cache cannot hold yet")
    if isinstance(handle.layer, StackedLayer):
        handle.layer.check(attention_mask, kwargs.get("position_ids"))
    valid = None
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise SeamError(
                f"a compressed cache takes a 2-D padding mask [rows, tokens], got shape {tuple(attention_mask.shape)}"
            )
        new = query.shape[2]
        past, valid = once(attention_mask, (new, handle.layer.rows[0].seen), lambda mask: _split(mask, new))
        _check_history(handle, past)
    call = AttentionCall(query, key, value, scale, valid, softcap, s_aux, kwargs.get("position_ids"))
    return handle.attend(call).transpose(1, 2), None


def _split(mask: Tensor, new: int) -> tuple[list[int], Tensor]:
    """How many tokens of each row a padding mask counts before the last `new`, and a copy of what it says of those."""
    return mask[:, :-new].sum(1).tolist(), mask[:, -new:].to("cpu", torch.bool, copy=True)


def _check_history(handle: Handle, past: list[int]) -> None:
    """Tokens that entered the cache cannot be masked out later, nor can padding be unmasked."""
    for b, (row, said) in enumerate(zip(handle.layer.rows, past, strict=True)):
        if row.seen != said:
            raise SeamError(
                f"row {b} of the cache has taken {row.seen} tokens, but the mask now counts {said} before the new "
                "ones: a mask must keep its past"
            )


def _dense(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention of layers kvlab does not store: sliding ones, and any under a cache that is not ours."""
    if softcap is None and s_aux is None:
        # Expanded by hand: a bool mask with grouped heads must not depend on which SDPA backend is picked.
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, scaling=scale, is_causal=False)[0]
    if mask is not None and mask.dtype != torch.bool:
        raise SeamError(
            f"{type(module).__name__} takes a bool mask here, got {mask.dtype}: True where a key may be read"
        )
    allowed = mask.expand(q.shape[0], -1, -1, -1)[:, 0] if mask is not None else [None] * q.shape[0]
    rows = [attend_reference(q[b], k[b], v[b], scale, allowed[b], softcap, s_aux) for b in range(q.shape[0])]
    return torch.stack(rows).transpose(1, 2).contiguous()


def _causal(q: Tensor, k: Tensor, padding: Tensor | None, window: int | None) -> Tensor:
    """Bool [B or 1, 1, Q, T], True where a key may be read, for queries that are the last Q of T tokens."""
    at = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device).unsqueeze(1)
    key_at = torch.arange(k.shape[2], device=q.device)
    allowed = key_at <= at
    if window is not None:
        allowed = allowed & (key_at > at - window)
    if padding is None:
        return allowed[None, None]
    # A padding query may read itself: a row without any key would be NaN.
    return (allowed & padding[:, None, -k.shape[2] :].bool() | (key_at == at)).unsqueeze(1)


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What attention gets as its mask: the 2-D padding mask itself for plain causal layers, else SDPA's 4-D mask."""
    plain = mask_function is causal_mask_function and local_size is None
    # A static cache has room behind the newest token, which only a full mask can exclude; its offsets are tensors.
    ends_with_queries = type(q_offset) is int and type(kv_offset) is int and q_offset + q_length == kv_length
    if plain and ends_with_queries and kv_offset == 0:
        return attention_mask
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )
