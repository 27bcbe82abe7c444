"""The output item that a streamed response is writing: its events and its final form.

``added`` returns the item of its first event, ``open`` the events that follow at once, ``delta``
those of a piece, ``close`` those that complete its parts, and ``item`` the whole item. The emitter
numbers the events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec
import orjson

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.responses.tools import ClientTool, custom_input
from bridle.proxy.wire.canonical import Detail, ToolCallDelta, entries_of, joined


class OpenReasoning:
    """A ``reasoning`` item.

    Its text is the item's summary if ``summarise`` is set, else its content.
    """

    def __init__(self, identifier: str, place: Json, summarise: bool, signature: str | None):
        self._id = identifier
        self._signature = signature
        self._field = "summary" if summarise else "content"
        self._kind = "summary_text" if summarise else "reasoning_text"
        self._text_event = f"response.reasoning_{'summary_' if summarise else ''}text"
        self._part_event = f"response.{'reasoning_summary' if summarise else 'content'}_part"
        self._place = {"item_id": identifier, **place, f"{self._field}_index": 0}
        self._text: list[str] = []

    def item(self, status: str) -> Json:
        item = {"id": self._id, "type": "reasoning", "summary": [], self._field: [self._part()]}
        if self._signature is not None:
            item["encrypted_content"] = self._signature
        return {**item, "status": status}

    def added(self) -> Json:
        return {"id": self._id, "type": "reasoning", "summary": [], "status": "in_progress"}

    def open(self) -> list[Json]:
        return [{"type": f"{self._part_event}.added", **self._place, "part": self._part()}]

    def delta(self, text: str) -> list[Json]:
        self._text.append(text)
        return [{"type": f"{self._text_event}.delta", **self._place, "delta": text}]

    def close(self) -> list[Json]:
        part = self._part()
        return [
            {"type": f"{self._text_event}.done", **self._place, "text": part["text"]},
            {"type": f"{self._part_event}.done", **self._place, "part": part},
        ]

    def _part(self) -> Json:
        return {"type": self._kind, "text": "".join(self._text)}


class OpenText:
    """An assistant ``message`` with one text part."""

    def __init__(self, identifier: str, place: Json):
        self._id = identifier
        self._place = {"item_id": identifier, **place, "content_index": 0}
        self._text: list[str] = []
        self._logprobs: list[Mapping[str, Any] | msgspec.Raw] = []
        self._part = _output_text("")

    def item(self, status: str) -> Json:
        item = {"id": self._id, "type": "message", "role": "assistant", "status": status}
        return {**item, "content": [self._part]}

    def added(self) -> Json:
        return {**self.item("in_progress"), "content": []}

    def open(self) -> list[Json]:
        return [{"type": "response.content_part.added", **self._place, "part": self._part}]

    def delta(self, text: str, detail: Detail) -> list[Json]:
        self._text.append(text)
        self._logprobs.extend(detail)
        event = {"type": "response.output_text.delta", **self._place}
        return [{**event, "delta": text, "logprobs": orjson.Fragment(joined(detail))}]

    def close(self) -> list[Json]:
        text = "".join(self._text)
        part = self._part = _output_text(text, _aligned(text, self._logprobs))
        done = {"type": "response.output_text.done", **self._place}
        return [
            {**done, "text": text, "logprobs": part["logprobs"]},
            {"type": "response.content_part.done", **self._place, "part": part},
        ]


class OpenCall:
    """A ``function_call`` or ``custom_tool_call`` item.

    The input of the latter is known only when the function arguments that carry it are whole, and
    is sent in one piece.
    """

    def __init__(self, identifier: str, place: Json, first: ToolCallDelta, tool: ClientTool):
        self.index = first.index
        self._id = identifier
        self._place = {"item_id": identifier, **place}
        self._call_id = first.id or ""
        self._arguments: list[str] = []
        self._tool = tool

    def item(self, status: str) -> Json:
        item: Json = {"id": self._id, "type": "function_call", "status": status}
        item["call_id"] = self._call_id
        item["name"] = self._tool.name
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        arguments = "".join(self._arguments)
        if self._tool.custom:
            item["type"] = "custom_tool_call"
            item["input"] = custom_input(arguments)
        else:
            item["arguments"] = arguments
        return item

    def added(self) -> Json:
        return self.item("in_progress")

    def open(self) -> list[Json]:
        return []

    def delta(self, arguments: str) -> list[Json]:
        self._arguments.append(arguments)
        if self._tool.custom or not arguments:
            return []
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, **self._place, "delta": arguments}]

    def close(self) -> list[Json]:
        arguments = "".join(self._arguments)
        if not self._tool.custom:
            done = {"type": "response.function_call_arguments.done", **self._place}
            return [{**done, "arguments": arguments, "name": self._tool.name}]
        text, kind = custom_input(arguments), "response.custom_tool_call_input"
        return [
            {"type": f"{kind}.delta", **self._place, "delta": text},
            {"type": f"{kind}.done", **self._place, "input": text},
        ]


OpenItem = OpenReasoning | OpenText | OpenCall


class _Spelled(msgspec.Struct, gc=False):
    token: Any = ""


def _output_text(text: str, detail: Detail = ()) -> Json:
    logprobs = orjson.Fragment(joined(detail))
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _aligned(text: str, detail: Detail) -> Detail:
    """Return the entries of ``detail`` whose tokens make up ``text``, or all of them if none do."""
    if not detail or not text:
        return detail
    tokens = [str(entry.token) for entry in entries_of(detail, _Spelled)]
    start = "".join(tokens).rfind(text)
    if start < 0:
        return detail
    ends = list(accumulate(map(len, tokens)))
    first = bisect_right(ends, start)
    return detail[first : bisect_left(ends, start + len(text), first) + 1]
