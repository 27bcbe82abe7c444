"""A Gemini reply as it streams: each event is a whole ``GenerateContentResponse``.

Gemini gives a function call in one piece, so a call is held until the next begins; the last one is
sent with the finish reasons in ``end``. The first text part and every call carry a signature,
because clients send it back from there in the next request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.errors import google_error_object
from bridle.proxy.dialects.functions import call_in_pieces
from bridle.proxy.dialects.google.reply import (
    JSON_ARRAY,
    call_part,
    candidate,
    finish_reason_of,
    response_object,
    signature,
)
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
    ToolCall,
    ToolCallDelta,
    Usage,
)


class _Choice:
    """The parts of one candidate that have not been sent yet."""

    def __init__(self) -> None:
        self.signed = False
        self.open: tuple[int, str, str, list[str]] | None = None
        """Index, id, name and argument pieces of the call that is being written."""
        self.detail: list[Mapping[str, Any] | msgspec.Raw] = []
        self.reason: FinishReason | None = None


class GoogleEmitter:
    """Writes one streamed response; see :class:`bridle.proxy.wire.canonical.Emitter`."""

    def __init__(self, request: Request, minted: Minted) -> None:
        self._wants = request.wants
        self._sse = request.own != JSON_ARRAY
        self._minted = minted
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._count = request.sampling.n or 1
        self._usage: Usage | None = None
        self._first = True

    @property
    def content_type(self) -> str:
        """The media type; without ``alt=sse`` the stream is a JSON array."""
        return "text/event-stream" if self._sse else "application/json; charset=UTF-8"

    def begin(self) -> bytes:
        return b"" if self._sse else b"["

    def event(self, event: Event) -> bytes:
        match event:
            case TextDelta() if event.text:
                choice = self._choices[event.choice]
                part: Json = {"text": event.text}
                if not choice.signed:
                    choice.signed = True
                    part["thoughtSignature"] = signature(self._minted, 0)
                return self._parts(event.choice, [*self._finished_call(choice), part])
            case ReasoningDelta() if event.text and self._wants.reasoning:
                return self._parts(event.choice, [{"text": event.text, "thought": True}])
            case ToolCallDelta():
                return self._call(event)
            case Tokens():
                if self._wants.logprobs:
                    self._choices[event.choice].detail.extend(event.detail or ())
            case Finished():
                self._choices[event.choice].reason = event.reason
            case Usage():
                self._usage = event
            case Started() | Opaque() | TextDelta() | ReasoningDelta():
                pass
        return b""

    def keep_alive(self) -> bytes:
        """Return a response with an empty text.

        The text is there since Google's own client drops a whole turn from its chat when one
        response of it has no content. Inside an array, white space is enough.
        """
        if not self._sse:
            return b"\n"
        return self._write(response_object(self._minted, [candidate(0, [{"text": ""}])]))

    def end(self) -> bytes:
        first, candidates = self._first, []
        for index in range(self._count):
            choice = self._choices[index]
            parts = self._finished_call(choice) or [{"text": ""}]
            finish = finish_reason_of(choice.reason)
            candidates.append(candidate(index, parts, choice.detail, finish))
        last = self._write(response_object(self._minted, candidates, self._usage))
        self._first = first  # These bytes may be discarded, and ``fail`` called after them.
        return last if self._sse else last + b"]"

    def fail(self, error: ApiError) -> bytes:
        last = self._write(google_error_object(error))
        return last if self._sse else last + b"]"

    def _call(self, event: ToolCallDelta) -> bytes:
        choice = self._choices[event.choice]
        if choice.open is not None and choice.open[0] == event.index:
            choice.open[3].append(event.arguments)
            return b""
        if event.id is None or event.name is None:
            raise call_in_pieces(event.index)
        finished = self._finished_call(choice)
        choice.open = (event.index, event.id, event.name, [event.arguments])
        return self._parts(event.choice, finished) if finished else b""

    def _finished_call(self, choice: _Choice) -> list[Json]:
        if choice.open is None:
            return []
        _, identifier, name, pieces = choice.open
        choice.open = None
        call = ToolCall(identifier, name, "".join(pieces))
        return [call_part(self._minted, call)]

    def _parts(self, index: int, parts: list[Json]) -> bytes:
        choice = self._choices[index]
        detail, choice.detail = choice.detail, []
        return self._write(response_object(self._minted, [candidate(index, parts, detail)]))

    def _write(self, response: Json) -> bytes:
        if self._sse:
            return b"data: %b\n\n" % orjson.dumps(response)
        separator, self._first = b"" if self._first else b",\n", False
        return separator + orjson.dumps(response)
