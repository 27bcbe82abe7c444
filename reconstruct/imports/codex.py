"""Codex's rollouts: ``~/.codex/sessions/YEAR/MONTH/DAY/rollout-….jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from bridle.reconstruct.imports.turns import (
    ImportedSession,
    ImportedTurn,
    NotReadable,
    json_lines,
    seconds,
)
from bridle.store.records import Message, ToolCall

_CALLS: Final = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")


def read_codex(path: Path) -> Iterator[ImportedSession]:
    """Yield the session of a rollout."""
    reading = _Reading()
    for line in json_lines(path):
        if not isinstance(line.get("payload"), dict):
            continue
        reading.take(line["type"], line["payload"], seconds(line.get("timestamp")))
    reading.end_reply()
    if not reading.turns:
        raise NotReadable(f"{path}: no reply of Codex is in it")
    name = f"codex-{reading.session or path.stem}"
    yield ImportedSession(name, tuple(reading.turns), harness="codex")


@dataclass(slots=True)
class _Reading:
    """A rollout that is read up to some line."""

    session: str | None = None
    model: str | None = None
    turns: list[ImportedTurn] = field(default_factory=list)
    _instructions: list[Message] = field(default_factory=list)
    _brought: list[Message] = field(default_factory=list)
    _reply: list[Mapping[str, Any]] = field(default_factory=list)
    _at: float | None = None
    _last: int | None = None

    def take(self, kind: str, payload: dict[str, Any], at: float | None) -> None:
        if kind == "session_meta":
            self.session = payload.get("id") or payload.get("session_id")
            text = (payload.get("base_instructions") or {}).get("text")
            self._instructions = [Message("system", text)] if text else []
            self._brought = list(self._instructions)
        elif kind == "turn_context":
            self.model = payload.get("model", self.model)
        elif kind == "compacted":
            self.end_reply()
            self._last = None
            self._brought = [*self._instructions, Message("user", payload.get("message") or "")]
        elif kind == "response_item":
            self._item(payload, at)

    def _item(self, item: dict[str, Any], at: float | None) -> None:
        kind, role = item.get("type"), item.get("role")
        if kind in ("reasoning", *_CALLS) or (kind == "message" and role == "assistant"):
            self._at = at if not self._reply else self._at
            self._reply.append(item)
            return
        self.end_reply()
        if kind in _RESULTS:
            output = item.get("output")
            text = output if isinstance(output, str) else orjson.dumps(output).decode()
            self._brought.append(Message("tool", text, tool_call_id=item.get("call_id")))
        elif kind == "message":
            said = _text(item)
            self._brought.append(
                Message("user", said) if role == "user" else Message("system", said)
            )

    def end_reply(self) -> None:
        """Make a turn of the items of a reply, if there are any."""
        if not self._reply:
            return
        calls = tuple(_call(item) for item in self._reply if item["type"] in _CALLS)
        said = "".join(_text(item) for item in self._reply if item["type"] == "message")
        thought = "\n".join(
            part["text"]
            for item in self._reply
            if item["type"] == "reasoning"
            for part in (item.get("content") or item.get("summary") or ())
        )
        reply = Message("assistant", said or None, thought or None, calls)
        finish = "tool_calls" if calls else "stop"
        self.turns.append(
            ImportedTurn(tuple(self._brought), reply, self._last, self.model, self._at, finish)
        )
        self._last, self._brought, self._reply = len(self.turns) - 1, [], []


def _text(item: Mapping[str, Any]) -> str:
    return "\n".join(part["text"] for part in item.get("content") or () if part.get("text"))


def _call(item: Mapping[str, Any]) -> ToolCall:
    if item["type"] == "local_shell_call":
        name, arguments = "local_shell", orjson.dumps(item.get("action")).decode()
    else:
        name, arguments = item["name"], item.get("arguments") or item.get("input") or ""
    return ToolCall(item.get("call_id") or "", name, arguments)
