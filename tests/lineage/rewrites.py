"""Every rewrite of a history that harnesses make without meaning anything by it, at random."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from bridle.proxy.wire.canonical import Message, ToolCall


def used_part(message: Message, rng: Random) -> Message:
    """A reply as a harness keeps it that saw only its beginning."""
    if message.tool_calls:
        keep = rng.randrange(0 if message.content else 1, len(message.tool_calls))
        return msgspec.structs.replace(message, tool_calls=message.tool_calls[:keep])
    assert isinstance(message.content, str)
    return msgspec.structs.replace(message, content=message.content.partition("\n")[0])


def rewritten(
    history: Sequence[Message], rng: Random, *, own_ids: bool, drops_text: bool
) -> list[Message]:
    """Return the history as some harness sends it.

    It may have call ids of its own and lack the text beside tool calls. Every part of it is in any
    of the ways that mean the same.
    """
    calls = [call for message in history for call in message.tool_calls]
    ids = {call.id: f"own{n}" for n, call in enumerate(calls)} if own_ids else {}
    sent: list[Message] = []
    for message in history:
        if message.role == "assistant":
            if drops_text and message.tool_calls:
                message = msgspec.structs.replace(message, content=None)
            if own_ids:
                message = msgspec.structs.replace(message, anchors=())
            sent += assistant_rewritten(message, rng, ids)
        else:
            call_id = ids.get(message.tool_call_id or "", message.tool_call_id)
            content = content_rewritten(message.content, rng)
            sent.append(msgspec.structs.replace(message, content=content, tool_call_id=call_id))
    return shuffled(sent, rng)


def assistant_rewritten(message: Message, rng: Random, ids: Mapping[str, str]) -> list[Message]:
    calls = tuple(
        ToolCall(ids.get(call.id, call.id), call.name, arguments_rewritten(call.arguments, rng))
        for call in message.tool_calls
    )
    if calls and rng.random() < 0.1:
        return [folded(message, calls)]
    content: Any = content_rewritten(message.content, rng) if message.content else None
    if not content and calls:
        content = rng.choice([None, "", []])
    thought = message.reasoning
    reasoning = rng.choice([thought, None, (thought or "").strip() or None])
    anchors = rng.choice([(), message.anchors])
    if content and calls and not anchors and rng.random() < 0.1:
        return [
            Message("assistant", content, reasoning=reasoning),
            Message("assistant", rng.choice([None, ""]), tool_calls=calls),
        ]
    return [Message("assistant", content, reasoning=reasoning, tool_calls=calls, anchors=anchors)]


def folded(message: Message, calls: Sequence[ToolCall]) -> Message:
    """The turn with its calls written into its text, as smolagents does."""
    literal = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call in calls
    ]
    text = message.content + "\n" if isinstance(message.content, str) else ""
    return Message("assistant", f"{text}Calling tools:\n{literal}")


def arguments_rewritten(arguments: str, rng: Random) -> str:
    value = json.loads(arguments)
    return rng.choice(
        [
            arguments,
            json.dumps(value, separators=(",", ":"), ensure_ascii=False),
            json.dumps(dict(reversed(value.items())), indent=2),
            json.dumps(value | {"é": 1}),
        ]
    )


def content_rewritten(content: Any, rng: Random) -> Any:
    part: dict[str, Any] = {"type": "text", "text": content}
    return rng.choice(
        [
            content,
            content,
            f"{content} \n",
            content.strip(),
            content.replace("\n", "  \r\n\n"),
            [part],
            [part | {"cache_control": {"type": "ephemeral"}}],
            [{"type": "text", "text": line} for line in content.split("\n")],
        ]
    )


def shuffled(messages: list[Message], rng: Random) -> list[Message]:
    """Results of one turn in any order."""
    runs: list[list[Message]] = []
    for message in messages:
        if message.role == "tool" and runs and runs[-1][-1].role == "tool":
            runs[-1].append(message)
        else:
            runs.append([message])
    for run in runs:
        rng.shuffle(run)
    return [message for run in runs for message in run]
