"""Claude Code's transcripts: ``~/.claude/projects/FOLDER/SESSION.jsonl``.

Each line names the line that it follows. A reply is on several lines, one for each content block;
where a conversation was rewound, or a sub-agent worked, two replies follow one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from bridle.reconstruct.imports.turns import (
    ImportedSession,
    ImportedTurn,
    NotReadable,
    json_lines,
    seconds,
)
from bridle.store.records import Message, ToolCall


def read_claude_code(path: Path) -> Iterator[ImportedSession]:
    """Yield the session of a transcript."""
    entries = {line["uuid"]: line for line in json_lines(path) if "uuid" in line}
    replies: dict[str, list[dict[str, Any]]] = {}
    for line in entries.values():
        if line.get("type") == "assistant":
            replies.setdefault(line["message"].get("id") or line["uuid"], []).append(line)
    if not replies:
        raise NotReadable(f"{path}: no reply of Claude Code is in it")
    index = {line["uuid"]: number for number, of in enumerate(replies.values()) for line in of}
    turns = [_turn(of, entries, index) for of in replies.values()]
    session = next(iter(replies.values()))[0].get("sessionId") or path.stem
    yield ImportedSession(f"claude-code-{session}", tuple(turns), harness="claude-code")


def _turn(
    lines: list[dict[str, Any]], entries: Mapping[str, dict[str, Any]], index: Mapping[str, int]
) -> ImportedTurn:
    first, own = lines[0], index[lines[0]["uuid"]]
    brought: list[Message] = []
    system: list[str] = []
    at = entries.get(first.get("parentUuid") or "")
    while at is not None and index.get(at["uuid"], own) == own:
        if at.get("type") == "user":
            brought[:0] = _asked(at["message"])
        elif not system and (at.get("attachment") or {}).get("type") == "prompt_snapshot":
            system = at["attachment"].get("systemPrompt") or []
        at = entries.get(at.get("parentUuid") or "")
    if at is None and system:
        brought.insert(0, Message("system", "\n".join(system)))
    message = first["message"]
    return ImportedTurn(
        tuple(brought),
        _reply([block for line in lines for block in line["message"]["content"]]),
        None if at is None else index[at["uuid"]],
        message.get("model"),
        seconds(first.get("timestamp")),
        lines[-1]["message"].get("stop_reason"),
        {
            "prompt_tokens": (message.get("usage") or {}).get("input_tokens"),
            "completion_tokens": (message.get("usage") or {}).get("output_tokens"),
        },
    )


def _asked(message: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a user's line: results of tools first, then the text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [Message("user", content)]
    results = [
        Message("tool", _text(block.get("content")), tool_call_id=block.get("tool_use_id"))
        for block in content
        if block.get("type") == "tool_result"
    ]
    said = [_part(block) for block in content if block.get("type") != "tool_result"]
    if all(part["type"] == "text" for part in said):
        text = "\n".join(part["text"] for part in said)
        return [*results, Message("user", text)] if said else results
    return [*results, Message("user", said)]


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("type") == "text":
        return {"type": "text", "text": block["text"]}
    return dict(block)


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    parts = (part.get("text") or orjson.dumps(part).decode() for part in content)
    return "\n".join(parts)


def _reply(blocks: list[dict[str, Any]]) -> Message:
    def joined(kind: str) -> str | None:
        return "".join(one[kind] for one in blocks if one.get("type") == kind) or None

    calls = tuple(
        ToolCall(one["id"], one["name"], orjson.dumps(one["input"]).decode())
        for one in blocks
        if one.get("type") == "tool_use"
    )
    return Message("assistant", joined("text"), joined("thinking"), calls)
