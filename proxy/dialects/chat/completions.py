"""OpenAI (legacy) completions: a prompt as text or token ids, and no template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from bridle.proxy.dialects.body import convert, decode, invalid, sampling
from bridle.proxy.dialects.chat.reply import usage_object
from bridle.proxy.dialects.chat.request import FORWARDED, Parameters, beyond
from bridle.proxy.dialects.chat.stream import ChatEmitter
from bridle.proxy.wire.canonical import (
    ChoiceReply,
    Event,
    Minted,
    Reply,
    Request,
    Started,
    TextDelta,
    Wants,
    entries_of,
    plain_ids,
)

encode = msgspec.json.encode

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Body(Parameters, kw_only=True, gc=False):
    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    echo: bool | None = None


_KNOWN: Final = frozenset(_Body.__struct_fields__)


def parse(body: bytes, path: Mapping[str, str], query: Mapping[str, str]) -> Request:
    """See :data:`bridle.proxy.wire.canonical.Parse`."""
    fields = decode(body)
    wire = convert(fields, _Body)
    extra, notes = beyond(fields, _KNOWN, FORWARDED)
    if wire.echo:
        raise invalid("echo", "is not supported: prompts are recorded anyway")
    return Request(
        dialect="completions",
        model=wire.model,
        prompt=_prompt(wire.prompt),
        sampling=sampling(wire),
        stream=bool(wire.stream),
        wants=Wants(
            logprobs=wire.logprobs is not None,
            top_logprobs=wire.logprobs or 0,
            token_ids=bool(wire.return_token_ids),
            stream_usage=bool(wire.stream_options and wire.stream_options.include_usage),
        ),
        extra=extra,
        notes=tuple(notes),
    )


def write(request: Request, minted: Minted, reply: Reply) -> bytes:
    whole: dict[str, Any] = {
        "id": minted.response_id,
        "object": "text_completion",
        "created": minted.created,
        "model": minted.model,
        "choices": [
            _choice(index, choice, request, reply) for index, choice in enumerate(reply.choices)
        ],
    }
    if reply.usage is not None:
        whole["usage"] = usage_object(reply.usage)
    return encode(whole)


class CompletionsEmitter(ChatEmitter):
    """Chunks of another shape, in the order of chat completions."""

    object_type = b"text_completion"
    nothing = b'""'

    def __init__(self, request: Request, minted: Minted) -> None:
        super().__init__(request, minted)
        self._prompt_token_ids: Sequence[int] | None = None
        self._written: dict[int, int] = {}
        """Number of characters of each choice's tokens whose logprobs have been written."""

    def begin(self) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self.chunk(event.choice, encode(event.text))
        if isinstance(event, Started):
            self._prompt_token_ids = plain_ids(event.prompt_token_ids)
            return b""
        return super().event(event)

    def keep_alive(self) -> bytes:
        return self.chunk(0, self.nothing)

    def chunk(self, choice: int, delta: bytes, finish: bytes = b"null") -> bytes:
        held = self.tokens.pop(choice, ())
        logprobs, token_ids = b"null", b""
        if held and self.wants.logprobs:
            entries = [entry for one in held for entry in entries_of(one.detail or ())]
            start = self._written.get(choice, 0)
            logprobs = encode(_logprobs(entries, start))
            self._written[choice] = start + sum(len(entry["token"]) for entry in entries)
        if held and self.wants.token_ids:
            ids = [token for one in held for token in one.token_ids]
            prompt, self._prompt_token_ids = self._prompt_token_ids, None
            token_ids = b',"token_ids":%b,"prompt_token_ids":%b' % (encode(ids), encode(prompt))
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self.head,
            choice,
            delta,
            logprobs,
            finish,
            token_ids,
        )


def _prompt(wire: str | list[Any]) -> str | tuple[int, ...]:
    """Return the one prompt: text, token ids, or a list of one of these."""
    if isinstance(wire, str):
        return wire
    if not wire:
        raise invalid("prompt", "is empty")
    if len(wire) == 1 and isinstance(wire[0], str | list):
        return _prompt(wire[0])
    try:
        return tuple(msgspec.convert(wire, list[TokenId]))
    except msgspec.ValidationError as error:
        problem = "must be one prompt per request: a text, or a list of token ids"
        raise invalid("prompt", problem) from error


def _choice(index: int, choice: ChoiceReply, request: Request, reply: Reply) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "index": index,
        "text": choice.text,
        "logprobs": _logprobs(entries_of(choice.detail)) if request.wants.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if request.wants.token_ids:
        shown["token_ids"] = choice.token_ids
        shown["prompt_token_ids"] = plain_ids(reply.prompt_token_ids)
    return shown


def _logprobs(detail: Sequence[Mapping[str, Any]], position: int = 0) -> dict[str, Any]:
    """Return the parallel lists in which this dialect shows logprobs.

    ``position`` is the first token's position in the text.
    """
    offsets: list[int] = []
    for entry in detail:
        offsets.append(position)
        position += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in detail],
        "token_logprobs": [entry["logprob"] for entry in detail],
        "top_logprobs": [entry.get("top_logprobs") for entry in detail],
        "text_offset": offsets,
    }
