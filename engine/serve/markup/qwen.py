"""Qwen3-Coder's elements: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…``.

Qwen 3.5, Nemotron 3 and Step 3.5 write the same; Seed-OSS has tags of its own around it.
"""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls, is_name
from bridle.engine.serve.markup.parameters import ArgumentsWriter
from bridle.engine.serve.markup.reading import Feed, Reading, content

FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_ENDS: Final = ("\n</parameter>", "</parameter>")


def read(
    feed: Feed, calls: Calls, opening: str = "<tool_call>", closing: str = "</tool_call>"
) -> Reading[None]:
    while True:
        _, before = yield from feed.until((opening, FUNCTION), emit=content)
        if not before:
            return
        if before == opening:
            before += yield from feed.accept(FUNCTION)
        if not before.endswith(FUNCTION):
            yield from content(before)
            continue
        name, end = yield from feed.until((">", "\n"))
        if end != ">" or not is_name(name):
            yield from content(before + name + end)
            continue
        yield calls.begin(name.strip())
        yield from _arguments(feed, ArgumentsWriter(calls, name.strip()), closing)


def _arguments(feed: Feed, arguments: ArgumentsWriter, closing: str) -> Reading[None]:
    """Read a call from its first parameter to its end."""
    _, tag = yield from feed.until((PARAMETER, FUNCTION_END, closing))
    while tag == PARAMETER:
        key, tag = yield from feed.until((">",))
        if tag:
            yield from feed.accept("\n", blanks=False)
            tag = yield from arguments.parameter(feed, key.strip(), PARAMETER_ENDS)
        if tag:
            _, tag = yield from feed.until((PARAMETER, FUNCTION_END, closing))
    if tag:
        yield from arguments.close()
    if tag == FUNCTION_END:
        yield from feed.accept(closing)
