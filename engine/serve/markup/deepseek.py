"""DeepSeek's calls between its own tokens, in the form of V3 and R1, and in that of V3.1.

V3 writes ``function<｜tool▁sep｜>NAME`` and the arguments in a fenced block of JSON, V3.1 writes
``NAME<｜tool▁sep｜>`` and the arguments as they are.
"""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls, is_name
from bridle.engine.serve.markup.reading import Feed, Reading, content

CALLS: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
CALL: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
FENCE: Final = "```json"


def read(feed: Feed, calls: Calls) -> Reading[None]:
    called = False
    while True:
        _, before = yield from feed.until((CALLS, CALL, CALLS_END), emit=content)
        if not before:
            return
        if before == CALLS:
            before += yield from feed.accept(CALL)
        if before.endswith(CALL):
            called = yield from _call(feed, calls, before)
        elif not called or before == CALLS:
            yield from content(before)


def _call(feed: Feed, calls: Calls, shown: str) -> Reading[bool]:
    """Read the text after ``shown``. Return whether it is a call."""
    name, tag = yield from feed.until((SEPARATOR, CALL_END, CALL, CALLS_END))
    shown += name + tag
    if tag == SEPARATOR:
        opened = yield from feed.accept("{")
        if not opened:
            name, tag = yield from feed.until((FENCE, CALL_END, CALL, CALLS_END))
            opened = (yield from feed.accept("{")) if tag == FENCE else ""
            shown += name + tag
        if opened:
            feed.unread("{")
            shown += opened[:-1]
        if opened and is_name(name):
            yield calls.begin(name.strip())
            if (yield from feed.value(emit=calls.arguments)):
                yield from feed.until((CALL_END, CALLS_END))
            return True
    yield from content(shown)
    return False
