"""A response of an upstream, read for the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.received import Pieces, ReceivedReply, child, count, text_of
from bridle.proxy.dialects.responses.history import Items
from bridle.proxy.dialects.responses.tools import ToolList
from bridle.proxy.dialects.transcript import Transcript
from bridle.proxy.wire.canonical import ApiError, FinishReason, Message, Request, Usage

_LAST: Final = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
_DELTAS: Final[Mapping[str, str]] = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "content",
    "response.reasoning_text.delta": "summary",
    "response.reasoning_summary_text.delta": "summary",
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}
"""Events with a piece of an item that is not done, and the item's field for it."""
_TEXTS: Final = {"content": "output_text", "summary": "summary_text"}


class ReceivedResponse(ReceivedReply):
    """See :class:`bridle.proxy.dialects.received.ReceivedReply`."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._response: Json = {}
        self._items: dict[Any, Json] = {}
        self._done: set[Any] = set()
        self._pieces = Pieces()

    def _take(self, event: Json) -> None:
        kind, place = str(event.get("type")), event.get("output_index")
        if kind in ("response.output_item.added", "response.output_item.done"):
            self._items[place] = child(event, "item")
            if kind.endswith("done"):
                self._done.add(place)
        elif (name := _DELTAS.get(kind)) is not None:
            self._pieces.add(place, name, event.get("delta"))
        elif kind == "error":
            self.over = True
            message = str(event.get("message") or child(event, "error").get("message"))
            self.failure = ApiError("upstream_error", message, status=502)
        elif child(event, "response"):
            self._begin(child(event, "response"))
            if kind in _LAST:
                self._whole(child(event, "response"))
                self.over = True

    def _whole(self, reply: Json) -> None:
        self._begin(reply)
        output = reply.get("output")
        if isinstance(output, list) and output:
            self._items = dict(enumerate(output))
            self._done = set(self._items)
        error = child(reply, "error")
        if reply.get("status") == "failed" or error:
            message = str(error.get("message") or "the upstream gave no reason")
            self.failure = ApiError("upstream_error", message, status=502)

    def _begin(self, response: Json) -> None:
        self._response = response
        self.identifier, self.model = text_of(response.get("id")), text_of(response.get("model"))
        usage = child(response, "usage")
        if usage:
            given, made = (
                child(usage, "input_tokens_details"),
                child(usage, "output_tokens_details"),
            )
            self.usage = Usage(
                prompt_tokens=count(usage, "input_tokens"),
                completion_tokens=count(usage, "output_tokens"),
                cached_tokens=count(given, "cached_tokens"),
                reasoning_tokens=count(made, "reasoning_tokens"),
                cache_written_tokens=count(given, "cache_write_tokens") or None,
            )

    def body(self) -> Json:
        return self._response | {"output": self._output()}

    def _output(self) -> list[Json]:
        return [
            item if place in self._done else _with(item, self._pieces.at(place))
            for place, item in self._items.items()
        ]

    def _choices(self) -> Iterator[tuple[Message, FinishReason | None, str | None]]:
        items = self._output()

        def add(transcript: Transcript) -> None:
            Items(ToolList(transcript), {}).add(transcript, items, 0)

        message = self._message(add)
        yield message, self._reason(bool(message.tool_calls)), None

    def _reason(self, called: bool) -> FinishReason | None:
        status = self._response.get("status")
        if status == "incomplete":
            why = child(self._response, "incomplete_details").get("reason")
            return "content_filter" if why == "content_filter" else "length"
        if status != "completed":
            return None
        return "tool_calls" if called else "stop"


def _with(item: Json, pieces: Mapping[str, str]) -> Json:
    """Return an item that was cut, with what has come of it."""
    texts: Json = {}
    for name, text in pieces.items():
        texts[name] = [{"type": _TEXTS[name], "text": text}] if name in _TEXTS else text
    return item | texts
