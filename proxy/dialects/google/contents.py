"""Gemini contents as chat messages.

Gemini's clients may leave call ids out, or make their own; a response then belongs to the oldest
unanswered call of its name. A signature of ours beside a call without an id restores the id.
"""

from __future__ import annotations

from typing import Any, Final

from bridle.proxy.dialects.fields import Fields, invalid, json_text
from bridle.proxy.dialects.functions import arguments_text
from bridle.proxy.dialects.google.schema import named
from bridle.proxy.dialects.turns import Content, Transcript, Turn, image_part, joined, text_part
from bridle.proxy.wire import minting
from bridle.proxy.wire.canonical import ToolCall

_AUDIO: Final = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mp3": "mp3", "audio/mpeg": "mp3"}
_PLAIN_RESULTS: Final = ("output", "result", "error")
"""Keys under which clients put a function's result when it is text."""


def instruction_text(fields: Fields, transcript: Transcript) -> Content | None:
    """``systemInstruction``: a content, or plain text."""
    given = fields.raw("systemInstruction")
    if given is None or isinstance(given, str):
        return given
    content = named(Fields.of(given, "systemInstruction"))
    converted = [_part(part, transcript) for part in _parts(content)]
    return joined([part for part in converted if part is not None])


def add_contents(fields: Fields, transcript: Transcript) -> None:
    given = fields.raw("contents")
    if isinstance(given, str):
        transcript.user(given)
        return
    contents = (
        [Fields(given, "contents")] if isinstance(given, dict) else fields.objects("contents")
    )
    if not contents:
        raise invalid("contents", "must be a non-empty list")
    calls = _Calls(transcript)
    for content in map(named, contents):
        role = content.string("role") or "user"
        if role == "model":
            _add_model(_parts(content), transcript, calls)
        elif role in ("user", "function", "tool"):
            _add_user(_parts(content), transcript, calls)
        elif role == "system":
            converted = [_part(part, transcript) for part in _parts(content)]
            transcript.system(joined([part for part in converted if part is not None]))
        else:
            raise invalid(content.path("role"), "must be user or model")


class _Calls:
    """The calls that still wait for their response."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._waiting: list[ToolCall] = []
        self._count = 0

    def new_id(self) -> str:
        """An id for a call that has none, the same whenever the same history is sent."""
        return f"call_{self._count}"

    def add(self, call: ToolCall) -> None:
        self._waiting.append(call)
        self._count += 1

    def answered(self, identifier: str | None, name: str | None) -> str:
        """The id of the call that a response answers."""
        for call in self._waiting:
            if call.id == identifier:
                return self._take(call)
        if identifier is not None:
            self._transcript.note("call_id_repaired")
        for call in self._waiting:
            if call.name == name:
                return self._take(call)
        return identifier or f"call_for_{name}"

    def _take(self, call: ToolCall) -> str:
        self._waiting.remove(call)
        return call.id


def _parts(content: Fields) -> list[Fields]:
    given = content.raw("parts")
    if isinstance(given, dict):
        return [named(Fields(given, content.path("parts")))]
    if isinstance(given, str):
        return [Fields({"text": given}, content.path("parts"))]
    return [named(part) for part in content.objects("parts")]


def _add_model(parts: list[Fields], transcript: Transcript, calls: _Calls) -> None:
    """Contents in a row are one turn: clients keep each chunk of a streamed reply as its own."""
    ids = [part.string("thoughtSignature") for part in parts]
    for part in parts:
        call = part.child("functionCall")
        ids.append(named(call).string("id") if call else None)
    turn = transcript.turn(*ids)
    for part in parts:
        _add_model_part(part, turn, transcript, calls)


def _add_model_part(part: Fields, turn: Turn, transcript: Transcript, calls: _Calls) -> None:
    signature = part.string("thoughtSignature")
    turn.anchor(signature)
    call = part.child("functionCall")
    if call is not None:
        call = named(call)
        identifier = call.string("id") or _signed_id(signature) or calls.new_id()
        arguments = arguments_text(call.raw("args"), call.path("args"))
        made = ToolCall(identifier, call.need_string("name"), arguments)
        turn.tool_calls.append(made)
        calls.add(made)
    elif (text := part.string("text")) is not None:
        (turn.reasoning if part.boolean("thought") else turn.text).append(text)
    elif signature is None:
        transcript.note("part_dropped", _kind(part))


def _signed_id(signature: str | None) -> str | None:
    mark = minting.read(signature) if signature is not None else None
    return f"{mark.call_id}{mark.index:02d}" if mark and mark.index is not None else None


def _add_user(parts: list[Fields], transcript: Transcript, calls: _Calls) -> None:
    """Function responses become tool messages; what stands between them, user messages."""
    held: list[dict[str, Any]] = []
    told = False
    for part in parts:
        response = part.child("functionResponse")
        if response is None:
            converted = _part(part, transcript)
            if converted is not None:
                held.append(converted)
            continue
        if held:
            transcript.user(joined(held))
            held = []
        response = named(response)
        call_id = calls.answered(response.string("id"), response.string("name"))
        transcript.tool(call_id, _result(response, transcript))
        told = True
    if held or not told:
        transcript.user(joined(held))


def _result(response: Fields, transcript: Transcript) -> Content:
    text = _result_text(response, transcript)
    media = [_part(named(part), transcript) for part in response.objects("parts")]
    kept = [part for part in media if part is not None]
    return [text_part(text), *kept] if kept else text


def _result_text(response: Fields, transcript: Transcript) -> str:
    given = response.raw("response")
    if isinstance(given, dict) and len(given) == 1:
        ((key, value),) = given.items()
        if key in _PLAIN_RESULTS and isinstance(value, str):
            if key == "error":
                transcript.note("tool_error_flag")
            return value
    return "" if given is None else json_text(given, response.path("response"))


def _part(part: Fields, transcript: Transcript) -> dict[str, Any] | None:
    """A text, image or audio part in chat shape; others are dropped and noted."""
    text = part.string("text")
    if text is not None:
        return text_part(text)
    if (inline := part.child("inlineData")) is not None:
        return _inline(named(inline), transcript)
    if (file := part.child("fileData")) is not None:
        file = named(file)
        uri, mime_type = file.string("fileUri") or "", file.string("mimeType") or ""
        if uri.startswith(("https://", "http://")) and mime_type.startswith("image/"):
            return image_part(uri)
    transcript.note("part_dropped", _kind(part))
    return None


def _inline(inline: Fields, transcript: Transcript) -> dict[str, Any] | None:
    mime_type = inline.need_string("mimeType")
    data = inline.need_string("data").replace("-", "+").replace("_", "/")
    if mime_type.startswith("image/"):
        return image_part(f"data:{mime_type};base64,{data}")
    if mime_type in _AUDIO:
        return {"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO[mime_type]}}
    transcript.note("part_dropped", f"inlineData {mime_type[:32]}")
    return None


def _kind(part: Fields) -> str:
    return next(iter(part.data), "empty")[:64]
