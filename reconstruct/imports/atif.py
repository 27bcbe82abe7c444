"""Agent Trajectory Interchange Format (Harbor): a trajectory in each line, or one in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from bridle.reconstruct.imports.turns import (
    ImportedSession,
    ImportedTurn,
    NotReadable,
    as_recorded,
    json_lines,
    name_of,
    seconds,
)
from bridle.store.records import Message, ToolCall


def read_atif(path: Path) -> Iterator[ImportedSession]:
    """Yield a session for each trajectory. Token ids in it are left out."""
    for trajectory in _trajectories(path):
        if not str(trajectory.get("schema_version", "")).startswith("ATIF"):
            raise NotReadable(f"{path}: no `schema_version` of ATIF")
        agent, extra = trajectory.get("agent") or {}, trajectory.get("extra") or {}
        try:
            turns = _turns(trajectory["steps"], agent.get("model_name"))
        except (KeyError, TypeError, AttributeError) as error:
            raise NotReadable(f"{path}: a step is not ATIF's: {error!r}") from error
        yield ImportedSession(
            name_of("atif", trajectory),
            turns,
            harness=agent.get("name"),
            tools=tuple(agent.get("tool_definitions") or ()),
            rewards=extra.get("rewards") or {},
            labels={"task_id": extra["task_id"]} if extra.get("task_id") else {},
        )


def _trajectories(path: Path) -> Iterator[dict[str, Any]]:
    try:
        whole = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        yield from json_lines(path)
        return
    yield whole


def _turns(steps: list[dict[str, Any]], model: str | None) -> tuple[ImportedTurn, ...]:
    turns: list[ImportedTurn] = []
    brought: list[Message] = []
    for step in steps:
        message = _message(step)
        if step["source"] == "agent" and not step.get("is_copied_context"):
            before = len(turns) - 1 if turns else None
            served, at = step.get("model_name") or model, seconds(step.get("timestamp"))
            turns.append(ImportedTurn(tuple(brought), message, before, served, at))
            brought = []
        else:
            brought.append(message)
        for result in (step.get("observation") or {}).get("results", ()):
            call = result.get("source_call_id")
            brought.append(Message("tool", result.get("content"), tool_call_id=call))
    return tuple(turns)


def _message(step: dict[str, Any]) -> Message:
    role = {"agent": "assistant", "user": "user"}.get(step["source"], "system")
    calls = [
        ToolCall(
            call["tool_call_id"], call["function_name"], orjson.dumps(call["arguments"]).decode()
        )
        for call in step.get("tool_calls") or ()
    ]
    return as_recorded(role, step.get("message"), step.get("reasoning_content"), calls)
