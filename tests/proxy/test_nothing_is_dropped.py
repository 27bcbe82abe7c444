"""Request fields that change what the model is asked: each is carried out, or refused in words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

GO: Any = {"role": "user", "content": "go"}
TOOL: Any = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
PDF = "JVBERi0xLjcK"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GOOGLE = "/v1beta/models/m:generateContent"


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"model": "m", "messages": [GO]} | fields


def responses(*items: Any, **fields: Any) -> tuple[str, Any]:
    return RESPONSES, {"model": "m", "input": [GO, *items]} | fields


def messages(*content: Any, **fields: Any) -> tuple[str, Any]:
    asked = [{"role": "user", "content": [{"type": "text", "text": "go"}, *content]}]
    return MESSAGES, {"model": "m", "max_tokens": 9, "messages": asked} | fields


def google(*parts: Any) -> tuple[str, Any]:
    return GOOGLE, {"contents": [{"role": "user", "parts": [{"text": "go"}, *parts]}]}


def document(**source: str) -> Any:
    return {"type": "document", "source": source}


pdf = document(type="base64", media_type="application/pdf", data=PDF)
thread = {"type": "continue", "previous_message_id": "msg_unknown"}
REFUSED: dict[str, tuple[tuple[str, Any], str]] = {
    "a thread of nowhere": (messages(thread=thread), "send the whole history"),
    "a compaction item": (responses({"type": "compaction", "encrypted_content": "x"}), "summary"),
    "a PDF of Messages": (messages(pdf), "send its text, or an image of it"),
    "a file of Messages": (messages(document(type="file", file_id="f")), "send its text"),
    "a file of Responses": (
        responses({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}),
        "send its text as 'input_text'",
    ),
    "a PDF of Gemini": (
        google({"inlineData": {"mimeType": "application/pdf", "data": PDF}}),
        "send its text, or an image of it",
    ),
    "a file of Gemini": (
        google({"fileData": {"mimeType": "application/pdf", "fileUri": "files/a"}}),
        "send its text, or an image of it",
    ),
    "legacy functions": (chat(functions=[TOOL]), "send them as 'tools'"),
    "legacy calls": (
        chat(messages=[GO, {"role": "assistant", "function_call": {"name": "f"}}]),
        "send 'tool_calls'",
    ),
    "background": (responses(background=True), "keep the connection open"),
    "a chat template": (chat(chat_template="{{ messages }}"), "chat_template"),
    "documents": (chat(documents=[{"text": "d"}]), "documents"),
    "compaction by the provider": (messages(compaction={"type": "auto"}), "compaction"),
    "a stored prompt": (responses(prompt={"id": "pmpt_1"}), "'input'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_the_providers_form(bench: Any, stage: Any, case: str) -> None:
    (path, body), words = REFUSED[case]
    headers = {"anthropic-version": "2023-06-01"}
    reply = httpx.post(bench.url + path, json=body, headers=headers, timeout=60, trust_env=False)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]
    assert not stage.requests


summary = {"type": "compaction", "content": "They met in Oslo."}
CARRIED: dict[str, tuple[tuple[str, Any], str]] = {
    "a compaction block": (
        messages(messages=[{"role": "assistant", "content": [summary]}, GO]),
        "They met in Oslo.",
    ),
    "a document of text": (
        messages(document(type="text", media_type="text/plain", data="It rains.")),
        "It rains.",
    ),
    "the beginning of the reply": (
        chat(
            messages=[GO, {"role": "assistant", "content": "It begins"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        "It begins",
    ),
    "a beginning, then another turn": (
        messages(messages=[GO, {"role": "assistant", "content": "Begun"}, GO]),
        "Begun",
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_it_reaches_the_model(bench: Any, stage: Any, case: str) -> None:
    (path, body), words = CARRIED[case]
    headers = {"anthropic-version": "2023-06-01"}
    reply = httpx.post(bench.url + path, json=body, headers=headers, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    (asked,) = stage.requests
    assert words in str([*asked.messages, *asked.tools])
