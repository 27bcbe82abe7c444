"""Apps on the providers' official clients, which call one tool until the model answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai
from google import genai

PARAMETERS = {"type": "object", "properties": {"step": {"type": "integer"}}, "required": ["step"]}
TOOL = {"name": "look_up", "description": "Look a step up.", "parameters": PARAMETERS}


@dataclass
class ToolLoop:
    """The settings of one run of an app, and the arguments that its tool was called with."""

    url: str
    stream: bool = False
    http: httpx2.Client | None = None
    model: str = "the-model"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request."""
    result: str = "done"
    """The result of the tool."""
    key: str = "mine"
    made: list[Any] = field(default_factory=list)

    def called(self, arguments: Any) -> str:
        """Return the result of a call of the tool."""
        self.made.append(json.loads(arguments) if isinstance(arguments, str) else arguments)
        return self.result

    def openai(self) -> openai.OpenAI:
        url = f"{self.url}/v1"
        return openai.OpenAI(base_url=url, api_key=self.key, max_retries=0, http_client=self.http)


Ask = Callable[[ToolLoop], str]
"""Runs an app to its end. Returns the answer."""


def by_chat(loop: ToolLoop) -> str:
    client = loop.openai()
    messages: list[Any] = [{"role": "user", "content": "go"}]
    given: Any = {"model": loop.model, "tools": [{"type": "function", "function": TOOL}]}
    given |= {"max_completion_tokens": 99, **loop.fields}
    while True:
        if loop.stream:
            with client.chat.completions.stream(**given, messages=messages) as events:
                said = events.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(**given, messages=messages).choices[0].message
        if not said.tool_calls:
            return str(said.content)
        (call,) = said.tool_calls
        made = {"name": call.function.name, "arguments": call.function.arguments}
        kept = {"id": call.id, "type": "function", "function": made}
        messages.append({"role": "assistant", "content": said.content, "tool_calls": [kept]})
        result = loop.called(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def by_responses(loop: ToolLoop) -> str:
    client, items = loop.openai(), [{"role": "user", "content": "go"}]
    given = _for_responses(loop) | {"store": False}
    while True:
        said = _response(client, given | {"input": items}, loop.stream)
        items += [item.model_dump(exclude_none=True) for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return str(said.output_text)
        items.append(_output(loop, calls[0]))


def by_previous_response(loop: ToolLoop) -> str:
    client, items = loop.openai(), [{"role": "user", "content": "go"}]
    given = _for_responses(loop)
    while True:
        said = _response(client, given | {"input": items}, loop.stream)
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return str(said.output_text)
        given["previous_response_id"], items = said.id, [_output(loop, calls[0])]


def _for_responses(loop: ToolLoop) -> dict[str, Any]:
    tool = {"type": "function", "strict": True, **TOOL}
    return {"model": loop.model, "tools": [tool], "max_output_tokens": 99, **loop.fields}


def _response(client: openai.OpenAI, given: Any, stream: bool) -> Any:
    if not stream:
        return client.responses.create(**given)
    *_, last = client.responses.create(**given, stream=True)
    return last.response


def _output(loop: ToolLoop, call: Any) -> dict[str, str]:
    result = loop.called(call.arguments)
    return {"type": "function_call_output", "call_id": call.call_id, "output": result}


def by_messages(loop: ToolLoop) -> str:
    client = anthropic.Anthropic(
        base_url=loop.url, api_key=loop.key, max_retries=0, http_client=loop.http
    )
    tool = {"name": "look_up", "description": "Look a step up.", "input_schema": PARAMETERS}
    given: Any = {"model": loop.model, "max_tokens": 2000, "tools": [tool], **loop.fields}
    messages: list[Any] = [{"role": "user", "content": "go — é"}]
    while True:
        if loop.stream:
            with client.messages.stream(**given, messages=messages) as events:
                said = events.get_final_message()
        else:
            said = client.messages.create(**given, messages=messages)
        messages.append({"role": "assistant", "content": said.content})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in said.content if block.type == "text")
        result: Any = {"type": "tool_result", "tool_use_id": calls[0].id}
        messages.append(
            {"role": "user", "content": [result | {"content": loop.called(calls[0].input)}]}
        )


def by_google(loop: ToolLoop) -> str:
    options = genai.types.HttpOptions(base_url=loop.url, httpx_client=loop.http)
    client = genai.Client(api_key=loop.key, http_options=options)
    types = genai.types
    declared = types.FunctionDeclaration(
        name="look_up", description="Look a step up.", parameters_json_schema=PARAMETERS
    )
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])], max_output_tokens=99
    )
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="go")])]
    while True:
        asked: Any = {"model": loop.model, "contents": contents, "config": config}
        chunks: list[Any] = []
        if loop.stream:
            chunks += client.models.generate_content_stream(**asked)
        else:
            chunks.append(client.models.generate_content(**asked))
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
        contents.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text or "" for part in parts if not part.thought)
        output = {"output": loop.called(calls[0].args)}
        reply = types.FunctionResponse(id=calls[0].id, name="look_up", response=output)
        contents.append(types.Content(role="user", parts=[types.Part(function_response=reply)]))


FIELDS: dict[str, dict[str, Any]] = {
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "responses": {"include": ["reasoning.encrypted_content"]},
}
"""The fields that ask a provider for its thinking, by dialect."""
