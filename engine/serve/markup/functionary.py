"""Functionary and Llama 3's own functions: ``<function=NAME>{…}</function>``."""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls, is_name
from bridle.engine.serve.markup.reading import Feed, Reading, content

OPEN: Final = "<function="
CLOSE: Final = "</function>"


def read(feed: Feed, calls: Calls) -> Reading[None]:
    while True:
        _, opened = yield from feed.until((OPEN,), emit=content)
        if not opened:
            return
        name, tag = yield from feed.until((">", "\n"))
        brace = (yield from feed.accept("{")) if tag == ">" and is_name(name) else ""
        if brace:
            feed.unread("{")
            yield calls.begin(name.strip())
            yield from feed.value(emit=calls.arguments)
            yield from feed.accept(CLOSE)
        else:
            yield from content(OPEN + name + tag)
