"""A Messages reply as it streams: canonical events become content blocks.

Blocks come one after another. A block's stop event is sent when the next block begins. The last
block is stopped by ``end``, with the terminal events, because harnesses run what is complete even
if the stream is cut afterwards. A call's arguments are sent whole with its stop, because clients
parse every piece as the beginning of an object and run what they could parse of a broken one. Until
then, empty pieces show that more is coming.
"""

from __future__ import annotations

from typing import Literal

from bridle.proxy.dialects.blank import BlankText
from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.errors import anthropic_stream_error
from bridle.proxy.dialects.functions import arguments_object_text, call_in_pieces
from bridle.proxy.dialects.messages.reply import (
    call_block,
    message_object,
    stop_reason_of,
    text_block,
    usage_object,
)
from bridle.proxy.dialects.sse import event_bytes
from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    Minted,
    Opaque,
    ReasoningDelta,
    Request,
    Started,
    TextDelta,
    Tokens,
    ToolCallDelta,
    Usage,
)

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesEmitter:
    """Writes one streamed message; see :class:`bridle.proxy.wire.canonical.Emitter`.

    ``message_start`` has the prompt's length, so it waits for the first event: ``begin`` writes
    nothing, and a ping may come before it.
    """

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: Request, minted: Minted) -> None:
        self._minted = minted
        self._started = False
        self._index = -1
        self._open: Literal["text", "thinking"] | int | None = None
        """The kind of the block that is being written; a tool call's index for ``tool_use``."""
        self._arguments: list[str] = []
        """Pieces of the arguments of the call that is being written."""
        self._blank = BlankText()
        self._called_tools = False
        self._usage = Usage(0, 0)
        self._finished: Finished | None = None

    def begin(self) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        start = b"" if self._started else self._start(event)
        match event:
            case TextDelta():
                text = event.text if self._open == "text" else self._blank.opening(event.text)
                return start + self._text(text)
            case ReasoningDelta():
                return start + self._thinking(event.text)
            case ToolCallDelta():
                return start + self._tool_use(event)
            case Finished():
                self._finished = event
            case Usage():
                self._usage = event
            case Started() | Opaque() | Tokens():
                pass
        return start

    def keep_alive(self) -> bytes:
        return PING

    def end(self) -> bytes:
        start = b"" if self._started else self._start(None)
        finished = self._finished or Finished("stop")
        stop_reason = stop_reason_of(finished.reason, finished.stop_sequence, self._called_tools)
        delta = {
            "stop_reason": stop_reason,
            "stop_sequence": finished.stop_sequence if stop_reason == "stop_sequence" else None,
            "stop_details": None,
            "container": None,
        }
        usage = usage_object(self._usage)
        return b"".join(
            (
                start,
                b"" if self._called_tools else self._text(self._blank.rest()),
                self._stop_block(),
                event_bytes({"type": "message_delta", "delta": delta, "usage": usage}),
                event_bytes({"type": "message_stop"}),
            )
        )

    def fail(self, error: ApiError) -> bytes:
        return event_bytes(anthropic_stream_error(error))

    def _start(self, event: Event | None) -> bytes:
        self._started = True
        if isinstance(event, Started):
            self._usage = Usage(event.prompt_tokens or 0, 0)
        message = message_object(
            self._minted,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage_object(self._usage),
        )
        return event_bytes({"type": "message_start", "message": message})

    def _text(self, text: str) -> bytes:
        if not text:
            return b""
        opening = b""
        if self._open != "text":
            opening = self._start_block("text", text_block(""))
        return opening + self._delta({"type": "text_delta", "text": text})

    def _thinking(self, text: str) -> bytes:
        if not text:
            return b""
        opening = b""
        if self._open != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            opening = self._start_block("thinking", block)
        return opening + self._delta({"type": "thinking_delta", "thinking": text})

    def _tool_use(self, event: ToolCallDelta) -> bytes:
        opening = b""
        if self._open != event.index:
            if event.id is None or event.name is None:
                raise call_in_pieces(event.index)
            self._blank.rest()
            opening = self._start_block(event.index, call_block(event.id, event.name, {}))
            self._called_tools = True
        if not event.arguments:
            return opening
        self._arguments.append(event.arguments)
        return opening + self._input("")

    def _start_block(self, kind: Literal["text", "thinking"] | int, block: Json) -> bytes:
        stopped = self._stop_block()
        self._open = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return stopped + event_bytes(start)

    def _input(self, partial_json: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": partial_json})

    def _delta(self, delta: Json) -> bytes:
        return event_bytes({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop_block(self) -> bytes:
        if self._open is None:
            return b""
        last = b""
        if self._open == "thinking":
            signature = self._minted.signature(self._index)
            last = self._delta({"type": "signature_delta", "signature": signature})
        elif self._arguments:
            last = self._input(arguments_object_text("".join(self._arguments)))
            self._arguments = []
        self._open = None
        return last + event_bytes({"type": "content_block_stop", "index": self._index})
