"""DeepSeek's elements since V3.2, such as ``<｜DSML｜invoke name="NAME">``.

Their parameters state whether they are text.
"""

from __future__ import annotations

import re
from typing import Final

from bridle.engine.serve.markup.calls import Calls, is_name
from bridle.engine.serve.markup.parameters import ArgumentsWriter
from bridle.engine.serve.markup.reading import Feed, Reading, content

MARK: Final = "｜DSML｜"
INVOKE: Final = f'<{MARK}invoke name="'
INVOKE_END: Final = f"</{MARK}invoke>"
PARAMETER: Final = f"<{MARK}parameter "
PARAMETER_END: Final = f"</{MARK}parameter>"
_ATTRIBUTES: Final = re.compile(r'\s*name="([^"]*)"(?:\s+string="(true|false)")?\s*')


def read(feed: Feed, calls: Calls, block: str) -> Reading[None]:
    """Read a reply; ``block`` is the name of the element around its calls."""
    opening, closing = f"<{MARK}{block}>", f"</{MARK}{block}>"
    called = False
    while True:
        _, before = yield from feed.until((opening, INVOKE, closing), emit=content)
        if not before:
            return
        if before == opening:
            before += yield from feed.accept(INVOKE)
        if not before.endswith(INVOKE):
            yield from content("" if called and before == closing else before)
            continue
        name, end = yield from feed.until(('">', "\n"))
        if end != '">' or not is_name(name):
            yield from content(before + name + end)
            continue
        called = True
        yield calls.begin(name)
        arguments = ArgumentsWriter(calls, name)
        _, tag = yield from feed.until((PARAMETER, INVOKE_END, closing))
        while tag == PARAMETER:
            written, tag = yield from feed.until((">",))
            found = _ATTRIBUTES.fullmatch(written)
            if tag and found:
                string = found[2] == "true" if found[2] else None
                tag = yield from arguments.parameter(
                    feed, found[1], (PARAMETER_END,), string=string
                )
            if tag:
                _, tag = yield from feed.until((PARAMETER, INVOKE_END, closing))
        if tag:
            yield from arguments.close()
