"""A Responses reply as it streams: canonical events become the API's typed events.

Items come one after another. An item's ``added`` event is sent with its first piece, and its
``done`` event when the next item begins. The last item is closed by ``end``, with the terminal
event, because harnesses run what is done even if the stream is cut afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time as now
from typing import Any

import msgspec
import orjson

from bridle.proxy.dialects.blank import BlankText
from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.errors import openai_error_object
from bridle.proxy.dialects.functions import call_in_pieces
from bridle.proxy.dialects.responses.open_item import OpenCall, OpenItem, OpenReasoning, OpenText
from bridle.proxy.dialects.responses.request import ResponsesFields
from bridle.proxy.dialects.responses.tools import ClientTool
from bridle.proxy.dialects.sse import event_bytes
from bridle.proxy.wire.canonical import (
    ApiError,
    Event,
    Finished,
    FinishReason,
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


class ResponsesEmitter:
    """Writes one streamed response; see :class:`bridle.proxy.wire.canonical.Emitter`."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, request: Request, minted: Minted) -> None:
        self._wants = request.wants
        self._own: ResponsesFields = request.own or ResponsesFields()
        self._minted = minted
        self._sequence = 0
        self._output: list[Json] = []
        self._open: OpenItem | None = None
        self._detail: list[Mapping[str, Any] | msgspec.Raw] = []
        self._blank = BlankText()
        self._called_tools = False
        self._reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._before_end: tuple[int, int] | None = None
        """Sequence number and count of items before ``end``, whose bytes may be discarded."""

    def begin(self) -> bytes:
        response = orjson.Fragment(self._object("in_progress"))
        return self._write(
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        )

    def event(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._text(event)
            case ReasoningDelta():
                return self._reasoning(event)
            case ToolCallDelta():
                return self._call(event)
            case Tokens():
                if self._wants.logprobs:
                    self._detail.extend(event.detail or ())
            case Finished():
                self._reason = event.reason
            case Usage():
                self._usage = event
            case Started() | Opaque():
                pass
        return b""

    def keep_alive(self) -> bytes:
        """Return ``response.in_progress`` again: a typed event that no client acts on."""
        response = orjson.Fragment(self._object("in_progress"))
        return self._write({"type": "response.in_progress", "response": response})

    def end(self) -> bytes:
        self._before_end = (self._sequence, len(self._output))
        closing = self._finish()
        kind = f"response.{_status_of(self._reason)[0]}"
        return closing + self._write({"type": kind, "response": orjson.Fragment(self.whole())})

    def whole(self) -> bytes:
        """Return the ``response`` object of all events so far, as JSON."""
        self._finish()
        status, incomplete = _status_of(self._reason)
        return self._object(status, self._output, self._usage, incomplete=incomplete)

    def fail(self, error: ApiError) -> bytes:
        """Return ``response.failed``.

        The item that was being written remains without its ``done`` event.
        """
        if self._before_end is not None:
            self._sequence, done = self._before_end
            del self._output[done:]
        shown = openai_error_object(error)
        failure = {"code": shown["code"] or "server_error", "message": shown["message"]}
        response = orjson.Fragment(self._object("failed", self._output, error=failure))
        return self._write({"type": "response.failed", "response": response})

    def _text(self, event: TextDelta) -> bytes:
        if isinstance(self._open, OpenText):
            return self._more_text(event.text)
        return self._more_text(self._blank.opening(event.text))

    def _more_text(self, text: str) -> bytes:
        if not text:
            return b""
        item, opening = self._open, b""
        if not isinstance(item, OpenText):
            opening = self._close("completed")
            item = OpenText(self._item_id("msg"), self._place())
            opening += self._add(item)
        logprobs, self._detail = self._detail, []
        return opening + self._write(*item.delta(text, logprobs))

    def _reasoning(self, event: ReasoningDelta) -> bytes:
        self._detail.clear()
        if not event.text:
            return b""
        item, opening = self._open, b""
        if not isinstance(item, OpenReasoning):
            opening = self._close("completed")
            item = OpenReasoning(
                self._item_id("rs"), self._place(), self._own.reasoning_summary, self._signature()
            )
            opening += self._add(item)
        return opening + self._write(*item.delta(event.text))

    def _call(self, event: ToolCallDelta) -> bytes:
        self._detail.clear()
        item, opening = self._open, b""
        if not isinstance(item, OpenCall) or item.index != event.index:
            if event.id is None or event.name is None:
                raise call_in_pieces(event.index)
            self._blank.rest()
            self._called_tools = True
            opening = self._close("completed")
            tool = self._own.tools.get(event.name) or ClientTool(event.name)
            kind = "ctc" if tool.custom else "fc"
            item = OpenCall(self._item_id(kind), self._place(), event, tool)
            opening += self._add(item)
        return opening + self._write(*item.delta(event.arguments))

    def _add(self, item: OpenItem) -> bytes:
        self._open = item
        added = {"type": "response.output_item.added", **self._place(), "item": item.added()}
        return self._write(added, *item.open())

    def _finish(self) -> bytes:
        """Complete the last item, with the response's status."""
        rest = b"" if self._called_tools else self._more_text(self._blank.rest())
        return rest + self._close(_status_of(self._reason)[0])

    def _close(self, status: str) -> bytes:
        """Complete the item that is being written, if any."""
        item, self._open = self._open, None
        if item is None:
            return b""
        closing, whole = item.close(), item.item(status)
        done = {"type": "response.output_item.done", **self._place(), "item": whole}
        self._output.append(whole)
        return self._write(*closing, done)

    def _place(self) -> Json:
        return {"output_index": len(self._output)}

    def _item_id(self, kind: str) -> str:
        return self._minted.item_id(kind, len(self._output))

    def _signature(self) -> str | None:
        return self._minted.signature(len(self._output)) if self._own.encrypted_reasoning else None

    def _object(
        self,
        status: str,
        output: Sequence[Json] = (),
        usage: Usage | None = None,
        *,
        error: Json | None = None,
        incomplete: str | None = None,
    ) -> bytes:
        own = {
            "id": self._minted.response_id,
            "object": "response",
            "created_at": self._minted.created,
            "completed_at": int(now()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete is not None else None,
            "model": self._minted.model,
            "output": list(output),
            "usage": _usage_object(usage) if usage is not None else None,
        }
        return orjson.dumps(own)[:-1] + b"," + self._own.echo[1:]

    def _write(self, *events: Json) -> bytes:
        written = []
        for event in events:
            event["sequence_number"] = self._sequence
            self._sequence += 1
            written.append(event_bytes(event))
        return b"".join(written)


def _usage_object(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _status_of(reason: FinishReason | None) -> tuple[str, str | None]:
    """Return the response's status and, if it is incomplete, the reason."""
    if reason == "length":
        return "incomplete", "max_output_tokens"
    if reason == "content_filter":
        return "incomplete", "content_filter"
    return "completed", None
