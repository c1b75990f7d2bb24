"""Items over a text of one token per character, and the slow way to answer them: what any batch must give."""

import dataclasses
from typing import Any

import torch

from kvlab.attach import attach, cache_kwarg
from kvlab.config import KVConfig
from kvlab.evals.item import Item
from kvlab.models import Loaded

WORDS = "the lamp stood by the river; nobody came in winter, and 417 boats lay on the sand. " * 3


def item_of(index: int, context: str, question: str, answers: tuple[str, ...], **more: Any) -> Item:
    known: dict[str, Any] = {"task": "needle_text", "family": "retrieval", "cluster": f"c{index}"}
    return Item(
        id=f"{more.get('task', 'needle_text')}/confirm/0/{index}",
        context=context,
        question=question,
        answers=answers,
        **known | more,
    )


# Contexts of 1 to 249 tokens, so that a batch holds lone tokens beside long rows.
ITEMS = [
    item_of(0, WORDS, "How many boats? ", (" 417", " four hundred")),
    item_of(1, "x", "y", ("z",)),
    item_of(2, WORDS[:17], "What stood there?", (" the lamp",), choices=(" a boat", " the lamp", " sand", " it")),
    item_of(3, WORDS[5:105], "Who came?\n", ("nobody",)),
    item_of(4, WORDS[:200], "?", ("in", "at"), choices=("in", "on", "of the")),
    item_of(5, WORDS[40:66], "When did nobody come to the river?", (" in winter",)),
]


def sharpened(model: Any) -> Any:
    """Wider weights, so that attention prefers some keys and answers differ clearly under compression."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(8)
    return model


def ids_of(loaded: Loaded, text: str) -> list[int]:
    return loaded.tokenizer.encode(text, add_special_tokens=False)


def asked(item: Item, **more: Any) -> Item:
    return dataclasses.replace(item, **{"stop": (), "max_new_tokens": 24, "choices": (), **more})


@torch.no_grad()
def by_hand(loaded: Loaded, item: Item, config: KVConfig, tokens: int) -> str:
    drawn: list[int] = []
    with attach(loaded.model, config) as kv:
        cache = {cache_kwarg(): kv.cache()}
        loaded.model(torch.tensor([ids_of(loaded, item.context)]), use_cache=True, **cache)
        ids = ids_of(loaded, item.question)
        for _ in range(tokens):
            ids = [int(loaded.model(torch.tensor([ids]), use_cache=True, **cache).logits[0, -1].argmax())]
            drawn += ids
    return loaded.tokenizer.decode(drawn)
