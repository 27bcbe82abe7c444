"""``/v1/chat/completions``: pieces of choices written as chunks, or folded into one reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.detokenizer import Vocabulary
from bridle.engine.serve.backend import PromptLogprob, SampledToken
from bridle.engine.serve.choices import Piece
from bridle.engine.serve.deltas import Content, Delta, Reasoning, ToolArguments, ToolName
from bridle.engine.serve.requests import ChatBody
from bridle.engine.serve.wire import (
    chat_logprobs,
    experts,
    prompt_logprobs,
    sampling_mask,
    texts,
    usage,
)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The fields that every chunk of a reply repeats."""

    id: str
    created: int
    model: str


class ChatWriter:
    """A writer of the chunks of one streamed chat reply."""

    def __init__(self, body: ChatBody, head: ReplyHead, vocabulary: Vocabulary) -> None:
        self._body = body
        self._head = head
        self._text_of = texts(vocabulary, body.return_tokens_as_token_ids)
        self._called: set[int] = set()
        """Indices of the choices that have called a tool."""

    def begin(self, prompt_ids: Sequence[int]) -> Iterable[dict[str, Any]]:
        """Yield the role chunks, with ``prompt_token_ids`` if requested."""
        for index in range(self._body.choices):
            choice = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._chunk([choice])
            if self._body.return_token_ids:
                chunk["prompt_token_ids"] = list(prompt_ids)
            yield chunk

    def write(self, piece: Piece) -> dict[str, Any]:
        """Return the chunk of a piece. Its delta is empty if a parser holds the text back."""
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": self._delta(piece),
            "logprobs": chat_logprobs(piece.tokens, self._text_of) if self._body.logprobs else None,
            "finish_reason": chat_finish(
                piece.finish_reason, piece.index in self._called, self._body
            ),
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in piece.tokens]
            choice |= sampling_mask(piece.tokens) | experts(piece.routed_experts)
        return self._chunk([choice])

    def usage(self, prompt_tokens: int, completion_tokens: int, cached: int) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage(prompt_tokens, completion_tokens, cached)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for part in visible(piece.deltas, self._body):
            match part:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning"] = delta.get("reasoning", "") + text
                case ToolName(index, name, id):
                    self._called.add(piece.index)
                    delta.setdefault("tool_calls", []).append(
                        {
                            "index": index,
                            "id": id or tool_call_id(),
                            "type": "function",
                            "function": {"name": name, "arguments": ""},
                        }
                    )
                case ToolArguments(index, text):
                    calls = delta.setdefault("tool_calls", [])
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return delta


@dataclass(slots=True)
class ChoiceFold:
    """A whole choice: the fold of its pieces."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Id, name and arguments of each tool call."""
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: NDArray[np.int16] | None = None

    def add(self, piece: Piece, body: ChatBody) -> None:
        self.tokens += piece.tokens
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        self.routed_experts = piece.routed_experts
        for part in visible(piece.deltas, body):
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolName(_, name, id):
                    self.calls.append([id or tool_call_id(), name, ""])
                case ToolArguments(index, text):
                    self.calls[index][2] += text

    def write(self, body: ChatBody, vocabulary: Vocabulary) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content or (None if self.calls or self.reasoning else ""),
            "reasoning": self.reasoning or None,
        }
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for id, name, arguments in self.calls
            ]
        text_of = texts(vocabulary, body.return_tokens_as_token_ids)
        return {
            "index": self.index,
            "message": message,
            "logprobs": chat_logprobs(self.tokens, text_of) if body.logprobs else None,
            "finish_reason": chat_finish(self.finish_reason, bool(self.calls), body),
            "stop_reason": self.stop_reason,
            "token_ids": [token.id for token in self.tokens] if body.return_token_ids else None,
            **(
                sampling_mask(self.tokens) | experts(self.routed_experts)
                if body.return_token_ids
                else {}
            ),
        }


def chat_reply(
    body: ChatBody,
    head: ReplyHead,
    vocabulary: Vocabulary,
    prompt_ids: Sequence[int],
    choices: Sequence[ChoiceFold],
    cached: int,
    scored: Sequence[PromptLogprob | None] | None,
) -> dict[str, Any]:
    """Return the non-streamed reply."""
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    return {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice.write(body, vocabulary) for choice in choices],
        "usage": usage(len(prompt_ids), completion_tokens, cached),
        "prompt_logprobs": None if scored is None else prompt_logprobs(scored, vocabulary),
        "prompt_token_ids": list(prompt_ids) if body.return_token_ids else None,
    }


def visible(deltas: Iterable[Delta], body: ChatBody) -> Iterable[Delta]:
    """Return ``deltas``, without calls after the first if ``parallel_tool_calls`` is false.

    vLLM does the same.
    """
    if body.parallel_tool_calls is not False:
        return deltas
    return [
        delta
        for delta in deltas
        if not (isinstance(delta, ToolName | ToolArguments) and delta.index > 0)
    ]


def chat_finish(reason: str | None, called: bool, body: ChatBody) -> str | None:
    """Return ``tool_calls`` instead of ``stop`` after calls, unless the request named the tool."""
    return "tool_calls" if reason == "stop" and called and not body.named_tool else reason


def tool_call_id() -> str:
    return f"chatcmpl-tool-{uuid4().hex}"
