"""Nemotron Nano v2: ``<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>``."""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls
from bridle.engine.serve.markup.mistral import read_array
from bridle.engine.serve.markup.reading import Feed, Reading, content

OPEN: Final = "<TOOLCALL>"
CLOSE: Final = "</TOOLCALL>"


def read(feed: Feed, calls: Calls) -> Reading[None]:
    while True:
        _, opened = yield from feed.until((OPEN,), emit=content)
        if not opened:
            return
        if array := (yield from feed.accept("[")):
            if (yield from read_array(feed, calls, OPEN + array)):
                yield from feed.accept(CLOSE)
        else:
            yield from content(OPEN)
