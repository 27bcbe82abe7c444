"""GLM's elements: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``."""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls, is_name
from bridle.engine.serve.markup.parameters import ArgumentsWriter
from bridle.engine.serve.markup.reading import Feed, Reading, content

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
KEY: Final = "<arg_key>"
KEY_END: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
VALUE_END: Final = "</arg_value>"


def read(feed: Feed, calls: Calls) -> Reading[None]:
    while True:
        _, opened = yield from feed.until((OPEN,), emit=content)
        if not opened:
            return
        name, tag = yield from feed.until((KEY, CLOSE, OPEN))
        if tag not in (KEY, CLOSE) or not is_name(name):
            yield from content(OPEN + name + ("" if tag == OPEN else tag))
            feed.unread(OPEN if tag == OPEN else "")
            continue
        yield calls.begin(name.strip())
        arguments = ArgumentsWriter(calls, name.strip())
        while tag == KEY:
            key, tag = yield from feed.until((KEY_END,))
            if tag:
                _, tag = yield from feed.until((VALUE,))
            if tag:
                tag = yield from arguments.parameter(feed, key.strip(), (VALUE_END,))
            if tag:
                _, tag = yield from feed.until((KEY, CLOSE))
        if tag:
            yield from arguments.close()
