"""``/v1/completions``: pieces of choices written as chunks, or folded into one reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.detokenizer import Vocabulary
from bridle.engine.serve.backend import PromptLogprob, SampledToken
from bridle.engine.serve.chat import ReplyHead
from bridle.engine.serve.choices import Piece
from bridle.engine.serve.deltas import Content
from bridle.engine.serve.requests import CompletionBody
from bridle.engine.serve.wire import (
    completion_logprobs,
    experts,
    prompt_logprobs,
    sampling_mask,
    texts,
    usage,
)


@dataclass(slots=True)
class CompletionFold:
    """One choice of a text completion; its pieces are folded, or written as they come."""

    index: int
    prompt_ids: Sequence[int]
    body: CompletionBody
    vocabulary: Vocabulary
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scored: Sequence[PromptLogprob | None] | None = None
    routed_experts: NDArray[np.int16] | None = None
    _characters: int = 0
    """Length of the tokens' texts so far, which may be ahead of the text that was let through."""

    def add(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.text += _text(piece)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        self.routed_experts = piece.routed_experts

    def write(self) -> dict[str, Any]:
        """Return this choice for a reply that is not streamed."""
        choice = self._choice(
            self.text, self.tokens, self.finish_reason, self.stop_reason, self.routed_experts
        )
        choice["prompt_logprobs"] = (
            None if self.scored is None else prompt_logprobs(self.scored, self.vocabulary)
        )
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = list(self.prompt_ids)
        return choice

    def write_piece(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        choice = self._choice(
            _text(piece),
            piece.tokens,
            piece.finish_reason,
            piece.stop_reason,
            piece.routed_experts,
        )
        if self.body.return_token_ids and first:
            choice["prompt_token_ids"] = list(self.prompt_ids)
        return choice

    def _choice(
        self,
        text: str,
        tokens: Sequence[SampledToken],
        finish_reason: str | None,
        stop_reason: int | str | None,
        routed_experts: NDArray[np.int16] | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            text_of = texts(self.vocabulary, self.body.return_tokens_as_token_ids)
            logprobs = completion_logprobs(tokens, text_of, self._characters)
            self._characters += sum(len(token) for token in logprobs["tokens"])
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": [token.id for token in tokens] if self.body.return_token_ids else None,
            **(
                sampling_mask(tokens) | experts(routed_experts)
                if self.body.return_token_ids
                else {}
            ),
        }


def completion_reply(
    head: ReplyHead,
    choices: Sequence[CompletionFold],
    prompts: Sequence[Sequence[int]],
    cached: int,
) -> dict[str, Any]:
    """Return the non-streamed reply."""
    return completion_chunk(head, [choice.write() for choice in choices]) | {
        "usage": usage(
            sum(len(prompt) for prompt in prompts),
            sum(len(choice.tokens) for choice in choices),
            cached,
        )
    }


def completion_chunk(head: ReplyHead, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
    }


def _text(piece: Piece) -> str:
    return "".join(delta.text for delta in piece.deltas if isinstance(delta, Content))
