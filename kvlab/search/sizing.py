"""How much of everything fits the minutes: speeds are measured first, search and confirm planned together."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvlab import stats
from kvlab.book import SCORE_ERRORS
from kvlab.config import KVConfig
from kvlab.evals.item import EvalSet, Item
from kvlab.stats import MARGINS, least_items
from kvlab.subject import LocalSubject

# Shares of the time. The rest is loading, measuring, timing the winner, promoting the best, and rows that are slower
# than those measured: a default run planned with .46 and .42 took 7 minutes instead of 6, one with .40 and .35 6.4.
_CONFIRM_SHARE, _SEARCH_SHARE = 0.38, 0.33
_MIN_CONFIRM, _MAX_CONFIRM = least_items(MARGINS[-1]), 256
ARMS = 7  # confirm: baseline twice, the control, int8, three finalists
# A trial sees half of the items on average where the better half of a batch goes on, and more where a front does.
SEEN, SEEN_OF_A_FRONT = 0.5, 0.75
# How layers may be told apart: items of each family, and formats measured of each stream. The first that takes no more
# than its share of the time, which it does once for a model. On the default model two items in one format chose as well
# as two in four formats, and better than one in four.
LAYER_PLANS = ((2, 4), (2, 2), (2, 1), (1, 1))
_LAYERS_SHARE = 0.15


# Scores that telling layers apart still needs with so many items and formats; None where it is not asked for.
LayerRows = Callable[[int, int], int | None]


def no_layers(items: int, depth: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a prefill, and of one further config on a prefilled item."""

    prefill_s: float
    row_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run will do: items per family in each stage, and trials. No `layer_items`: layers are not told apart."""

    search_items: int
    trials: int
    confirm_items: int
    layer_items: int = 0
    layer_formats: int = 0

    def seconds(
        self,
        speed: Speed,
        families: int,
        anchors: int,
        *,
        layer_rows: LayerRows = no_layers,
        arms: int = ARMS,
        seen: float = SEEN,
    ) -> float:
        """Planned time of all stages."""
        layers = (layer_rows(self.layer_items, self.layer_formats) or 0) * speed.row_s
        search = families * self.search_items * (speed.prefill_s + (anchors + 1) * speed.row_s)
        trials = self.trials * families * self.search_items * seen * speed.row_s
        confirm = families * self.confirm_items * (speed.prefill_s + arms * speed.row_s)
        return layers + search + trials + confirm


def fastest(subject: LocalSubject, probe: EvalSet, configs: list[KVConfig]) -> tuple[Speed, int]:
    """Speed, and how many threads gave it: torch's own choice or one, whichever does more. The choice is left set.

    Two threads beat one by far on two idle cores, and lose by far where something else keeps a core busy. Every count
    is measured on items of its own, an item of each family and two at least.
    """
    each = max(2, len(probe.families))
    tried: list[tuple[Speed, int]] = []
    for count in dict.fromkeys((torch.get_num_threads(), 1)):
        torch.set_num_threads(count)
        start = len(tried) * each
        tried.append((measure(subject, list(probe.items[start : start + each]), configs), count))
    speed, count = min(tried, key=lambda t: t[0].prefill_s + ARMS * t[0].row_s)
    torch.set_num_threads(count)
    return speed, count


def measure(subject: LocalSubject, items: list[Item], configs: list[KVConfig]) -> Speed:
    """Speed on items not prefilled yet: a pass that prefills with one config, and one with all of them."""
    list(subject.score(items[:1], configs[:1], persist=False))  # first calls are slow
    begin = time.perf_counter()
    list(subject.score(items[1:], configs[:1], persist=False))
    middle = time.perf_counter()
    first = (middle - begin) / (len(items) - 1)
    try:
        list(subject.score(items[1:], configs, persist=False))
    except SCORE_ERRORS:
        # A reference that cannot be scored is the race's to set aside; the first config alone tells the speed.
        configs, middle = configs[:1], time.perf_counter()
        list(subject.score(items[1:], configs, persist=False))
    many = (time.perf_counter() - middle) / (len(items) - 1)
    # The first pass holds a baseline row and one config; the second, all configs and no prefill.
    row = max(many / len(configs), 1e-4)
    return Speed(max(first - 2 * row, 0.1 * first), row)


def fit(
    minutes: float,
    speed: Speed,
    families: int,
    anchors: int,
    *,
    layer_rows: LayerRows = no_layers,
    arms: int = ARMS,
    seen: float = SEEN,
) -> Sizes:
    """Sizes whose planned time is about `minutes`. Never fewer confirm items than the widest margin needs.

    `layer_rows` says what it takes to tell layers apart; `arms` are the configs that a confirmation scores; `seen` is
    the share of the items that a trial sees.
    """
    total = minutes * 60
    layers = _layer_plan(layer_rows, total / speed.row_s)
    total -= (layer_rows(*layers) or 0) * speed.row_s
    per_confirm = families * (speed.prefill_s + arms * speed.row_s)
    confirm = max(_MIN_CONFIRM, min(_MAX_CONFIRM, int(total * _CONFIRM_SHARE / per_confirm)))
    # A fifth more items is a fair price for a margin at which a config holds that lost one answer: near the fewest
    # items of a margin only a config without any flip does, which hardly any is.
    steps = [n for m in reversed(MARGINS) if stats.planned_margin(n := stats.forgiving_items(m)) == m]
    confirm = next((enough for enough in steps if confirm < enough <= 1.2 * confirm), confirm)
    search_s = total * _SEARCH_SHARE
    per_item = families * (speed.prefill_s + (anchors + 1) * speed.row_s)
    items = next((n for n in (64, 48, 32, 24, 16) if n * per_item <= 0.6 * search_s), 8)
    per_trial = families * items * seen * speed.row_s
    trials = int((search_s - items * per_item) / per_trial)
    return Sizes(items, max(8, min(64, trials)), confirm, *layers)


def _layer_plan(layer_rows: LayerRows, rows: float) -> tuple[int, int]:
    """Items and formats: what is known already, else the most that may take their share of the time in `rows`."""
    wanted = [(plan, found) for plan in LAYER_PLANS if (found := layer_rows(*plan)) is not None]
    known = [plan for plan, found in wanted if not found]
    affordable = [plan for plan, found in wanted if found <= _LAYERS_SHARE * rows]
    return next(iter([*known, *affordable]), (0, 0))


def with_wishes(sizes: Sizes, trials: int | None, items: int | None) -> Sizes:
    """`items` sets the confirm items of each family and bounds those of the search; `trials` the trials."""
    if items is not None:
        sizes = dataclasses.replace(
            sizes, confirm_items=items, search_items=min(sizes.search_items, max(4, math.ceil(items / 2)))
        )
    return sizes if trials is None else dataclasses.replace(sizes, trials=trials)
