"""The script of ``bridle engine scripted``: a policy that needs no weights, for a first look.

It calls the first tool that a request offers, with arguments made from the user's own words, and
then answers with what the tool returned. A shell is asked to list the folder. Without tools it
repeats the user's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from bridle.engine.scripted import ScriptedCall, ScriptedReply, ScriptedRequest

_SHELL: Final = re.compile(r"shell|exec|bash|terminal", re.IGNORECASE)
_COMMAND: Final = "ls"
_UNCALLED: Final = re.compile(r"agent|task|todo|plan|schema", re.IGNORECASE)
"""A pattern for the names of tools that begin something longer than a first look."""
_LONGEST_ECHO: Final = 400
"""Maximum characters of a question or a result that are repeated."""
_ASIDE: Final = "This asks for no tool."


def stand_in(request: ScriptedRequest) -> ScriptedReply:
    """Return a tool call after the user's message, and an answer after the tool's result."""
    messages = request.messages
    asked = next((_text(one) for one in reversed(messages) if one["role"] == "user"), "")
    replies = [one for one in messages if one["role"] == "assistant"]
    results = [one for one in messages if one["role"] == "tool"]
    if results and replies and replies[-1].get("tool_calls"):
        return ScriptedReply(
            f"The tool returned: {_shortened(_text(results[-1]))}",
            reasoning="The result is here, so the question can be answered.",
        )
    tool = _chosen(request)
    if tool is None:
        return ScriptedReply(f"You said: {_shortened(asked)}", reasoning=_ASIDE)
    call = ScriptedCall(tool["name"], _arguments(tool, asked))
    return ScriptedReply(reasoning=f"The tool {tool['name']} may know.", tool_calls=(call,))


def _chosen(request: ScriptedRequest) -> Mapping[str, Any] | None:
    """Return a shell if there is one, else the first tool that only answers."""
    functions = [
        tool["function"]
        for tool in request.tools
        if "function" in tool and not _UNCALLED.search(tool["function"]["name"])
    ]
    shells = [one for one in functions if _SHELL.search(one["name"])]
    return next(iter(shells or functions), None)


def _arguments(tool: Mapping[str, Any], asked: str) -> dict[str, Any]:
    schema = tool.get("parameters") or {}
    properties = schema.get("properties") or {}
    names = schema.get("required") or list(properties)[:1]
    numbers = iter(re.findall(r"-?\d+", asked))
    words = asked.rstrip(" .?!").split() or ["nothing"]
    shell = _SHELL.search(tool["name"]) is not None
    return {
        name: _value(properties.get(name) or {}, next(numbers, "1"), words[-1], shell)
        for name in names
    }


def _value(schema: Mapping[str, Any], number: str, word: str, shell: bool) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    match schema.get("type"):
        case "integer" | "number":
            return int(number)
        case "boolean":
            return False
        case "array":
            return ["sh", "-c", _COMMAND] if shell else []
        case "object":
            return {}
        case _:
            return _COMMAND if shell else word


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else json.dumps(content)


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_ECHO else f"{text[:_LONGEST_ECHO]}…"
