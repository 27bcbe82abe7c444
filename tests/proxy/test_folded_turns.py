"""A client that folds turns without text into the assistant message before them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from bridle.engine.scripted import ScriptedCall, ScriptedReply
from bridle.reconstruct.audit import audit_session
from bridle.store.records import CallKind

NAMES = ("look", "open", "read", "close")
TOOLS = [
    {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
    for name in NAMES
]
QUESTION = "What is in the box?"


def play(request: Any) -> ScriptedReply:
    """Text and a call, then two turns of calls alone, then a text."""
    done = sum(m["role"] == "tool" for m in request.messages)
    if done == 0:
        return ScriptedReply("I look.", tool_calls=(ScriptedCall("look", {"at": 0}),))
    if done == 1:
        both = (ScriptedCall("open", {"at": 1}), ScriptedCall("read", {"at": 2}))
        return ScriptedReply(tool_calls=both)
    if done == 3:
        return ScriptedReply(tool_calls=(ScriptedCall("close", {"at": 3}),))
    return ScriptedReply("A cat.")


class Client:
    """A client that keeps one assistant message for all calls since the last text."""

    def __init__(self, url: str, dialect: str, *, stream: bool = False) -> None:
        self.url, self.dialect, self.stream = url, dialect, stream
        self.calls: list[Any] = []
        self.text = ""

    def ask(self) -> None:
        reply = getattr(self, f"_{self.dialect}")()
        self.text = self.text or reply[0]
        self.calls += reply[1]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        reply = httpx.post(f"{self.url}/{path}", json={"model": "m", **body}, timeout=30)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def _chat(self) -> tuple[str, list[Any]]:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        if self.calls:
            messages.append({"role": "assistant", "content": self.text, "tool_calls": self.calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                for call in self.calls
            ]
        tools = [{"type": "function", "function": tool} for tool in TOOLS]
        body = {"messages": messages, "tools": tools}
        message = self._post("v1/chat/completions", body)["choices"][0]["message"]
        return message["content"] or "", message.get("tool_calls") or []

    def _messages(self) -> tuple[str, list[Any]]:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        if self.calls:
            said = [{"type": "text", "text": self.text}, *self.calls]
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
                for call in self.calls
            ]
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": results},
            ]
        tools = [
            {"name": tool["name"], "input_schema": tool["parameters"], "description": "x"}
            for tool in TOOLS
        ]
        body = {"messages": messages, "tools": tools, "max_tokens": 100}
        content = self._post("v1/messages", body)["content"]
        text = "".join(part["text"] for part in content if part["type"] == "text")
        return text, [part for part in content if part["type"] == "tool_use"]

    def _responses(self) -> tuple[str, list[Any]]:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        if self.calls:
            items.append({"role": "assistant", "content": self.text})
            items += self.calls
            items += [
                {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
                for call in self.calls
            ]
        tools = [{"type": "function", **tool} for tool in TOOLS]
        output = self._post("v1/responses", {"input": items, "tools": tools})["output"]
        text = "".join(
            part["text"] for item in output if item["type"] == "message" for part in item["content"]
        )
        return text, [item for item in output if item["type"] == "function_call"]


@pytest.mark.parametrize("session", ["s/lamp", ""])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_folded_turns_are_one_line_of_exact_continuations(
    stage: Any, start_proxy: Any, model_dir: Any, dialect: str, session: str
) -> None:
    stage.play = play
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    client = Client(f"{bench.url}/{session}".rstrip("/"), dialect)
    for _ in range(4):
        client.ask()
    calls = bench.judged()
    assert len({call.session_id for call in calls}) == 1
    assert [call.parent_call_id for call in calls] == [None, *[call.id for call in calls[:-1]]]
    assert [call.break_reason for call in calls] == [None] * 4
    assert {call.kind for call in calls} == {CallKind.MAIN}
    notes = [[note.name for note in call.notes] for call in calls]
    assert ["turns_unfolded" in names for names in notes] == [False, False, True, True]
    audited = audit_session(bench.reader, calls[0].session_id)
    assert audited.clean
    assert audited.samples == 1
    assert audited.conservation.trained == audited.conservation.captured > 0
    last = stage.requests[-1]
    path = [
        *bench.reader.prompt_token_ids(calls[2].id),
        *bench.reader.sampled(calls[2].id)[0].token_ids,
    ]
    assert list(last.prompt_ids)[: len(path)] == path


def test_calls_of_two_samples_in_one_message_stay_as_the_client_sent_them(
    stage: Any, start_proxy: Any, model_dir: Any
) -> None:
    stage.play = play
    bench = start_proxy(stage.engine.base_url, tokenizer_dir=model_dir)
    client = Client(f"{bench.url}/s/lamp", "chat")
    client._chat()
    both = [*client._chat()[1], *client._chat()[1]]
    client.text, client.calls = "I look.", both
    client.ask()
    assert [len(m.get("tool_calls", ())) for m in stage.requests[-1].messages] == [0, 2, 0, 0]
    assert "turns_unfolded" not in [note.name for note in bench.calls()[-1].notes]
