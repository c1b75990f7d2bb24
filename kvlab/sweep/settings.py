"""What a sweep was asked to do. Checked before a model is loaded; knows no model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args

from kvlab.evals.item import FAMILIES, unknown
from kvlab.evals.sampling import Sampling
from kvlab.evals.sets import DEFAULT, families_of
from kvlab.kernels.chunks import Bound
from kvlab.policies.base import Scope
from kvlab.search.settings import Request, UsageError
from kvlab.sweep.arms import EVICTERS
from kvlab.sweep.catalog import AXES, SWEEPS
from kvlab.sweep.formats import FORMATS
from kvlab.sweep.params import GIGABYTES, NAMES, NUMBER, SHARES, SWITCH, TEXT, WHOLE, WHOLES, Kind, Params


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(Params):
    """One sweep. `budget_gb` in 10**9 bytes, `items` per family, `out` the folder for run folders ("": the default).

    Every format is combined with every way to keep tokens (`keep` shares of them, by each of `scorers`, in each of
    `scopes`) and every way to read (`read` shares of the chunks, by each bound and chunk size). A share of 1 keeps or
    reads everything, once.

    `sets` are names as `kvlab.evals.sets` takes them. With `generate` answers are decoded and graded, not forced, and
    `samples` of each item drawn at a `temperature`; generated code runs only with `allow_code_exec`.
    """

    model: str = "smollm2-135m"
    budget_gb: float = 6.0
    context: int = 131072
    concurrency: int = 8
    formats: tuple[str, ...] = ("raw", "fp8_e4m3", "fp8_e5m2", "int8")
    scorers: tuple[str, ...] = ("snapkv",)
    keep: tuple[float, ...] = (1.0,)
    scopes: tuple[str, ...] = ("head",)
    read: tuple[float, ...] = (1.0,)
    chunks: tuple[int, ...] = (16,)
    bounds: tuple[str, ...] = ("minmax",)
    families: tuple[str, ...] = FAMILIES
    sets: tuple[str, ...] = DEFAULT
    items: int = 64
    seed: int = 0
    query_aware: bool = False
    generate: bool = False
    allow_code_exec: bool = False
    samples: int = 1
    temperature: float = 0.0
    out: str = ""

    KINDS: ClassVar[Mapping[str, Kind]] = {
        "model": TEXT,
        "budget_gb": GIGABYTES,
        "context": WHOLE,
        "concurrency": WHOLE,
        "formats": NAMES,
        "scorers": NAMES,
        "keep": SHARES,
        "scopes": NAMES,
        "read": SHARES,
        "chunks": WHOLES,
        "bounds": NAMES,
        "families": NAMES,
        "sets": NAMES,
        "items": WHOLE,
        "seed": WHOLE,
        "query_aware": SWITCH,
        "generate": SWITCH,
        "allow_code_exec": SWITCH,
        "samples": WHOLE,
        "temperature": NUMBER,
        "out": TEXT,
    }

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("model is empty: give an alias, hub id, folder or .gguf file")
        for name, least in (("context", 1), ("concurrency", 1), ("items", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}")
        _check_budget(self.budget_gb)
        for kind, names, known in (
            ("format", self.formats, tuple(FORMATS)),
            ("scorer", self.scorers, tuple(EVICTERS)),
            ("scope", self.scopes, get_args(Scope)),
            ("bound", self.bounds, get_args(Bound)),
            ("family", self.families, FAMILIES),
        ):
            for name in names:
                if name not in known:
                    raise UsageError(str(unknown(kind, name, known)))
            _check_once(kind, names)
        for kind, shares in (("share to keep", self.keep), ("share to read", self.read)):
            _check_once(kind, shares)
            for share in shares:
                if not 0 < share <= 1:
                    raise UsageError(f"a {kind} must lie in (0, 1], got {share:g}: 0.5 is half")
        _check_once("chunk size", self.chunks)
        if min(self.chunks) < 1:
            raise UsageError(f"a chunk size must be at least 1, got {min(self.chunks)}")
        _check_sets(self.sets, self.families)
        if self.allow_code_exec and not self.generate:
            raise UsageError("allow_code_exec runs generated code, and nothing is generated: pass generate True too")
        if (self.samples, self.temperature) != (1, 0.0) and not self.generate:
            raise UsageError("samples and temperature draw answers, and nothing is generated: pass generate True too")
        try:
            _ = self.sampling
        except ValueError as error:
            raise UsageError(f"samples, temperature: {error}") from None

    @property
    def budget_bytes(self) -> int:
        return round(self.budget_gb * 1e9)

    @property
    def sampling(self) -> Sampling:
        """How decoded answers are drawn."""
        return Sampling(temperature=self.temperature, samples=self.samples, seed=self.seed)

    def answers(self) -> dict[str, Any]:
        """How answers are scored, as `kvlab.answering.scoring` takes it."""
        return {"generate": self.generate, "allow_code_exec": self.allow_code_exec, "sampling": self.sampling}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotConfig(Params):
    """One search as `python -m kvlab.search` takes it. `trials` and `items` are what fits the minutes where they are
    0; with `memo`, scores of earlier runs of the model are not made again."""

    model: str = "smollm2-135m"
    budget_gb: float = 6.0
    context: int = 131072
    concurrency: int = 8
    mode: str = "best"
    layers: str = "auto"
    minutes: float = 6.0
    trials: int = 0
    items: int = 0
    families: tuple[str, ...] = FAMILIES
    sets: tuple[str, ...] = DEFAULT
    seed: int = 0
    generate: bool = False
    allow_code_exec: bool = False
    samples: int = 1
    temperature: float = 0.0
    memo: bool = True
    out: str = ""

    KINDS: ClassVar[Mapping[str, Kind]] = {
        "model": TEXT,
        "budget_gb": GIGABYTES,
        "context": WHOLE,
        "concurrency": WHOLE,
        "mode": TEXT,
        "layers": TEXT,
        "minutes": NUMBER,
        "trials": WHOLE,
        "items": WHOLE,
        "families": NAMES,
        "sets": NAMES,
        "seed": WHOLE,
        "generate": SWITCH,
        "allow_code_exec": SWITCH,
        "samples": WHOLE,
        "temperature": NUMBER,
        "memo": SWITCH,
        "out": TEXT,
    }

    def __post_init__(self) -> None:
        _check_budget(self.budget_gb)
        for name in ("trials", "items"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0 (what fits the minutes), got {getattr(self, name)}")
        request = self.request()
        _check_sets(request.sets, request.families)

    def request(self) -> Request:
        """The same in the search's own terms. Raises UsageError for what a search refuses."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Request) if f.name != "budget_bytes"}
        values |= {"trials": self.trials or None, "items": self.items or None}
        try:
            return Request(budget_bytes=round(self.budget_gb * 1e9), **values)
        except UsageError as error:
            # The search names flags, a notebook has parameters.
            raise UsageError(str(error).replace("--", "").replace("allow-code-exec", "allow_code_exec")) from None


def kind_of(sweep: str) -> type[SweepConfig] | type[SpotConfig]:
    """What the parameters of a sweep become."""
    return SpotConfig if SWEEPS[sweep].search else SweepConfig


def config_of(sweep: str, given: Mapping[str, Any]) -> SweepConfig | SpotConfig:
    """The config of a sweep by name, its own defaults below what is given. Raises UsageError as `from_params` does."""
    return kind_of(sweep).from_params({**SWEEPS[sweep].defaults, **given})


def shown_of(sweep: str) -> dict[str, str | int | float | bool]:
    """The parameters that a sweep's notebook shows, with their defaults, in order."""
    entry = SWEEPS[sweep]
    return {n: v for n, v in config_of(sweep, {}).to_params().items() if n not in AXES or n in entry.defaults}


def _check_budget(gigabytes: float) -> None:
    if not 0 < gigabytes < 1e9 or round(gigabytes * 1e9) < 1:
        raise UsageError(f"budget_gb must be a positive number of GB, got {gigabytes}")


def _check_once(kind: str, values: tuple[Any, ...]) -> None:
    if not values or len(set(values)) != len(values):
        raise UsageError(f"name every {kind} once and at least one, got {','.join(map(str, values)) or 'none'}")


def _check_sets(sets: tuple[str, ...], families: tuple[str, ...]) -> None:
    try:
        there = families_of(sets)
    except ValueError as error:
        raise UsageError(f"sets: {error}") from None
    missing = [family for family in families if family not in there]
    if missing:
        raise UsageError(
            f"sets {','.join(sets)} have no items of family {', '.join(missing)}: pass families "
            f"{','.join(there)}, or more sets"
        )
