"""Conversations of official clients that call the tool ``look_up`` until the model answers.

Each function returns the text of the last reply.
"""

from __future__ import annotations

from typing import Any, Final

from google.genai import types

PARAMETERS: Final = {
    "type": "object",
    "properties": {"step": {"type": "integer"}},
    "required": ["step"],
}


def by_messages(client: Any, given: dict[str, Any], text: str, stream: bool) -> str:
    tool = {"name": "look_up", "description": "Look a step up.", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": text}]
    while True:
        asked: Any = {**given, "tools": [tool], "messages": messages}
        if stream:
            with client.messages.stream(**asked) as events:
                said = events.get_final_message()
        else:
            said = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": said.content})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in said.content if block.type == "text")
        result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "done"}
        messages.append({"role": "user", "content": [result]})


def response(client: Any, given: dict[str, Any], stream: bool) -> Any:
    if not stream:
        return client.responses.create(**given)
    *_, last = client.responses.create(**given, stream=True)
    return last.response


def output_of(calls: list[Any]) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": calls[0].call_id, "output": "done"}


def by_responses(client: Any, given: dict[str, Any], stream: bool) -> str:
    items: list[Any] = [{"role": "user", "content": "go"}]
    while True:
        said = response(client, given | {"input": items}, stream)
        items += [item.model_dump(exclude_none=True) for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return str(said.output_text)
        items.append(output_of(calls))


def by_google(client: Any, model: str, stream: bool, *, with_id: bool) -> str:
    declared = types.FunctionDeclaration(
        name="look_up", description="Look a step up.", parameters_json_schema=PARAMETERS
    )
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])], max_output_tokens=99
    )
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="go")])]
    while True:
        asked: Any = {"model": model, "contents": contents, "config": config}
        chunks: list[Any] = (
            list(client.models.generate_content_stream(**asked))
            if stream
            else [client.models.generate_content(**asked)]
        )
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
        contents.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text or "" for part in parts if not part.thought)
        reply = types.FunctionResponse(
            id=calls[0].id if with_id else None, name="look_up", response={"output": "done"}
        )
        contents.append(types.Content(role="user", parts=[types.Part(function_response=reply)]))
