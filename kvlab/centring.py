"""Where centres come from: a model's rotary embedding found by what it does, its key bias, the mean of its keys.

Everything is read off the running model: a prompt of one token attends only to itself, so what its key is at position p
differs from what it is at position 0 by the rotation and nothing else. No model is known by name.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvlab.cache import cache_kwarg
from kvlab.centre import Centre
from kvlab.kernels.rope import Rotary

Kind = Literal["bias", "mean"]
# One entry for each layer of the model; None for a layer that kvlab does not store.
Rotaries = tuple[Rotary | None, ...]
Centres = tuple[Centre | None, ...]

SINK_TOKENS = 4  # the first tokens carry a constant of their own and stay raw: they are not in a mean
LEAST_TOKENS = 64
# What rounding may do to a key, relative to the largest.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


class CentringError(ValueError):
    """The keys of this model cannot be centred that way; the message says why and what to do instead."""


@torch.no_grad()
def find_rotaries(model: PreTrainedModel) -> Rotaries:
    """The rotary embedding of every layer that keeps a full-attention cache.

    Candidates are the model's buffers named *inv_freq, in both pairings, and no rotation. Each layer takes the one that
    turns its keys from position 0 to where they are, up to twice the trained context. Raises CentringError when none
    does: a rotation that changes with the length (dynamic, long), or none that is known here.
    """
    text = model.config.get_text_config(decoder=True)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise CentringError(f"{type(model).__name__} takes no position_ids: its keys cannot be tied to positions")
    trained = getattr(text, "max_position_embeddings", None) or 4096
    at = [0, 1, 2, 301, trained // 2 + 3, trained - 1, 2 * trained + 1]
    # Embeddings that follow the longest prompt so far take their short form before, and again afterwards.
    _single_token_keys(model, [0])
    frequencies = _frequencies(model)
    keys = _single_token_keys(model, at)
    _single_token_keys(model, [0])
    # Layers that turn alike share one Rotary, and with it the table of its angles.
    candidates = {d: _candidates(frequencies, d, model.device) for d in {k.shape[-1] for k in keys if k is not None}}
    return tuple(None if k is None else _rotary_of(k, i, at, candidates[k.shape[-1]]) for i, k in enumerate(keys))


def _frequencies(model: nn.Module) -> list[Float[Tensor, " M"]]:
    """Distinct buffers of that name, copied before a forward may change them."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.ndim == 1 and not any(_equal(buffer, x) for x in found):
            found.append(buffer.detach().clone())
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _single_token_keys(model: PreTrainedModel, positions: Sequence[int]) -> list[Float[Tensor, "P N D"] | None]:
    """Keys of one token, alone at each of the positions; None for layers without a full-attention cache."""
    ids = torch.full((len(positions), 1), 5, device=model.device)
    at = torch.tensor(positions, device=model.device).unsqueeze(1)
    return [None if k is None else k[:, :, 0] for k in _keys(model, ids, at)]


def _keys(model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> list[Tensor | None]:
    """Keys [B, N, T, D] of every layer with a full-attention cache after one forward of the body."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    more: dict[str, Any] = {} if positions is None else {"position_ids": positions}
    model.base_model(input_ids=ids, use_cache=True, **{cache_kwarg(): cache}, **more)
    return [layer.keys if type(layer) is DynamicLayer else None for layer in cache.layers]  # type: ignore[misc]


def _candidates(frequencies: Sequence[Float[Tensor, " M"]], head_dim: int, device: torch.device) -> list[Rotary]:
    still = Rotary(torch.empty(0, device=device), head_dim)
    fitting = [f for f in frequencies if 2 * len(f) <= head_dim]
    return [still, *(Rotary(f, head_dim, interleaved) for f in fitting for interleaved in (False, True))]


def _rotary_of(keys: Float[Tensor, "P N D"], layer: int, at: Sequence[int], candidates: Sequence[Rotary]) -> Rotary:
    """The candidate that turns keys[0] into the others."""
    positions = torch.tensor(at, device=keys.device)
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    limit = _TOLERANCE.get(keys.dtype, 2e-3) * float(wide.abs().max())
    first = wide[:1].transpose(0, 1).expand(-1, len(at), -1)
    distances = [float((r.rotate(first, positions).transpose(0, 1) - wide).abs().max()) for r in candidates]
    best = min(range(len(candidates)), key=distances.__getitem__)
    if distances[best] <= limit:
        return candidates[best]
    raise CentringError(
        f"layer {layer}: no known rotation takes its keys from position 0 to {at[-1]} (nearest misses by "
        f"{min(distances):.3g}, {limit:.3g} is allowed): it changes with the length, or is of another kind. Leave keys "
        "uncentred, or use per-channel keys"
    )


def _of_layers(model: nn.Module) -> dict[int, nn.Linear]:
    """The `k_proj` of each layer, where a module with a `layer_idx` has one."""
    found = {}
    for module in model.modules():
        projection, index = getattr(module, "k_proj", None), getattr(module, "layer_idx", None)
        if isinstance(projection, nn.Module) and isinstance(index, int):
            found[index] = projection
    return found


@torch.no_grad()
def bias_centres(model: PreTrainedModel, rotaries: Rotaries) -> Centres:
    """The bias of `k_proj` in every layer, times what the model does to a projected key before it is cached.

    That must be one constant factor for each dim (RoPE at position 0 and its scaling of cos and sin): it is measured on
    several tokens. Raises CentringError where there is no bias, or where something else follows, such as a norm.
    """
    projections = _of_layers(model)
    for i in (i for i, rotary in enumerate(rotaries) if rotary is not None):
        if getattr(projections.get(i), "bias", None) is None:
            raise CentringError(f"layer {i} has no k_proj bias to take as its centre: use centring 'mean'")
    seen: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        return lambda _module, _inputs, out: seen.update({index: out.detach()})

    hooks = [projection.register_forward_hook(keep(i)) for i, projection in projections.items()]
    try:
        keys = _keys(model, torch.arange(3, 19, device=model.device).unsqueeze(1))
    finally:
        for hook in hooks:
            hook.remove()
    centres: list[Centre | None] = []
    for i, (rotary, k) in enumerate(zip(rotaries, keys, strict=True)):
        if rotary is None or k is None:
            centres.append(None)
            continue
        heads, head_dim = k.shape[1], k.shape[3]
        projected = seen[i].view(-1, heads, head_dim).double()
        factor = _factor(projected, k[:, :, 0].double(), i, _TOLERANCE.get(k.dtype, 1e-4))
        bias = projections[i].bias.detach().view(heads, head_dim)
        centres.append(Centre((factor * bias.double()).float(), rotary))
    return tuple(centres)


def _factor(
    projected: Float[Tensor, "B N D"], cached: Float[Tensor, "B N D"], layer: int, tolerance: float
) -> Float[Tensor, " D"]:
    """What a projected key is multiplied by, dim by dim, on its way into the cache."""
    factor = (projected * cached).sum((0, 1)) / projected.square().sum((0, 1)).clamp_min(1e-30)
    missed = float((cached - factor * projected).abs().max())
    if missed > tolerance * float(cached.abs().max()):
        raise CentringError(
            f"layer {layer}: what leaves k_proj is not what is rotated (off by {missed:.3g}), such as where a norm "
            "follows: its bias is not the constant of the keys. Use centring 'mean'"
        )
    return factor


@torch.no_grad()
def mean_centres(model: PreTrainedModel, token_ids: Sequence[int], rotaries: Rotaries) -> Centres:
    """The mean key before RoPE over a calibration text, the first SINK_TOKENS left out.

    Raises CentringError for a text of fewer than LEAST_TOKENS tokens.
    """
    if len(token_ids) < LEAST_TOKENS:
        raise CentringError(f"a mean needs at least {LEAST_TOKENS} calibration tokens, got {len(token_ids)}")
    keys = _keys(model, torch.tensor([list(token_ids)], device=model.device))
    positions = torch.arange(len(token_ids), device=model.device)
    centres: list[Centre | None] = []
    for rotary, k in zip(rotaries, keys, strict=True):
        if rotary is None or k is None:
            centres.append(None)
            continue
        flat = rotary.rotate_back(k[0].double(), positions)
        centres.append(Centre(flat[:, SINK_TOKENS:].mean(1).float(), rotary))
    return tuple(centres)


LOUD = 4.0  # a bias this many times a channel's spread sets the step of every group it is in
_SMALL = 3e9  # parameters


def key_advice(model: PreTrainedModel) -> str:
    """Which way to store keys in 4 bit suits this model, from its weights alone; nothing is run.

    A key bias is loud when it is far above what the projection adds for inputs of unit size. Models with a norm on keys
    lose most at 4 bit per token when they are small (reported for Qwen3 below 4 B parameters).
    """
    loudness = {i: float(x) for i, p in _of_layers(model).items() if (x := _loudness(p)) is not None}
    if loudness and max(loudness.values()) >= LOUD:
        layer = max(loudness, key=loudness.__getitem__)
        return (
            f"k_proj biases reach {loudness[layer]:.0f} times the spread of a key channel (layer {layer}): at 4 bit "
            "use centring='bias', or per-channel keys; plain per-token keys would lose their signal"
        )
    if _keys_are_normed(model) and sum(p.numel() for p in model.parameters()) < _SMALL:
        return "keys are normed in a small model: keep them at 8 bit, or at 4 bit per channel or with centring='mean'"
    return "at 4 bit per token use centring='mean', best with hadamard=True"


def _loudness(projection: nn.Module) -> Tensor | None:
    """The largest bias of a channel over the norm of its weights."""
    weight, bias = getattr(projection, "weight", None), getattr(projection, "bias", None)
    if weight is None or bias is None or weight.ndim != 2:
        return None
    return (bias.detach().abs().float() / weight.detach().float().norm(dim=1).clamp_min(1e-12)).max()


def _keys_are_normed(model: PreTrainedModel) -> bool:
    """Whether an attention module holds a norm as wide as a key head or as all of them."""
    head_dim = getattr(model.config.get_text_config(decoder=True), "head_dim", None)
    for module in model.modules():
        projection = getattr(module, "k_proj", None)
        if not isinstance(projection, nn.Module):
            continue
        widths = {head_dim, getattr(projection, "out_features", None)}
        for child in module.children():
            weight = getattr(child, "weight", None)
            if "norm" in type(child).__name__.lower() and weight is not None and weight.shape[-1] in widths:
                return True
    return False
