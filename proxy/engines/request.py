"""A canonical request in the form for an engine, which is asked for token ids, logprobs and usage.

Some external upstreams want opaque fields of assistant messages back. DeepSeek, Kimi and MiniMax
demand the ``reasoning_content`` of a reply with its tool calls, Gemini the ``thought_signature`` in
``extra_content``, OpenRouter the ``reasoning_details``; other providers refuse a request with such
a field. So each upstream gets the fields that it sent itself and those that its refusals ask for,
except those that its refusals object to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
import orjson

from bridle.engine.contract.contract import CHAT_COMPLETIONS, COMPLETIONS
from bridle.proxy.continuation.prompt import NO_PROMPT, CallPrompt
from bridle.proxy.engines.weights import EngineSampling
from bridle.proxy.wire.canonical import ApiError, Message, Request, Sampling
from bridle.store.records import (
    MESSAGE_FIELDS,
    SAMPLER_PARAMETERS,
    Note,
    Sampler,
)

_GRAMMARS: Final = frozenset(
    {"guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"}
)
"""An engine's own fields that constrain what it samples."""
_RESHAPING: Final[Mapping[str, Any]] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "ignore_eos": False,
    "logit_bias": {},
    "min_tokens": 0,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
}
"""Other fields that change the distribution that is sampled from, with the value at which they do
not."""
_OURS: Final = frozenset({"top_k", "min_p", "repetition_penalty"})
"""Sampling parameters that providers refuse."""


EXACT: Final = "kv_transfer_params"
"""The field that carries the ids of an exact continuation."""
REASONING: Final = ("reasoning_content", "reasoning")
"""The two names of the text of reasoning."""
_NAMES: Final = (*REASONING, "reasoning_details", "extra_content", "thought_signature")
_MENTIONS: Final = {name: re.compile(rf"(?<![a-z_]){name}(?![a-z_])") for name in _NAMES}


LIMIT: Final = "max_tokens"
LATER_LIMIT: Final = "max_completion_tokens"
"""The two names of the largest number of tokens of a reply."""
_TOKENS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s"{}\[\]:,]+', re.DOTALL)
"""The tokens of JSON."""
_UNSUPPORTED: Final = re.compile(
    r"unsupported|not supported|unrecogni[sz]ed|unknown|unexpected|not permitted|not allowed"
)


class UpstreamFields:
    """The fields that one upstream takes, as learned from its replies and refusals."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        """The opaque fields of assistant messages."""
        self.limit: str | None = None
        """The name that it takes of :data:`LIMIT` and :data:`LATER_LIMIT`, if it refused one."""
        self.refused: set[str] = set()
        """The opaque fields that it objected to."""

    def sent(self, names: Iterable[str]) -> None:
        """Record that the upstream sent these fields."""
        self.taken |= set(names) - self.refused

    def learn(self, error: ApiError, request: EngineRequest) -> str:
        """Learn from the refusal of a request.

        Return the names of what is sent otherwise from now on; an empty text if nothing is.
        """
        if error.kind != "invalid_request":
            return ""
        text = f"{error.message} {error.param or ''}".lower()
        sent = request.limit(self)
        if sent is not None and re.search(rf"(?<![a-z_]){sent}(?![a-z_])", text):
            other = LIMIT if sent == LATER_LIMIT else LATER_LIMIT
            if _UNSUPPORTED.search(text) and self.limit is None:
                self.limit = other
                return other
        return ", ".join(sorted(self._learned_opaque(text, request.opaque_names)))

    def _learned_opaque(self, text: str, offered: frozenset[str]) -> set[str]:
        named = {name for name, pattern in _MENTIONS.items() if pattern.search(text)}
        if "thought_signature" in named:
            named.add("extra_content")
        refused = named & offered & self.taken
        missing = (named & offered) - self.taken
        if refused:
            self.refused |= refused
            self.taken -= refused
        elif missing:
            self.refused -= missing
            self.taken |= missing
        return refused or missing


class OpaqueFields(NamedTuple):
    """The opaque fields of one assistant message and of its tool calls, by field name."""

    position: int
    message: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]]

    @property
    def names(self) -> set[str]:
        return {*self.message, *(name for call in self.calls for name in call)}


def opaque_fields(messages: Sequence[Message]) -> tuple[OpaqueFields, ...]:
    """Return the opaque fields of all assistant messages that have any."""
    found: list[OpaqueFields] = []
    for position, message in enumerate(messages):
        if message.role != "assistant":
            continue
        made = message.tool_calls
        fields = dict((made[0].extra or {}).get(MESSAGE_FIELDS, {})) if made else {}
        if message.reasoning:
            fields |= dict.fromkeys(REASONING, message.reasoning)
        calls = [call.own_extra for call in made]
        if fields or any(calls):
            found.append(OpaqueFields(position, fields, calls))
    return tuple(found)


def with_opaque_fields(
    messages: Sequence[Mapping[str, Any]], fields: Sequence[OpaqueFields], taken: set[str]
) -> list[Mapping[str, Any]]:
    """Return the chat messages with those of their ``fields`` that the upstream takes."""
    written = list(messages)
    for one in fields:
        message = {**written[one.position], **_taken(one.message, taken)}
        if any(one.calls):
            message["tool_calls"] = [
                {**call, **_taken(extra, taken)}
                for call, extra in zip(message["tool_calls"], one.calls, strict=True)
            ]
        written[one.position] = message
    return written


def _taken(fields: Mapping[str, Any], taken: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in taken}


class PassedRequest(msgspec.Struct, frozen=True, gc=False):
    """A client's request for an upstream that speaks the client's dialect.

    Nothing but the model's name is changed in it.
    """

    target: str
    """Its path from ``/v1`` on, and its query."""
    content: bytes
    model: str
    """The model's name in the body or in the path."""
    headers: str = ""
    """The lines of the headers that are passed on."""
    credentials: str | None = None
    """The header for the upstream's key, if it is not ``authorization``."""

    def path(self, model: str) -> str:
        """Return the path with the upstream's name of the model, if it has one."""
        return self.target.replace(self._in_path, f"/{quote(model)}:", 1)

    def body(self, model: str) -> bytes:
        """Return the body with the upstream's name of the model.

        All other bytes stay as they are.
        """
        if model == self.model or self._in_path in self.target:
            return self.content
        return with_model(self.content, model)

    @property
    def _in_path(self) -> str:
        return f"/{quote(self.model)}:"


def with_model(body: bytes, model: str) -> bytes:
    """Return a JSON object with another value of its own field ``model``, if it has one."""
    pieces: list[bytes] = []
    depth = copied = 0
    name = last = b""
    for token in _TOKENS.finditer(body):
        text = token[0]
        if depth == 1 and last == b":" and name == b'"model"':
            pieces += body[copied : token.start()], orjson.dumps(model)
            copied, name = token.end(), b""
        depth += (text in (b"{", b"[")) - (text in (b"}", b"]"))
        if text == b":":
            name = last
        last = text
    return b"".join((*pieces, body[copied:]))


class EngineRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, ready to be sent once the chosen engine's name of the model is known."""

    path: str
    model: str
    """The model's name, as the client gave it."""
    fields: Mapping[str, Any]
    stream: bool
    choices: int
    detail: bool
    """True if the client wants to see logprobs, so that their entries are kept."""
    sampling: Mapping[str, Any]
    """The effective sampling parameters, as sent."""
    grammar: str = ""
    """Names of the request fields that make the engine use constrained decoding; empty if there are
    none."""
    external: bool = False
    later: bool = False
    """True if the client used :data:`LATER_LIMIT`."""
    opaque: tuple[OpaqueFields, ...] = ()
    """The fields of assistant messages that an external upstream may want back; empty for our
    engines."""
    written: Mapping[str, tuple[bytes, ...]] = {}
    """Large fields that have been written already, as the pieces of their JSON."""
    reshaping: tuple[str, ...] = ()
    """Further fields of the request that change the distribution that is sampled from."""
    notes: tuple[Note, ...] = ()
    passed: PassedRequest | None = None
    """The client's own request, for an upstream that speaks the client's dialect."""

    @property
    def opaque_names(self) -> frozenset[str]:
        """The names in :attr:`opaque`."""
        return frozenset(name for one in self.opaque for name in one.names)

    def limit(self, upstream: UpstreamFields) -> str | None:
        """Return the name under which an external upstream gets the largest number of tokens."""
        if not self.external or LIMIT not in self.fields:
            return None
        return upstream.limit or (LATER_LIMIT if self.later else LIMIT)

    def body(self, model: str, upstream: UpstreamFields | None = None) -> tuple[bytes, ...]:
        """Return the pieces of the JSON for an engine that calls the model ``model``.

        ``upstream`` is known of an external one.

        Raises :class:`ApiError` if a value cannot be written (an integer beyond 64 bits).
        """
        if self.passed is not None:
            return (self.passed.body(model),)
        fields = self.fields
        if self.external and upstream is not None:
            fields = self._written_for(upstream)
        try:
            body = orjson.dumps({"model": model, **fields}, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise ApiError(
                "invalid_request", f"the request cannot be sent on: {error}", status=400
            ) from error
        if not self.written:
            return (body,)
        pieces = [body[:-1]]
        for name, value in self.written.items():
            pieces += (b',"%b":' % name.encode(), *value)
        return (*pieces, b"}")

    def _written_for(self, upstream: UpstreamFields) -> dict[str, Any]:
        fields = dict(self.fields)
        if self.opaque and upstream.taken:
            fields["messages"] = with_opaque_fields(fields["messages"], self.opaque, upstream.taken)
        if (limit := self.limit(upstream)) is not None:
            fields[limit] = fields.pop(LIMIT)
        return fields

    def sampler(self, engine: EngineSampling) -> Sampler:
        """Return the sampler that the reply is drawn from, given the engine's own sampling."""
        values: dict[str, Any] = {}
        for name in SAMPLER_PARAMETERS:
            value = self.sampling.get(name)
            if value is not None:
                values[name] = max(value, 0) if name == "top_k" else value
            elif not engine.neutral:
                values[name] = None
        grammar = self.grammar if engine.grammars != "none" else ""
        return Sampler(engine.logprobs, grammar=grammar, others=self.reshaping, **values)


def engine_request(
    request: Request,
    sampling: Sampling,
    *,
    stream: bool,
    prompt: CallPrompt = NO_PROMPT,
    messages: tuple[bytes, ...] | None = None,
    external: bool = False,
) -> EngineRequest:
    """Build the request for an engine.

    ``prompt`` has the ids of an exact continuation. The messages are sent all the same, so that an
    engine that does not know the field still answers, and the record shows it. ``messages`` are the
    pieces of their JSON array, if they have been written already.
    ``external`` upstreams are asked for nothing that only an engine of ours knows.
    """
    effective: dict[str, Any] = msgspec.to_builtins(sampling)
    notes: tuple[Note, ...] = ()
    if external:
        dropped = sorted(_OURS & effective.keys())
        effective = {name: value for name, value in effective.items() if name not in _OURS}
        notes = tuple([Note("sampling_not_forwarded", name) for name in dropped])
    written: dict[str, tuple[bytes, ...]] = {}
    fields: dict[str, Any] = {"stream": stream, **effective, **request.extra}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if not external:
        fields["return_token_ids"] = True
    if request.prompt is not None:
        fields["prompt"] = request.prompt
        if request.wants.logprobs or not external:
            fields["logprobs"] = request.wants.top_logprobs
    else:
        if messages is None:
            fields["messages"] = _chat(request, external)
        else:
            written["messages"] = messages
        _add_chat_fields(fields, request, external)
        if prompt.text is not None:
            written[EXACT] = (b'{"prompt_token_ids":[', *prompt.text, b"]}")
        elif prompt.token_ids is not None:
            fields[EXACT] = {"prompt_token_ids": prompt.token_ids}
    return EngineRequest(
        path=CHAT_COMPLETIONS if request.prompt is None else COMPLETIONS,
        model=request.model,
        fields=fields,
        stream=stream,
        choices=sampling.n or 1,
        detail=request.wants.logprobs,
        sampling=effective,
        grammar=constraint(request),
        external=external,
        later=request.names.get(LIMIT) == LATER_LIMIT,
        opaque=opaque_fields(request.messages) if external else (),
        written=written,
        reshaping=_reshaping(request) if request.extra else (),
        notes=notes,
    )


def _reshaping(request: Request) -> tuple[str, ...]:
    extra = request.extra
    return tuple([name for name, off in _RESHAPING.items() if extra.get(name, off) != off])


def constraint(request: Request) -> str:
    """Return the names of the request fields that make the engine use constrained decoding.

    Return an empty text if there are none.
    """
    extra = request.extra
    shapes: list[str] = []
    if extra:
        shapes += [name for name in sorted(_GRAMMARS & extra.keys()) if extra[name] is not None]
    shape = (request.response_format or {}).get("type", "text")
    if shape != "text":
        shapes.append(f"response_format {shape}")
    if request.tools:
        if request.tool_choice == "required" or isinstance(request.tool_choice, dict):
            shapes.append("tool_choice")
        if request.parallel_tool_calls is False:
            shapes.append("parallel_tool_calls")
    return ", ".join(shapes)


def _chat(request: Request, external: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        messages.append(message.to_chat())
    if external:
        # Providers refuse fields that they do not know; those that one wants back are added when
        # it is asked (:class:`UpstreamFields`).
        for chat in messages:
            chat.pop("reasoning", None)
    return messages


def _add_chat_fields(fields: dict[str, Any], request: Request, external: bool) -> None:
    if request.wants.logprobs or not external:
        fields["logprobs"] = True
        fields["top_logprobs"] = request.wants.top_logprobs
    if request.tools:
        fields["tools"] = request.tools
        if request.tool_choice is not None:
            fields["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.response_format is not None:
        fields["response_format"] = request.response_format
    if not external and (arguments := request.template_arguments):
        fields["chat_template_kwargs"] = arguments
