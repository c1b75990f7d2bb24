"""Put kvlab's attention on a model and take it off without a trace; decide by facts and a dry run whether it fits."""

import functools
import itertools
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvlab.attending import SeamError
from kvlab.cache import KVCache, Mode, cache_kwarg
from kvlab.centring import Centres, Rotaries, bias_centres, find_rotaries, key_advice
from kvlab.config import KVConfig
from kvlab.kernels.dispatch import Impl
from kvlab.layer import Centring, LayerShape, ModelShape
from kvlab.policies import Dense
from kvlab.seam import attention, attention_mask

NAME = "kvlab"


class UnsupportedModelError(ValueError):
    """kvlab cannot compress this model's cache; the message says why."""


class Plan(NamedTuple):
    """How a model's cache will be served."""

    mode: Literal["packed", "dense", "refuse"]
    reason: str
    compressed: tuple[int, ...]  # layers kvlab stores
    stock: tuple[int, ...]  # layers that keep transformers' own cache
    advice: str = ""  # which way to store keys in 4 bit suits the model, from its weights

    @property
    def stackable(self) -> bool:
        return self.mode == "packed" and not self.stock


class Attachment:
    """A model with kvlab's attention on it. A context manager; `detach` may also be called by hand, in any order.

    Each attachment registers a name of its own, so that models attached at the same time do not depend on each other.
    The model lists the attachments that are on it, oldest first: a generator closed late, by the garbage collector say,
    detaches whenever that may be, and must neither leave its name on the model nor take a later one's away.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: KVConfig,
        mode: Mode,
        centres: Mapping[str, Centres] | None = None,
        rotaries: Rotaries | None = None,
    ) -> None:
        self.model, self.config = model, config
        if rotaries is not None:
            self.rotaries = rotaries
        self._centres = dict(centres or {})
        self.mode: Mode = mode
        self.name = f"{NAME}-{id(self):x}"
        self._before = _implementations(model)
        self.attached = False
        if mode == "packed":
            AttentionInterface.register(self.name, attention)
            AttentionMaskInterface.register(self.name, attention_mask)
            _attached(model).append(self)
            try:
                model.set_attn_implementation(self.name)
            except BaseException:
                self._restore()
                raise
        self.attached = True

    def cache(self, config: KVConfig | None = None, impl: Impl = "auto") -> KVCache:
        """A fresh, empty cache, by default of the attached config.

        `impl` names what works on its pages where that is not left to the device: "triton", "numba" or "torch". The
        first forward raises ValueError where it cannot run.
        """
        if not self.attached:
            raise RuntimeError("detached: attach the model again to make caches for it")
        config = config or self.config
        text = self.model.config.get_text_config(decoder=True)
        return KVCache(config, text, self.mode, self.centres(config.centring), self.turns(config), impl)

    @functools.cached_property
    def rotaries(self) -> Rotaries:
        """How each compressed layer turns its keys; found once, when first asked for.

        Raises CentringError where that cannot be told.
        """
        return find_rotaries(self.model)

    def turns(self, config: KVConfig) -> Rotaries | None:
        """`rotaries`, where the config's scorer looks at queries before RoPE."""
        return self.rotaries if config.budget.evicts and config.scorer.reads_queries else None

    def centres(self, centring: Centring) -> Centres | None:
        """What is taken out of the keys of each layer under such a config; None where nothing is.

        "bias" is read off the model when first asked for. Raises ValueError for "mean" when it was not given.
        """
        if centring == "none":
            return None
        if self.mode == "dense":
            raise UnsupportedModelError(f"{type(self.model).__name__}: keys are centred in packed mode only")
        if centring == "bias" and centring not in self._centres:
            self._centres[centring] = bias_centres(self.model, self.rotaries)
        if centring not in self._centres:
            raise ValueError(
                "centring 'mean' needs centres measured beforehand: attach(model, config, "
                "centres=calibrated(loaded, ['mean'])) with kvlab.calibration.calibrated"
            )
        return self._centres[centring]

    def detach(self) -> None:
        """Take kvlab off again; the model's own attention is back when no attachment is left. Twice is harmless."""
        if self.attached and self.mode == "packed":
            self._restore()
        self.attached = False

    def _restore(self) -> None:
        on = _attached(self.model)
        later = on[on.index(self) + 1 :]
        on.remove(self)
        if later:
            later[0]._before = self._before
        else:
            # Straight into the configs: the setter would check, warn, and level what differed below the top.
            for config, implementation in self._before:
                config._attn_implementation_internal = implementation
        if not on:
            del self.model._kvlab_attached
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def _attached(model: PreTrainedModel) -> list[Attachment]:
    """The attachments that are on `model`, kept with it."""
    return model.__dict__.setdefault("_kvlab_attached", [])


def _implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """Every config below `model` with the attention it names, which need not be one and the same."""
    configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    for config in configs:
        configs += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    distinct = {id(config): config for config in configs}
    return [(config, config._attn_implementation_internal) for config in distinct.values()]


def attach(
    model: PreTrainedModel,
    config: KVConfig | None = None,
    *,
    plan: Plan | None = None,
    centres: Mapping[str, Centres] | None = None,
    rotaries: Rotaries | None = None,
) -> Attachment:
    """Run `model` under `config` (raw by default). Use as `with attach(model, config) as kv: ... kv.cache()`.

    Raises UnsupportedModelError when the model's cache cannot be compressed, ValueError when the config does not fit
    its heads or its keys cannot be centred; all before any text is processed. `plan` skips the dry run. `centres` are
    those measured on a text, by centring, as `calibration.calibrated` makes them. `rotaries` are this model's, as
    `find_rotaries` finds them, where an earlier attachment has looked already.
    """
    config = config or KVConfig()
    plan = plan or make_plan(model)
    if plan.mode == "refuse":
        raise UnsupportedModelError(f"{type(model).__name__}: {plan.reason}")
    if plan.mode == "dense" and config.budget.evicts:
        raise UnsupportedModelError(f"{type(model).__name__}: no eviction in dense mode ({plan.reason})")
    if plan.mode == "dense" and not isinstance(config.reader, Dense):
        raise UnsupportedModelError(f"{type(model).__name__}: no sparse reading in dense mode ({plan.reason})")
    config.check(shape_of(model))
    attachment = Attachment(model, config, "dense" if plan.mode == "dense" else "packed", centres, rotaries)
    try:
        attachment.centres(config.centring)
        attachment.turns(config)
    except BaseException:
        attachment.detach()
        raise
    return attachment


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Heads, head dims and dtype of each layer that has a K/V cache, from a two-token forward of the model itself."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        model(input_ids=_probe_ids(model, 1, 2), use_cache=True, **{cache_kwarg(): cache})
    layers = []
    for layer in cache.layers:
        k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
        if k is None or v is None:
            raise UnsupportedModelError(f"{type(model).__name__}: {type(layer).__name__} holds no K/V of its own")
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        layers.append(LayerShape(k.shape[1], k.shape[3], v.shape[3], window))
    return ModelShape(tuple(layers), model.dtype)


def _probe_ids(model: PreTrainedModel, rows: int, tokens: int) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return (torch.arange(rows * tokens, device=model.device) * 7 % (vocabulary - 1) + 1).view(rows, tokens)


def make_plan(model: PreTrainedModel) -> Plan:
    """Packed, dense or refuse: by the facts of the model's cache layers and a two-step dry run, never by its name.

    The dry run takes a left-padded batch of two through a prompt and a step, and compares logits with the model's own.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return Plan("refuse", "encoder-decoder models keep two caches", (), ())
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return Plan("refuse", "the model keeps a cache class of its own", (), ())
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    compressed = tuple(i for i, x in enumerate(layers) if type(x) is DynamicLayer)
    stock = tuple(i for i in range(len(layers)) if i not in compressed)
    if not compressed:
        kinds = sorted({type(x).__name__ for x in layers})
        return Plan("refuse", f"no layer keeps a full-attention cache, only {kinds}", compressed, stock)
    other = sorted({type(layers[i]).__name__ for i in stock} - {DynamicSlidingWindowLayer.__name__})
    if other:
        return Plan("refuse", f"layers of class {other} cannot be forked or counted yet", compressed, stock)
    reasons = []
    modes: tuple[Mode, ...] = ("packed", "dense") if model._can_set_attn_implementation() else ("dense",)
    if "packed" not in modes:
        reasons.append("attention does not go through AttentionInterface")
    for mode in modes:
        problem = _dry_run(model, mode)
        if problem is None:
            reason = "; ".join(reasons) or "attention is served from the packed store"
            return Plan(mode, reason, compressed, stock, key_advice(model) if mode == "packed" else "")
        reasons.append(f"{mode}: {problem}")
    return Plan("refuse", "; ".join(reasons), compressed, stock)


def _dry_run(model: PreTrainedModel, mode: Mode) -> str | None:
    """None when two steps under `mode` equal the model's own, else what went wrong."""
    text = model.config.get_text_config(decoder=True)
    ids = _probe_ids(model, 2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    try:
        own = _two_steps(model, ids, mask, DynamicCache(config=text))
        if own.isnan().any():
            # Some models turn padding into NaN by themselves (float64's minimum as a mask, taken in float32).
            rows = [
                _two_steps(model, ids[b : b + 1, n:], mask[b : b + 1, n:], DynamicCache(config=text))
                for b, n in ((0, 0), (1, 2))
            ]
            own = torch.stack(rows, dim=1).flatten(0, 1)
        with Attachment(model, KVConfig(), mode) as kv:
            cache = kv.cache()
            ours = _two_steps(model, ids, mask, cache)
    except (SeamError, RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    if any(cache.layers[i].seen != ids.shape[1] or not cache.layers[i].rows[0].seen for i in cache.compressed):  # type: ignore[union-attr]
        return "the model does not use the cache it is given"
    spread = float(own.abs().max())
    worst = float((own - ours).abs().max())
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 5e-2}.get(model.dtype, 1e-3)
    return None if worst <= tolerance * max(spread, 1.0) else f"logits differ by {worst:.3g} from the model's own"


@torch.no_grad()
def _two_steps(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Last logits of a left-padded prompt and of one more step."""
    prompt, step = ids[:, :-1], ids[:, -1:]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    last = []
    for part, upto in ((prompt, prompt.shape[1]), (step, ids.shape[1])):
        out = model(
            input_ids=part,
            attention_mask=mask[:, :upto],
            position_ids=positions[:, upto - part.shape[1] : upto],
            use_cache=True,
            **{cache_kwarg(): cache},
        )
        last.append(out.logits[:, -1].float())
    return torch.cat(list(itertools.chain(last)), dim=0)
