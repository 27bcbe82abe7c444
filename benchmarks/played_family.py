"""A model that replies to any harness as a family writes.

It renders a request by the family's own template, or takes the given ids of an exactly continued
prompt. A scripted policy decides the reply; its ids are those of the text that the template writes
for it, and of the family's end token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridle.bench.families import Family
from bridle.bench.played_engine import LONGEST, Answer
from bridle.engine.contract.errors import TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.scripted import ScriptedReply, ScriptedRequest
from bridle.engine.serve.backend import SamplingParams

Policy = Callable[[ScriptedRequest], ScriptedReply]


@dataclass(slots=True)
class PlayedFamily:
    """A model of a family whose replies a policy decides."""

    tokenizer: Tokenizer
    family: Family
    policy: Policy
    refusals: list[str] = field(default_factory=list)
    """The messages of the template for the requests that it refused."""

    @property
    def thinks(self) -> bool:
        return "think" in self.tokenizer.chat_template_source.lower()

    @property
    def _is_harmony(self) -> bool:
        return self.family.model_type == "gpt_oss"

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """Return the reply to a chat request.

        Raise :class:`TemplateError` if the template refuses its messages.
        """
        messages, tools = body["messages"], body.get("tools") or []
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given is None:
            kwargs = body.get("chat_template_kwargs") or {}
            written = [_as_text(one) for one in messages] if self._is_harmony else messages
            given = self.tokenizer.encode(self.tokenizer.render(written, tools, **kwargs))
        sampling = SamplingParams(max_tokens=LONGEST)
        reply = self.policy(ScriptedRequest(messages, tools, given, sampling, self.tokenizer))
        message = self._message(reply, messages)
        return Answer(given, self._sampled(messages, tools, message, given), message)

    def _message(
        self, reply: ScriptedReply, messages: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
        if self.thinks and reply.reasoning:
            message["reasoning"] = reply.reasoning
        before = sum(len(one.get("tool_calls") or ()) for one in messages)
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(before + n, call.name),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _text(call.arguments)},
                }
                for n, call in enumerate(reply.tool_calls)
            ]
        return message

    def _call_id(self, number: int, name: str) -> str:
        match self.family.call_ids:
            case "nine":
                return f"aB{number:07d}"
            case "counted":
                return f"functions.{name}:{number}"
            case _:
                return f"chatcmpl-tool-{number:032d}"

    def _sampled(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        prompt_ids: Sequence[int],
    ) -> list[int]:
        shown = self._written(messages, tools, message)
        reasoning = message.get("reasoning")
        if reasoning and reasoning.strip() not in shown:
            opened = self.tokenizer.decode(prompt_ids[-16:]).rstrip().endswith("<think>")
            shown = f"{'' if opened else '<think>' + chr(10)}{reasoning}\n</think>\n\n{shown}"
        called = message.get("tool_calls")
        end = self.family.call_end if called else self.family.text_end
        end_id = self.tokenizer.token_id(end or self.family.eos[0])
        assert end_id is not None
        return [*self.tokenizer.encode(shown), end_id]

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
    ) -> str:
        # The rendering of a long history by itself shows the same reply.
        asked = next((n for n, one in enumerate(messages) if one["role"] == "user"), 0)
        history = [*messages[: asked + 1]]
        try:
            before = self.tokenizer.render(history, tools)
            whole = self.tokenizer.render([*history, message], tools, add_generation_prompt=False)
        except TemplateError:
            return _in_hermes(message)
        start = next(
            (n for n, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b),
            min(len(whole), len(before)),
        )
        text = whole[start:].rstrip()
        family = self.family
        ends = [*family.eos, family.call_end, family.text_end, family.earlier_end]
        while closed := next((end for end in ends if end and text.endswith(end)), None):
            text = text.removesuffix(closed).rstrip()
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        # A template that shows no calls leaves the policy to write some all the same.
        return text if all(name in text for name in names) else _in_hermes(message)


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its content as one text.

    vLLM takes contents of several parts for Harmony; the local renderer leaves them to the engine.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part.get("text", "") for part in content)}


def _in_hermes(message: Mapping[str, Any]) -> str:
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return "\n".join([*([message["content"]] if message["content"] else []), *written])


def _text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
