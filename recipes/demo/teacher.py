"""The demo's scripted teacher, which uses the agent's tools but often picks the wrong operation.

It is served behind the proxy like any engine, so its demonstrations are recorded, exported and
learned from as other sessions are. It looks up the right thing and answers with the result of the
last tool. It computes with the operation that the question calls for only in a part of the
sessions, and in the others always with the same wrong one. A policy that imitates it is right as
often as the teacher, and wrong when it is greedy; only a reward makes it better.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest
from bridle.harnesses.tasks.task import Task

OPERATIONS = ("add", "subtract", "multiply")


def teacher(tasks: Iterable[Task], *, skill: float) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Return a script that answers the questions of ``tasks``.

    ``skill`` is the share of questions for which it computes with the right operation; the
    question's text decides which ones. For the others it takes the next one in ``OPERATIONS``.
    """
    payloads = {task.prompt: task.payload for task in tasks}

    def script(request: ScriptedRequest) -> ScriptedReply:
        question = next(m["content"] for m in request.messages if m["role"] == "user")
        payload = payloads[question]
        results = [m["content"] for m in request.messages if m["role"] == "tool"]
        if not results:
            arguments = {"item": payload["item"], "field": payload["field"]}
            return ScriptedReply(tool_calls=(ScriptedCall("look_up", arguments),))
        if len(results) == 1:
            arguments = {
                "a": int(results[0]),
                "operation": _operation(question, payload, skill),
                "b": payload["numbers"][1],
            }
            return ScriptedReply(tool_calls=(ScriptedCall("calculate", arguments),))
        return ScriptedReply(content=f"The answer is {results[-1]}.")

    return script


def _operation(question: str, payload: Mapping[str, Any], skill: float) -> str:
    draw = hashlib.sha256(question.encode()).digest()
    right: str = payload["operation"]
    if int.from_bytes(draw[:4], "big") < skill * 2**32:
        return right
    return OPERATIONS[(OPERATIONS.index(right) + 1) % len(OPERATIONS)]
