"""Llama 3: a reply that is ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``.

Further calls follow behind semicolons.
"""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls, JsonCall
from bridle.engine.serve.markup.reading import Feed, Reading, content

TAG: Final = "<|python_tag|>"


def read(feed: Feed, calls: Calls) -> Reading[None]:
    before = yield from feed.accept(TAG)
    while opened := (yield from feed.accept("{")):
        feed.unread("{")
        call = JsonCall(calls, before + opened[:-1])
        yield from feed.value(emit=call.push)
        yield from call.end()
        if not call.shown:
            before = ""
            break
        before = yield from feed.accept(";")
        before += yield from feed.accept(TAG)
    yield from content(before)
    yield from feed.rest()
