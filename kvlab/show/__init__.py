"""How objects look in a notebook: text, HTML and JSON made from plain data. Imports the standard library only.

Objects say what they are as a document (a dict that JSON can hold) and hand it to `bundle`; one file a kind turns it
into text and HTML. Nothing here asks a network, a clock or an object, so equal documents look equal.
"""

from collections.abc import Mapping
from typing import Any

from kvlab.show import cache, codec, config, item, items, result, run, score, session, study
from kvlab.show.page import framed
from kvlab.show.words import plain

KINDS = {
    "cache": cache,
    "codec": codec,
    "config": config,
    "item": item,
    "items": items,
    "result": result,
    "run": run,
    "score": score,
    "session": session,
    "study": study,
}


def mime(kind: str) -> str:
    """The MIME type of a kind's document."""
    return f"application/vnd.kvlab.{kind}+json"


def bundle(kind: str, document: Mapping[str, Any], *, json: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `_repr_mimebundle_` returns for a document of one of KINDS.

    `json` is what the JSON type carries where that is more than what is shown.
    """
    shown, text = KINDS[kind], KINDS[kind].text(document)
    return {
        "text/plain": text,
        "text/html": framed(text, shown.html(document)),
        mime(kind): plain(document if json is None else json),
    }
