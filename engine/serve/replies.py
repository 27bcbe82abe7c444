"""Replies as they are sampled: a stream of events, or the fold of the same pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from bridle.engine.contract.detokenizer import Vocabulary
from bridle.engine.serve.backend import Backend, PromptLogprob
from bridle.engine.serve.chat import ChatWriter, ChoiceFold, ReplyHead, chat_reply
from bridle.engine.serve.completions import CompletionFold, completion_chunk, completion_reply
from bridle.engine.serve.generation import ChoicePlan, running
from bridle.engine.serve.requests import ChatBody, CompletionBody
from bridle.engine.serve.wire import event, usage


async def chat_events(
    body: ChatBody,
    head: ReplyHead,
    plans: Sequence[ChoicePlan],
    backend: Backend,
    vocabulary: Vocabulary,
) -> AsyncGenerator[bytes]:
    """Yield the events of a streamed chat reply, after an empty one that signals its admission.

    The role chunks are sent with the first sampled token, as in vLLM.
    """
    writer = ChatWriter(body, head, vocabulary)
    prompt_ids = plans[0].prompt.token_ids
    begun, cached = False, 0
    async with running(plans, backend) as progress:
        yield b""
        async for item in progress:
            if not begun:
                begun, cached = True, item.cached_tokens
                for chunk in writer.begin(prompt_ids):
                    yield event(chunk)
            yield event(writer.write(item.piece))
    if body.include_usage:
        sampled = sum(plan.reader.sampled for plan in plans)
        yield event(writer.usage(len(prompt_ids), sampled, cached))


async def whole_chat(
    body: ChatBody,
    head: ReplyHead,
    plans: Sequence[ChoicePlan],
    backend: Backend,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """Return the chat reply that is not streamed."""
    folds = [ChoiceFold(plan.reader.index) for plan in plans]
    cached: int | None = None
    scored: Sequence[PromptLogprob | None] | None = None
    async with running(plans, backend) as progress:
        async for item in progress:
            cached = item.cached_tokens if cached is None else cached
            scored = scored or item.prompt_logprobs
            folds[item.piece.index].add(item.piece, body)
    prompt_ids = plans[0].prompt.token_ids
    return chat_reply(body, head, vocabulary, prompt_ids, folds, cached or 0, scored)


async def completion_events(
    body: CompletionBody,
    head: ReplyHead,
    plans: Sequence[ChoicePlan],
    backend: Backend,
    vocabulary: Vocabulary,
) -> AsyncGenerator[bytes]:
    """Yield the events of a streamed text completion, after an empty one that signals admission."""
    folds = _completion_folds(body, plans, vocabulary)
    cached: dict[int, int] = {}
    async with running(plans, backend) as progress:
        yield b""
        async for item in progress:
            index = item.piece.index
            first = index not in cached
            cached.setdefault(index, item.cached_tokens)
            choice = folds[index].write_piece(item.piece, first=first)
            yield event(completion_chunk(head, [choice]))
    if body.include_usage:
        totals = usage(
            sum(len(prompt) for prompt in _prompts(body, plans)),
            sum(plan.reader.sampled for plan in plans),
            _cached(body, cached),
        )
        yield event(completion_chunk(head, []) | {"usage": totals})


async def whole_completion(
    body: CompletionBody,
    head: ReplyHead,
    plans: Sequence[ChoicePlan],
    backend: Backend,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """Return the text completion that is not streamed."""
    folds = _completion_folds(body, plans, vocabulary)
    cached: dict[int, int] = {}
    async with running(plans, backend) as progress:
        async for item in progress:
            fold = folds[item.piece.index]
            cached.setdefault(item.piece.index, item.cached_tokens)
            fold.scored = fold.scored or item.prompt_logprobs
            fold.add(item.piece)
    return completion_reply(head, folds, _prompts(body, plans), _cached(body, cached))


def _completion_folds(
    body: CompletionBody, plans: Sequence[ChoicePlan], vocabulary: Vocabulary
) -> list[CompletionFold]:
    return [
        CompletionFold(plan.reader.index, plan.prompt.token_ids, body, vocabulary) for plan in plans
    ]


def _prompts(body: CompletionBody, plans: Sequence[ChoicePlan]) -> list[Sequence[int]]:
    """Return each prompt once, however many choices it has."""
    return [plan.prompt.token_ids for plan in plans[:: body.choices]]


def _cached(body: CompletionBody, cached: dict[int, int]) -> int:
    """Return the sum of cached tokens over the prompts, each counted at its first choice."""
    return sum(tokens for index, tokens in cached.items() if index % body.choices == 0)
