"""KVLayer and KVCache: compressed rows behind transformers' Cache protocol. The only state of the engine.

Packed mode: `update` hands back the new K and V untouched, together with a handle that kvlab's attention function reads
the rest through; rows attend, observe, evict and encode there. Dense mode, for models that do not route attention
through that function: `update` returns everything held, decoded. How models are put under it is attach.py's business.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from kvlab import inventory
from kvlab.attending import AttentionCall, SeamError, attend_rows
from kvlab.centre import Centre
from kvlab.config import KVConfig
from kvlab.kernels.dispatch import Impl, on_pages
from kvlab.kernels.rope import Rotary
from kvlab.kernels.rowwise import runs_compiled
from kvlab.launching import Launch
from kvlab.layer import LayerConfig, LayerShape, Occupancy
from kvlab.policies import Dense
from kvlab.row import Row
from kvlab.settling import settle
from kvlab.store import PagePool

Mode = Literal["packed", "dense"]
HANDLE_KWARG = "kvlab_handle"
_HANDLE_ATTRIBUTE = "_kvlab_handle"
UNATTENDED = (
    "the last update was never attended: either that forward was interrupted (start again with a fresh cache), or the "
    "model does not call kvlab's attention function"
)


def cache_kwarg() -> str:
    """The forward argument that takes a cache: `cache` from transformers 5.24 on, `past_key_values` before."""
    import transformers

    major, minor = (int(x) for x in transformers.__version__.split(".")[:2])
    return "cache" if (major, minor) >= (5, 24) else "past_key_values"


@runtime_checkable
class Attending(Protocol):
    """A cache layer that serves attention itself."""

    @property
    def rows(self) -> Sequence[Row]: ...

    def attend(self, call: AttentionCall) -> Tensor: ...


class Handle:
    """One layer's pending attention: K and V of the new tokens, and who serves them. Good for one call."""

    def __init__(self, layer: "Attending", k: Tensor, v: Tensor) -> None:
        self.layer = layer
        self.k: Tensor | None = k
        self.v: Tensor | None = v
        self.consumed = False
        self._versions = _versions(k, v)

    @staticmethod
    def of(key: Tensor, kwargs: dict[str, Any]) -> "Handle | None":
        """The handle of this attention call, by the call's kwargs or by the key tensor itself."""
        return kwargs.pop(HANDLE_KWARG, None) or getattr(key, _HANDLE_ATTRIBUTE, None)

    def publish(self, kwargs: dict[str, Any] | None) -> None:
        """Both channels: the kwargs the model splats into attention (transformers >= 5.24), and the tensor."""
        if self.k is not None:
            setattr(self.k, _HANDLE_ATTRIBUTE, self)
        if kwargs is not None:
            kwargs[HANDLE_KWARG] = self

    def attend(self, call: AttentionCall) -> Float[Tensor, "B H Q E"]:
        """Serve the call. Raises SeamError when K or V were replaced or changed after `update`, or served before."""
        if self.consumed:
            raise SeamError("two attention calls read one Cache.update (shared K/V layers); attach it in dense mode")
        if call.k is not self.k or call.v is not self.v or _versions(call.k, call.v) != self._versions:
            raise SeamError("the model changes K or V between Cache.update and attention; attach it in dense mode")
        out = self.layer.attend(call)
        self.consumed = True
        # The key carries this handle: holding it in turn would keep both until the next garbage collection.
        self.k = self.v = None
        return out


def _versions(k: Tensor, v: Tensor) -> tuple[int, int]:
    """How often each was written to. Inference tensors do not count; there the identity check has to do."""
    return (0, 0) if k.is_inference() or v.is_inference() else (k._version, v._version)


class KVLayer(CacheLayerMixin):
    """One layer's compressed cache. `seen` counts slots ever given, padding included; rows count their own tokens."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        config: LayerConfig,
        raw_dtype: torch.dtype | None,
        mode: Mode = "packed",
        pools: "dict[PoolKey, PagePool] | None" = None,
        centre: Centre | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.config, self.raw_dtype, self.mode, self.centre = config, raw_dtype, mode, centre
        self._pools = {} if pools is None else pools
        self.rows: list[Row] = []
        self.pool: PagePool | None = None
        self.seen = 0
        self.impl: Impl = "auto"  # what works on the pages: set before the first token
        self._launches: dict[int, Launch] = {}
        self._pending: Handle | None = None
        # Set on the last of the layers that share one budget: those before it. Not the cache, which would be a cycle.
        self.others: list[KVLayer] | None = None

    # transformers reads these
    @property
    def is_croppable(self) -> bool:
        return False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, key_dim = key_states.shape
        raw = self.raw_dtype or key_states.dtype
        self.dtype = key_states.dtype
        self.shape = LayerShape(heads, key_dim, value_states.shape[-1])
        key = (self.config, self.shape, raw, key_states.device)
        if key not in self._pools:
            streams = self.config.streams(self.shape, raw)
            self._pools[key] = PagePool(streams, self.config.page_tokens, key_states.device, self.impl)
        self.pool = self._pools[key]
        self.rows = [Row(self.config, self.pool, heads, raw, self.centre, self.rotary) for _ in range(rows)]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(self.rows) != key_states.shape[0]:
            raise ValueError(f"this cache holds {len(self.rows)} rows, got K for {key_states.shape[0]}")
        if self._pending is not None and not self._pending.consumed:
            raise SeamError(UNATTENDED)
        if self.mode == "dense":
            return self._update_dense(key_states, value_states)
        self.seen += key_states.shape[2]
        # A view, so that the handle rides on a tensor of our own and not on one the model may hand to others.
        key_states = key_states.view_as(key_states)
        self._pending = Handle(self, key_states, value_states)
        self._pending.publish(kwargs.get("kwargs"))
        return key_states, value_states

    def _update_dense(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.budget.evicts:
            raise SeamError("dense mode keeps every token: eviction needs a model that routes attention to kvlab")
        if not isinstance(self.config.reader, Dense):
            raise SeamError("dense mode reads every token: selection needs a model that routes attention to kvlab")
        held = [row.dense(k.dtype, k.shape[-1], v.shape[-1]) for row in self.rows] if self.seen else None
        self.seen += k.shape[2]
        for b, row in enumerate(self.rows):
            row.commit(k[b], v[b])
        if held is None:
            return k, v
        return tuple(torch.cat([torch.stack([h[i] for h in held]), x], dim=2) for i, x in enumerate((k, v)))  # type: ignore[return-value]

    def attend(self, call: AttentionCall) -> Tensor:
        out = attend_rows(self.rows, call, launches=self._launches)
        self._pending = None
        if self.others is not None:
            self.settle()
        return out

    def settle(self) -> None:
        """Evict among all layers that share a budget, once the last of them has attended; other layers have done so."""
        if self.others is not None:
            for b, row in enumerate(self.rows):
                settle([*(layer.rows[b] for layer in self.others), row])

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # batch operations of transformers' generation
    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        old, taken = self.rows, set()
        rows = []
        for i in chosen.tolist():
            rows.append(old[i].copy() if i in taken else old[i])
            taken.add(i)
        for i, row in enumerate(old):
            if i not in taken:
                row.release()
        self.rows = rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"a compressed cache cannot give back {abs(tokens_to_remove)} tokens: what they displaced is gone. "
                "Use copy.deepcopy of the cache before trying tokens, or decode without assistance"
            )

    def reset(self) -> None:
        for row in self.rows:
            row.release()
        self.rows, self.pool, self.seen, self._pending, self.is_initialized = [], None, 0, None, False

    def offload(self) -> None:
        raise ValueError("offloading a compressed cache is not supported: use offloading=False")

    prefetch = offload

    # sizes
    @property
    def nbytes(self) -> int:
        """Bytes of what is held; preallocation slack apart."""
        return sum(row.nbytes for row in self.rows)

    def storages(self) -> list[Tensor]:
        pool = self.pool.storages() if self.pool else []
        return pool + [x for row in self.rows for x in row.storages()]


PoolKey = tuple[LayerConfig, LayerShape, torch.dtype, torch.device]


class KVCache(Cache):
    """One KVLayer for every full-attention layer; sliding and other layers keep transformers' own class.

    Layers that store pages of one kind share one pool. `centres` and `rotaries` have an entry for each
    layer of the model, where a config needs them.
    """

    def __init__(
        self,
        config: KVConfig,
        model_config: PreTrainedConfig,
        mode: Mode = "packed",
        centres: Sequence[Centre | None] | None = None,
        rotaries: Sequence[Rotary | None] | None = None,
        impl: Impl = "auto",
    ) -> None:
        own = None if config.raw_dtype == "auto" else config.raw(torch.float32)
        self._pools: dict[PoolKey, PagePool] = {}
        layers: list[Any] = list(DynamicCache(config=model_config).layers)
        for i, rule in config.layers(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer).items():
            centre, rotary = (None if x is None else x[i] for x in (centres, rotaries))
            layers[i] = KVLayer(rule, own, mode, self._pools, centre, rotary)  # type: ignore[arg-type]
        super().__init__(layers=layers)
        self.config = config
        self.impl: Impl = impl
        own_layers = [layer for layer in layers if isinstance(layer, KVLayer)]
        for layer in own_layers:
            layer.impl = impl
        if own_layers and own_layers[0].config.scope == "model":
            if len({layer.config for layer in own_layers}) > 1:
                raise ValueError("budget scope 'model' needs the same settings in every compressed layer: use 'layer'")
            own_layers[-1].others = own_layers[:-1]

    @property
    def implementation(self) -> str:
        """What attends single tokens, for the record: "triton", "numba" or "torch"; "none" before the first token."""
        layer = next((x for x in self.layers if isinstance(x, KVLayer) and x.rows), None)
        if layer is None or layer.pool is None:
            return "none"
        row = layer.rows[0]
        if layer.mode == "dense":
            return "torch"
        if on_pages(self.impl, row.table.device, layer.dtype) == "triton":
            return "triton"
        return "numba" if runs_compiled(self.impl, row.table.device, layer.dtype, row.raw) else "torch"

    @property
    def compressed(self) -> list[int]:
        """Indices of the layers kvlab stores."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, KVLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes held now: codes, scales, positions, mass, raw tokens, page slack; and stock layers as they are."""
        return sum(x.nbytes if isinstance(x, KVLayer) else _stock_bytes(x) for x in self.layers)

    @property
    def storage_bytes(self) -> int:
        """Sum over the distinct storages behind this cache: `nbytes` plus slack, which `fit` gives back.

        Slack is preallocated room, and what stock layers retain: a slice keeps the whole tensor it was cut from.
        """
        tensors = [x for layer in self.layers for x in _storages(layer)]
        distinct = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}
        return sum(distinct.values())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As in transformers. Raises SeamError when an earlier forward stopped between two layers."""
        seen = {x.get_seq_length() for x in self.layers if isinstance(x, CacheLayerMixin)} if layer_idx == 0 else set()
        if len(seen) > 1:
            raise SeamError(
                f"layers have taken {min(seen)} to {max(seen)} tokens: a forward was interrupted; use a fresh cache"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def fit(self) -> None:
        """Give slack back, so that `storage_bytes` equals `nbytes`: preallocated rows, and what stock slices retain."""
        compressed = [layer for layer in self.layers if isinstance(layer, KVLayer)]
        for pool in self._pools.values():
            pool.fit([row.table for layer in compressed if layer.pool is pool for row in layer.rows])
        for layer in self.layers:
            if isinstance(layer, KVLayer):
                for row in layer.rows:
                    row.fit()
            elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def occupancy(self, row: int = 0) -> list[list[Occupancy]]:
        """Tokens held by each head of each compressed layer."""
        return [self.layers[i].rows[row].occupancy for i in self.compressed]  # type: ignore[union-attr]

    def __repr__(self) -> str:
        held = self.layers[self.compressed[0]].seen if self.compressed else 0  # type: ignore[union-attr]
        return f"KVCache({self.config.label}, {held} tokens seen, {self.nbytes:,} bytes)"

    def describe(self, budgets: Sequence[int] = inventory.BUDGETS) -> dict[str, Any]:
        """What is held as plain data (kvlab.cache/1): bytes by stream and layer, tokens kept, what fits budgets."""
        about = {"label": self.config.label, "config_id": self.config.id, "implementation": self.implementation}
        return about | inventory.document(
            [_inventoried(x) for x in self.layers], self.nbytes, self.storage_bytes, budgets
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from kvlab.show import bundle

        return bundle("cache", self.describe())


def _storages(layer: Any) -> list[Tensor]:
    own = (
        layer.storages()
        if isinstance(layer, KVLayer)
        else (getattr(layer, "keys", None), getattr(layer, "values", None))
    )
    return [x for x in own if x is not None]


def _stock_bytes(layer: Any) -> int:
    return sum(x.numel() * x.element_size() for x in _storages(layer))


def _inventoried(layer: Any) -> inventory.Stock | inventory.Own | None:
    if isinstance(layer, KVLayer):
        return inventory.Own(layer.rows, layer.mode, layer.shape) if layer.rows else None
    return inventory.Stock(_stock_bytes(layer), tuple(tuple(x.shape) for x in _storages(layer)))
