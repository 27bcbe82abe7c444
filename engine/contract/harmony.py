"""Conversations in Harmony, the format of gpt-oss, as vLLM renders them.

vLLM does not use the chat template of these models: it builds Harmony messages and has the
``openai_harmony`` library write them (``vllm/entrypoints/openai/parser/harmony_utils.py``, 0.32).
This module does the same, with the same library. Without the library the template is used, and the
proxy detects that the engine renders otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, Final

from bridle.engine.contract.errors import TemplateError

MODEL_TYPE: Final = "gpt_oss"

_CALL_HEADER: Final = re.compile(
    r"<\|start\|>assistant<\|channel\|>(\w+) to=([^<]+?) ?<\|constrain\|>(\w+)<\|message\|>"
)
_OLDER_HEADER: Final = r"<|start|>assistant to=\2<|channel|>\1 \3<|message|>"
"""vLLM's form of the header of earlier calls, which versions of the library write differently."""
_SPECIAL: Final = re.compile(r"<\|\w+\|>")


def available() -> bool:
    """Return whether the library is installed (the extra ``harmony``)."""
    try:
        import openai_harmony
    except ImportError:
        return False
    return bool(openai_harmony)


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """Return the prompt text of ``messages`` (chat shape) and ``tools``.

    Raise :class:`TemplateError` for a reasoning effort that Harmony does not have, and where the
    library would make other ids than the text has. It would do so for a content of several parts,
    each of which it tokenises by itself, and for a message with the spelling of a special token,
    which it takes for text.
    """
    import openai_harmony as harmony

    for message in messages:
        if _SPECIAL.search(json.dumps(message)):
            raise TemplateError("a message contains the text of a special token")
        if isinstance(message.get("content"), list) and len(message["content"]) > 1:
            raise TemplateError("a content of several parts")
    names = {
        call.get("id"): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    head, rest = _instructions(messages)
    turns = [_system(reasoning_effort)]
    if head or tools:
        turns.append(_developer(head, tools))
    for message in rest:
        turns += _turns(message, names)
    conversation = harmony.Conversation.from_messages(_without_old_analysis(turns))
    config = harmony.RenderConversationConfig(auto_drop_analysis=False)
    encoding = _encoding()
    if add_generation_prompt:
        assistant = harmony.Role.ASSISTANT
        ids = encoding.render_conversation_for_completion(conversation, assistant, config)
    else:
        ids = encoding.render_conversation(conversation, config)
    return _CALL_HEADER.sub(_OLDER_HEADER, encoding.decode_utf8(ids))


@cache
def _encoding() -> Any:
    import openai_harmony as harmony

    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def _instructions(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[str | None, Sequence[Mapping[str, Any]]]:
    """Return the text of a leading system message, and the messages after it."""
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return None, messages
    return _text(messages[0].get("content")), messages[1:]


def _system(reasoning_effort: str | None) -> Any:
    import openai_harmony as harmony

    content = harmony.SystemContent.new()
    if reasoning_effort is not None:
        try:
            effort = harmony.ReasoningEffort[reasoning_effort.upper()]
        except KeyError as error:
            raise TemplateError(f"Harmony has no reasoning effort {reasoning_effort}") from error
        content = content.with_reasoning_effort(effort)
    today = datetime.now().strftime("%Y-%m-%d")
    content = content.with_conversation_start_date(today)
    return harmony.Message.from_role_and_content(harmony.Role.SYSTEM, content)


def _developer(instructions: str | None, tools: Sequence[Mapping[str, Any]] | None = None) -> Any:
    import openai_harmony as harmony

    content = harmony.DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if tools:
        functions = [tool["function"] for tool in tools]
        content = content.with_function_tools(
            [
                harmony.ToolDescription.new(
                    each["name"], each.get("description") or "", each.get("parameters")
                )
                for each in functions
            ]
        )
    return harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)


def _turns(message: Mapping[str, Any], names: Mapping[Any, str]) -> list[Any]:
    """Return a chat message as Harmony messages.

    An assistant's message becomes one for its reasoning, one for its text and one for each of its
    calls.
    """
    import openai_harmony as harmony

    role, text = message["role"], _text(message.get("content")) or ""
    if role in ("system", "developer"):
        return [_developer(text)]
    if role == "tool":
        name = names.get(message.get("tool_call_id"), "")
        author = harmony.Author.new(harmony.Role.TOOL, f"functions.{name}")
        result = harmony.Message.from_author_and_content(author, text)
        return [result.with_channel("commentary").with_recipient("assistant")]
    if role != "assistant":
        return [harmony.Message.from_role_and_content(harmony.Role(role), text)]

    def says(words: str, channel: str) -> Any:
        said = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, words)
        return said.with_channel(channel)

    reasoning = message.get("reasoning")
    thought = [says(reasoning, "analysis")] if reasoning else []
    calls = message.get("tool_calls") or ()
    if not calls:
        return [*thought, *([says(text, "final")] if text else [])]
    beside = [says(text, "commentary")] if text else []
    called = [
        says(_arguments(call["function"]), "commentary")
        .with_recipient(f"functions.{call['function']['name']}")
        .with_content_type("json")
        for call in calls
    ]
    return [*beside, *thought, *called]


def _without_old_analysis(turns: Sequence[Any]) -> list[Any]:
    """Return the messages without the reasoning before the last final answer."""
    finals = [at for at, turn in enumerate(turns) if turn.channel == "final"]
    last = finals[-1] if finals else -1
    return [turn for at, turn in enumerate(turns) if at >= last or turn.channel != "analysis"]


def _arguments(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content) or None
