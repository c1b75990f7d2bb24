"""Every codec with every scorer, budget scope and reader: rows against a float64 composition of the definitions; and
settings that change nothing against the model itself.
"""

from typing import Any

import pytest
import torch
from test_row_eviction import compare
from tiny import tiny_model, token_ids
from variants import ALL_SCORERS, SOME_CODECS, name_of, readers_of

from kvlab.attach import attach, cache_kwarg
from kvlab.centring import find_rotaries, mean_centres
from kvlab.codecs import Codec, Raw
from kvlab.config import KVConfig
from kvlab.policies import SCORERS, Budget, Dense, Fraction, Reader, Scorer, Threshold, Tokens, TopK, Unlimited

SCOPES: list[Budget] = [
    Unlimited(),
    Fraction(0.5),
    Tokens(24, scope="layer", floor=0.3),
    Threshold(0.4, scope="model", floor=0.0),
]


def readers(codec: Codec) -> list[Reader]:
    """Everything, and a share by each bound that such keys allow."""
    shares = [r for r in readers_of(codec, codec) if isinstance(r, TopK) and r.fraction < 1 and not r.count]
    return [Dense(), *{r.bound: r for r in shares}.values()]


@pytest.mark.parametrize("kind", SCORERS)
@pytest.mark.parametrize("codec", SOME_CODECS, ids=name_of)
def test_every_codec_scorer_scope_and_reader_compose(codec: Codec, kind: str) -> None:
    scorer: Scorer = next(s for s in ALL_SCORERS if s.kind == kind)
    composed = 0
    for budget in SCOPES:
        for reader in readers(codec):
            if kind == "last_selected" and isinstance(reader, Dense) and budget.evicts:
                continue
            config = KVConfig(
                key=codec,
                value=codec,
                scorer=scorer,
                budget=budget,
                reader=reader,
                centring="mean" if composed % 2 else "none",
                sink_tokens=1,
                recent_tokens=3,
            )
            compare(config, [38, 3, *[1] * 14], 2, None, False, composed)
            composed += 1
    assert composed >= 9


IDENTITIES: list[dict[str, Any]] = [
    *({"scorer": cls(), "budget": Fraction(1.0)} for kind, cls in SCORERS.items() if kind != "last_selected"),
    *({"budget": budget} for budget in (Fraction(1.0, scope="layer"), Fraction(1.0, scope="model"), Tokens(10**6))),
    {"budget": Threshold(0.0)},
    {"reader": TopK(fraction=1.0, dense_layers=0)},
    {"reader": TopK(fraction=1.0, bound="mean", dense_layers=1, select_every=4)},
    {"centring": "mean"},
    {"centring": "mean", "budget": Fraction(1.0, scope="model"), "reader": TopK(fraction=1.0, dense_layers=0)},
]


@pytest.mark.parametrize("more", IDENTITIES, ids=str)
@torch.no_grad()
def test_what_takes_nothing_away_is_the_dense_model(more: dict[str, Any]) -> None:
    model = tiny_model("llama_9_3")
    ids, steps = token_ids(1, 61), 24
    want = model(input_ids=ids).logits[0]
    config = KVConfig(**({"key": Raw(), "value": Raw(), "sink_tokens": 2, "recent_tokens": 5} | more))
    centres = {"mean": mean_centres(model, token_ids(1, 400, seed=5)[0].tolist(), find_rotaries(model))}
    with attach(model, config, centres=centres) as kv:
        cache, got = kv.cache(), []
        for part in ids.split([ids.shape[1] - steps, *[1] * steps], dim=1):
            got.append(model(input_ids=part, use_cache=True, **{cache_kwarg(): cache}).logits[0])
    torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=1e-9)
