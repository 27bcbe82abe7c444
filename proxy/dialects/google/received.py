"""A Gemini reply of an upstream, read for the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import orjson

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.google.history import Contents
from bridle.proxy.dialects.received import ReceivedReply, child, count, text_of
from bridle.proxy.dialects.transcript import Transcript
from bridle.proxy.wire.canonical import ApiError, FinishReason, Message, Request, Usage

_REASONS: Final[Mapping[str, FinishReason]] = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "MALFORMED_FUNCTION_CALL": "stop",
    "UNEXPECTED_TOOL_CALL": "stop",
    "TOO_MANY_TOOL_CALLS": "stop",
    "OTHER": "stop",
}
"""Reasons that are no refusal; every other one is."""


class ReceivedContent(ReceivedReply):
    """See :class:`bridle.proxy.dialects.received.ReceivedReply`."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._parts: defaultdict[int, list[Any]] = defaultdict(list)
        self._ends: dict[int, str] = {}
        self._fields: Json = {}
        """The fields of the reply besides its candidates, the last value of each."""
        self._candidates: defaultdict[int, Json] = defaultdict(dict)
        """The fields of each candidate besides its content, the last value of each."""
        self._calls_before = sum(len(message.tool_calls) for message in request.messages)

    def whole(self, body: bytes) -> None:
        """Read a reply that came whole, or a stream that came as one array."""
        if body.lstrip().startswith(b"["):
            try:
                chunks = orjson.loads(body)
            except orjson.JSONDecodeError:
                chunks = []
                self._unread("not JSON")
            for chunk in chunks:
                self._take(chunk if isinstance(chunk, dict) else {})
            self.over = True
        else:
            super().whole(body)

    def _take(self, event: Json) -> None:
        if error := child(event, "error"):
            self.over = True
            status = count(error, "code") or 502
            kind = {429: "rate_limit", 503: "overloaded"}.get(status, "upstream_error")
            self.failure = ApiError(kind, str(error.get("message")), status=status)
            return
        self.identifier = text_of(event.get("responseId")) or self.identifier
        self.model = text_of(event.get("modelVersion")) or self.model
        if usage := child(event, "usageMetadata"):
            thoughts = count(usage, "thoughtsTokenCount")
            self.usage = Usage(
                prompt_tokens=count(usage, "promptTokenCount", "toolUsePromptTokenCount"),
                completion_tokens=count(usage, "candidatesTokenCount") + thoughts,
                cached_tokens=count(usage, "cachedContentTokenCount"),
                reasoning_tokens=thoughts,
            )
        self._fields |= {name: value for name, value in event.items() if name != "candidates"}
        candidates = event.get("candidates")
        for position, candidate in enumerate(candidates if isinstance(candidates, list) else ()):
            self._add(candidate, position)
        if blocked := child(event, "promptFeedback").get("blockReason"):
            self._ends.setdefault(0, str(blocked))
        self.over = self.over or len(self._ends) >= (self._request.sampling.n or 1)

    def _whole(self, reply: Json) -> None:
        self._take(reply)

    def _add(self, candidate: Any, position: int) -> None:
        at = candidate.get("index", position) if isinstance(candidate, dict) else position
        parts = child(candidate, "content").get("parts")
        self._parts[at] += parts if isinstance(parts, list) else ()
        given = candidate if isinstance(candidate, dict) else {}
        self._candidates[at] |= {name: value for name, value in given.items() if name != "content"}
        if (reason := child({"": candidate}, "").get("finishReason")) is not None:
            self._ends[at] = str(reason)

    def body(self) -> Json:
        candidates = [
            {"content": {"role": "model", "parts": self._parts[at]}, **fields}
            for at, fields in sorted(self._candidates.items())
        ]
        return {"candidates": candidates, **self._fields}

    def _add_content(self, content: Json, transcript: Transcript) -> None:
        Contents(transcript, self._calls_before).add_one(content, "contents[0]")

    def _choices(self) -> Iterator[tuple[Message, FinishReason | None, str | None]]:
        for at in range(max([*self._parts, *self._ends], default=-1) + 1):
            content: Json = {"role": "model", "parts": self._parts[at]}
            message = self._message(partial(self._add_content, content))
            end = self._ends.get(at)
            reason = None if end is None else _REASONS.get(end, "content_filter")
            called = reason == "stop" and message.tool_calls
            yield message, "tool_calls" if called else reason, None
