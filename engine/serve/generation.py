"""The steps from a checked request to the pieces of its choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bridle.engine.contract.detokenizer import Vocabulary
from bridle.engine.contract.errors import RequestRefused, TemplateError
from bridle.engine.contract.tokenizer import Tokenizer
from bridle.engine.serve.backend import Backend, Prompt, PromptLogprob, SamplingParams, Step
from bridle.engine.serve.choices import ChoiceReader, Piece
from bridle.engine.serve.markup import ReplyMarkup, ThinkingParser, reader
from bridle.engine.serve.requests import (
    ChatBody,
    CompletionBody,
    SamplingFields,
    TokenizeBody,
    sampling_of,
)
from bridle.engine.serve.stopping import StopScanner


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One sequence to sample, and the reader of its steps."""

    prompt: Prompt
    sampling: SamplingParams
    reader: ChoiceReader


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """A piece of one choice, with what its step reported about the prompt."""

    piece: Piece
    cached_tokens: int
    prompt_logprobs: Sequence[PromptLogprob | None] | None


def chat_prompt(body: ChatBody, tokenizer: Tokenizer) -> Prompt:
    """Return the prompt of a chat request: the given ids verbatim, else the rendered messages."""
    tools = body.tools or ()
    given = body.kv_transfer_params and body.kv_transfer_params.prompt_token_ids
    if given:
        return Prompt(given, body.messages, tools, body.response_format)
    text = render(tokenizer, body, body.messages)
    return Prompt(tokenizer.encode(text), body.messages, tools, body.response_format)


def render(
    tokenizer: Tokenizer, body: ChatBody | TokenizeBody, messages: Sequence[dict[str, Any]]
) -> str:
    """Return the body's ``messages``, rendered by the model's template with the body's settings.

    Raise :class:`RequestRefused` if the template refuses them.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise RequestRefused(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    setting = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    try:
        return tokenizer.render(
            messages, body.tools, **(setting | (body.chat_template_kwargs or {}))
        )
    except TemplateError as error:
        raise RequestRefused(str(error), param="messages") from error


def plan_chat(
    body: ChatBody, backend: Backend, vocabulary: Vocabulary, markup: ReplyMarkup
) -> list[ChoicePlan]:
    """Return one plan per choice of a chat request."""
    prompt = chat_prompt(body, backend.tokenizer)
    shown = markup.token_ids if body.parses_tools or markup.reasoning else frozenset()
    end = backend.tokenizer.decode(prompt.token_ids[-16:]).rstrip() if markup.reasoning else ""
    plans = []
    for index in range(body.choices):
        sampling = _sampling(
            body,
            prompt,
            backend,
            limit=body.output_limit,
            limit_name="max_tokens"
            if body.max_completion_tokens is None
            else "max_completion_tokens",
            top_logprobs=body.top_logprobs or 0,
            choice=index,
        )
        choice = _reader(body, vocabulary, index, shown)
        if markup.reasoning is not None:
            opened = end.endswith(markup.reasoning.opening.rstrip())
            choice.thinking = ThinkingParser(markup.reasoning, already_open=opened)
        if body.parses_tools and markup.tools is not None:
            choice.tools = reader(markup.tools, body.tools or ())
        plans.append(ChoicePlan(prompt, sampling, choice))
    return plans


def plan_completion(
    body: CompletionBody,
    prompts: Sequence[str | list[int]],
    backend: Backend,
    vocabulary: Vocabulary,
) -> list[ChoicePlan]:
    """Return one plan per prompt and choice; choice indices count through the prompts."""
    plans = []
    for position, source in enumerate(prompts):
        if isinstance(source, str):
            special = body.add_special_tokens
            ids = backend.tokenizer.encode(source, add_special_tokens=special)
        else:
            ids = source
        if not ids:
            raise RequestRefused("The prompt must not be empty.", param="prompt")
        prompt = Prompt(ids, response_format=body.response_format)
        for choice in range(body.choices):
            sampling = _sampling(
                body,
                prompt,
                backend,
                limit=body.max_tokens,
                limit_name="max_tokens",
                top_logprobs=body.logprobs or 0,
                choice=choice,
            )
            index = position * body.choices + choice
            plans.append(
                ChoicePlan(prompt, sampling, _reader(body, vocabulary, index, frozenset()))
            )
    return plans


@asynccontextmanager
async def running(
    plans: Sequence[ChoicePlan], backend: Backend
) -> AsyncIterator[AsyncIterator[GenerationProgress]]:
    """Admit all plans and iterate over their pieces as they come.

    Leaving the context frees everything.

    Raise :class:`RequestRefused` on entry if the backend refuses one of them.
    """
    streams: list[AsyncGenerator[GenerationProgress]] = []
    try:
        for plan in plans:
            steps = await backend.generate(plan.prompt, plan.sampling)
            streams.append(_read(plan.reader, steps))
        if len(streams) == 1:
            yield streams[0]
        else:
            async with aclosing(_merge(streams)) as merged:
                yield merged
    finally:
        for stream in streams:
            await stream.aclose()


async def _read(
    reader: ChoiceReader, steps: AsyncGenerator[Step]
) -> AsyncGenerator[GenerationProgress]:
    async with aclosing(steps):
        async for step in steps:
            piece = reader.read(step)
            yield GenerationProgress(piece, step.cached_tokens, step.prompt_logprobs)
            if piece.finish_reason is not None:
                return


async def _merge(
    streams: Sequence[AsyncGenerator[GenerationProgress]],
) -> AsyncGenerator[GenerationProgress]:
    """Yield all streams' items in the order in which they come. The first error ends it."""
    ready: asyncio.Queue[GenerationProgress | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[GenerationProgress]) -> None:
        try:
            async for item in stream:
                ready.put_nowait(item)
        finally:
            ready.put_nowait(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(pumps)
        while left:
            item = await ready.get()
            if item is not None:
                yield item
                continue
            left -= 1
            for task in pumps:
                if task.done():
                    task.result()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _sampling(
    body: SamplingFields,
    prompt: Prompt,
    backend: Backend,
    *,
    limit: int | None,
    limit_name: str,
    top_logprobs: int,
    choice: int,
) -> SamplingParams:
    largest = max(prompt.token_ids, default=0)
    if largest >= backend.vocab_size:
        raise RequestRefused(f"Token id {largest} is out of vocabulary", param="prompt_token_ids")
    assert backend.card.max_model_len is not None  # noqa: S101 - our engines always know it
    return sampling_of(
        body,
        prompt_tokens=len(prompt.token_ids),
        max_model_len=backend.card.max_model_len,
        limit=limit,
        limit_name=limit_name,
        top_logprobs=top_logprobs,
        choice=choice,
    )


def _reader(
    body: SamplingFields, vocabulary: Vocabulary, index: int, shown: frozenset[int]
) -> ChoiceReader:
    # The ids that end a reply are never text; other special ids only when asked for.
    hidden = vocabulary.special_ids - shown if body.skip_special_tokens else frozenset()
    hidden |= vocabulary.tokenizer.eos_token_ids | frozenset(body.stop_token_ids or ())
    stop = StopScanner(body.stops, include=body.include_stop_str_in_output)
    return ChoiceReader(index, vocabulary.detokenizer(hidden), stop)
