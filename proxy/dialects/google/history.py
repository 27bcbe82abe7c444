"""Gemini contents as canonical messages.

Gemini's clients may omit call ids, or make their own; a response then belongs to the oldest
unanswered call of its name. A signature that this proxy minted, beside a call without an id,
restores the id.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from bridle.proxy.dialects.body import Json, invalid, json_text
from bridle.proxy.dialects.functions import arguments_text
from bridle.proxy.dialects.google.schema import camel_keys, google
from bridle.proxy.dialects.transcript import (
    AssistantTurn,
    Content,
    Transcript,
    audio_part,
    image_part,
    joined,
    text_part,
)
from bridle.proxy.dialects.unsupported import as_text, unreadable
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import ToolCall
from bridle.proxy.wire.histories import Reading

_AUDIO: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mp3": "mp3", "audio/mpeg": "mp3"}
_UNREADABLE: Final = "cannot be read here; send its text, or an image of it"
_MEANINGLESS: Final = frozenset({"thought", "thoughtSignature", "videoMetadata", "partMetadata"})
"""Keys that mean nothing to the model without another one."""
_PLAIN_RESULTS: Final = ("output", "result", "error")
"""Keys under which clients put a function's result when it is text."""


class _Content(msgspec.Struct, rename="camel", gc=False):
    role: str | None = None
    parts: str | Json | list[Json] | None = None


class _Part(msgspec.Struct, rename="camel", gc=False):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: Json | None = None
    function_response: Json | None = None
    inline_data: Json | None = None
    file_data: Json | None = None


class _Call(msgspec.Struct, rename="camel", gc=False):
    name: str
    id: str | None = None
    args: Any = None


class _Response(msgspec.Struct, rename="camel", gc=False):
    id: str | None = None
    name: str | None = None
    response: Any = None
    parts: list[Json] | None = None


class _Inline(msgspec.Struct, rename="camel", gc=False):
    mime_type: str
    data: str


class _File(msgspec.Struct, rename="camel", gc=False):
    file_uri: str = ""
    mime_type: str = ""


class _Placed(NamedTuple):
    """A part and the field that it stands in."""

    part: _Part
    field: str
    kind: str
    """The part's first key, for notes."""
    given: Json
    """The part as the client wrote it."""


def instruction_content(given: str | Json, transcript: Transcript) -> Content:
    """Return the content of ``systemInstruction``, which is a content or plain text."""
    if isinstance(given, str):
        return given
    content = google(given, _Content, "systemInstruction")
    return joined(_chat_parts(_parts(content.parts, "systemInstruction.parts"), transcript))


class Contents:
    """The contents so far as messages, and the calls that wait for their responses."""

    def __init__(self, transcript: Transcript | None = None, calls_before: int = 0) -> None:
        """``calls_before`` is the number of calls in the conversation before the contents."""
        self.transcript = Transcript() if transcript is None else transcript
        self._calls = _Calls(self.transcript, calls_before)

    def fork(self) -> Contents:
        """Return a copy that goes on by itself."""
        other = Contents(self.transcript.fork())
        other._calls = self._calls.fork(other.transcript)
        return other

    def add(self, contents: Sequence[Json], first: int) -> None:
        """Add contents, of which the first is ``contents[first]`` of the request.

        Raise ``ApiError`` (400) that names the field.
        """
        for index, given in enumerate(contents, first):
            self.add_one(given, f"contents[{index}]")

    def add_one(self, given: Json, field: str) -> None:
        """Add the content that stands in ``field``."""
        transcript, calls = self.transcript, self._calls
        content = google(given, _Content, field)
        role, parts = content.role or "user", _parts(content.parts, f"{field}.parts")
        if role == "model":
            _add_model(parts, transcript, calls)
        elif role in ("user", "function", "tool"):
            _add_user(parts, transcript, calls)
        elif role == "system":
            transcript.system(joined(_chat_parts(parts, transcript)))
        else:
            raise invalid(f"{field}.role", "must be user or model")


def contents_of(contents: str | Json | list[Json] | None, reading: Reading) -> Transcript:
    """Return the contents as messages. Raise ``ApiError`` (400) that names the field."""
    talk = Contents()
    if isinstance(contents, str):
        talk.transcript.user(contents)
    elif not contents:
        raise invalid("contents", "must be a non-empty list")
    elif isinstance(contents, dict):
        talk.add_one(contents, "contents")
    else:
        talk = reading.over(contents, talk, Contents.add)
    return talk.transcript


class _Calls:
    """The calls that still wait for their response, by id and by name, oldest first."""

    def __init__(self, transcript: Transcript, before: int) -> None:
        self._transcript = transcript
        self._by_id: defaultdict[str, deque[_Waiting]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[_Waiting]] = defaultdict(deque)
        self._count = before

    def fork(self, transcript: Transcript) -> _Calls:
        """Return a copy that goes on by itself. Calls that have been answered are left out."""
        other = _Calls(transcript, self._count)
        copies: dict[_Waiting, _Waiting] = {}
        for mine, its in ((self._by_id, other._by_id), (self._by_name, other._by_name)):
            for key, waiting in mine.items():
                for call in waiting:
                    if not call.answered:
                        its[key].append(copies.setdefault(call, _Waiting(call.id)))
        return other

    def new_id(self) -> str:
        """Return an id for a call that has none, the same whenever the same history is sent."""
        return f"call_{self._count}"

    def add(self, call: ToolCall) -> None:
        waiting = _Waiting(call.id)
        self._by_id[call.id].append(waiting)
        self._by_name[call.name].append(waiting)
        self._count += 1

    def answered(self, identifier: str | None, name: str | None) -> str:
        found = _next(self._by_id.get(identifier or ""))
        if found is None and identifier is not None:
            self._transcript.note("call_id_repaired")
        if found is None:
            found = _next(self._by_name.get(name or ""))
        return found or identifier or f"call_for_{name}"


class _Waiting:
    """A call in both queues of :class:`_Calls`. Once it is answered, the other queue skips it."""

    __slots__ = ("answered", "id")

    def __init__(self, identifier: str) -> None:
        self.id = identifier
        self.answered = False


def _next(waiting: deque[_Waiting] | None) -> str | None:
    """Mark the oldest waiting call as answered and return its id."""
    while waiting:
        call = waiting.popleft()
        if not call.answered:
            call.answered = True
            return call.id
    return None


def _parts(given: str | Json | list[Json] | None, field: str) -> list[_Placed]:
    """Return the parts. One part may stand in place of a list, and a text in place of a part."""
    if isinstance(given, str):
        return [_Placed(_Part(given), field, "text", {"text": given})]
    if isinstance(given, dict):
        return [_placed(given, field)]
    return [_placed(part, f"{field}[{index}]") for index, part in enumerate(given or ())]


def _placed(given: Json, field: str) -> _Placed:
    named = camel_keys(given)
    return _Placed(google(named, _Part, field), field, next(iter(named), "empty")[:64], named)


def _add_model(parts: list[_Placed], transcript: Transcript, calls: _Calls) -> None:
    """Add a model's content.

    Contents in a row are one turn, because clients keep each chunk of a streamed reply as a content
    of its own.
    """
    called = [
        google(part.function_call, _Call, f"{field}.functionCall")
        if part.function_call is not None
        else None
        for part, field, *_ in parts
    ]
    ids = [part.thought_signature for part, *_ in parts]
    turn = transcript.turn(*ids, *(call.id for call in called if call is not None))
    for placed, call in zip(parts, called, strict=True):
        _add_model_part(placed, call, turn, transcript, calls)


def _add_model_part(
    placed: _Placed, call: _Call | None, turn: AssistantTurn, transcript: Transcript, calls: _Calls
) -> None:
    part = placed.part
    turn.anchor(part.thought_signature)
    if call is not None:
        identifier = call.id or _signed_id(part.thought_signature) or calls.new_id()
        arguments = arguments_text(call.args, f"{placed.field}.functionCall.args")
        made = ToolCall(identifier, call.name, arguments)
        turn.tool_calls.append(made)
        calls.add(made)
    elif part.text is not None:
        (turn.reasoning if part.thought else turn.text).append(part.text)
    elif part.thought_signature is None:
        parts = _chat_parts([placed], transcript)
        turn.text.extend(made["text"] for made in parts if made["type"] == "text")


def _signed_id(signature: str | None) -> str | None:
    minted = minting.read(signature) if signature is not None else None
    return f"{minted.call_id}{minted.index:02d}" if minted and minted.index is not None else None


def _add_user(parts: list[_Placed], transcript: Transcript, calls: _Calls) -> None:
    """Add a user's content.

    Function responses become tool messages, and the parts between them become user messages.
    """
    held: list[Json] = []
    has_response = False
    for placed in parts:
        given, field = placed.part.function_response, f"{placed.field}.functionResponse"
        if given is None:
            held += _chat_parts([placed], transcript)
            continue
        if held:
            transcript.user(joined(held))
            held = []
        response = google(given, _Response, field)
        call_id = calls.answered(response.id, response.name)
        transcript.tool(call_id, _result(response, field, transcript))
        has_response = True
    if held or not has_response:
        transcript.user(joined(held))


def _result(response: _Response, field: str, transcript: Transcript) -> Content:
    text = _result_text(response, field, transcript)
    media = _chat_parts(_parts(response.parts, f"{field}.parts"), transcript)
    return [text_part(text), *media] if media else text


def _result_text(response: _Response, field: str, transcript: Transcript) -> str:
    given = response.response
    if isinstance(given, dict) and len(given) == 1:
        ((key, value),) = given.items()
        if key in _PLAIN_RESULTS and isinstance(value, str):
            if key == "error":
                transcript.note("tool_error_flag")
            return value
    return "" if given is None else json_text(given, f"{field}.response")


def _chat_parts(parts: list[_Placed], transcript: Transcript) -> list[Json]:
    """Return text, image and audio parts in chat shape.

    A part of an unknown kind becomes its JSON text, with a note: history is not dropped. Raise
    ``ApiError`` (400) for files that cannot be read here.
    """
    return [chat for placed in parts if (chat := _chat_part(placed, transcript)) is not None]


def _chat_part(placed: _Placed, transcript: Transcript) -> Json | None:
    part, place = placed.part, placed.field
    if part.text is not None:
        return text_part(part.text)
    if part.inline_data is not None:
        inline = google(part.inline_data, _Inline, f"{place}.inlineData")
        data = inline.data.replace("-", "+").replace("_", "/")
        if inline.mime_type.startswith("image/"):
            return image_part(f"data:{inline.mime_type};base64,{data}")
        if inline.mime_type in _AUDIO:
            return audio_part(data, _AUDIO[inline.mime_type])
        problem = f"{inline.mime_type[:32]} {_UNREADABLE}"
        return text_part(unreadable(f"{place}.inlineData", problem, inline.data))
    if part.file_data is not None:
        file = google(part.file_data, _File, f"{place}.fileData")
        web = file.file_uri.startswith(("https://", "http://"))
        if web and file.mime_type.startswith("image/"):
            return image_part(file.file_uri)
        problem = f"a file of another place {_UNREADABLE}"
        return text_part(unreadable(f"{place}.fileData", problem, file.file_uri))
    if _MEANINGLESS.issuperset(placed.given):
        transcript.note("part_dropped", placed.kind)
        return None
    transcript.note("part_as_text", placed.kind)
    return text_part(as_text(placed.kind, placed.given, place))
