"""Mistral: ``[TOOL_CALLS]`` before an array of calls, or before each call's name and ``[ARGS]``.

The newer form may give the call's id between the two, behind ``[CALL_ID]``.
"""

from __future__ import annotations

from typing import Final

from bridle.engine.serve.markup.calls import Calls, JsonCall, is_name
from bridle.engine.serve.markup.reading import Feed, Reading, content

OPEN: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
ID: Final = "[CALL_ID]"


def read(feed: Feed, calls: Calls) -> Reading[None]:
    while True:
        _, opened = yield from feed.until((OPEN,), emit=content)
        if not opened:
            return
        if array := (yield from feed.accept("[")):
            yield from read_array(feed, calls, OPEN + array)
        else:
            yield from _named(feed, calls)


def read_array(feed: Feed, calls: Calls, before: str) -> Reading[bool]:
    """Read the calls of a JSON array whose bracket, with the text before it, is ``before``.

    Return whether there was one.
    """
    found = False
    while opened := (yield from feed.accept("{")):
        feed.unread("{")
        call = JsonCall(calls, before + opened[:-1])
        yield from feed.value(emit=call.push)
        yield from call.end()
        found |= bool(call.shown)
        before = yield from feed.accept(",", "]")
        if before.endswith("]"):
            yield from content("" if call.shown else before)
            return found
    yield from content(before)
    return found


def _named(feed: Feed, calls: Calls) -> Reading[None]:
    name, tag = yield from feed.until((ARGUMENTS, ID, "{", "\n", OPEN))
    shown, id = OPEN + name, ""
    if tag == ID:
        id, tag = yield from feed.until((ARGUMENTS, "\n", OPEN))
        shown += ID + id
    if tag == ARGUMENTS:
        opened = yield from feed.accept("{")
        shown, tag = shown + ARGUMENTS + opened[:-1], opened[-1:]
    if tag in ("{", OPEN):
        feed.unread(tag)
    if tag == "{" and is_name(name):
        yield calls.begin(name.strip(), id.strip() or None)
        yield from feed.value(emit=calls.arguments)
    else:
        yield from content(shown + (tag if tag == "\n" else ""))
