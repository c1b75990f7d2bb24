"""The search space, budget first: a trial picks a scheme, and eviction takes what the budget then still asks for.

Names are conditional and their domains constant, so that one study can hold every branch. Knows configs and bytes,
nothing of models, items or scores.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

import optuna

from kvlab.codecs import Affine, Codec, Fp8, Raw
from kvlab.config import KVConfig
from kvlab.layer import Centring, ModelShape
from kvlab.policies import AttentionMass, Budget, Fraction, KeyDiff, Recency, Scorer, TopK, Unlimited, WindowAttention
from kvlab.policies.base import Scope
from kvlab.search.mixing import Mixer
from kvlab.search.sensitivity import Formats
from kvlab.search.workload import Workload

# Joint K/V schemes, keys never in fewer bits than values: key error is what breaks models.
SCHEMES = ("raw", "fp8", "k8v8", "k8v4", "k4v4", "k4v3", "k4v2", "k3v3", "k3v2", "k2v2")
# One more where the layers' sensitivities are known: formats by layer, solved for the budget.
MIXED = "mixed"
# What a key's loss counts against a value's, and how far layers are told apart: the multipliers of that.
MIX_KEYS, MIX_CONTRAST = (0.25, 4.0), (0.5, 1.5)
MIX_BITS = (8, 4, 3, 2)
SCORERS: dict[str, Scorer] = {
    "window": Recency(),
    "h2o": AttentionMass(),
    "snapkv": WindowAttention(window=16),
    "keydiff": KeyDiff(),
}
SCOPES: tuple[Scope, ...] = ("head", "layer", "model")
SLOPES = (0.0, 0.4)
# Share of the chunks to read, drawn evenly from here; from 1 on everything is. A third of the draws reads sparsely.
READ = (0.25, 2.5)
KEY_AXES = ("token", "rotated", "channel")
CHANNEL_GROUPS = (32, 64)
TOKEN_GROUPS = (32, 64)
# Small on purpose: items are short, and a long raw window would hide from them what the encoded part loses.
SINK_TOKENS, RECENT_TOKENS, PAGE_TOKENS = 4, 16, 16
# Bounds of a chunk of 16 tokens would take a fifth of a 4-bit cache, those of 32 half of that.
CHUNK_TOKENS = 32
EVEN = Fraction()  # every head for itself
_STEP = 1000  # eviction fractions are thousandths


@dataclass(frozen=True, slots=True)
class Space:
    """Configs for one model, workload and budget. `raw_dtype` makes uncompressed tokens 16 bit wide; `centrings` are
    the kinds of centring the model's keys allow. With a `mixer` formats may differ from layer to layer.
    """

    shape: ModelShape
    workload: Workload
    budget: int
    raw_dtype: str
    centrings: tuple[Centring, ...] = ("none", "mean")
    # Out of the repr, which the hash is made of: what a mixer knows is measured, and follows from the rest.
    mixer: Mixer | None = field(default=None, repr=False)

    def config(self, trial: optuna.trial.BaseTrial) -> KVConfig | None:
        """The trial's config, using the budget it is given; None where none of this scheme fits.

        Where bytes run short, the trial says what to evict. Where they do not, nothing but reading is left to save,
        and it says how much to read; summaries of chunks take bytes, so a reader that no longer fits is left out.
        """
        scheme = trial.suggest_categorical("scheme", self.schemes)
        if scheme == MIXED and self.mixer is not None:
            return self._mixed(trial, self.mixer)
        key, value, page = self._codecs(trial, scheme)
        base = self.build(key, value, page_tokens=page, centring=self._centring(trial, key))
        if self.workload.bytes(base, self.shape) <= self.budget:
            sparse = self._sparse(base, trial.suggest_float("read", *READ))
            return sparse if self.workload.bytes(sparse, self.shape) <= self.budget else base
        name = trial.suggest_categorical("evict", tuple(SCORERS))
        like = self._shared(trial) if name != "window" else EVEN
        return self.fitted(base, SCORERS[name], trial.suggest_float("fill", 0.7, 1.0), like)

    @property
    def schemes(self) -> tuple[str, ...]:
        return SCHEMES if self.mixer is None else (*SCHEMES, MIXED)

    def _mixed(self, trial: optuna.trial.BaseTrial, mixer: Mixer) -> KVConfig | None:
        """Formats by layer for what the budget allows; where the fewest bits are too many, eviction takes the rest."""
        keys = trial.suggest_float("mix.keys", *MIX_KEYS, log=True)
        contrast = trial.suggest_float("mix.contrast", *MIX_CONTRAST)
        fill = trial.suggest_float("mix.fill", 0.7, 1.0)
        config = mixer.config(int(self.budget * fill), keys, contrast)
        return config or self.fitted(mixer.smallest(), Recency(), fill)

    def formats(self) -> Formats:
        """What a layer may be stored as where layers differ: per token, so that a short context shows its loss."""
        int8 = Affine(bits=8, group=0, mode="symmetric")
        low = [self._low(bits, "midrise", 64, "token", True) for bits in MIX_BITS[1:]]
        base = self.build(Raw(), Raw(), centring=self.centrings[-1])
        return Formats(base, (int8, *low), (int8, *low))

    def _centring(self, trial: optuna.trial.BaseTrial, key: Codec) -> Centring:
        """Asked where a token's channels share a scale in few bits: there one loud channel drowns the others."""
        loud = isinstance(key, Affine) and key.bits < 8 and key.axis == "token"
        return trial.suggest_categorical("k.centring", self.centrings) if loud else "none"  # type: ignore[return-value]

    def _sparse(self, base: KVConfig, read: float) -> KVConfig:
        """`base` reading a share of its chunks, in eighths; everything from 1 on."""
        if read >= 1:
            return base
        channel = base.key.block_tokens > 1
        chunk = base.page_tokens if max(base.key.block_tokens, base.value.block_tokens) > 1 else CHUNK_TOKENS
        reader = TopK(fraction=math.ceil(read * 8) / 8, chunk=chunk, bound="codec" if channel else "minmax")
        return replace(base, reader=reader, page_tokens=chunk) if reader.fraction < 1 else base

    def _shared(self, trial: optuna.trial.BaseTrial) -> Fraction:
        """Who shares a budget. With positions alone for a score, all heads would keep the same."""
        scope = trial.suggest_categorical("scope", self.scopes)
        slope = 0.0 if scope == "model" else trial.suggest_categorical("slope", SLOPES)
        return Fraction(scope=scope, slope=slope)  # type: ignore[arg-type]

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Layers can share one budget where their heads are alike."""
        alike = len({self.shape.layers[i] for i in self.shape.compressed}) == 1
        return SCOPES if alike else SCOPES[:2]

    def _codecs(self, trial: optuna.trial.BaseTrial, scheme: str) -> tuple[Codec, Codec, int]:
        if scheme in ("raw", "fp8"):
            codec = Raw() if scheme == "raw" else Fp8()
            return codec, codec, PAGE_TOKENS
        k_bits, v_bits = int(scheme[1]), int(scheme[3])
        if k_bits == 8:
            key: Codec = Affine(bits=8, group=0, mode="symmetric")
            axis, page = "token", PAGE_TOKENS
        else:
            axis = trial.suggest_categorical("k.axis", KEY_AXES)
            page = trial.suggest_categorical("k.channel_group", CHANNEL_GROUPS) if axis == "channel" else PAGE_TOKENS
            mode = trial.suggest_categorical("k.mode", ("asymmetric", "midrise"))
            group = page if axis == "channel" else trial.suggest_categorical("k.group", TOKEN_GROUPS)
            key = self._low(k_bits, mode, group, "channel" if axis == "channel" else "token", axis == "rotated")
        if v_bits == 8:
            return key, Affine(bits=8, group=0, mode="symmetric"), page
        rotated = trial.suggest_categorical("v.rotated", (False, True))
        group = trial.suggest_categorical("v.group", TOKEN_GROUPS)
        return key, self._low(v_bits, "midrise" if rotated else "asymmetric", group, "token", rotated), page

    def _low(self, bits: int, mode: str, group: int, axis: str, rotated: bool) -> Affine:
        """A codec of 4 bits or fewer; clip factors are the NMSE optima for normal data."""
        clip = {4: 0.92, 3: 0.8, 2: 0.6}[bits] if mode == "midrise" or bits == 2 else 1.0
        if axis == "token":
            group = self._group(group)
        return Affine(bits=bits, axis=axis, group=group, mode=mode, clip=clip, hadamard=rotated)  # type: ignore[arg-type]

    def _group(self, group: int) -> int:
        """`group` where it divides every head, else the whole head."""
        return 0 if any(s.key_dim % group or s.value_dim % group for s in self.shape.layers) else group

    def build(
        self,
        key: Codec,
        value: Codec,
        scorer: Scorer | None = None,
        budget: Budget | None = None,
        page_tokens: int = PAGE_TOKENS,
        centring: Centring = "none",
    ) -> KVConfig:
        """A config of this space's sinks, window and raw dtype."""
        return KVConfig(
            key=key,
            value=value,
            scorer=scorer or Recency(),
            budget=budget or Unlimited(),
            sink_tokens=SINK_TOKENS,
            # Channel groups leave the tokens that do not fill a page raw: that remainder is their recent window. With a
            # window on top, half of a short context would stay raw and its score would say little of the workload.
            recent_tokens=0 if max(key.block_tokens, value.block_tokens) > 1 else RECENT_TOKENS,
            page_tokens=page_tokens,
            centring=centring,
            raw_dtype=self.raw_dtype,
        )

    def fitted(self, base: KVConfig, scorer: Scorer, fill: float, like: Fraction = EVEN) -> KVConfig | None:
        """`base` evicting by `scorer` so that the workload takes `fill` of the budget; None if not even 1/1000 fits.

        `like` says who shares the budget. A slope cannot give the first layer more than everything.
        """
        low, high = 0, int(_STEP / (1 + like.slope))
        target = self.budget * fill
        while high - low > 1:
            middle = (low + high) // 2
            config = self._evicting(base, scorer, middle, like)
            low, high = (middle, high) if self.workload.bytes(config, self.shape) <= target else (low, middle)
        return self._evicting(base, scorer, low, like) if low else None

    def _evicting(self, base: KVConfig, scorer: Scorer, thousandths: int, like: Fraction = EVEN) -> KVConfig:
        return replace(base, scorer=scorer, budget=replace(like, fraction=thousandths / _STEP))

    def anchors(self) -> dict[str, KVConfig]:
        """Reference points on every figure, whether or not they fit the budget."""
        int8 = Affine(bits=8, group=0, mode="symmetric")
        int4 = Affine(bits=4, group=self._group(32))
        raw = self.build(Raw(), Raw())
        window = self.fitted(raw, Recency(), 1.0) if self.workload.bytes(raw, self.shape) > self.budget else None
        named = {
            "raw": raw,
            "fp8": self.build(Fp8(), Fp8()),
            "int8": self.build(int8, int8),
            "int4": self.build(int4, int4),
        }
        return named | ({"window": window} if window else {})

    def first_trials(self) -> list[dict[str, Any]]:
        """Trials always asked first: each scheme's plain form, as it fits the budget; keys of few bits per token are
        centred where they can be, and one budget is shared between the heads of a layer.
        """
        centred = {"k.centring": self.centrings[-1]}
        token4 = {"k.axis": "token", "k.mode": "asymmetric", "k.group": 32, "v.rotated": False, "v.group": 32} | centred
        rotated4 = {"k.axis": "rotated", "k.mode": "midrise", "k.group": 64, "v.rotated": True, "v.group": 64} | centred
        channel = {"k.axis": "channel", "k.channel_group": 32, "k.mode": "asymmetric", "v.rotated": True, "v.group": 64}
        h2o = {"evict": "h2o", "scope": "head", "slope": 0.0, "fill": 1.0, "read": READ[1]}
        return [
            {"scheme": "k8v8"} | h2o,
            {"scheme": "fp8"} | h2o | {"evict": "snapkv", "scope": "layer"},
            {"scheme": "k4v4"} | h2o | token4,
            {"scheme": "k4v3"} | h2o | rotated4,
            {"scheme": "k4v3"} | h2o | channel | {"k.channel_group": 64},
            {"scheme": "k4v2"} | h2o | channel,
            {"scheme": "raw", "evict": "window", "fill": 1.0, "read": READ[1]},
            *(self._first_mixes() if self.mixer else []),
        ]

    def _first_mixes(self) -> list[dict[str, Any]]:
        """As the table says, at three sizes: the best score within the budget is mostly among them, and what takes less
        is worth a look.
        """
        plain = {"scheme": MIXED, "mix.keys": 1.0, "mix.contrast": 1.0}
        return [plain | {"mix.fill": fill} for fill in (1.0, 0.85, 0.7)]

    def spread_trials(self) -> list[dict[str, Any]]:
        """The same where every size counts: each scheme as large as it is by itself, formats by layer at several."""
        out = []
        for params in self.first_trials():
            if params["scheme"] == MIXED:
                out += [params | {"size": share} for share in self._shares() if params["mix.fill"] == 1.0]
                continue
            whole = replace(self, budget=1 << 62).config(optuna.trial.FixedTrial(params))
            share = self.workload.bytes(whole, self.shape) / self.largest if whole else 1.0
            # A hair more, since a share of the budget is cut to whole bytes.
            out.append(params | {"size": min(1.0, max(self.least_share, share * (1 + 1e-9)))})
        return out

    def _shares(self) -> list[float]:
        """Sizes at which formats can differ: between 2 and 8 bits everywhere, or what of that the budget allows."""
        int8 = Affine(bits=8, group=0, mode="symmetric")
        low = min(1.0, 2 * self.least_share)
        high = max(low, min(1.0, self.workload.bytes(self.build(int8, int8), self.shape) / self.largest))
        return [low ** (1 - t) * high**t for t in (0.15, 0.35, 0.55, 0.75, 0.95)]

    @property
    def largest(self) -> int:
        """Bytes beyond which nothing is left to compress, or the budget allows nothing."""
        return min(self.budget, self.workload.bytes(self.build(Raw(), Raw()), self.shape))

    @property
    def least_share(self) -> float:
        """Half of what 2 bits everywhere take, as a share of the largest."""
        low = self._low(2, "midrise", 64, "token", True)
        return min(0.5, self.workload.bytes(self.build(low, low), self.shape) / self.largest / 2)

    def sized(self, trial: optuna.trial.BaseTrial) -> "Space":
        """This space for the share of the bytes that a trial asks for, so that one study covers all sizes."""
        return replace(self, budget=int(self.largest * trial.suggest_float("size", self.least_share, 1.0, log=True)))

    def first_configs(self) -> list[KVConfig]:
        """What the first trials try."""
        found = [self.config(optuna.trial.FixedTrial(params)) for params in self.first_trials()]
        return [config for config in found if config is not None]

    def control(self) -> KVConfig:
        """Known to be bad: 2-bit keys and values per token and a quarter of the tokens. It must fail."""
        int2 = Affine(bits=2, group=self._group(32))
        return self.build(int2, int2, Recency(), Fraction(0.25))

    def smallest(self) -> KVConfig:
        """The fewest bytes a config of this space can take."""
        codec = self._low(2, "midrise", 64, "token", True)
        return self._evicting(self.build(codec, codec), Recency(), 1)

    def scorers(self) -> tuple[Scorer, ...]:
        """Scorers a prefill must observe."""
        return tuple(SCORERS.values())

    @property
    def hash(self) -> str:
        """Changes when a config of this space could come out differently."""
        body = [SCHEMES, list(SCORERS), KEY_AXES, CHANNEL_GROUPS, TOKEN_GROUPS, SINK_TOKENS, RECENT_TOKENS, PAGE_TOKENS]
        body += [SCOPES, SLOPES, READ, CHUNK_TOKENS, repr(self.formats()), MIX_KEYS, MIX_CONTRAST]
        scorers = [repr(s) for s in SCORERS.values()]
        text = json.dumps([body, scorers, repr(self), self.first_trials()], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
