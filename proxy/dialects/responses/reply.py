"""A whole Responses reply: the last event of the same reply when it is streamed."""

from __future__ import annotations

from bridle.proxy.dialects.responses.stream import ResponsesEmitter
from bridle.proxy.wire.canonical import Minted, Reply, Request
from bridle.proxy.wire.fold import events_of


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    """Return the ``response`` object, as JSON."""
    emitter = ResponsesEmitter(request, minted)
    for event in events_of(reply, 0):
        emitter.event(event)
    return emitter.whole()
