"""An upstream's reply, whole or in chunks, as canonical events.

The wire shapes are vLLM's; other shapes are converted to them first
(``proxy/engines/reply_body.py``). Tool calls get their minted ids here, once, so that emitters,
fold and record all see the same ids; the engine's own ids are kept beside them. Each normalisation
is a note. A payload that cannot be understood, or that belongs to another reply, is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from bridle.proxy.engines.errors import error_in, reported
from bridle.proxy.engines.finish_reasons import FINISH_REASONS, odd_reason
from bridle.proxy.engines.reasoning import ReasoningCount
from bridle.proxy.engines.reply_body import (
    SURROGATE,
    Choice,
    DetailedBody,
    DraftCounts,
    Function,
    LeanBody,
    LogprobEntry,
    Logprobs,
    OddDetailedBody,
    OddReply,
    Text,
    ToolCallPiece,
    UsageObject,
    as_logprob,
    draft_counts,
    malformed,
)
from bridle.proxy.engines.request import REASONING
from bridle.proxy.engines.tool_calls import ToolCalls
from bridle.proxy.wire.canonical import (
    ApiError,
    Detail,
    Event,
    Finished,
    FinishReason,
    Minted,
    Opaque,
    ReasoningDelta,
    Started,
    TextDelta,
    Tokens,
    Usage,
    entries_of,
)
from bridle.proxy.wire.cut_ids import (
    PLACEHOLDER,
    WORTH_CUTTING,
    KnownPrompt,
    PromptCut,
    cut_prompt_ids,
)
from bridle.store.records import MISSING_LOGPROB, Note, TokenIds


class ReplyDecoder:
    """A decoder of one reply.

    It turns the reply's payloads into events and knows when the reply is whole.
    """

    def __init__(
        self,
        minted: Minted,
        *,
        choices: int,
        detail: bool,
        tool_call_prefix: str = "call",
        known_prompt: KnownPrompt | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Create the decoder.

        ``known_prompt`` is the session's latest long prompt; ``tools`` are those
        of the request, in chat shape.
        """
        self._minted = minted
        self._choices = choices
        self._detail = detail
        self._decode = _DETAILED.decode if detail else _LEAN.decode
        self._prefix = tool_call_prefix
        self._known_prompt = known_prompt
        self.arriving = None if known_prompt is None else PromptCut(known_prompt)
        """Takes the prompt's ids out of a stream before it is cut into payloads."""
        self._tools = tools
        self._started = False
        self._prompt: Sequence[int] | TokenIds | None = None
        self._id: str | None = None
        """The id of the reply, which all of its chunks must have."""
        self._finished: dict[int, FinishReason] = {}
        self._spoke: set[int] = set()
        """The choices of which deltas have come."""
        self._failure: ApiError | None = None
        """The error of a reply that came to its end but cannot be used."""
        self._gave_up: str | None = None
        """The engine's finish reason for a choice that it gave up."""
        self._odd: OddReply | None = None
        self._calls: dict[int, ToolCalls] = {}
        """The tool calls of each choice, by its index."""
        self._call_count = 0
        self._usage: UsageObject | None = None
        self._drafted: DraftCounts | None = None
        self._reasoning = ReasoningCount()
        self.notes: dict[Note, None] = {}
        """The notes of the normalisations so far, in order."""
        self.opaque_names: set[str] = set()
        """The names of the fields that the upstream sent and may demand back: those of reasoning
        and of opaque values."""
        self.model: str | None = None
        """The model name that the engine answered with."""
        self.contradiction: str | None = None
        """The reason why the reply as it came cannot be the reply to the request, in the form of
        :func:`bridle.store.writing.integrity.contradiction`; ``None`` if there is none."""

    def events(
        self, payload: bytes, cleaned: Callable[[bytes], bytes] | None = None
    ) -> list[Event]:
        """Return the events of one chunk, or of a whole non-streamed body.

        ``cleaned`` removes secrets from a payload; a long array of prompt ids has none.

        Raises :class:`ApiError` if the payload is malformed, reports an error, or belongs to
        another reply.
        """
        body, cut = self._body(payload, cleaned)
        choices: Sequence[Choice[Any]] = body.choices or ()
        if self._id is None:
            self._id = body.id or None
        elif body.id and body.id != self._id:
            self._check_id(body.id, bool(choices))
        if body.usage is not None:
            self._usage = body.usage
        if body.metrics is not None:
            self._drafted = draft_counts(body.metrics)
        if body.model is not None:
            self.model = body.model
        events: list[Event] = []
        prompt: Any = body.prompt_token_ids
        if choices and prompt is None:
            prompt = choices[0].prompt_token_ids
        if len(choices) > 1 and choices[0].message is not None:
            self._check_whole(choices)
        if prompt is not None or not self._started:
            events += self._prompt_events(prompt, cut)
        for choice in choices:
            self._add(choice, events)
        return events

    def _add(self, choice: Choice[Any], events: list[Event]) -> None:
        index = choice.index
        if choice.error:
            raise reported(choice.error)
        if (index >= self._choices or index in self._finished) and self._foreign(choice):
            return
        if choice.token_ids or choice.logprobs is not None:
            events.append(self._tokens(choice))
            self._reasoning.add(choice)
        text = choice.delta
        if text is None:
            text = choice.message and self._unsaid(choice.message, index)
        elif index not in self._spoke and text.says_anything:
            self._spoke.add(index)
        if text is not None:
            self._add_text(text, choice, events)
        if choice.text:
            events.append(TextDelta(choice.text, index))
        if choice.finish_reason:
            events += self._finish(choice)

    def _add_text(self, text: Text, choice: Choice[Any], events: list[Event]) -> None:
        index, start = choice.index, len(events)
        reasoning = text.reasoning or text.reasoning_content
        if reasoning:
            self.opaque_names.add(REASONING[text.reasoning_content is None])
            events.append(ReasoningDelta(reasoning, index))
        if text.content:
            events.append(TextDelta(text.content, index))
        if text.tool_calls or text.function_call is not None or text.refusal:
            self._add_other_parts(text, choice, events, start)
        elif index in self._calls:
            self._put_in_order(index, events, start)
        if text.reasoning_details or text.extra_content:
            events.append(self._opaque(text, index))
        if text.audio or text.images:
            self.notes[Note("media_not_sent", text.media)] = None

    def last_events(self) -> list[Event]:
        """Return the usage, which is complete only now.

        Raises :class:`ApiError` if the reply was cut short or is not understood.
        """
        if self._failure is not None:
            raise self._failure
        if len(self._finished) < self._choices:
            message = "the engine's reply ended before it was finished"
            if self._gave_up is not None:
                message = f"the engine ended the reply with {self._gave_up!r}"
            raise ApiError("upstream_error", message, status=502)
        if self._usage is None:
            return []
        usage = _usage(self._usage, self._reasoning.tokens)
        if self._drafted is None:
            return [usage]
        drafted, accepted = msgspec.structs.astuple(self._drafted)
        return [replace(usage, draft_tokens=drafted, accepted_draft_tokens=accepted)]

    # -- what the payload is ---------------------------------------------------------------------

    def _body(
        self, payload: bytes, cleaned: Callable[[bytes], bytes] | None
    ) -> tuple[Any, TokenIds | None]:
        """Return a payload as data, and the prompt ids that were cut out of it.

        Raises :class:`ApiError` if it is malformed or reports an error.
        """
        cut = None
        if self.arriving is not None and self.arriving.taken_from(payload):
            cut, self.arriving = self.arriving.taken, None
        elif len(payload) >= WORTH_CUTTING:
            payload, cut = cut_prompt_ids(payload, self._known_prompt)
        if cleaned is not None:
            payload = cleaned(payload)
        # The strict decoder lets some halves of characters through.
        escaped = b"\\u" in payload and SURROGATE.search(payload) is not None
        if escaped or (self._odd is not None and self._odd.holds):
            return self._odd_body(payload), cut
        try:
            body = self._decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._odd_body(payload), cut
        if body.error or (not body.choices and body.is_bare):
            return self._odd_body(payload), cut
        return body, cut

    def _odd_body(self, payload: bytes) -> Any:
        """Decode a payload that is not in the usual shape, or may report an error."""
        if self._odd is None:
            self._odd = OddReply(self.notes)
        given = self._odd.body(payload)
        if given.get("error") or error_in(given) is not None:
            raise reported(given)
        try:
            body: Any = msgspec.convert(given, OddDetailedBody if self._detail else LeanBody)
        except (msgspec.ValidationError, RecursionError) as problem:
            raise malformed(str(problem)) from problem
        if body.is_bare and given.get("choices", ()) is None:
            self.notes[Note("choices_null")] = None
        return body

    def _check_id(self, identifier: str, has_choices: bool) -> None:
        """Note another id than the reply's.

        Raises :class:`ApiError` for a chunk of another reply.
        """
        if has_choices:
            raise _mixed(f"a chunk of reply {identifier[:64]!r} in reply {str(self._id)[:64]!r}")
        self.notes[Note("id_changed", "in a chunk without choices")] = None

    def _check_whole(self, choices: Sequence[Choice[Any]]) -> None:
        indices = [choice.index for choice in choices]
        if len(set(indices)) < len(indices):
            raise _mixed("two choices with the same index")

    def _prompt_events(self, prompt: Any, cut: TokenIds | None) -> list[Event]:
        """Return the event that starts the reply.

        Raises :class:`ApiError` for the ids of another prompt.
        """
        if isinstance(prompt, str):
            if cut is None or prompt != PLACEHOLDER:
                raise malformed("prompt_token_ids is a text")
            prompt = cut
        if self._prompt is not None:
            if not np.array_equal(self._prompt, prompt):
                raise _mixed("the prompt_token_ids of another prompt")
            return []
        if self._started and prompt is not None:
            self.notes[Note("prompt_ids_late")] = None
        self._started, self._prompt = True, prompt
        return [Started(None if prompt is None else len(prompt), prompt)]

    def _foreign(self, choice: Choice[Any]) -> bool:
        """Record a choice not asked for, or output after a choice's end, as a contradiction.

        Return True if it must not be merged into the reply so far.
        """
        text = choice.delta or choice.message
        if choice.index >= self._choices:
            found = f"choice_not_asked_for: number {choice.index} of {self._choices} choices"
        elif choice.token_ids or choice.text or (text is not None and text.says_anything):
            found = f"output_after_finish: choice {choice.index}"
        else:
            return False
        self.contradiction = self.contradiction or found
        calls = text is not None and (text.tool_calls or text.function_call)
        return choice.index >= self._choices or bool(calls)

    # -- what it says ----------------------------------------------------------------------------

    def _unsaid(self, message: Text, index: int) -> Text | None:
        """Return the part of a whole message that no deltas before it have said."""
        if index not in self._spoke:
            return message
        self.notes[Note("message_repeated")] = None
        return None if index in self._calls else message.calls

    def _tokens(self, choice: Choice[Any]) -> Tokens:
        ids, kept = choice.token_ids or [], choice.sampling_mask or ()
        given: Logprobs[Any] | None = choice.logprobs
        if given is None or (given.content is None and given.token_logprobs is None):
            # Nothing says which tokens these would belong to, so each of them is without one.
            return Tokens(ids, [math.nan] * len(ids), choice.index, kept=kept)
        if given.content is not None:
            if self._detail:
                return replace(self._detailed(ids, given.content, choice.index), kept=kept)
            return Tokens(ids, list(map(_LOGPROB, given.content)), choice.index, kept=kept)
        plain = given.token_logprobs or []
        values = [math.nan if value is None else value for value in plain]
        detail = given.entries if self._detail else None
        return Tokens(ids, values, choice.index, detail, kept)

    def _detailed(self, ids: list[int], content: Detail, choice: int) -> Tokens:
        try:
            joined = b",".join(content)  # type: ignore[arg-type]
            values = list(map(_LOGPROB, _ENTRIES.decode(b"[%b]" % joined)))
            # The client gets the same bytes, which must not end a line of its stream.
            text = joined.decode()
        except (TypeError, msgspec.DecodeError, UnicodeDecodeError):
            return self._detailed_one_by_one(ids, content, choice)
        if "\n" in text or "\r" in text or not all(map(math.isfinite, values)):
            return self._detailed_one_by_one(ids, content, choice)
        return Tokens(ids, values, choice, content)

    def _detailed_one_by_one(self, ids: list[int], content: Detail, choice: int) -> Tokens:
        """Return tokens whose entries are not all in the usual form.

        Raises :class:`ApiError` if one is not an object.
        """
        try:
            entries = msgspec.convert(entries_of(content), list[dict[str, Any]])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise malformed(str(problem)) from problem
        values = [as_logprob(entry.get("logprob")) for entry in entries]
        shown = [
            entry if math.isfinite(value) else {**entry, "logprob": MISSING_LOGPROB}
            for entry, value in zip(entries, values, strict=True)
        ]
        return Tokens(ids, values, choice, shown)

    def _add_other_parts(
        self, text: Text, choice: Choice[Any], events: list[Event], start: int
    ) -> None:
        """Add the refusal and the tool calls of a text to ``events``.

        The part of ``events`` from ``start`` on is the text's own.
        """
        if text.refusal:
            self.notes[Note("refusal_as_text")] = None
            events.append(TextDelta(text.refusal, choice.index))
        pieces = [*(text.tool_calls or ())]
        function = text.function_call
        if function is not None and (function.name or function.arguments):
            self.notes[Note("function_call_converted")] = None
            pieces.append(ToolCallPiece(function=function))
        if pieces and choice.index not in self._calls:
            names = frozenset(_tool_names(self._tools))
            self._calls[choice.index] = ToolCalls(choice.index, self._mint, names, self.notes)
        if choice.index not in self._calls:
            return
        self._put_in_order(choice.index, events, start)
        calls = self._calls[choice.index]
        for position, piece in enumerate(pieces):
            function = piece.function or Function()
            name, arguments = function.name or None, function.arguments or ""
            extra = _named(
                extra_content=piece.extra_content, thought_signature=piece.thought_signature
            )
            self.opaque_names.update(extra)
            if choice.message is not None:
                events += calls.whole(piece.id or None, name, arguments, extra)
                continue
            events += calls.piece(
                piece.index,
                piece.id or None,
                name,
                arguments,
                extra,
                position=position,
                alone=len(pieces) == 1,
            )

    def _put_in_order(self, choice: int, events: list[Event], start: int) -> None:
        """Put the texts from ``start`` on in their place among the choice's tool calls."""
        calls, said = self._calls[choice], events[start:]
        del events[start:]
        for event in said:
            events += calls.between(event)

    def _mint(self) -> str:
        self._call_count += 1
        return self._minted.tool_call_id(self._call_count - 1, self._prefix)

    def _opaque(self, text: Text, choice: int) -> Opaque:
        fields = _named(reasoning_details=text.reasoning_details, extra_content=text.extra_content)
        self.opaque_names.update(fields)
        return Opaque(fields, choice)

    def _finish(self, choice: Choice[Any]) -> list[Event]:
        """Return the last events of a choice.

        A choice that the engine gave up (``abort``) has none: its tokens are kept, and
        :meth:`last_events` raises.
        """
        word, index = choice.finish_reason or "", choice.index
        reason = FINISH_REASONS.get(word)
        if reason is None:
            reason = odd_reason(word)
            if reason is None:
                self._gave_up = word[:64]
                return []
            self.notes[Note("finish_word", f"{word} as {reason}")] = None
        if index in self._finished:
            if self._finished[index] != reason:
                found = f"finished_twice: choice {index}, {self._finished[index]} then {reason}"
                self.contradiction = self.contradiction or found
            return []
        self._finished[index] = reason
        events: list[Event] = []
        if index in self._calls:
            try:
                events = self._calls[index].finish(cut=reason == "length")
            except ApiError as failure:
                self._failure = failure
        stop = choice.stop_reason
        stop = stop if isinstance(stop, str) else None
        events.append(Finished(reason, index, stop, choice.routed_experts))
        return events


_LOGPROB: Final = attrgetter("logprob")
_ENTRIES: Final = msgspec.json.Decoder(list[LogprobEntry])
_LEAN: Final = msgspec.json.Decoder(LeanBody)
_DETAILED: Final = msgspec.json.Decoder(DetailedBody)


def _mixed(found: str) -> ApiError:
    """Return the error for a part that belongs to another reply.

    The part must not be merged into this one.
    """
    return ApiError("upstream_error", f"the engine mixed replies: {found}", status=502)


def _named(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _tool_names(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            yield name


def _usage(given: UsageObject, reasoning_tokens: int) -> Usage:
    """Return the usage; ``reasoning_tokens`` were counted here, if the engine counts none."""
    cached = given.prompt_tokens_details
    reasoning = given.completion_tokens_details
    completion = given.completion_tokens or 0
    if reasoning is not None and reasoning.reasoning_tokens is not None:
        reasoning_tokens = reasoning.reasoning_tokens
    return Usage(
        prompt_tokens=given.prompt_tokens or 0,
        completion_tokens=completion,
        cached_tokens=(cached.cached_tokens or 0) if cached else 0,
        reasoning_tokens=min(reasoning_tokens, completion),
    )
