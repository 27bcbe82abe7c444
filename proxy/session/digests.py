"""Digests of messages that are equal for equal meaning, however a harness writes it.

A :class:`Unit` is one step of a conversation: a message, a run of tool results that answer one
assistant turn (in any order), or an assistant turn that was split over several messages. Its
*digest* is equal for every rewrite by which harnesses do not change the meaning: reasoning dropped
or renamed, arguments serialised again, white space at line ends, content as ``null``, text or
blocks, ``cache_control`` marks, other call ids, tool calls folded into text, Claude Code's changing
billing block. Its *form* is equal only for the same message written the same way.

Every message is hashed in its written form; its meaning is digested once for each form.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b as _blake
from typing import Any

import msgspec
import orjson

from bridle.proxy.wire.canonical import Message, Role, ToolCall
from bridle.proxy.wire.minting import call_ids

BILLING_MARK = "x-anthropic-billing-header"
"""The beginning of Claude Code's first system block, which has a hash that changes on every
call."""

FOLDED_CALLS = "Calling tools:"
"""The heading that smolagents writes before its tool calls, which follow as a Python literal."""

_FOLDED_LONGEST = 262_144
_FORMS_KEPT = 16_384
"""Maximum number of written forms that are remembered; all are forgotten when there are more."""
_SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
_ENCODER = msgspec.msgpack.Encoder()
_THOUGHTS = ("<think>", "</think>")


class Unit(msgspec.Struct, frozen=True, gc=False):
    """One step of a conversation."""

    role: Role
    digest: bytes
    """The digest of the meaning, 16 bytes."""
    form: bytes
    """The digest of the written form, 16 bytes."""
    start: int
    end: int
    """The end of the messages that it covers, which are ``messages[start:end]``."""
    message: Message | None = None
    """The assistant turn in one piece, tool calls unfolded; ``None`` for other roles."""
    minted: tuple[str, ...] = ()
    """Call ids read from the opaque values that came with it, in order."""


class _Known(msgspec.Struct, frozen=True, gc=False):
    """The results of reading a message in one written form."""

    digest: bytes
    minted: tuple[str, ...]
    folded: bool
    alone: bytes = b""
    """The digest of the unit of a tool's result that stands alone and answers the first call; empty
    for other messages."""


class _Asked:
    """The calls of the latest assistant turn.

    Their places are read once, when a result needs them, however many results stand apart from each
    other.
    """

    __slots__ = ("_places", "calls")

    def __init__(self, message: Message | None) -> None:
        self.calls = () if message is None else message.tool_calls
        self._places: dict[str, int] | None = None

    def place(self, call_id: str | None, otherwise: int) -> int:
        """Return the place of the call with this id, or ``otherwise`` if there is none."""
        if self._places is None:
            self._places = {call.id: at for at, call in enumerate(self.calls)}
        return self._places.get(call_id or "", otherwise)


class Digester:
    """A reader that cuts conversations into units.

    It remembers the meaning of each written form.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}

    def units(
        self, messages: Sequence[Message], first: int = 0, last: Message | None = None
    ) -> tuple[Unit, ...]:
        """Return the units of ``messages[first:]``, in order.

        ``last`` is the latest assistant turn before them, in one piece.
        """
        units: list[Unit] = []
        asked: _Asked | None = None
        position = first
        while position < len(messages):
            message, end = messages[position], position + 1
            if message.role == "tool":
                asked = asked or _Asked(last)
                if end == len(messages) or messages[end].role != "tool":
                    unit = self._tool_result(message, position, asked)
                else:
                    unit = self._tool_results(messages, position, asked)
            elif message.role != "assistant":
                form = _blake(_ENCODER.encode(message), digest_size=16).digest()
                known = self._known.get(form) or self._read(message, form)
                unit = Unit(message.role, known.digest, form, position, end, minted=known.minted)
            elif end < len(messages) and messages[end].role == "assistant":
                unit = self._split_reply(messages, position)
                last, asked = unit.message, None
            else:
                form = _blake(_ENCODER.encode(message), digest_size=16).digest()
                known = self._known.get(form) or self._read(message, form)
                last, asked = unfolded(message) if known.folded else message, None
                unit = Unit("assistant", known.digest, form, position, end, last, known.minted)
            units.append(unit)
            position = unit.end
        return tuple(units)

    def reply(self, message: Message) -> tuple[bytes, bytes]:
        """Return the digest and the form of a reply.

        The form is then known when the reply is echoed.
        """
        form = _blake(_ENCODER.encode(message), digest_size=16).digest()
        known = self._known.get(form) or self._read(message, form)
        return known.digest, form

    def system(self, messages: Sequence[Message]) -> tuple[bytes, bytes, int]:
        """Return :func:`system_digest`, which is remembered by form."""
        if not messages or messages[0].role != "system":
            return NO_SYSTEM
        form, count = _system_form(messages)
        known = self._known.get(form)
        if known is None:
            known = self._remember(form, _Known(_system_meaning(messages[:count]), (), False))
        return known.digest, form, count

    def _split_reply(self, messages: Sequence[Message], start: int) -> Unit:
        """Return the unit of an assistant turn that is followed by another assistant message.

        The other message may belong to the turn.
        """
        end = start + 1
        message, form = messages[start], form_of(messages[start])
        known = self._known.get(form) or self._read(message, form)
        message = unfolded(message) if known.folded else message
        pieces, called, minted = [message], bool(message.tool_calls), known.minted
        while end < len(messages) and messages[end].role == "assistant":
            following = unfolded(messages[end])
            next_minted = _minted(following)
            if not _same_turn(called, minted, following, next_minted):
                break
            pieces.append(following)
            called, minted = called or bool(following.tool_calls), minted or next_minted
            end += 1
        if len(pieces) == 1:
            return Unit("assistant", known.digest, form, start, end, message, known.minted)
        whole = _joined(pieces)
        digest, minted = digest_of(whole), _minted(whole)
        return Unit("assistant", digest, form_of(whole), start, end, whole, minted)

    def _tool_result(self, message: Message, position: int, asked: _Asked) -> Unit:
        """Return the unit of a single result, as :meth:`_tool_results` does.

        This is the fast path: agents call one tool after the other, and all results of a session
        pass here in every call.
        """
        form = _blake(_ENCODER.encode(message), digest_size=16).digest()
        known = self._known.get(form) or self._read(message, form)
        digest = known.alone
        if len(asked.calls) > 1:
            digest = _placed(asked.place(message.tool_call_id, 0), known.digest)
        return Unit("tool", digest, form, position, position + 1, minted=known.minted)

    def _tool_results(self, messages: Sequence[Message], start: int, asked: _Asked) -> Unit:
        """Return the unit of a run of results.

        Each result is known by the place of its call in the message that ``asked``, whatever the
        calls' ids.
        """
        end = start
        forms: list[bytes] = []
        results: list[bytes] = []
        minted: list[str] = []
        while end < len(messages) and messages[end].role == "tool":
            message = messages[end]
            form = _blake(_ENCODER.encode(message), digest_size=16).digest()
            known = self._known.get(form) or self._read(message, form)
            call = asked.place(message.tool_call_id, end - start)
            forms.append(form)
            results.append(call.to_bytes(4, "big") + known.digest)
            minted += known.minted
            end += 1
        digest = _blake(b"".join(sorted(results)), digest_size=16).digest()
        form = forms[0] if len(forms) == 1 else _blake(b"".join(forms), digest_size=16).digest()
        return Unit("tool", digest, form, start, end, minted=tuple(dict.fromkeys(minted)))

    def _read(self, message: Message, form: bytes) -> _Known:
        plain = unfolded(message) if message.role == "assistant" else message
        echoes = plain.anchors or plain.tool_calls or plain.tool_call_id is not None
        minted = _minted(plain) if echoes else ()
        digest = digest_of(plain)
        alone = _placed(0, digest) if message.role == "tool" else b""
        return self._remember(form, _Known(digest, minted, plain is not message, alone))

    def _remember(self, form: bytes, known: _Known) -> _Known:
        if len(self._known) >= _FORMS_KEPT:
            self._known.clear()
        self._known[form] = known
        return known


def _placed(call: int, digest: bytes) -> bytes:
    """Return the digest of a tool's result that stands alone and answers the ``call``-th call."""
    return _blake(call.to_bytes(4, "big") + digest, digest_size=16).digest()


def form_of(message: Message) -> bytes:
    """Return 16 bytes that are equal for messages written the same way.

    Ids and anchors are included.
    """
    return _blake(_ENCODER.encode(message), digest_size=16).digest()


def digest_of(message: Message) -> bytes:
    """Return 16 bytes that are equal for messages of the same meaning."""
    said: list[Any] = [message.role]
    if message.role != "assistant":
        said += meaning_parts(message.content)
    else:
        said.append(spoken_text(message))
        said += [[call.name, meaning_arguments(call.arguments)] for call in message.tool_calls]
    return _hash(said)


def system_digest(messages: Sequence[Message]) -> tuple[bytes, bytes, int]:
    """Return the digest and the form of the leading system messages, and their number."""
    form, count = _system_form(messages)
    return _system_meaning(messages[:count]), form, count


def _system_form(messages: Sequence[Message]) -> tuple[bytes, int]:
    count = 0
    while count < len(messages) and messages[count].role == "system":
        count += 1
    forms = b"".join([form_of(message) for message in messages[:count]])
    return _blake(forms, digest_size=16).digest(), count


def _system_meaning(leading: Sequence[Message]) -> bytes:
    said: list[Any] = []
    for message in leading:
        said += meaning_parts(message.content)
    text = "\n".join([part for part in said if isinstance(part, str)])
    return _hash([text, [part for part in said if not isinstance(part, str)]])


def value_digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal JSON values.

    Key order and ``cache_control`` marks do not count.
    """
    encoded = _encoded(value)
    if b'"cache_control"' in encoded:
        encoded = _encoded(_without_cache_marks(value))
    return _blake(encoded, digest_size=16).digest()


def meaning_text(text: str) -> str:
    """Return ``text`` without white space at its ends and at line ends, and without empty lines."""
    text = text.strip()
    if "\n" not in text:
        return text
    lines = (line.rstrip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def meaning_parts(content: str | list[dict[str, Any]] | None) -> list[Any]:
    """Return content as a list of texts and of other parts, with neighbouring texts joined."""
    if content is None:
        return []
    if isinstance(content, str):
        whole = _without_billing(content) if content.startswith(BILLING_MARK) else content
        whole = meaning_text(whole) if "\n" in whole else whole.strip()
        return [whole] if whole else []
    said: list[Any] = []
    texts: list[str] = []
    for part in content:
        text = part.get("text")
        if part.get("type") in ("text", "input_text", "output_text") and text is not None:
            if text := meaning_text(_without_billing(text)):
                texts.append(text)
            continue
        if texts:
            said.append("\n".join(texts))
            texts.clear()
        said.append(_without_cache_marks(part))
    if texts:
        said.append("\n".join(texts))
    return said


def meaning_arguments(arguments: str) -> Any:
    """Return tool-call arguments as a JSON value, or as the text itself if it is not JSON."""
    text = arguments.strip()
    if not text:
        return {}
    try:
        value = _decoded(text)
        if isinstance(value, str):
            # Some clients encode twice.
            try:
                inner = _decoded(value)
            except ValueError:
                return value
            value = inner if isinstance(inner, dict) else value
        return _plain_numbers(value)
    except (ValueError, RecursionError):
        return text


def _decoded(text: str) -> Any:
    """Return the JSON value of a text, also of one that only Python's own parser accepts.

    An agent written in Python takes raw control characters and ``NaN``, and writes them down in its
    way.

    Raises ``ValueError`` or ``RecursionError``.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text, strict=False, parse_constant=str)


def spoken_text(message: Message) -> str:
    """Return an assistant's text without the thoughts that are written into it."""
    if message.content is None:
        return ""
    parts = meaning_parts(message.content)
    if not isinstance(message.content, str):
        parts = [part for part in parts if isinstance(part, str)]
    text = "\n".join(parts)
    opening, closing = _THOUGHTS
    if text.startswith(opening):
        _, closed, spoken = text.partition(closing)
        return spoken.strip() if closed else text
    return text


def unfolded(message: Message) -> Message:
    """Return an assistant message in which folded tool calls are calls again.

    Folded tool calls are those that were written into the message's text.
    """
    if message.tool_calls or message.role != "assistant":
        return message
    if isinstance(message.content, str) and FOLDED_CALLS not in message.content:
        return message
    text = "\n".join(part for part in meaning_parts(message.content) if isinstance(part, str))
    before, mark, literal = text.rpartition(FOLDED_CALLS)
    if not mark or len(literal) > _FOLDED_LONGEST:
        return message
    try:
        calls = tuple(_folded_call(call) for call in ast.literal_eval(literal.strip()))
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return message
    return msgspec.structs.replace(message, content=before.strip() or None, tool_calls=calls)


def _folded_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    return ToolCall(id=str(call.get("id", "")), name=str(function["name"]), arguments=arguments)


def _minted(message: Message) -> tuple[str, ...]:
    values = [*message.anchors, *(call.id for call in message.tool_calls)]
    if message.tool_call_id is not None:
        values.append(message.tool_call_id)
    return call_ids(values) if values else ()


def _same_turn(
    called: bool, minted: tuple[str, ...], following: Message, next_minted: tuple[str, ...]
) -> bool:
    """Return True if an assistant message is a piece of the reply before it.

    ``called`` is true if that reply has tool calls; ``minted`` and ``next_minted`` are the call ids
    in the two.
    """
    if minted and next_minted:
        return minted == next_minted
    return not called and bool(following.tool_calls) and not following.content


def _joined(pieces: Sequence[Message]) -> Message:
    texts = [part for piece in pieces for part in meaning_parts(piece.content)]
    plain = [text for text in texts if isinstance(text, str)]
    reasoning = [piece.reasoning for piece in pieces if piece.reasoning]
    return msgspec.structs.replace(
        pieces[0],
        content="\n".join(plain) or None,
        reasoning="\n".join(reasoning) or None,
        tool_calls=tuple([call for piece in pieces for call in piece.tool_calls]),
        anchors=tuple([anchor for piece in pieces for anchor in piece.anchors]),
    )


def _without_billing(text: str) -> str:
    if not text.startswith(BILLING_MARK):
        return text
    return text.partition("\n")[2]


def _without_cache_marks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_cache_marks(item) for key, item in value.items() if key != "cache_control"
        }
    if isinstance(value, list | tuple):
        return [_without_cache_marks(item) for item in value]
    return value


def _plain_numbers(value: Any) -> Any:
    """Return whole floats as integers, because JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _hash(value: Any) -> bytes:
    try:
        encoded = orjson.dumps(value, option=_SORTED)
    except TypeError:
        encoded = _encoded(value)
    return _blake(encoded, digest_size=16).digest()


def _encoded(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_SORTED)
    except TypeError:  # half a surrogate, or deeper than it writes
        return json.dumps(value, sort_keys=True).encode()


NO_SYSTEM = system_digest(())
