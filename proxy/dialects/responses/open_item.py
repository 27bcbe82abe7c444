"""The output item that a streamed response is writing: its events and its final form.

``added`` is the item of its first event, ``open`` the events that follow at once, ``delta`` those
of a piece, ``close`` those that complete its parts, ``item`` the whole. The emitter numbers the
events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridle.proxy.dialects.body import Json
from bridle.proxy.dialects.responses.custom import InputText
from bridle.proxy.wire.canonical import ClientTool, ToolCallDelta


class OpenReasoning:
    """A ``reasoning`` item."""

    def __init__(self, identifier: str, place: Json, summarise: bool, signature: str | None):
        self._id = identifier
        self._summarise = summarise
        self._signature = signature
        index = "summary_index" if summarise else "content_index"
        self._place = {"item_id": identifier, **place, index: 0}
        self._text: list[str] = []

    def item(self, status: str) -> Json:
        place, kind = (
            ("summary", "summary_text") if self._summarise else ("content", "reasoning_text")
        )
        item: Json = {"id": self._id, "type": "reasoning", "summary": []}
        item[place] = [{"type": kind, "text": "".join(self._text)}]
        if self._signature is not None:
            item["encrypted_content"] = self._signature
        item["status"] = status
        return item

    def added(self) -> Json:
        return {"id": self._id, "type": "reasoning", "summary": [], "status": "in_progress"}

    def open(self) -> list[Json]:
        if self._summarise:
            return [{"type": "response.reasoning_summary_part.added", **self._part("")}]
        return [{"type": "response.content_part.added", **self._part("")}]

    def delta(self, text: str) -> list[Json]:
        self._text.append(text)
        kind = "reasoning_summary_text" if self._summarise else "reasoning_text"
        return [{"type": f"response.{kind}.delta", **self._place, "delta": text}]

    def close(self) -> list[Json]:
        text = "".join(self._text)
        kind = "reasoning_summary_text" if self._summarise else "reasoning_text"
        part = "reasoning_summary_part" if self._summarise else "content_part"
        return [
            {"type": f"response.{kind}.done", **self._place, "text": text},
            {"type": f"response.{part}.done", **self._part(text)},
        ]

    def _part(self, text: str) -> Json:
        kind = "summary_text" if self._summarise else "reasoning_text"
        return {**self._place, "part": {"type": kind, "text": text}}


class OpenText:
    """An assistant ``message`` with one text part."""

    def __init__(self, identifier: str, place: Json):
        self._id = identifier
        self._place = {"item_id": identifier, **place, "content_index": 0}
        self._text: list[str] = []
        self._logprobs: list[Mapping[str, Any]] = []

    def item(self, status: str) -> Json:
        item = {"id": self._id, "type": "message", "role": "assistant", "status": status}
        return {**item, "content": [self._part()]}

    def added(self) -> Json:
        return {**self.item("in_progress"), "content": []}

    def open(self) -> list[Json]:
        return [{"type": "response.content_part.added", **self._place, "part": _output_text("")}]

    def delta(self, text: str, logprobs: list[Mapping[str, Any]]) -> list[Json]:
        self._text.append(text)
        self._logprobs.extend(logprobs)
        event = {"type": "response.output_text.delta", **self._place}
        return [{**event, "delta": text, "logprobs": logprobs}]

    def close(self) -> list[Json]:
        part = self._part()
        done = {"type": "response.output_text.done", **self._place}
        return [
            {**done, "text": part["text"], "logprobs": part["logprobs"]},
            {"type": "response.content_part.done", **self._place, "part": part},
        ]

    def _part(self) -> Json:
        text = "".join(self._text)
        return _output_text(text, _aligned(text, self._logprobs))


class OpenCall:
    """A ``function_call`` or ``custom_tool_call`` item."""

    def __init__(self, identifier: str, place: Json, first: ToolCallDelta, tool: ClientTool):
        self.index = first.index
        self._id = identifier
        self._place = {"item_id": identifier, **place}
        self._call_id = first.id or ""
        self._arguments: list[str] = []
        self._tool = tool
        self._input = InputText() if self._tool.custom else None

    def item(self, status: str) -> Json:
        item: Json = {"id": self._id, "type": "function_call", "status": status}
        item["call_id"] = self._call_id
        item["name"] = self._tool.name
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        if self._input is not None:
            item["type"] = "custom_tool_call"
            item["input"] = self._input.text
        else:
            item["arguments"] = "".join(self._arguments)
        return item

    def added(self) -> Json:
        return self.item("in_progress")

    def open(self) -> list[Json]:
        return []

    def delta(self, arguments: str) -> list[Json]:
        self._arguments.append(arguments)
        if self._input is None:
            kind, piece = "function_call_arguments", arguments
        else:
            kind, piece = "custom_tool_call_input", self._input.feed(arguments)
        if not piece:
            return []
        return [{"type": f"response.{kind}.delta", **self._place, "delta": piece}]

    def close(self) -> list[Json]:
        if self._input is None:
            done = {"type": "response.function_call_arguments.done", **self._place}
            arguments = "".join(self._arguments)
            return [{**done, "arguments": arguments, "name": self._tool.name}]
        events: list[Json] = []
        if rest := self._input.finish():
            delta = {"type": "response.custom_tool_call_input.delta", **self._place}
            events.append({**delta, "delta": rest})
        done = {"type": "response.custom_tool_call_input.done", **self._place}
        return [*events, {**done, "input": self._input.text}]


OpenItem = OpenReasoning | OpenText | OpenCall


def _output_text(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _aligned(text: str, detail: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The entries of ``detail`` whose tokens make up ``text``; all of them when none do."""
    spelled = "".join(str(entry.get("token", "")) for entry in detail)
    start = spelled.rfind(text)
    if start < 0 or not text:
        return detail
    end, position, kept = start + len(text), 0, []
    for entry in detail:
        after = position + len(str(entry.get("token", "")))
        if position < end and after > start:
            kept.append(entry)
        position = after
    return kept
