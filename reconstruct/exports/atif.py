"""Agent Trajectory Interchange Format (Harbor), version 1.7: a trajectory per line.

Each reply's step carries its sampled token ids and logprobs exactly: a float32 is told as the
float64 of the same value. Steps that an earlier trajectory has trained, and those that are not to
be trained, are ``is_copied_context``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from bridle.reconstruct.conversation import ReplyId
from bridle.reconstruct.exports.conversation import Turn
from bridle.reconstruct.exports.lines import Inexpressible, Told
from bridle.reconstruct.exports.messages import reasoning, text, tool_calls
from bridle.store.reading.queries import Reader

SCHEMA_VERSION: Final = "ATIF-v1.7"


def atif_rows(told: Told, reader: Reader) -> Iterator[dict[str, Any]]:
    """One trajectory."""
    told.require_messages()
    steps: list[dict[str, Any]] = []
    for turn in told.turns:
        role = turn.message["role"]
        if role == "tool":
            _observe(steps, turn)
            continue
        step = _reply(told, turn, reader) if role == "assistant" else _said(turn)
        steps.append({"step_id": len(steps) + 1} | step)
    leaf = told.calls[told.leaf.call_id]
    agent: dict[str, Any] = {
        "name": told.session.harness or "unknown",
        "version": "unknown",
        "model_name": leaf.model_served or leaf.model_requested,
    }
    if told.tools:
        agent["tool_definitions"] = list(told.tools)
    counted = [step["metrics"] for step in steps if "metrics" in step]
    yield {
        "schema_version": SCHEMA_VERSION,
        "session_id": told.session.id,
        "trajectory_id": told.id,
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(metrics["prompt_tokens"] or 0 for metrics in counted),
            "total_completion_tokens": sum(m["completion_tokens"] for m in counted),
            "total_steps": len(steps),
        },
        "extra": {
            "task_id": told.session.task_id,
            "rewards": dict(told.rewards),
            "recorded_by": "bridle",
        },
    }


def _said(turn: Turn) -> dict[str, Any]:
    source = "user" if turn.message["role"] == "user" else "system"
    return {"source": source, "message": text(turn.message)}


def _reply(told: Told, turn: Turn, reader: Reader) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": text(turn.message)}
    if (thought := reasoning(turn.message)) is not None:
        step["reasoning_content"] = thought
    if calls := tool_calls(turn.message):
        step["tool_calls"] = [
            {"tool_call_id": c.id, "function_name": c.name, "arguments": c.arguments} for c in calls
        ]
    if not told.is_trained(turn):
        step["is_copied_context"] = True
    if turn.reply is not None:
        call = told.calls[turn.reply.call_id]
        step["timestamp"] = datetime.fromtimestamp(call.started_at, UTC).isoformat()
        step["model_name"] = call.model_served or call.model_requested
        step["llm_call_count"] = 1
        step["metrics"] = _metrics(told, turn.reply, reader)
        step["extra"] = {"call_id": call.id, "choice": turn.reply.choice}
    return step


def _metrics(told: Told, reply: ReplyId, reader: Reader) -> dict[str, Any]:
    call = told.calls[reply.call_id]
    choices = reader.sampled(reply.call_id)
    if reply.choice >= len(choices):
        return {"prompt_tokens": call.prompt_tokens, "completion_tokens": 0}
    choice = choices[reply.choice]
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": len(choice.token_ids),
        "completion_token_ids": choice.token_ids.tolist(),
        "logprobs": choice.logprobs.tolist(),
        "extra": {"versions": [[run.start, run.version] for run in choice.versions]},
    }


def _observe(steps: list[dict[str, Any]], turn: Turn) -> None:
    """Adds a tool's result to the step that called it."""
    wanted = turn.message["tool_call_id"]
    for step in reversed(steps):
        if any(call["tool_call_id"] == wanted for call in step.get("tool_calls", ())):
            results = step.setdefault("observation", {"results": []})["results"]
            results.append({"source_call_id": wanted, "content": text(turn.message)})
            return
    raise Inexpressible("tool_result_without_call")
