"""Agent Trajectory Interchange Format (Harbor), version 1.7: a trajectory per line.

Each reply's step carries its sampled token ids and logprobs exactly: a float32 is written as the
float64 of the same value. Steps that an earlier trajectory trains, and those that no trajectory
trains, are ``is_copied_context``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from math import isnan
from typing import Any, Final

from bridle.reconstruct.conversation import RecordedMessage
from bridle.reconstruct.exports.lines import ExportedConversation, Inexpressible
from bridle.reconstruct.exports.messages import reasoning, text, tool_calls
from bridle.store.reading.conversation import ReplyId
from bridle.store.records import MISSING_LOGPROB

SCHEMA_VERSION: Final = "ATIF-v1.7"


def atif_rows(exported: ExportedConversation) -> Iterator[dict[str, Any]]:
    """Yield one trajectory."""
    exported.require_messages()
    steps: list[dict[str, Any]] = []
    for entry in exported.messages:
        role = entry.message["role"]
        if role == "tool":
            _observe(steps, entry)
            continue
        step = _reply(exported, entry) if role == "assistant" else _said(entry)
        steps.append({"step_id": len(steps) + 1} | step)
    leaf = exported.last_call
    agent: dict[str, Any] = {
        "name": exported.session.record.harness or "unknown",
        "version": "unknown",
        "model_name": leaf.model_served or leaf.model_requested,
    }
    if exported.tools:
        agent["tool_definitions"] = list(exported.tools)
    counted = [step["metrics"] for step in steps if "metrics" in step]
    yield {
        "schema_version": SCHEMA_VERSION,
        "session_id": exported.session.record.id,
        "trajectory_id": exported.id,
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(metrics["prompt_tokens"] or 0 for metrics in counted),
            "total_completion_tokens": sum(m["completion_tokens"] for m in counted),
            "total_steps": len(steps),
        },
        "extra": {
            "task_id": exported.session.record.task_id,
            "rewards": dict(exported.session.rewards),
            "recorded_by": "bridle",
        },
    }


def _said(entry: RecordedMessage) -> dict[str, Any]:
    source = "user" if entry.message["role"] == "user" else "system"
    return {"source": source, "message": text(entry.message)}


def _reply(exported: ExportedConversation, entry: RecordedMessage) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": text(entry.message)}
    if (thought := reasoning(entry.message)) is not None:
        step["reasoning_content"] = thought
    if calls := tool_calls(entry.message):
        step["tool_calls"] = [
            {"tool_call_id": c.id, "function_name": c.name, "arguments": c.arguments} for c in calls
        ]
    if not exported.is_trained(entry):
        step["is_copied_context"] = True
    if entry.reply is not None:
        call = exported.session.by_id[entry.reply.call_id]
        step["timestamp"] = datetime.fromtimestamp(call.started_at, UTC).isoformat()
        step["model_name"] = call.model_served or call.model_requested
        step["llm_call_count"] = 1
        step["metrics"] = _metrics(exported, entry.reply)
        step["extra"] = {"call_id": call.id, "choice": entry.reply.choice}
    return step


def _metrics(exported: ExportedConversation, reply: ReplyId) -> dict[str, Any]:
    call = exported.session.by_id[reply.call_id]
    rows = exported.session.sampled.get(call.id, ())
    span = next((row.span for row in rows if row.choice == reply.choice), None)
    if span is None or span.logprobs is None:
        return {"prompt_tokens": call.prompt_tokens, "completion_tokens": 0}
    logprobs = [MISSING_LOGPROB if isnan(value) else value for value in span.logprobs.tolist()]
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": len(span.token_ids),
        "completion_token_ids": span.token_ids.tolist(),
        "logprobs": logprobs,
        "extra": {"versions": [[run.start, run.version] for run in span.versions]},
    }


def _observe(steps: list[dict[str, Any]], entry: RecordedMessage) -> None:
    """Add a tool's result to the step that called it."""
    wanted = entry.message["tool_call_id"]
    for step in reversed(steps):
        if any(call["tool_call_id"] == wanted for call in step.get("tool_calls", ())):
            results = step.setdefault("observation", {"results": []})["results"]
            results.append({"source_call_id": wanted, "content": text(entry.message)})
            return
    raise Inexpressible("tool_result_without_call")
