"""A Messages reply of an upstream, read for the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.functions import INVALID_JSON
from bridle.proxy.dialects.messages.history import AnthropicMessage, add_messages
from bridle.proxy.dialects.received import Pieces, ReceivedReply, child, count, text_of
from bridle.proxy.wire.canonical import ApiError, FinishReason, Message, Request, Usage

_REASONS: Final[Mapping[str, FinishReason]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
_DELTAS: Final = ("text", "thinking", "signature", "partial_json")
"""Fields of a block's deltas that hold pieces of text."""


class ReceivedMessage(ReceivedReply):
    """See :class:`bridle.proxy.dialects.received.ReceivedReply`."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._message_object: Json = {}
        self._blocks: dict[Any, Json] = {}
        self._pieces = Pieces()
        self._counts: Json = {}

    def _take(self, event: Json) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self._begin(child(event, "message"))
        elif kind == "content_block_start":
            self._blocks[event.get("index")] = child(event, "content_block")
        elif kind == "content_block_delta":
            delta = child(event, "delta")
            for name in _DELTAS:
                self._pieces.add(event.get("index"), name, delta.get(name))
            if "citation" in delta:
                block = self._blocks[event.get("index")]
                block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
        elif kind == "message_delta":
            self._message_object |= child(event, "delta")
            self._count(child(event, "usage"))
        elif kind == "message_stop":
            self.over = True
        elif kind == "error":
            self._failed(child(event, "error"))

    def _whole(self, reply: Json) -> None:
        if reply.get("type") == "error":
            self._failed(child(reply, "error"))
            return
        self._begin(reply)
        content = reply.get("content")
        self._blocks = dict(enumerate(content if isinstance(content, list) else ()))

    def _begin(self, message: Json) -> None:
        self._message_object = message
        self.identifier, self.model = text_of(message.get("id")), text_of(message.get("model"))
        self._count(child(message, "usage"))

    def _failed(self, error: Json) -> None:
        self.over = True
        overloaded = error.get("type") == "overloaded_error"
        kind = "overloaded" if overloaded else "upstream_error"
        self.failure = ApiError(kind, str(error.get("message")), status=529 if overloaded else 502)

    def _count(self, usage: Json) -> None:
        self._counts |= {name: value for name, value in usage.items() if value is not None}
        counts = self._counts
        self.usage = Usage(
            prompt_tokens=count(
                counts, "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"
            ),
            completion_tokens=count(counts, "output_tokens"),
            cached_tokens=count(counts, "cache_read_input_tokens"),
            reasoning_tokens=count(child(counts, "output_tokens_details"), "thinking_tokens"),
            cache_written_tokens=count(counts, "cache_creation_input_tokens") or None,
        )

    def body(self) -> Json:
        return self._message_object | {"content": self._content(), "usage": self._counts}

    def _content(self) -> list[Json]:
        return [_with(block, self._pieces.at(at)) for at, block in self._blocks.items()]

    def _choices(self) -> Iterator[tuple[Message, FinishReason | None, str | None]]:
        blocks = self._content()
        message = self._message(
            lambda transcript: add_messages(transcript, [AnthropicMessage("assistant", blocks)], 0)
        )
        whole = self._message_object
        reason = _REASONS.get(str(whole.get("stop_reason")))
        yield message, reason, text_of(whole.get("stop_sequence"))


def _with(block: Json, pieces: Mapping[str, str]) -> Json:
    """Return the block with the texts that came in pieces."""
    texts = {name: str(block.get(name) or "") + text for name, text in pieces.items()}
    given = texts.pop("partial_json", None)
    if given is not None:
        try:
            texts["input"] = orjson.loads(given) if given.strip() else {}
        except orjson.JSONDecodeError:
            return block | texts | {"input": {INVALID_JSON: given}}
    return block | texts
