"""Hermes: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls, JsonCall
from bridle.engine.serve.markup.reading import Feed, Reading, content

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


def read(feed: Feed, calls: Calls) -> Reading[None]:
    while True:
        _, opened = yield from feed.until((OPEN,), emit=content)
        if not opened:
            return
        call = JsonCall(calls, before=OPEN)
        _, closed = yield from feed.until((CLOSE,), emit=call.push)
        yield from call.end(closed)
